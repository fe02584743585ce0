#include "simulator/report.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "core/json.h"
#include "core/lower.h"
#include "core/memory_plan.h"

namespace bmt::sim {
namespace {

const char* axisOf(TaskKind kind) {
  switch (kind) {
    case TaskKind::TensorComm:
      return "tensor";
    case TaskKind::DataComm:
      return "data";
    case TaskKind::PipeComm:
      return "pipeline";
    case TaskKind::ContextComm:
      return "context";
    case TaskKind::ExpertComm:
      return "expert";
    default:
      return nullptr;
  }
}

void fillMemory(Report& report, const TaskGraph& graph, const ClusterSpec& cluster) {
  const NodeGroup& node = cluster.groups.front();
  report.device_memory = node.device.memory;
  std::map<std::int32_t, StageMemory> worst;
  std::map<std::int32_t, Bytes> per_node;
  for (const RankProgram& program : graph.ranks) {
    const MemoryUse use = memoryUse(program);
    StageMemory& stage = worst[program.coord.pp];
    per_node[cluster.nodeOf(program.rank)] += program.arena;
    if (program.arena <= stage.total) continue;
    stage.stage = program.coord.pp;
    stage.by_kind = use.at_peak;
    stage.overhead = program.arena - use.peak_live;
    stage.total = program.arena;
  }
  for (const auto& [index, stage] : worst) {
    report.memory.push_back(stage);
    report.peak_memory = std::max(report.peak_memory, stage.total);
  }
  report.memory_share = static_cast<double>(report.peak_memory) / static_cast<double>(report.device_memory);
  report.fits = report.memory_share <= 1;
  // Ranks on a CPU share their node's memory.
  if (node.device.kind == DeviceKind::Cpu && graph.selection == RankSelection::All) {
    Bytes most = 0;
    for (const auto& [index, bytes] : per_node) most = std::max(most, bytes);
    report.memory_share =
        static_cast<double>(most) / static_cast<double>(node.device.memory * node.devices_per_node);
    report.fits = report.memory_share <= 1;
  }
}

void fillComm(Report& report, const trace::Trace& t, std::size_t num_ranks) {
  for (const char* axis : {"tensor", "data", "pipeline", "context", "expert"}) {
    AxisComm entry;
    entry.axis = axis;
    for (const trace::Span& span : t.spans) {
      const char* const of = axisOf(span.kind);
      if (of == nullptr || entry.axis != of) continue;
      entry.bytes_per_rank += static_cast<double>(span.bytes) / static_cast<double>(num_ranks);
      entry.time_s += toSeconds(span.end - span.start) / static_cast<double>(num_ranks);
    }
    if (entry.bytes_per_rank > 0) report.comm.push_back(entry);
  }
  // Exposed time per axis: the axis's spans against the rank's compute spans.
  std::map<RankId, std::vector<std::pair<Ns, Ns>>> busy;
  for (const trace::Span& span : t.spans) {
    if (span.lane == Lane::Compute && axisOf(span.kind) == nullptr)
      busy[span.rank].emplace_back(span.start, span.end);
  }
  for (const trace::Span& span : t.spans) {
    const char* const of = axisOf(span.kind);
    if (of == nullptr) continue;
    const auto& intervals = busy[span.rank];  // in lane order, disjoint
    auto at = std::lower_bound(intervals.begin(), intervals.end(), span.start,
                               [](const std::pair<Ns, Ns>& i, Ns time) { return i.second <= time; });
    Ns hidden = 0;
    for (; at != intervals.end() && at->first < span.end; ++at)
      hidden += std::min(at->second, span.end) - std::max(at->first, span.start);
    for (AxisComm& entry : report.comm) {
      if (entry.axis == of)
        entry.exposed_s += toSeconds(span.end - span.start - hidden) / static_cast<double>(num_ranks);
    }
  }
}

// Walks back from the last task through the causes; every nanosecond of the step falls into one.
void fillCriticalPath(Report& report, const trace::Trace& t) {
  std::map<RankId, std::size_t> first;
  for (std::size_t i = t.spans.size(); i-- > 0;) first[t.spans[i].rank] = i;
  const auto last =
      std::max_element(t.spans.begin(), t.spans.end(),
                       [](const trace::Span& a, const trace::Span& b) { return a.end < b.end; });
  if (last == t.spans.end()) return;
  std::map<std::string, double> seconds;
  const trace::Span* span = &*last;
  Ns upper = t.step_time;
  while (span != nullptr) {
    const std::string cause = span->kind == TaskKind::PipeComm || axisOf(span->kind) == nullptr
                                  ? std::string(toString(span->kind))
                                  : std::string(axisOf(span->kind)) + "_comm";
    seconds[cause] += toSeconds(upper - span->start);
    upper = span->start;
    if (span->cause.task < 0) break;
    span = &t.spans[first.at(span->cause.rank) + static_cast<std::size_t>(span->cause.task)];
    if (span->end < upper) seconds["waiting"] += toSeconds(upper - span->end);
    upper = std::min(upper, span->end);
  }
  if (upper > 0) seconds["waiting"] += toSeconds(upper);
  report.critical_path.assign(seconds.begin(), seconds.end());
}

}  // namespace

double modelFlopsPerStep(const ModelSpec& model, const Plan& plan, bool causal) {
  return 3 * static_cast<double>(plan.global_batch) * forwardFlopsPerSequence(model, causal);
}

double hardwareFlopsPerStep(const ModelSpec& model, const Plan& plan) {
  const double flops = modelFlopsPerStep(model, plan, false);
  if (plan.recompute != Recompute::Full) return flops;
  const double rows = static_cast<double>(plan.global_batch * lossRowsPerSequence(model));
  const double head = 6 * rows * static_cast<double>(model.vocab) * static_cast<double>(model.d_model);
  return head + (flops - head) * 4 / 3;
}

Simulation simulatePlan(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
                        const trace::CostProfile& profile, RankSelection selection, Granularity granularity) {
  const auto start = std::chrono::steady_clock::now();
  // Ranks that share cores slow each other: one representative per stage would not see that.
  const NodeGroup& node = cluster.groups.front();
  if (node.device.kind == DeviceKind::Cpu) selection = RankSelection::All;
  const TaskGraph graph = lower(model, cluster, plan, selection, granularity);
  const CostModel costs(graph, cluster, profile);
  SimResult played = simulate(graph, costTable(graph, costs), costs.resources());

  Simulation result;
  Report& r = result.report;
  r.model = model.name;
  r.cluster = cluster.name;
  r.plan = planToText(plan);
  r.profile = fmt::format("{} ({})", profile.name, profile.measured ? "measured" : "assumed");
  played.trace.cluster = cluster.name;
  played.trace.profile = profile.name;
  r.step_time_s = toSeconds(played.trace.step_time);
  const double devices = plan.numRanks();
  r.tokens_per_s = static_cast<double>(plan.global_batch * model.seq_len) / r.step_time_s;
  r.tokens_per_s_per_device = r.tokens_per_s / devices;
  const double flops_per_device_s = modelFlopsPerStep(model, plan, false) / r.step_time_s / devices;
  r.model_tflops_per_device = flops_per_device_s * 1e-12;
  double peak = peakFlops(node.device, plan.precision);
  if (node.device.kind == DeviceKind::Cpu) {
    const double cores = profile.cores > 0 ? profile.cores : node.cores_per_node;
    peak = profile.core_peak_flops * std::min(1.0, cores / node.devices_per_node);
  }
  if (peak > 0) {
    r.mfu = flops_per_device_s / peak;
    r.mfu_causal = modelFlopsPerStep(model, plan, true) / r.step_time_s / devices / peak;
    r.hfu = hardwareFlopsPerStep(model, plan) / r.step_time_s / devices / peak;
    if (r.mfu_causal > 1)
      throw Error(
          ErrorKind::BadInput,
          fmt::format(
              "the prediction is {:.0f} % of peak ({} per device of {}), which is impossible; the profile "
              "does not fit this device",
              100 * r.mfu_causal, formatRate(flops_per_device_s, "FLOP"), formatRate(peak, "FLOP")),
          "profile " + profile.name);
  }
  r.shares = trace::stepShares(played.trace);
  fillMemory(r, graph, cluster);
  fillComm(r, played.trace, graph.ranks.size());
  fillCriticalPath(r, played.trace);
  r.num_ranks = static_cast<std::int64_t>(graph.ranks.size());
  r.num_tasks = played.num_tasks;
  r.num_events = played.num_events;
  r.warnings = costs.warnings();
  if (!r.fits)
    r.warnings.push_back(node.device.kind == DeviceKind::Cpu
                             ? fmt::format("does not fit: the ranks of one node need {:.0f} % of its {}",
                                           100 * r.memory_share,
                                           formatBytes(r.device_memory * node.devices_per_node))
                             : fmt::format("does not fit: the worst device needs {} of {}",
                                           formatBytes(r.peak_memory), formatBytes(r.device_memory)));
  result.trace = std::move(played.trace);
  r.simulate_wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

std::string reportToJson(const Report& r) {
  Json json;
  json["schema"] = "bmtrain.report/1";
  json["model"] = r.model;
  json["cluster"] = r.cluster;
  json["plan"] = r.plan;
  json["profile"] = r.profile;
  json["fits"] = r.fits;
  json["step_time_s"] = r.step_time_s;
  json["tokens_per_s"] = r.tokens_per_s;
  json["tokens_per_s_per_device"] = r.tokens_per_s_per_device;
  json["model_tflops_per_device"] = r.model_tflops_per_device;
  json["mfu"] = r.mfu;
  json["mfu_causal"] = r.mfu_causal;
  json["hfu"] = r.hfu;
  json["bubble_fraction"] = r.shares.bubble;
  json["exposed_comm_fraction"] = r.shares.exposed;
  json["compute_fraction"] = r.shares.compute;
  json["peak_memory_bytes"] = r.peak_memory;
  json["memory"] = Json::array();
  const auto kind = [](const StageMemory& m, BufferKind k) { return m.by_kind[static_cast<std::size_t>(k)]; };
  for (const StageMemory& m : r.memory) {
    json["memory"].push_back(
        {{"stage", m.stage},
         {"weights", kind(m, BufferKind::Weights)},
         {"gradients", kind(m, BufferKind::Gradients)},
         {"optimizer", kind(m, BufferKind::Optimizer)},
         {"activations", kind(m, BufferKind::Activations)},
         {"buffers",
          kind(m, BufferKind::Workspace) + kind(m, BufferKind::Communication) + kind(m, BufferKind::Input)},
         {"overhead", m.overhead},
         {"total", m.total}});
  }
  json["comm"] = Json::array();
  for (const AxisComm& c : r.comm)
    json["comm"].push_back({{"axis", c.axis},
                            {"bytes_per_rank", c.bytes_per_rank},
                            {"time_s", c.time_s},
                            {"exposed_s", c.exposed_s}});
  json["critical_path"] = Json::object();
  for (const auto& [cause, seconds] : r.critical_path) json["critical_path"][cause] = seconds;
  json["num_ranks_simulated"] = r.num_ranks;
  json["num_tasks"] = r.num_tasks;
  json["num_events"] = r.num_events;
  json["simulate_wall_s"] = r.simulate_wall_s;
  json["warnings"] = r.warnings;
  return json.dump(2) + "\n";
}

std::string reportToText(const Report& r) {
  std::string out =
      fmt::format("{} on {}\n  plan     {}\n  profile  {}\n\n", r.model, r.cluster, r.plan, r.profile);
  out += fmt::format("predicted step      {:>12}   {} tokens/s ({} per device)\n",
                     formatDuration(r.step_time_s), static_cast<std::int64_t>(r.tokens_per_s),
                     static_cast<std::int64_t>(r.tokens_per_s_per_device));
  out += fmt::format("model FLOP/s        {:>12}   per device{}\n",
                     formatRate(r.model_tflops_per_device * 1e12, "FLOP"),
                     r.mfu > 0 ? fmt::format(", MFU {:.1f} % ({:.1f} % with causal attention halved)",
                                             100 * r.mfu, 100 * r.mfu_causal)
                               : std::string(", peak unknown"));
  out += fmt::format(
      "compute             {:>11.1f} %   bubble {:.1f} %, exposed communication {:.1f} % (means over "
      "ranks)\n",
      100 * r.shares.compute, 100 * r.shares.bubble, 100 * r.shares.exposed);
  out += fmt::format("peak memory         {:>12}   of {} per device: {}\n", formatBytes(r.peak_memory),
                     formatBytes(r.device_memory), r.fits ? "fits" : "DOES NOT FIT");
  out += "\nmemory per stage       weights  gradients  optimizer activations    buffers      total\n";
  for (const StageMemory& m : r.memory) {
    const auto cell = [&](BufferKind k) { return formatBytes(m.by_kind[static_cast<std::size_t>(k)]); };
    Bytes buffers = m.overhead;
    for (const BufferKind k : {BufferKind::Workspace, BufferKind::Communication, BufferKind::Input})
      buffers += m.by_kind[static_cast<std::size_t>(k)];
    out += fmt::format("  stage {:<4} {:>16} {:>10} {:>10} {:>11} {:>10} {:>10}\n", m.stage,
                       cell(BufferKind::Weights), cell(BufferKind::Gradients), cell(BufferKind::Optimizer),
                       cell(BufferKind::Activations), formatBytes(buffers), formatBytes(m.total));
  }
  if (!r.comm.empty()) {
    out += "\ncommunication        bytes per rank    running    exposed\n";
    for (const AxisComm& c : r.comm)
      out += fmt::format("  {:<16} {:>16} {:>10} {:>10}\n", c.axis,
                         formatBytes(static_cast<Bytes>(c.bytes_per_rank)), formatDuration(c.time_s),
                         formatDuration(c.exposed_s));
  }
  out += "\ncritical path\n";
  for (const auto& [cause, seconds] : r.critical_path)
    out += fmt::format("  {:<16} {:>12} {:>6.1f} %\n", cause, formatDuration(seconds),
                       100 * seconds / r.step_time_s);
  for (const std::string& warning : r.warnings) out += "warning: " + warning + "\n";
  out += fmt::format("\n{} ranks, {} tasks simulated in {}\n", r.num_ranks, r.num_tasks,
                     formatDuration(r.simulate_wall_s));
  return out;
}

trace::CostProfile chooseProfile(const ClusterSpec& cluster, const std::string& path) {
  if (!path.empty()) return trace::loadProfile(path);
  const DeviceSpec& device = cluster.groups.front().device;
  if (device.kind != DeviceKind::Cpu)
    return trace::shippedProfile(device.name).value_or(trace::datasheetProfile(device));
  const std::string local = trace::localProfilePath();
  struct stat info {};
  if (::stat(local.c_str(), &info) != 0)
    throw Error(ErrorKind::BadInput, fmt::format("this machine has no cost profile ({} is missing); run "
                                                 "'bmtrain calibrate' once, or give --profile",
                                                 local));
  return trace::loadProfile(local);
}

}  // namespace bmt::sim
