#include "traces/cost_profile.h"

#include <fmt/format.h>

#include <cstdlib>

#include "core/json.h"

namespace bmt::trace {
namespace {

constexpr const char* kSchema = "bmtrain.profile/1";

// Assumed where a device has no measurements: shares of the datasheet peaks that well-tuned kernels reach,
// and the cost of starting a kernel.
constexpr double kAssumedMatrixEfficiency = 0.6;
constexpr double kAssumedBandwidthEfficiency = 0.8;
constexpr double kAssumedLaunch_s = 5e-6;

OpKind opKindFromString(const std::string& text, const std::string& source) {
  for (int i = 0; i < kNumOpKinds; ++i) {
    if (toString(static_cast<OpKind>(i)) == text) return static_cast<OpKind>(i);
  }
  throw Error(ErrorKind::BadInput, fmt::format("unknown op kind '{}'", text), source);
}

CommKind commKindFromString(const std::string& text, const std::string& source) {
  for (const CommKind kind :
       {CommKind::AllReduce, CommKind::AllGather, CommKind::ReduceScatter, CommKind::Send, CommKind::Recv}) {
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

}  // namespace

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
  return p;
}

CostProfile loadProfile(const std::string& path) {
  return profileFromJson(readFile(path), path);
}

CostProfile datasheetProfile(const DeviceSpec& device) {
  CostProfile p;
  p.name = device.name;
  p.source = fmt::format("datasheet of {} x {:.0f} % (matrix products) and {:.0f} % (memory), assumed",
                         device.name, 100 * kAssumedMatrixEfficiency, 100 * kAssumedBandwidthEfficiency);
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
      fit.flops_per_s = peak * kAssumedMatrixEfficiency;
    } else {
      fit.bytes_per_s = device.memory_bandwidth * kAssumedBandwidthEfficiency;
    }
    p.ops.push_back(fit);
  }
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
