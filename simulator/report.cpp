#include "simulator/report.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <thread>

#include "core/lower.h"
#include "core/memory_plan.h"
#include "simulator/cluster_costs.h"

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
  std::map<std::int32_t, StageMemory> worst;
  std::map<std::int32_t, Bytes> per_node;
  report.device_memory = cluster.groupOf(graph.ranks.front().rank).device.memory;
  for (const RankProgram& program : graph.ranks) {
    const MemoryUse use = memoryUse(program);
    const NodeGroup& group = cluster.groupOf(program.rank);
    const double share = static_cast<double>(program.arena) / static_cast<double>(group.device.memory);
    if (share > report.memory_share) {
      report.memory_share = share;
      report.device_memory = group.device.memory;
      report.worst_rank = program.rank;
    }
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
  // Ranks on a CPU share their node's memory.
  const NodeGroup& node = cluster.groupOf(report.worst_rank);
  if (cluster.homogeneous() && node.device.kind == DeviceKind::Cpu && graph.selection == RankSelection::All) {
    Bytes most = 0;
    for (const auto& [index, bytes] : per_node) most = std::max(most, bytes);
    report.memory_share =
        static_cast<double>(most) / static_cast<double>(node.device.memory * node.devices_per_node);
  }
  report.fits = report.memory_share <= 1;
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

void fillCriticalPath(Report& report, const trace::Trace& t, bool tasks) {
  std::vector<CriticalTask> path = criticalPath(t);
  std::map<std::string, double> seconds;
  for (const CriticalTask& task : path) seconds[task.cause] += toSeconds(task.end - task.begin);
  report.critical_path.assign(seconds.begin(), seconds.end());
  if (tasks) report.critical_tasks = std::move(path);
}

// FLOP/s of all ranks together at `type`; 0 when a device has no such peak.
double clusterPeak(const ClusterSpec& cluster, const Plan& plan,
                   const std::vector<trace::CostProfile>& profiles) {
  double sum = 0;
  for (std::size_t g = 0; g < cluster.groups.size(); ++g) {
    const NodeGroup& node = cluster.groups[g];
    double peak = peakFlops(node.device, plan.precision);
    if (node.device.kind == DeviceKind::Cpu) {
      const double cores = profiles[g].cores > 0 ? profiles[g].cores : node.cores_per_node;
      peak = profiles[g].core_peak_flops * std::min(1.0, cores / node.devices_per_node);
    }
    if (!(peak > 0)) return 0;
    sum += peak * node.num_nodes * node.devices_per_node;
  }
  return sum;
}

JitterResult playJitter(const TaskGraph& graph, const CostTable& costs,
                        const std::vector<Resource>& resources, const SimulateOptions& o) {
  std::vector<double> steps(static_cast<std::size_t>(o.draws));
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < steps.size(); i = next++) {
      const CostTable drawn = withJitter(graph, costs, o.jitter, o.seed, static_cast<std::int64_t>(i));
      steps[i] = toSeconds(simulate(graph, drawn, resources, {false}).trace.step_time);
    }
  };
  std::vector<std::thread> threads;
  for (int j = 1; j < o.jobs; ++j) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  std::sort(steps.begin(), steps.end());
  JitterResult result{o.jitter, o.draws, o.seed, 0, 0, steps.front(), steps.back()};
  for (const double step : steps) result.mean_s += step / static_cast<double>(o.draws);
  // Nearest rank: the smallest step that at least 95 % of the draws do not exceed.
  const auto rank = static_cast<std::size_t>(std::ceil(0.95 * static_cast<double>(o.draws)));
  result.p95_s = steps[rank - 1];
  return result;
}

}  // namespace

double modelFlopsPerStep(const ModelSpec& model, const Plan& plan, bool causal) {
  return 3 * static_cast<double>(plan.global_batch) * forwardFlopsPerSequence(model, causal);
}

double hardwareFlopsPerStep(const ModelSpec& model, const Plan& plan) {
  const double flops = modelFlopsPerStep(model, plan, false);
  const double rows = static_cast<double>(plan.global_batch * lossRowsPerSequence(model));
  const double head = 6 * rows * static_cast<double>(model.vocab) * static_cast<double>(model.d_model);
  // Share of the layers that are computed again, and of those whose attention core is.
  double full = 0, core = 0;
  for (const RecomputeSegment& segment : recomputeSegments(plan, 0, model.layers)) {
    const auto share = static_cast<double>(segment.end - segment.begin) / static_cast<double>(model.layers);
    if (segment.policy == Recompute::Full) full += share;
    if (segment.policy == Recompute::Selective) core += share;
  }
  // Attention is what halves when causal pairs are counted once.
  const double attention = 2 * (flops - modelFlopsPerStep(model, plan, true));
  return flops + full * (flops - head) / 3 + core * attention / 3;
}

std::string whyNotFolded(const ClusterSpec& cluster, const Plan& plan) {
  if (!cluster.homogeneous()) return fmt::format("the cluster has {} node groups", cluster.groups.size());
  if (!cluster.slow_devices.empty()) return "a device is slow";
  if (!cluster.slow_links.empty()) return "a link is slow";
  if (!plan.batch_shares.empty()) return "replicas have unequal shares of the batch";
  // Ranks that share cores slow each other: one representative per stage would not see that.
  if (cluster.groups.front().device.kind == DeviceKind::Cpu) return "ranks share the cores of a node";
  return {};
}

Simulation simulatePlan(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
                        const trace::CostProfile& profile, RankSelection selection, Granularity granularity,
                        const SimOptions& sim_options) {
  SimulateOptions options;
  options.details = sim_options.details;
  if (whyNotFolded(cluster, plan).empty()) options.selection = selection;
  options.granularity = granularity;
  return simulatePlan(model, cluster, plan, std::vector<trace::CostProfile>(cluster.groups.size(), profile),
                      options);
}

Simulation simulatePlan(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
                        const std::vector<trace::CostProfile>& profiles, const SimulateOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  std::string differ = whyNotFolded(cluster, plan);
  if (differ.empty() && options.jitter > 0) differ = "jitter differs from rank to rank";
  if (!differ.empty() && options.selection == RankSelection::Folded)
    throw Error(ErrorKind::BadInput,
                fmt::format("one rank per stage cannot stand for the others: {}; play all ranks", differ),
                "ranks");
  if (!cluster.slow_links.empty() && options.granularity == Granularity::Stage)
    throw Error(ErrorKind::BadInput, "slow links need layer granularity: stages merge their collectives",
                "granularity");
  const RankSelection selection =
      options.selection.value_or(differ.empty() ? RankSelection::Folded : RankSelection::All);
  const TaskGraph graph = lower(model, cluster, plan, selection, options.granularity);
  const ClusterCosts costs(graph, cluster, profiles);
  const CostTable table = costs.table();
  SimResult played = simulate(graph, table, costs.resources(), {options.details});

  Simulation result;
  Report& r = result.report;
  r.model = model.name;
  r.cluster = cluster.name;
  r.plan = planToText(plan);
  for (const trace::CostProfile& profile : profiles) {
    const std::string name = fmt::format("{} ({})", profile.name, profile.measured ? "measured" : "assumed");
    if (r.profile.find(name) == std::string::npos) r.profile += (r.profile.empty() ? "" : ", ") + name;
  }
  played.trace.cluster = cluster.name;
  played.trace.profile = r.profile;
  r.step_time_s = toSeconds(played.trace.step_time);
  const double devices = plan.numRanks();
  r.tokens_per_s = static_cast<double>(plan.global_batch * model.seq_len) / r.step_time_s;
  r.tokens_per_s_per_device = r.tokens_per_s / devices;
  const double flops_per_device_s = modelFlopsPerStep(model, plan, false) / r.step_time_s / devices;
  r.model_tflops_per_device = flops_per_device_s * 1e-12;
  const double peak = clusterPeak(cluster, plan, profiles) / devices;
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
          "profile " + r.profile);
  }
  r.shares = trace::stepShares(played.trace);
  fillMemory(r, graph, cluster);
  fillComm(r, played.trace, graph.ranks.size());
  if (options.details) fillCriticalPath(r, played.trace, options.critical_tasks);
  if (options.explain) {
    const CostTable healthy = costs.healthy();
    r.explanation = explain(
        graph, played.trace,
        [&](std::size_t rank, TaskId task) {
          const auto t = static_cast<std::size_t>(task);
          return TaskCostParts{healthy[rank][t].duration, table[rank][t].duration};
        },
        [&](RankId rank, SegmentId segment) { return costs.partsOf(rank, segment); });
  }
  if (options.jitter > 0) r.jitter = playJitter(graph, table, costs.resources(), options);
  r.num_ranks = static_cast<std::int64_t>(graph.ranks.size());
  r.num_tasks = played.num_tasks;
  r.num_events = played.num_events;
  r.warnings = costs.warnings();
  for (const NodeGroup& group : cluster.groups) r.executed = r.executed && group.device.executed;
  const NodeGroup& node = cluster.groupOf(r.worst_rank);
  if (!r.fits)
    r.warnings.push_back(
        cluster.homogeneous() && node.device.kind == DeviceKind::Cpu
            ? fmt::format("does not fit: the ranks of one node need {:.0f} % of its {}", 100 * r.memory_share,
                          formatBytes(r.device_memory * node.devices_per_node))
        : cluster.homogeneous()
            ? fmt::format("does not fit: the worst device needs {} of {}", formatBytes(r.peak_memory),
                          formatBytes(r.device_memory))
            : fmt::format("does not fit: rank {} needs {:.0f} % of the {} of its {}", r.worst_rank,
                          100 * r.memory_share, formatBytes(r.device_memory), node.device.name));
  result.trace = std::move(played.trace);
  r.simulate_wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

namespace {

trace::CostProfile deviceProfile(const DeviceSpec& device) {
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

}  // namespace

trace::CostProfile chooseProfile(const ClusterSpec& cluster, const std::string& path) {
  if (!path.empty()) return trace::loadProfile(path);
  return deviceProfile(cluster.groups.front().device);
}

std::vector<trace::CostProfile> chooseProfiles(const ClusterSpec& cluster, const std::string& path) {
  if (!path.empty() && !cluster.homogeneous())
    throw Error(
        ErrorKind::BadInput,
        fmt::format("one profile cannot describe {} node groups; leave --profile out", cluster.groups.size()),
        "profile " + path);
  if (!path.empty()) return {trace::loadProfile(path)};
  std::vector<trace::CostProfile> profiles;
  for (const NodeGroup& group : cluster.groups) profiles.push_back(deviceProfile(group.device));
  return profiles;
}

}  // namespace bmt::sim
