// The report as JSON (bmtrain.report/1) and as text.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "core/json.h"
#include "simulator/report.h"

namespace bmt::sim {
namespace {

Json trainingToJson(const TrainingRun& t) {
  return {{"tokens", t.tokens},
          {"steps", t.steps},
          {"compute_days", t.compute_days},
          {"days", t.days},
          {"goodput", t.goodput},
          {"mtbf_s", t.mtbf_s},
          {"expected_failures", t.failures},
          {"checkpoint_bytes", t.checkpoint_bytes},
          {"checkpoint_s", t.checkpoint_s},
          {"checkpoint_interval_s", t.interval_s},
          {"checkpoint_interval_young_s", t.interval_young_s},
          {"restart_s", t.restart_s},
          {"device_hours", t.device_hours},
          {"cost", t.cost},
          {"assumptions", t.assumptions}};
}

std::string trainingToText(const TrainingRun& t) {
  std::string out = fmt::format("\ntraining run          {:.4g} tokens, {:.0f} steps\n", t.tokens, t.steps);
  out += fmt::format("  {:<24} {:>8.2f} days\n", "steps alone", t.compute_days);
  if (t.mtbf_s > 0) {
    out += fmt::format("  {:<24} {:>8.1f} %   a failure every {}, {:.0f} expected\n", "goodput",
                       100 * t.goodput, formatDuration(t.mtbf_s), t.failures);
    out += fmt::format("  {:<24} {:>8}     every {} (Daly 2006; Young 1974: {})\n", "checkpoint",
                       formatDuration(t.checkpoint_s), formatDuration(t.interval_s),
                       formatDuration(t.interval_young_s));
  }
  out += fmt::format("  {:<24} {:>8.2f} days, {:.4g} device-hours{}\n", "time to train", t.days,
                     t.device_hours, t.cost > 0 ? fmt::format(", cost {:.4g}", t.cost) : std::string());
  return out + "  assumed: " + t.assumptions + "\n";
}

// The tasks of one rank and slot in a row are one line; the longest lines, in order of time.
std::string criticalTasksToText(const Report& r) {
  constexpr std::size_t kLines = 40;
  struct Line {
    CriticalTask first;
    Ns time = 0;
    std::int64_t count = 0;
    std::map<std::string, Ns> causes;
  };
  std::vector<Line> lines;
  for (const CriticalTask& t : r.critical_tasks) {
    const bool same =
        !lines.empty() && lines.back().first.rank == t.rank && lines.back().first.slot == t.slot;
    if (!same) lines.push_back({t, 0, 0, {}});
    lines.back().time += t.end - t.begin;
    lines.back().causes[t.cause] += t.end - t.begin;
    ++lines.back().count;
  }
  std::vector<Ns> times;
  for (const Line& line : lines) times.push_back(line.time);
  std::sort(times.rbegin(), times.rend());
  const Ns least = times.size() > kLines ? times[kLines - 1] : 0;
  std::string out = "\ncritical path by task        from        time  tasks\n";
  std::size_t shown = 0;
  Ns hidden = 0;
  for (const Line& line : lines) {
    if (line.time < least || shown >= kLines) {
      hidden += line.time;
      continue;
    }
    ++shown;
    std::string causes;
    for (const auto& [cause, time] : line.causes)
      causes += fmt::format("{}{} {}", causes.empty() ? "" : ", ", cause, formatDuration(toSeconds(time)));
    out += fmt::format("  rank {:<6} {:<8} {:>10} {:>11} {:>6}  {}\n", line.first.rank, line.first.slot,
                       formatDuration(toSeconds(line.first.begin)), formatDuration(toSeconds(line.time)),
                       line.count, causes);
  }
  if (lines.size() > shown)
    out += fmt::format("  {} shorter pieces, {} together\n", lines.size() - shown,
                       formatDuration(toSeconds(hidden)));
  return out;
}

}  // namespace

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
  if (!r.critical_tasks.empty()) {
    json["critical_path_tasks"] = Json::array();
    for (const CriticalTask& t : r.critical_tasks)
      json["critical_path_tasks"].push_back({{"rank", t.rank},
                                             {"cause", t.cause},
                                             {"task", t.task},
                                             {"begin_s", toSeconds(t.begin)},
                                             {"end_s", toSeconds(t.end)}});
  }
  if (r.explanation) {
    Json parts = Json::array();
    for (const TimePart& part : r.explanation->parts)
      parts.push_back({{"group", part.group},
                       {"name", part.name},
                       {"time_s", part.mean_s},
                       {"fraction", part.mean_s / r.step_time_s},
                       {"total_ns", part.total}});
    json["explanation"] = {{"step_time_s", r.step_time_s},
                           {"step_ns", r.explanation->step},
                           {"ranks", r.explanation->ranks},
                           {"parts", parts}};
  }
  if (r.jitter)
    json["jitter"] = {{"distribution", "lognormal, mean 1"},
                      {"sigma", r.jitter->sigma},
                      {"draws", r.jitter->draws},
                      {"seed", r.jitter->seed},
                      {"mean_step_s", r.jitter->mean_s},
                      {"p95_step_s", r.jitter->p95_s},
                      {"min_step_s", r.jitter->min_s},
                      {"max_step_s", r.jitter->max_s}};
  if (r.training) json["training"] = trainingToJson(*r.training);
  json["executed"] = r.executed;
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
  if (r.explanation) {
    out += "\nwhere the time goes   mean per rank\n";
    std::string group;
    for (const TimePart& part : r.explanation->parts) {
      const bool single = part.name.empty();
      if (part.group != group) {
        const double sum = r.explanation->seconds(part.group);
        out += fmt::format("  {:<24} {:>12} {:>6.1f} %\n", part.group, formatDuration(sum),
                           100 * sum / r.step_time_s);
      }
      group = part.group;
      if (!single)
        out += fmt::format("    {:<22} {:>12} {:>6.1f} %\n", part.name, formatDuration(part.mean_s),
                           100 * part.mean_s / r.step_time_s);
    }
  }
  out += "\ncritical path\n";
  for (const auto& [cause, seconds] : r.critical_path)
    out += fmt::format("  {:<16} {:>12} {:>6.1f} %\n", cause, formatDuration(seconds),
                       100 * seconds / r.step_time_s);
  if (!r.critical_tasks.empty()) out += criticalTasksToText(r);
  if (r.jitter)
    out += fmt::format(
        "\njitter              {:>12}   mean of {} draws, p95 {}, {} to {} (lognormal, sigma {}, seed {})\n",
        formatDuration(r.jitter->mean_s), r.jitter->draws, formatDuration(r.jitter->p95_s),
        formatDuration(r.jitter->min_s), formatDuration(r.jitter->max_s), r.jitter->sigma, r.jitter->seed);
  if (r.training) out += trainingToText(*r.training);
  if (!r.executed) out += "not executed: this cluster has devices that are simulated only\n";
  for (const std::string& warning : r.warnings) out += "warning: " + warning + "\n";
  out += fmt::format("\n{} ranks, {} tasks simulated in {}\n", r.num_ranks, r.num_tasks,
                     formatDuration(r.simulate_wall_s));
  return out;
}

}  // namespace bmt::sim
