#include "simulator/gpu_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <map>

#include "simulator/gpu_cost.h"
#include "simulator/network.h"
#include "simulator/validate.h"

namespace bmt::sim {
namespace {

using trace::CsvTable;
using trace::GpuConstants;

// Measured on a model of the same family that differs in clock and power ("A100-PCIe" for "A100-SXM4"):
// shapes carry over, ceilings do not.
struct Shapes {
  std::vector<std::pair<OpCall, double>> products, attention;  // with seconds
  std::string product_gpu;                                     // where they were measured
  double ceiling = 0;                                          // best product of that GPU
};

double number(const std::string& text) {
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

std::string family(const std::string& gpu) {
  return gpu.substr(0, gpu.find_first_of(" -"));
}

bool sameFamily(const std::string& gpu, const std::string& device) {
  // "H100/H200 SXM" lists two.
  return gpu.find(family(device)) != std::string::npos;
}

double medianOf(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Best achieved product [FLOP/s] of "bf16" or "fp8"; exact: the SXM part of the family only.
double bestProduct(const std::vector<CsvTable>& micro, const std::string& device, const char* type,
                   bool pcie) {
  double best = 0;
  for (const CsvTable& t : micro) {
    for (std::size_t i = 0; i < t.rows.size(); ++i) {
      if (t.at(i, "category") != "matmul" || !sameFamily(t.at(i, "gpu"), device)) continue;
      if (!t.at(i, "config").starts_with(type)) continue;
      if ((t.at(i, "gpu").find("PCIe") != std::string::npos) != pcie) continue;
      if (t.at(i, "gpu").starts_with("G") != device.starts_with("G")) continue;  // GH200, GB200
      best = std::max(best, number(t.at(i, "value")) * 1e12);
    }
  }
  return best;
}

Shapes readShapes(const FitInput& input) {
  Shapes shapes;
  for (const CsvTable& t : input.gemm) {
    for (std::size_t i = 0; i < t.rows.size(); ++i) {
      const std::string gpu = t.at(i, "gpu"), kind = t.at(i, "op");
      if (!sameFamily(gpu, input.device.name)) continue;
      const auto dim = [&](const char* column) { return static_cast<std::int64_t>(number(t.at(i, column))); };
      const double rate = number(t.at(i, "achieved_tflops")) * 1e12;
      OpCall call;
      call.op.dtype = DType::BF16;
      if (kind == "matmul") {
        // The weight-gradient form accumulates into fp32.
        call.op.kind = t.at(i, "accumulate") == "True" ? OpKind::LinearBackwardWeight : OpKind::LinearForward;
        const std::int64_t m = dim("m"), k = dim("k"), n = dim("n");
        call.op.dim = call.op.kind == OpKind::LinearForward ? decltype(Op::dim){m, n, k}
                                                            : decltype(Op::dim){k, m, n, 1};
        shapes.products.emplace_back(call, flops(call.op) / rate);
        shapes.product_gpu = gpu;
      } else if (kind.starts_with("sdp")) {
        call.op.kind = kind == "sdp_fwd" ? OpKind::AttentionForward : OpKind::AttentionBackward;
        call.op.dim = {std::max<std::int64_t>(1, dim("batch")),
                       dim("seq"),
                       dim("heads"),
                       dim("kv_heads"),
                       dim("v_head_dim"),
                       0};
        if (dim("qk_head_dim") != dim("v_head_dim")) continue;
        // The source counts the full square where half is counted here; 2 products forward, 5 backward.
        const double full = 2 * flops(call.op);
        shapes.attention.emplace_back(call, full / rate);
      }
    }
  }
  const bool pcie = shapes.product_gpu.find("PCIe") != std::string::npos;
  shapes.ceiling = bestProduct(input.micro, input.device.name, "bf16", pcie);
  return shapes;
}

struct Sweep {
  double bytes, seconds, ranks, nodes;
  bool multicast;
};
std::vector<Sweep> readSweeps(const FitInput& input) {
  std::vector<Sweep> sweeps;
  for (const CsvTable& t : input.micro) {
    for (std::size_t i = 0; i < t.rows.size(); ++i) {
      if (t.at(i, "category") != "all_reduce" || t.at(i, "quantity") != "busbw") continue;
      const std::string gpu = t.at(i, "gpu"), device = input.device.name;
      // One switch generation: H100 and H200.
      const bool same = sameFamily(gpu, device) || (device.starts_with("H100") && gpu.starts_with("H200"));
      const double bytes = number(t.at(i, "payload_bytes")), bus = number(t.at(i, "value")) * 1e9;
      const double n = number(t.at(i, "n_gpus"));
      if (!same || bytes < 1e6 || bus <= 0 || n != 8 || number(t.at(i, "n_nodes")) != 1) continue;
      const std::string config = t.at(i, "config");
      const bool multicast = config.find("NVLS") != std::string::npos &&
                             config.find("NVLS disabled") == std::string::npos &&
                             config.find("NVLS off") == std::string::npos;
      const bool library =
          config.find("torch 2.9") != std::string::npos;  // chose NVLS at this size (same source)
      sweeps.push_back({bytes, 2 * (n - 1) / n * bytes / bus, n, 1, multicast || library});
    }
  }
  return sweeps;
}

double sweepSeconds(const GpuConstants& g, const LinkSpec& link, const Sweep& s) {
  NodeGroup node;
  node.scale_up = link;
  GpuConstants used = g;
  if (!s.multicast) used.multicast_efficiency = 0;
  return collectiveSeconds(makeFabric(node, 1, used), CommKind::AllReduce, s.bytes,
                           {s.ranks, s.nodes, s.ranks, 1});
}

// Mean absolute log error; the same for an over- and an underestimate by a factor.
double logError(double predicted, double measured) {
  return std::fabs(std::log(predicted / measured));
}

struct Parameter {
  double GpuConstants::*value;
  double low, high;
};
// Coordinate search: every parameter in turn up and down by shrinking factors while the loss falls.
void search(GpuConstants& g, const std::vector<Parameter>& parameters,
            const std::function<double(const GpuConstants&)>& loss) {
  double best = loss(g);
  for (const double step : {0.2, 0.1, 0.05, 0.02, 0.01}) {
    for (int round = 0; round < 4; ++round) {
      bool improved = false;
      for (const Parameter& p : parameters) {
        for (const double factor : {1 + step, 1 / (1 + step)}) {
          GpuConstants trial = g;
          trial.*p.value = std::clamp(trial.*p.value * factor, p.low, p.high);
          if (trial.*p.value == g.*p.value) continue;
          const double value = loss(trial);
          if (value >= best * (1 - 1e-4)) continue;
          best = value;
          g = trial;
          improved = true;
        }
      }
      if (!improved) break;
    }
  }
}

void setSource(GpuConstants& g, std::initializer_list<const char*> names, const std::string& source) {
  for (const char* name : names) g.sources[name] = source;
}

}  // namespace

FitResult fitGpu(const FitInput& input, const GpuConstants& start) {
  GpuConstants g = start;
  const DeviceSpec& device = input.device;
  if (const double best =
          bestProduct(input.micro, device.name, "bf16", device.name.find("PCIe") != std::string::npos);
      best > 0) {
    g.matmul_16 = best;
    g.sources["matmul_16"] = "micro.csv, best product measured (stas00/ml-engineering@744d01e18b)";
  }
  if (const double best = bestProduct(input.micro, device.name, "fp8", false); best > 0) {
    g.matmul_8 = best;
    g.sources["matmul_8"] = "micro.csv, best fp8 product measured (stas00/ml-engineering@744d01e18b)";
  }
  const Shapes shapes = readShapes(input);
  if (!shapes.products.empty()) {
    GpuConstants at = g;  // the device the shapes were measured on
    if (shapes.ceiling > 0) at.matmul_16 = shapes.ceiling;
    search(at, {{&GpuConstants::k_ramp, 10, 600}, {&GpuConstants::sustained, 0.4, 1}},
           [&](const GpuConstants& trial) {
             double sum = 0;
             for (const auto& [call, seconds] : shapes.products)
               sum += logError(gpuOpTime(trial, {}, call).device_s, seconds);
             return sum;
           });
    const std::string source = fmt::format("fitted to {} products of {} (gemm_efficiency.csv)",
                                           shapes.products.size(), shapes.product_gpu);
    g.k_ramp = at.k_ramp;
    g.sustained = at.sustained;
    setSource(g, {"k_ramp", "sustained"}, source);
    for (const bool backward : {false, true}) {
      std::vector<double> ratios;
      for (const auto& [call, seconds] : shapes.attention) {
        if ((call.op.kind == OpKind::AttentionBackward) == backward)
          ratios.push_back(gpuOpTime(at, {}, call).device_s / seconds);
      }
      if (ratios.empty()) continue;
      double& rate = backward ? g.flash_backward : g.flash_forward;
      rate *= medianOf(ratios) * g.matmul_16 / at.matmul_16;
      g.sources[backward ? "flash_backward" : "flash_forward"] = fmt::format(
          "median of {} attention shapes of {} (gemm_efficiency.csv)", ratios.size(), shapes.product_gpu);
    }
  }
  const std::vector<Sweep> sweeps = readSweeps(input);
  if (!sweeps.empty()) {
    std::vector<Parameter> parameters{{&GpuConstants::link_efficiency, 0.3, 1},
                                      {&GpuConstants::comm_fill_s, 1e-6, 300e-6},
                                      {&GpuConstants::comm_start_s, 5e-6, 60e-6}};
    const bool multicast =
        std::any_of(sweeps.begin(), sweeps.end(), [](const Sweep& s) { return s.multicast; });
    if (multicast && g.multicast_efficiency > 0)
      parameters.push_back({&GpuConstants::multicast_efficiency, 0.5, 1.2});
    search(g, parameters, [&](const GpuConstants& trial) {
      double sum = 0;
      for (const Sweep& s : sweeps) sum += logError(sweepSeconds(trial, input.scale_up, s), s.seconds);
      return sum;
    });
    const std::string source =
        fmt::format("fitted to {} all-reduce measurements on 8 GPUs (micro.csv)", sweeps.size());
    setSource(g, {"link_efficiency", "comm_fill_s", "comm_start_s"}, source);
    if (multicast) setSource(g, {"multicast_efficiency"}, source);
  }
  FitResult result;
  result.profile.name = device.name;
  result.profile.measured = true;
  if (!input.runs.empty()) {
    std::vector<Parameter> parameters{
        {&GpuConstants::sustained, 0.5, 1},
        {&GpuConstants::memory_bandwidth, 0.7 * device.memory_bandwidth, 0.92 * device.memory_bandwidth},
        {&GpuConstants::host_s, 2e-6, 60e-6},
        {&GpuConstants::nic_efficiency, 0.3, 0.9}};
    std::string fitted = "sustained memory_bandwidth host_s nic_efficiency";
    if (shapes.attention.empty()) {
      parameters.push_back({&GpuConstants::flash_forward, 0.2 * g.matmul_16, 0.8 * g.matmul_16});
      parameters.push_back({&GpuConstants::flash_backward, 0.2 * g.matmul_16, 0.7 * g.matmul_16});
      fitted += " flash_forward flash_backward";
    }
    std::map<std::string, double> per_source;  // sources count alike, however many rows they give
    for (const MeasuredRun& run : input.runs) per_source[run.source] += 1;
    const auto loss = [&](const GpuConstants& trial) {
      trace::CostProfile profile = result.profile;
      profile.gpu = trial;
      double sum = 0;
      for (const MeasuredRun& run : input.runs)
        sum += logError(predictRun(run, profile).step_s, *run.step_s) / per_source[run.source];
      return sum;
    };
    search(g, parameters, loss);
    std::string ids;
    for (const MeasuredRun& run : input.runs) ids += (ids.empty() ? "" : " ") + run.id;
    for (const trace::GpuField& field : trace::gpuFields()) {
      if ((" " + fitted + " ").find(std::string(" ") + field.name + " ") != std::string::npos)
        g.sources[field.name] = fmt::format("fitted to {} calibration steps: {}", input.runs.size(), ids);
    }
  }
  result.profile.gpu = g;
  result.profile.source = fmt::format("bmtrain fit {}; every constant names its source", device.name);
  GpuConstants at = g;
  if (shapes.ceiling > 0) {
    at.matmul_16 = shapes.ceiling;
    at.flash_forward *= at.matmul_16 / g.matmul_16;
    at.flash_backward *= at.matmul_16 / g.matmul_16;
  }
  for (const auto& [call, seconds] : shapes.products)
    result.samples.push_back(
        {"product",
         fmt::format("{} {}x{}x{}", toString(call.op.kind), call.op.dim[0], call.op.dim[1], call.op.dim[2]),
         seconds, gpuOpTime(at, {}, call).device_s});
  for (const auto& [call, seconds] : shapes.attention)
    result.samples.push_back(
        {"attention",
         fmt::format("{} seq {} heads {}", toString(call.op.kind), call.op.dim[1], call.op.dim[2]), seconds,
         gpuOpTime(at, {}, call).device_s});
  for (const Sweep& s : sweeps)
    result.samples.push_back({"all-reduce",
                              formatBytes(static_cast<Bytes>(s.bytes)) + (s.multicast ? " multicast" : ""),
                              s.seconds, sweepSeconds(g, input.scale_up, s)});
  for (const MeasuredRun& run : input.runs)
    result.samples.push_back({"step", run.id, *run.step_s, predictRun(run, result.profile).step_s});
  return result;
}

std::string fitToText(const FitResult& result) {
  std::string out = fmt::format("{}\n", result.profile.name);
  for (const trace::GpuField& field : trace::gpuFields()) {
    const auto source = result.profile.gpu->sources.find(field.name);
    out += fmt::format("  {:<22} {:>12.5g} {:<7} {}\n", field.name, (*result.profile.gpu).*field.value,
                       field.unit, source == result.profile.gpu->sources.end() ? "" : source->second);
  }
  out += "residuals              n   MAPE %   median      p90     bias\n";
  std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> kinds;
  for (const FitSample& s : result.samples) {
    kinds[s.kind].first.push_back(s.predicted);
    kinds[s.kind].second.push_back(s.measured);
  }
  for (const auto& [kind, series] : kinds) {
    const ErrorSummary s = summarize(series.first, series.second);
    out += fmt::format("  {:<18} {:>5} {:>8.2f} {:>8.2f} {:>8.2f} {:>+8.2f}\n", kind, s.n, s.mape_pct,
                       s.median_ape_pct, s.p90_ape_pct, s.bias_pct);
  }
  std::vector<FitSample> worst = result.samples;
  std::sort(worst.begin(), worst.end(), [](const FitSample& a, const FitSample& b) {
    return logError(a.predicted, a.measured) > logError(b.predicted, b.measured);
  });
  if (worst.size() > 12) worst.resize(12);
  out += "largest misses\n";
  for (const FitSample& s : worst)
    out += fmt::format("  {:<11} {:<44} {:>10} measured {:>10} {:>+7.1f} %\n", s.kind, s.name,
                       formatDuration(s.predicted), formatDuration(s.measured),
                       100 * (s.predicted / s.measured - 1));
  return out;
}

}  // namespace bmt::sim
