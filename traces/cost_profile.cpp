#include "traces/cost_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "core/json.h"

namespace bmt::trace {

// Defined by the build from traces/data/*.json: name and text of every committed profile.
extern const std::vector<std::pair<const char*, const char*>> kShippedProfiles;

namespace {

constexpr const char* kSchema = "bmtrain.profile/1";

// Assumed where a device has no measurements: shares of the datasheet's peaks that A100, H100 and B200 reach
// (the committed profiles of traces/data/).
constexpr double kMatrixShare = 0.82, kSustainedShare = 0.92;
constexpr double kBandwidthShare = 0.82, kFlashShare = 0.45;
constexpr double kAssumedLaunch_s = 5e-6;

OpKind opKindFromString(const std::string& text, const std::string& source) {
  for (int i = 0; i < kNumOpKinds; ++i) {
    if (toString(static_cast<OpKind>(i)) == text) return static_cast<OpKind>(i);
  }
  throw Error(ErrorKind::BadInput, fmt::format("unknown op kind '{}'", text), source);
}

CommKind commKindFromString(const std::string& text, const std::string& source) {
  for (const CommKind kind : {CommKind::AllReduce, CommKind::AllGather, CommKind::ReduceScatter,
                              CommKind::Send, CommKind::Recv, CommKind::AllToAll, CommKind::Shift}) {
    if (toString(kind) == text) return kind;
  }
  throw Error(ErrorKind::BadInput, fmt::format("unknown communication kind '{}'", text), source);
}

double positive(const Json& json, const char* key, const std::string& source) {
  const double value = jsonNumber(json, key, 0, source);
  if (!(value >= 0))
    throw Error(ErrorKind::BadInput, fmt::format("field '{}': {} is negative", key, value), source);
  return value;
}

GpuConstants gpuFromJson(const Json& json, const std::string& source) {
  if (!json.is_object()) throw Error(ErrorKind::BadInput, "field 'gpu': expected an object", source);
  GpuConstants gpu;
  for (const GpuField& field : gpuFields()) {
    if (!json.contains(field.name) || !json.at(field.name).is_object())
      throw Error(ErrorKind::BadInput, fmt::format("field 'gpu.{}' is missing", field.name), source);
    gpu.*field.value = positive(json.at(field.name), "value", source);
    gpu.sources[field.name] = jsonString(json.at(field.name), "source", "", source);
  }
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, double>>{{"sms", gpu.sms},
                                                             {"matmul_16", gpu.matmul_16},
                                                             {"matmul_32", gpu.matmul_32},
                                                             {"sustained", gpu.sustained},
                                                             {"memory_bandwidth", gpu.memory_bandwidth},
                                                             {"flash_forward", gpu.flash_forward},
                                                             {"flash_backward", gpu.flash_backward},
                                                             {"link_efficiency", gpu.link_efficiency},
                                                             {"nic_efficiency", gpu.nic_efficiency}}) {
    if (!(value > 0))
      throw Error(ErrorKind::BadInput, fmt::format("field 'gpu.{}' must be positive", name), source);
  }
  return gpu;
}

}  // namespace

const std::vector<GpuField>& gpuFields() {
  using G = GpuConstants;
  static const std::vector<GpuField> fields{
      {"sms", &G::sms, "", "streaming multiprocessors"},
      {"matmul_16", &G::matmul_16, "FLOP/s", "16-bit product that fills the device, long k"},
      {"matmul_8", &G::matmul_8, "FLOP/s", "8-bit product that fills the device, long k"},
      {"matmul_32", &G::matmul_32, "FLOP/s", "fp32-storage product that fills the device, long k"},
      {"sustained", &G::sustained, "", "share of these rates that large products keep"},
      {"k_ramp", &G::k_ramp, "", "length of k lost to a tile's prologue and epilogue"},
      {"memory_bandwidth", &G::memory_bandwidth, "B/s", "reached by streaming kernels"},
      {"launch_s", &G::launch_s, "s", "device idle between dependent kernels"},
      {"host_s", &G::host_s, "s", "host time per kernel"},
      {"flash_forward", &G::flash_forward, "FLOP/s", "fused attention forward, causal half counted"},
      {"flash_backward", &G::flash_backward, "FLOP/s", "fused attention backward, causal half counted"},
      {"comm_share", &G::comm_share, "", "share of the device a communication kernel takes"},
      {"link_efficiency", &G::link_efficiency, "", "of the nominal link, large rings inside a node"},
      {"multicast_efficiency", &G::multicast_efficiency, "", "of the nominal link, all-reduce in the switch"},
      {"nic_efficiency", &G::nic_efficiency, "", "of the NICs' nominal rate, rings across nodes"},
      {"comm_start_s", &G::comm_start_s, "s", "launch and set-up of a collective"},
      {"comm_fill_s", &G::comm_fill_s, "s",
       "until the chunk pipeline runs at full rate, per round of a ring"},
  };
  return fields;
}

const OpFit* findOp(const CostProfile& profile, OpKind kind) {
  for (const OpFit& fit : profile.ops) {
    if (fit.kind == kind) return &fit;
  }
  return nullptr;
}

const CommFit* findComm(const CostProfile& profile, CommKind kind, const std::string& transport) {
  for (const CommFit& fit : profile.comms) {
    if (fit.kind == kind && fit.transport == transport) return &fit;
  }
  return nullptr;
}

std::string profileToJson(const CostProfile& p) {
  Json json;
  json["schema"] = kSchema;
  json["name"] = p.name;
  json["source"] = p.source;
  json["measured"] = p.measured;
  json["cores"] = p.cores;
  json["core_peak_flops_per_s"] = p.core_peak_flops;
  json["memory_bandwidth_bytes_per_s"] = p.memory_bandwidth;
  json["task_overhead_s"] = p.task_overhead_s;
  json["contention"] = p.contention;
  json["ops"] = Json::array();
  for (const OpFit& fit : p.ops) {
    json["ops"].push_back({{"kind", std::string(toString(fit.kind))},
                           {"overhead_s", fit.overhead_s},
                           {"flops_per_s", fit.flops_per_s},
                           {"bytes_per_s", fit.bytes_per_s},
                           {"samples", fit.samples},
                           {"mean_abs_error_pct", fit.mean_abs_error_pct},
                           {"max_abs_error_pct", fit.max_abs_error_pct}});
  }
  json["comms"] = Json::array();
  for (const CommFit& fit : p.comms) {
    json["comms"].push_back({{"kind", std::string(toString(fit.kind))},
                             {"transport", fit.transport},
                             {"alpha_s", fit.alpha_s},
                             {"bytes_per_s", fit.bytes_per_s},
                             {"samples", fit.samples},
                             {"mean_abs_error_pct", fit.mean_abs_error_pct},
                             {"max_abs_error_pct", fit.max_abs_error_pct}});
  }
  if (p.gpu) {
    json["gpu"] = Json::object();
    for (const GpuField& field : gpuFields()) {
      const auto source = p.gpu->sources.find(field.name);
      json["gpu"][field.name] = {{"value", (*p.gpu).*field.value},
                                 {"unit", field.unit},
                                 {"meaning", field.meaning},
                                 {"source", source == p.gpu->sources.end() ? "" : source->second}};
    }
  }
  return json.dump(2) + "\n";
}

CostProfile profileFromJson(const std::string& text, const std::string& source) {
  const Json json = parseJson(text, source);
  if (!json.is_object()) throw Error(ErrorKind::BadInput, "expected a JSON object", source);
  const std::string schema = jsonString(json, "schema", "", source);
  if (schema != kSchema)
    throw Error(ErrorKind::BadInput, fmt::format("schema is '{}', expected '{}'", schema, kSchema), source);
  CostProfile p;
  p.name = jsonString(json, "name", source, source);
  p.source = jsonString(json, "source", source, source);
  p.measured = jsonBool(json, "measured", false, source);
  p.cores = positive(json, "cores", source);
  p.core_peak_flops = positive(json, "core_peak_flops_per_s", source);
  p.memory_bandwidth = positive(json, "memory_bandwidth_bytes_per_s", source);
  p.task_overhead_s = positive(json, "task_overhead_s", source);
  p.contention = positive(json, "contention", source);
  const auto list = [&](const char* key) {
    const Json entries = json.contains(key) ? json.at(key) : Json::array();
    if (!entries.is_array())
      throw Error(ErrorKind::BadInput, fmt::format("field '{}': expected a list", key), source);
    for (const Json& entry : entries) {
      if (!entry.is_object())
        throw Error(ErrorKind::BadInput, fmt::format("field '{}': expected objects", key), source);
    }
    return entries;
  };
  for (const Json& entry : list("ops")) {
    OpFit fit;
    fit.kind = opKindFromString(jsonString(entry, "kind", "", source), source);
    fit.overhead_s = positive(entry, "overhead_s", source);
    fit.flops_per_s = positive(entry, "flops_per_s", source);
    fit.bytes_per_s = positive(entry, "bytes_per_s", source);
    fit.samples = jsonInt(entry, "samples", 0, source);
    fit.mean_abs_error_pct = positive(entry, "mean_abs_error_pct", source);
    fit.max_abs_error_pct = positive(entry, "max_abs_error_pct", source);
    p.ops.push_back(fit);
  }
  for (const Json& entry : list("comms")) {
    CommFit fit;
    fit.kind = commKindFromString(jsonString(entry, "kind", "", source), source);
    fit.transport = jsonString(entry, "transport", "", source);
    fit.alpha_s = positive(entry, "alpha_s", source);
    fit.bytes_per_s = positive(entry, "bytes_per_s", source);
    fit.samples = jsonInt(entry, "samples", 0, source);
    fit.mean_abs_error_pct = positive(entry, "mean_abs_error_pct", source);
    fit.max_abs_error_pct = positive(entry, "max_abs_error_pct", source);
    p.comms.push_back(fit);
  }
  if (json.contains("gpu")) p.gpu = gpuFromJson(json.at("gpu"), source);
  return p;
}

CostProfile loadProfile(const std::string& path) {
  return profileFromJson(readFile(path), path);
}

std::optional<CostProfile> shippedProfile(const std::string& device) {
  for (const auto& [name, text] : kShippedProfiles) {
    if (name == device) return profileFromJson(text, fmt::format("traces/data/{}.json", name));
  }
  return std::nullopt;
}

std::vector<std::string> shippedProfiles() {
  std::vector<std::string> names;
  for (const auto& [name, text] : kShippedProfiles) names.emplace_back(name);
  return names;
}

CostProfile datasheetProfile(const DeviceSpec& device) {
  CostProfile p;
  p.name = device.name;
  p.source =
      fmt::format("datasheet of {} x the shares of peak that measured devices reach, assumed", device.name);
  double peak = 0;
  for (const DType type : {DType::BF16, DType::F16, DType::F32}) {
    if (peak == 0) peak = peakFlops(device, type);
  }
  p.core_peak_flops = peak;
  p.memory_bandwidth = device.memory_bandwidth;
  for (int i = 0; i < kNumOpKinds; ++i) {
    OpFit fit;
    fit.kind = static_cast<OpKind>(i);
    fit.overhead_s = kAssumedLaunch_s;
    const bool attention = fit.kind == OpKind::AttentionForward || fit.kind == OpKind::AttentionBackward;
    if (isMatrixProduct(fit.kind) || attention) {
      fit.flops_per_s = peak * kMatrixShare * kSustainedShare;
    } else {
      fit.bytes_per_s = device.memory_bandwidth * kBandwidthShare;
    }
    p.ops.push_back(fit);
  }
  if (device.kind == DeviceKind::Cpu) return p;
  GpuConstants g;
  g.sms = 128;
  g.matmul_16 = kMatrixShare * peak;
  g.matmul_8 = kMatrixShare * device.peak_fp8;
  g.matmul_32 = kMatrixShare * std::max(device.peak_fp32, device.peak_tf32);
  if (!(g.matmul_32 > 0)) g.matmul_32 = g.matmul_16;
  g.sustained = kSustainedShare;
  g.k_ramp = 128;
  g.memory_bandwidth = kBandwidthShare * device.memory_bandwidth;
  g.launch_s = 3e-6;
  g.host_s = 10e-6;
  g.flash_forward = kFlashShare * peak;
  g.flash_backward = 0.8 * g.flash_forward;
  g.comm_share = 0.125;
  g.link_efficiency = 0.8;
  g.nic_efficiency = 0.9;
  g.comm_start_s = 20e-6;
  g.comm_fill_s = 50e-6;
  for (const GpuField& field : gpuFields()) g.sources[field.name] = "assumed: " + p.source;
  p.gpu = g;
  return p;
}

std::string localProfilePath() {
  const char* const config = std::getenv("XDG_CONFIG_HOME");
  const char* const home = std::getenv("HOME");
  const std::string base = config != nullptr && *config != '\0'
                               ? config
                               : std::string(home != nullptr ? home : "/root") + "/.config";
  return base + "/bmtrain/local-profile.json";
}

}  // namespace bmt::trace
