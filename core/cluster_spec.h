// ClusterSpec: devices, nodes and links. Groups may differ: a heterogeneous cluster is two groups, not
// another code path.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "core/units.h"

namespace bmt {

enum class DeviceKind : std::uint8_t { Gpu, Cpu, Npu };

struct DeviceSpec {
  std::string name;  // "A100-SXM4-80GB"; also the name of its cost profile
  DeviceKind kind = DeviceKind::Gpu;
  Bytes memory = 0;
  // Peak FLOP/s (dense). 0 = not supported. F32 on a CPU: all vector units of ONE core (a rank computes on
  // one core).
  double peak_fp32 = 0, peak_tf32 = 0, peak_fp16 = 0, peak_bf16 = 0, peak_fp8 = 0;
  double memory_bandwidth = 0;  // B/s
  double pcie_bandwidth = 0;    // B/s per direction to the host; 0 for CPUs
  bool executed = true;         // false: simulated only ("not executed")
  std::string source;           // where the figures come from
  bool operator==(const DeviceSpec&) const = default;
};

// Peak FLOP/s of matrix products in `type`; 0 when the device has none.
double peakFlops(const DeviceSpec& device, DType type);

struct LinkSpec {
  double bandwidth = 0;  // B/s per direction and port
  Ns latency = 0;        // per message
  bool operator==(const LinkSpec&) const = default;
};

struct NodeGroup {
  std::int32_t num_nodes = 1;
  std::int32_t devices_per_node = 1;  // = ranks per node
  DeviceSpec device;
  LinkSpec scale_up;               // device to device inside a node (NVLink, shared memory)
  std::int32_t nics_per_node = 0;  // 0: single node only
  LinkSpec nic;                    // each NIC
  // CPU nodes: cores shared by all ranks of the node, and their shared memory bandwidth [B/s]. 0 = one per
  // device.
  double cores_per_node = 0;
  double node_memory_bandwidth = 0;
  bool operator==(const NodeGroup&) const = default;
};

// A device whose compute takes `factor` times as long as its kind's (thermal throttling, a bad part).
struct SlowDevice {
  std::int32_t device = 0;
  double factor = 1;  // >= 1
  bool operator==(const SlowDevice&) const = default;
};
// A link whose traffic takes `factor` times as long: the NICs of `node` (traffic between nodes), or, when
// `device` >= 0, everything that one device sends or receives.
struct SlowLink {
  std::int32_t node = -1, device = -1;  // one of them
  double factor = 1;                    // >= 1
  bool operator==(const SlowLink&) const = default;
};

struct ClusterSpec {
  std::string name;
  std::vector<NodeGroup> groups;
  double oversubscription = 1.0;  // scale-out fabric: 2.0 = the spine carries half of all NICs
  std::vector<SlowDevice> slow_devices;
  std::vector<SlowLink> slow_links;
  bool operator==(const ClusterSpec&) const = default;

  std::int32_t numDevices() const;
  std::int32_t numNodes() const;
  bool homogeneous() const { return groups.size() == 1; }
  // All devices and links of a kind are alike, so that one rank can stand for others.
  bool uniform() const { return homogeneous() && slow_devices.empty() && slow_links.empty(); }
  // Node index (0-based over all groups) and group of a device; devices are numbered node by node, group by
  // group.
  std::int32_t nodeOf(std::int32_t device) const;
  const NodeGroup& groupOf(std::int32_t device) const;
};

std::vector<Issue> validateCluster(const ClusterSpec& cluster);

struct ClusterPreset {
  std::string name;  // "dgx-a100-80g"
  std::string description;
  NodeGroup node;  // num_nodes = 1
};
const std::vector<ClusterPreset>& clusterPresets();

// "PRESET:NODES", several of them joined by '+' ("dgx-a100-80g:4+dgx-v100-32g:2": devices are numbered in
// this order), "local", "local:RANKS", or a cluster file. Throws Error{BadInput} naming the nearest preset.
// local: `ranks` CPU devices of this machine sharing its cores (sysconf); peaks come from the calibrated
// profile.
ClusterSpec loadCluster(const std::string& text);
ClusterSpec localCluster(std::int32_t ranks);
ClusterSpec clusterFromJson(const std::string& text, const std::string& source);
std::string clusterToJson(const ClusterSpec& cluster);

// "rank=3:1.5" (simulate --slow), "node=1:2" or "rank=3:2" (--slow-link). Throws Error{BadInput}.
SlowDevice parseSlowDevice(const std::string& text);
SlowLink parseSlowLink(const std::string& text);

}  // namespace bmt
