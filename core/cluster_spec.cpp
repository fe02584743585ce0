#include "core/cluster_spec.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "core/json.h"
#include "core/suggest.h"

namespace bmt {
namespace {

constexpr const char* kSchema = "bmtrain.cluster/1";
constexpr std::int32_t kMaxNodes = 1 << 18;

std::int32_t parseCount(const std::string& text, const std::string& whole) {
  std::int32_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc{} || end != text.data() + text.size() || count < 1 || count > kMaxNodes)
    throw Error(ErrorKind::BadInput,
                fmt::format("cluster '{}': '{}' is not a count between 1 and {}", whole, text, kMaxNodes));
  return count;
}

std::int32_t usableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<std::int32_t>(::sysconf(_SC_NPROCESSORS_ONLN)));
}

Json deviceToJson(const DeviceSpec& d) {
  static constexpr const char* kKinds[] = {"gpu", "cpu", "npu"};
  Json json;
  json["name"] = d.name;
  json["kind"] = kKinds[static_cast<std::size_t>(d.kind)];
  json["memory_bytes"] = d.memory;
  json["peak_fp32_flops_per_s"] = d.peak_fp32;
  json["peak_tf32_flops_per_s"] = d.peak_tf32;
  json["peak_fp16_flops_per_s"] = d.peak_fp16;
  json["peak_bf16_flops_per_s"] = d.peak_bf16;
  json["peak_fp8_flops_per_s"] = d.peak_fp8;
  json["memory_bandwidth_bytes_per_s"] = d.memory_bandwidth;
  json["pcie_bandwidth_bytes_per_s"] = d.pcie_bandwidth;
  json["executed"] = d.executed;
  json["source"] = d.source;
  return json;
}

DeviceSpec deviceFromJson(const Json& json, const std::string& source) {
  DeviceSpec d;
  d.name = jsonString(json, "name", "", source);
  const std::string kind = jsonString(json, "kind", "gpu", source);
  if (kind != "gpu" && kind != "cpu" && kind != "npu")
    throw Error(ErrorKind::BadInput, fmt::format("field 'kind': '{}' is not one of gpu, cpu, npu", kind),
                source);
  d.kind = kind == "gpu" ? DeviceKind::Gpu : kind == "cpu" ? DeviceKind::Cpu : DeviceKind::Npu;
  d.memory = jsonInt(json, "memory_bytes", 0, source);
  d.peak_fp32 = jsonNumber(json, "peak_fp32_flops_per_s", 0, source);
  d.peak_tf32 = jsonNumber(json, "peak_tf32_flops_per_s", 0, source);
  d.peak_fp16 = jsonNumber(json, "peak_fp16_flops_per_s", 0, source);
  d.peak_bf16 = jsonNumber(json, "peak_bf16_flops_per_s", 0, source);
  d.peak_fp8 = jsonNumber(json, "peak_fp8_flops_per_s", 0, source);
  d.memory_bandwidth = jsonNumber(json, "memory_bandwidth_bytes_per_s", 0, source);
  d.pcie_bandwidth = jsonNumber(json, "pcie_bandwidth_bytes_per_s", 0, source);
  d.executed = jsonBool(json, "executed", true, source);
  d.source = jsonString(json, "source", source, source);
  return d;
}

LinkSpec linkFromJson(const Json& json, const char* key, const std::string& source) {
  if (!json.contains(key)) return {};
  const Json& link = json.at(key);
  if (!link.is_object())
    throw Error(ErrorKind::BadInput, fmt::format("field '{}': expected an object", key), source);
  return {jsonNumber(link, "bandwidth_bytes_per_s", 0, source), jsonInt(link, "latency_ns", 0, source)};
}

// A list of objects, or nothing.
std::vector<Json> objects(const Json& json, const char* key, const std::string& source) {
  if (!json.contains(key)) return {};
  std::vector<Json> list;
  if (json.at(key).is_array()) list.assign(json.at(key).begin(), json.at(key).end());
  if (!json.at(key).is_array() ||
      std::any_of(list.begin(), list.end(), [](const Json& entry) { return !entry.is_object(); }))
    throw Error(ErrorKind::BadInput, fmt::format("field '{}': expected a list of objects", key), source);
  return list;
}

// "rank=3:1.5" -> name, index, factor.
struct Slowed {
  std::string name;
  std::int32_t index = 0;
  double factor = 1;
};
Slowed parseSlowed(const std::string& text, const std::string& example) {
  const std::size_t equals = text.find('='), colon = text.find(':');
  Slowed s;
  bool good = equals != std::string::npos && colon != std::string::npos && colon > equals;
  if (good) {
    s.name = text.substr(0, equals);
    const char* const end = text.data() + text.size();
    const auto index = std::from_chars(text.data() + equals + 1, text.data() + colon, s.index);
    const auto factor = std::from_chars(text.data() + colon + 1, end, s.factor);
    good = index.ec == std::errc{} && index.ptr == text.data() + colon && factor.ec == std::errc{} &&
           factor.ptr == end;
  }
  if (!good)
    throw Error(ErrorKind::BadInput, fmt::format("'{}' is not of the form {}", text, example), "cluster");
  return s;
}

std::int32_t count32(const Json& json, const char* key, std::int64_t fallback, const std::string& source) {
  const std::int64_t value = jsonInt(json, key, fallback, source);
  if (value < 0 || value > kMaxNodes)
    throw Error(ErrorKind::BadInput,
                fmt::format("field '{}': {} is not between 0 and {}", key, value, kMaxNodes), source);
  return static_cast<std::int32_t>(value);
}

}  // namespace

double peakFlops(const DeviceSpec& d, DType type) {
  switch (type) {
    case DType::F32:
      return d.peak_fp32;
    case DType::TF32:
      return d.peak_tf32;
    case DType::F16:
      return d.peak_fp16;
    case DType::BF16:
      return d.peak_bf16;
    case DType::F8:
      return d.peak_fp8;
    case DType::F64:
    case DType::I32:
    case DType::I8:
      return 0;
  }
  return 0;
}

std::int32_t ClusterSpec::numDevices() const {
  std::int32_t count = 0;
  for (const NodeGroup& group : groups) count += group.num_nodes * group.devices_per_node;
  return count;
}

std::int32_t ClusterSpec::numNodes() const {
  std::int32_t count = 0;
  for (const NodeGroup& group : groups) count += group.num_nodes;
  return count;
}

std::int32_t ClusterSpec::nodeOf(std::int32_t device) const {
  std::int32_t node = 0;
  for (const NodeGroup& group : groups) {
    const std::int32_t devices = group.num_nodes * group.devices_per_node;
    if (device < devices) return node + device / group.devices_per_node;
    device -= devices;
    node += group.num_nodes;
  }
  checkFailed("device < numDevices()", __FILE__, __LINE__, "no such device");
}

const NodeGroup& ClusterSpec::groupOf(std::int32_t device) const {
  for (const NodeGroup& group : groups) {
    const std::int32_t devices = group.num_nodes * group.devices_per_node;
    if (device < devices) return group;
    device -= devices;
  }
  checkFailed("device < numDevices()", __FILE__, __LINE__, "no such device");
}

std::vector<Issue> validateCluster(const ClusterSpec& cluster) {
  std::vector<Issue> issues;
  if (cluster.groups.empty())
    issues.push_back({"cluster.groups", "is empty; at least one node group is needed"});
  std::int64_t devices = 0;
  for (std::size_t i = 0; i < cluster.groups.size(); ++i) {
    const NodeGroup& g = cluster.groups[i];
    const auto add = [&](const char* field, const std::string& what) {
      issues.push_back({fmt::format("cluster.groups[{}].{}", i, field), what});
    };
    if (g.num_nodes < 1) add("num_nodes", fmt::format("{} is not positive", g.num_nodes));
    if (g.devices_per_node < 1)
      add("devices_per_node", fmt::format("{} is not positive", g.devices_per_node));
    if (g.device.memory <= 0) add("device.memory_bytes", fmt::format("{} is not positive", g.device.memory));
    if (g.devices_per_node > 1 && g.device.kind != DeviceKind::Cpu && !(g.scale_up.bandwidth > 0))
      add("scale_up.bandwidth_bytes_per_s", fmt::format("{} is not positive", g.scale_up.bandwidth));
    if ((g.num_nodes > 1 || cluster.groups.size() > 1) && (g.nics_per_node < 1 || !(g.nic.bandwidth > 0)))
      add("nic",
          fmt::format("{} NICs of {} B/s cannot connect several nodes", g.nics_per_node, g.nic.bandwidth));
    devices += std::int64_t{std::max(0, g.num_nodes)} * std::max(0, g.devices_per_node);
  }
  if (devices >= (1 << 24))
    issues.push_back(
        {"cluster", fmt::format("{} devices; at most {} are supported", devices, (1 << 24) - 1)});
  if (!(cluster.oversubscription >= 1))
    issues.push_back({"cluster.oversubscription", fmt::format("{} is below 1", cluster.oversubscription)});
  const auto index = [&](const std::string& where, std::int64_t value, std::int64_t count, const char* what) {
    if (value < 0 || value >= count)
      issues.push_back({where, fmt::format("{} {} of {}, numbered 0 to {}", what, value, count, count - 1)});
  };
  const auto factor = [&](const std::string& where, double value) {
    if (!(value >= 1 && value <= 1e6))
      issues.push_back({where, fmt::format("factor {} is not between 1 (healthy) and 1000000", value)});
  };
  for (std::size_t i = 0; i < cluster.slow_devices.size(); ++i) {
    const std::string where = fmt::format("cluster.slow_devices[{}]", i);
    index(where, cluster.slow_devices[i].device, devices, "device");
    factor(where, cluster.slow_devices[i].factor);
  }
  for (std::size_t i = 0; i < cluster.slow_links.size(); ++i) {
    const std::string where = fmt::format("cluster.slow_links[{}]", i);
    const SlowLink& link = cluster.slow_links[i];
    if ((link.node < 0) == (link.device < 0)) {
      issues.push_back({where, "names neither or both of node and device; one is needed"});
    } else if (link.device >= 0) {
      index(where, link.device, devices, "device");
    } else {
      index(where, link.node, cluster.numNodes(), "node");
    }
    factor(where, link.factor);
  }
  return issues;
}

ClusterSpec localCluster(std::int32_t ranks) {
  ClusterSpec cluster;
  cluster.name = fmt::format("local:{}", ranks);
  NodeGroup node;
  node.devices_per_node = ranks;
  node.device.name = "local-cpu";
  node.device.kind = DeviceKind::Cpu;
  const auto pages = static_cast<Bytes>(::sysconf(_SC_PHYS_PAGES));
  node.device.memory = pages * static_cast<Bytes>(::sysconf(_SC_PAGESIZE)) / ranks;
  node.device.source =
      "this machine: cores and memory from the operating system, speeds from its calibrated profile";
  node.cores_per_node = usableCores();
  cluster.groups.push_back(node);
  return cluster;
}

SlowDevice parseSlowDevice(const std::string& text) {
  const Slowed s = parseSlowed(text, "rank=R:FACTOR, for example rank=3:1.5");
  if (s.name != "rank")
    throw Error(ErrorKind::BadInput, fmt::format("'{}': expected rank=R:FACTOR", text), "cluster");
  return {s.index, s.factor};
}

SlowLink parseSlowLink(const std::string& text) {
  const Slowed s = parseSlowed(text, "node=N:FACTOR or rank=R:FACTOR, for example node=1:2");
  if (s.name != "rank" && s.name != "node")
    throw Error(ErrorKind::BadInput, fmt::format("'{}': expected node=N:FACTOR or rank=R:FACTOR", text),
                "cluster");
  return s.name == "node" ? SlowLink{s.index, -1, s.factor} : SlowLink{-1, s.index, s.factor};
}

ClusterSpec loadCluster(const std::string& text) {
  if (const std::size_t plus = text.find('+'); plus != std::string::npos && !text.ends_with(".json")) {
    ClusterSpec cluster;
    cluster.name = text;
    for (std::size_t begin = 0; begin <= text.size();) {
      const std::size_t end = std::min(text.find('+', begin), text.size());
      const ClusterSpec part = loadCluster(text.substr(begin, end - begin));
      cluster.groups.insert(cluster.groups.end(), part.groups.begin(), part.groups.end());
      cluster.oversubscription = std::max(cluster.oversubscription, part.oversubscription);
      begin = end + 1;
    }
    throwIfAny(validateCluster(cluster), "cluster " + text);
    return cluster;
  }
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const bool counted = colon != std::string::npos;
  if (name == "local")
    return localCluster(counted ? parseCount(text.substr(colon + 1), text) : usableCores());
  std::vector<std::string> names{"local"};
  for (const ClusterPreset& preset : clusterPresets()) {
    names.push_back(preset.name);
    if (preset.name != name) continue;
    ClusterSpec cluster;
    cluster.name = text;
    cluster.groups.push_back(preset.node);
    cluster.groups[0].num_nodes = counted ? parseCount(text.substr(colon + 1), text) : 1;
    return cluster;
  }
  struct stat info {};
  if (::stat(text.c_str(), &info) != 0 && !text.ends_with(".json") && text.find('/') == std::string::npos)
    throw Error(
        ErrorKind::BadInput,
        fmt::format(
            "cluster '{}' is neither a preset nor a file; the nearest preset is '{}' (bmtrain clusters "
            "lists them)",
            text, nearestName(name, names)));
  return clusterFromJson(readFile(text), text);
}

std::string clusterToJson(const ClusterSpec& cluster) {
  Json json;
  json["schema"] = kSchema;
  json["name"] = cluster.name;
  json["oversubscription"] = cluster.oversubscription;
  json["groups"] = Json::array();
  for (const NodeGroup& g : cluster.groups) {
    Json group;
    group["num_nodes"] = g.num_nodes;
    group["devices_per_node"] = g.devices_per_node;
    group["device"] = deviceToJson(g.device);
    group["scale_up"] = {{"bandwidth_bytes_per_s", g.scale_up.bandwidth}, {"latency_ns", g.scale_up.latency}};
    group["nics_per_node"] = g.nics_per_node;
    group["nic"] = {{"bandwidth_bytes_per_s", g.nic.bandwidth}, {"latency_ns", g.nic.latency}};
    group["cores_per_node"] = g.cores_per_node;
    group["node_memory_bandwidth_bytes_per_s"] = g.node_memory_bandwidth;
    json["groups"].push_back(group);
  }
  for (const SlowDevice& s : cluster.slow_devices)
    json["slow_devices"].push_back({{"device", s.device}, {"factor", s.factor}});
  for (const SlowLink& s : cluster.slow_links) {
    Json link;
    if (s.device >= 0) link["device"] = s.device;
    if (s.node >= 0) link["node"] = s.node;
    link["factor"] = s.factor;
    json["slow_links"].push_back(link);
  }
  return json.dump(2) + "\n";
}

ClusterSpec clusterFromJson(const std::string& text, const std::string& source) {
  const Json json = parseJson(text, source);
  if (!json.is_object()) throw Error(ErrorKind::BadInput, "expected a JSON object", source);
  const std::string schema = jsonString(json, "schema", "", source);
  if (schema != kSchema)
    throw Error(ErrorKind::BadInput, fmt::format("schema is '{}', expected '{}'", schema, kSchema), source);
  ClusterSpec cluster;
  cluster.name = jsonString(json, "name", source, source);
  cluster.oversubscription = jsonNumber(json, "oversubscription", 1, source);
  if (!json.contains("groups") || !json.at("groups").is_array())
    throw Error(ErrorKind::BadInput, "field 'groups': expected a list of node groups", source);
  for (const Json& group : json.at("groups")) {
    if (!group.is_object() || !group.contains("device") || !group.at("device").is_object())
      throw Error(ErrorKind::BadInput, "field 'groups': every group needs an object 'device'", source);
    NodeGroup g;
    g.num_nodes = count32(group, "num_nodes", 1, source);
    g.devices_per_node = count32(group, "devices_per_node", 1, source);
    g.device = deviceFromJson(group.at("device"), source);
    g.scale_up = linkFromJson(group, "scale_up", source);
    g.nics_per_node = count32(group, "nics_per_node", 0, source);
    g.nic = linkFromJson(group, "nic", source);
    g.cores_per_node = jsonNumber(group, "cores_per_node", 0, source);
    g.node_memory_bandwidth = jsonNumber(group, "node_memory_bandwidth_bytes_per_s", 0, source);
    cluster.groups.push_back(g);
  }
  const auto device = [&source](const Json& entry, const char* key) {
    const std::int64_t value = jsonInt(entry, key, -1, source);
    return value < 0 || value >= (1 << 24) ? -1 : static_cast<std::int32_t>(value);
  };
  for (const Json& entry : objects(json, "slow_devices", source))
    cluster.slow_devices.push_back({device(entry, "device"), jsonNumber(entry, "factor", 1, source)});
  for (const Json& entry : objects(json, "slow_links", source))
    cluster.slow_links.push_back(
        {device(entry, "node"), device(entry, "device"), jsonNumber(entry, "factor", 1, source)});
  throwIfAny(validateCluster(cluster), source);
  return cluster;
}

}  // namespace bmt
