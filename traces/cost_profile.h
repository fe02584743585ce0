// CostProfile: what a device's work costs, fitted from measurements (calibrate) or taken from a datasheet.
// Few constants with a meaning; every figure says where it is from.
//   op time alone on an idle device [s] = overhead + flops / flops_per_s + bytes / bytes_per_s
//   collective time alone          [s] = steps(n) * alpha + bytes sent per rank / bytes_per_s
// with flops() and bytesMoved() of core/op.h and steps and bytes by algorithm (simulator/cost_model.h).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/cluster_spec.h"
#include "core/op.h"
#include "core/task_graph.h"
#include "core/units.h"

namespace bmt::trace {

struct OpFit {
  OpKind kind = OpKind::Zero;
  double overhead_s = 0;
  double flops_per_s = 0;  // 0 = the term is absent
  double bytes_per_s = 0;  // 0 = the term is absent
  std::int64_t samples = 0;
  double mean_abs_error_pct = 0, max_abs_error_pct = 0;  // residuals of the fit
};

struct CommFit {
  CommKind kind = CommKind::AllReduce;
  std::string transport;   // "threads", "mpi", "nvlink", "network"
  double alpha_s = 0;      // per algorithm step
  double bytes_per_s = 0;  // per rank, alone
  std::int64_t samples = 0;
  double mean_abs_error_pct = 0, max_abs_error_pct = 0;
};

// What the GPU formulas need (simulator/gpu_cost.h, simulator/network.h): one device type's figures, none of
// them per model or per run. Every one carries its source in `sources`.
struct GpuConstants {
  double sms = 0;               // streaming multiprocessors
  double matmul_16 = 0;         // FLOP/s of a 16-bit product that fills all of them, long k
  double matmul_8 = 0;          // the same with 8-bit operands; 0 = none
  double matmul_32 = 0;         // the same, fp32 storage (TF32 units where there are any)
  double sustained = 1;         // share of those rates that large products keep (power limit)
  double k_ramp = 0;            // length of k lost to a tile's prologue and epilogue
  double memory_bandwidth = 0;  // B/s that streaming kernels reach
  double launch_s = 0;          // device idle between dependent kernels, and a kernel's tail
  double host_s = 0;            // host time per kernel of a framework; bounds streams of tiny kernels
  double flash_forward = 0;     // FLOP/s of fused attention, causal half counted, head size 128
  double flash_backward = 0;
  double comm_share = 0;            // share of the device a communication kernel takes beside compute
  double link_efficiency = 0;       // bus bandwidth reached by large rings over the nominal link
  double multicast_efficiency = 0;  // of all-reduce inside the switch (NVLS) over the nominal link; 0 = none
  double nic_efficiency = 0;        // bus bandwidth reached across nodes over the NICs' nominal rate
  double comm_start_s = 0;          // launch and set-up of a collective
  double comm_fill_s = 0;           // until its chunk pipeline runs at full rate
  std::map<std::string, std::string> sources;  // constant -> where it is from
};
struct GpuField {
  const char* name;
  double GpuConstants::*value;
  const char* unit;
  const char* meaning;
};
const std::vector<GpuField>& gpuFields();  // every constant, in file order

struct CostProfile {
  std::string name;    // device or machine
  std::string source;  // "measured 2026-12-01 on ...", "datasheet: ..."
  bool measured = false;
  double cores = 0;             // CPU: cores shared by the node's ranks; 0 = one device per rank
  double core_peak_flops = 0;   // measured FMA (or matrix) peak of one core or device [FLOP/s]
  double memory_bandwidth = 0;  // measured copy bandwidth of the node (read + write) [B/s]
  double task_overhead_s = 0;   // per task: issue, queue hand-over, event
  double contention = 0;  // CPU: extra time share of compute when all cores are busy (shared caches, memory)
  std::vector<OpFit> ops;
  std::vector<CommFit> comms;
  // Present for devices that are costed by tiles, traffic and launches instead of by op kind.
  std::optional<GpuConstants> gpu;
};

const OpFit* findOp(const CostProfile& profile, OpKind kind);  // nullptr = none
const CommFit* findComm(const CostProfile& profile, CommKind kind,
                        const std::string& transport);  // nullptr = none

// JSON with schema "bmtrain.profile/1". Reading throws Error{BadInput}.
std::string profileToJson(const CostProfile& profile);
CostProfile profileFromJson(const std::string& text, const std::string& source);
CostProfile loadProfile(const std::string& path);

// The profile committed for this device in traces/data/, if there is one.
std::optional<CostProfile> shippedProfile(const std::string& device);
std::vector<std::string> shippedProfiles();  // names

// From the datasheet alone, for a device without measurements, with shares of the peaks that its peers reach;
// `source` and every constant's source say so.
CostProfile datasheetProfile(const DeviceSpec& device);

// Where `calibrate` stores the profile of this machine and `simulate` looks for it:
// $XDG_CONFIG_HOME/bmtrain/local-profile.json (default ~/.config).
std::string localProfilePath();

}  // namespace bmt::trace
