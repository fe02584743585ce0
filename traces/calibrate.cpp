// Fitting of calibrate.h.
#include "traces/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>

#include "core/error.h"

namespace bmt::trace {
namespace {

double secondsOf(const OpFit& fit, const Op& op) {
  double seconds = fit.overhead_s;
  if (fit.flops_per_s > 0) seconds += flops(op) / fit.flops_per_s;
  if (fit.bytes_per_s > 0) seconds += bytesMoved(op) / fit.bytes_per_s;
  return seconds;
}

// Median over the kinds that were measured of bytes per second at their largest sample: what streaming
// reaches.
double streamingBandwidth(const std::map<OpKind, std::vector<OpSample>>& by_kind) {
  std::vector<double> rates;
  for (const auto& [kind, samples] : by_kind) {
    if (isMatrixProduct(kind) || kind == OpKind::AttentionForward || kind == OpKind::AttentionBackward)
      continue;
    double largest = 0, rate = 0;
    for (const OpSample& sample : samples) {
      if (bytesMoved(sample.op) <= largest) continue;
      largest = bytesMoved(sample.op);
      rate = largest / sample.seconds;
    }
    rates.push_back(rate);
  }
  if (rates.empty()) return 0;
  std::nth_element(rates.begin(), rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2), rates.end());
  return rates[rates.size() / 2];
}

}  // namespace

std::vector<OpFit> fitOps(const std::vector<OpSample>& samples, double core_peak_flops) {
  std::map<OpKind, std::vector<OpSample>> by_kind;
  for (const OpSample& sample : samples) {
    BMT_CHECK(sample.seconds > 0, "a measured time is positive");
    by_kind[sample.op.kind].push_back(sample);
  }
  const double streaming = streamingBandwidth(by_kind);
  std::vector<OpFit> fits;
  for (int i = 0; i < kNumOpKinds; ++i) {
    const auto kind = static_cast<OpKind>(i);
    const auto found = by_kind.find(kind);
    if (found == by_kind.end()) {
      if (!(streaming > 0)) continue;
      OpFit assumed;
      assumed.kind = kind;
      assumed.bytes_per_s = streaming;
      fits.push_back(assumed);
      continue;
    }
    OpFit fit = fitOp(kind, found->second);
    if (isMatrixProduct(kind) && core_peak_flops > 0)
      fit.flops_per_s = std::min(fit.flops_per_s, core_peak_flops);
    fits.push_back(fit);
  }
  return fits;
}

CostProfile refineFromTrace(const CostProfile& base, const TaskGraph& graph, const Trace& measured) {
  struct Sample {
    std::array<double, kNumOpKinds> seconds{};  // predicted, by kind
    double measured_s = 0;                      // without the task's overhead
  };
  std::vector<Sample> tasks;
  std::array<std::int64_t, kNumOpKinds> uses{};
  for (const Span& span : measured.spans) {
    const auto at = std::find_if(graph.ranks.begin(), graph.ranks.end(),
                                 [&](const RankProgram& program) { return program.rank == span.rank; });
    const std::string where = fmt::format("task {} of rank {}", span.task, span.rank);
    if (at == graph.ranks.end() || static_cast<std::size_t>(span.task) >= at->tasks.size())
      throw Error(ErrorKind::BadInput, "the trace's plan has no such task", where);
    const Task& task = at->tasks[static_cast<std::size_t>(span.task)];
    if (task.kind != span.kind || !(task.slot == span.slot))
      throw Error(ErrorKind::BadInput,
                  fmt::format("is '{}' in the trace and '{}' in the plan: another version's trace",
                              toString(span.kind), toString(task.kind)),
                  where);
    if (task.segment < 0) continue;
    Sample sample;
    sample.measured_s = toSeconds(span.end - span.start) - base.task_overhead_s;
    for (const OpCall& call : graph.segments[static_cast<std::size_t>(task.segment)].ops) {
      const OpFit* const fit = findOp(base, call.op.kind);
      if (fit == nullptr)
        throw Error(ErrorKind::BadInput,
                    fmt::format("has no cost for {}; calibrate without --from first", toString(call.op.kind)),
                    "profile " + base.name);
      sample.seconds[static_cast<std::size_t>(call.op.kind)] += secondsOf(*fit, call.op);
      ++uses[static_cast<std::size_t>(call.op.kind)];
    }
    if (sample.measured_s > 0) tasks.push_back(sample);
  }
  if (tasks.empty()) throw Error(ErrorKind::BadInput, "the trace holds no compute task with a measured time");

  constexpr int kRounds = 100;
  std::array<double, kNumOpKinds> scale;
  scale.fill(1);
  const auto predicted = [&](const Sample& sample) {
    double sum = 0;
    for (std::size_t k = 0; k < scale.size(); ++k) sum += scale[k] * sample.seconds[k];
    return sum;
  };
  for (int round = 0; round < kRounds; ++round) {
    std::array<double, kNumOpKinds> weight{}, pull{};
    for (const Sample& sample : tasks) {
      const double ratio = sample.measured_s / predicted(sample);
      for (std::size_t k = 0; k < scale.size(); ++k) {
        weight[k] += sample.seconds[k];
        pull[k] += sample.seconds[k] * ratio;
      }
    }
    for (std::size_t k = 0; k < scale.size(); ++k) {
      if (weight[k] > 0) scale[k] *= pull[k] / weight[k];
    }
  }
  double sum_pct = 0, max_pct = 0;
  for (const Sample& sample : tasks) {
    const double error = 100 * std::fabs(predicted(sample) / sample.measured_s - 1);
    sum_pct += error;
    max_pct = std::max(max_pct, error);
  }
  CostProfile refined = base;
  refined.measured = true;
  refined.source = fmt::format("{}; op costs scaled to a measured trace of {} with {} ({} tasks)",
                               base.source, measured.model, measured.plan, tasks.size());
  for (OpFit& fit : refined.ops) {
    const auto k = static_cast<std::size_t>(fit.kind);
    if (uses[k] == 0) continue;
    fit.overhead_s *= scale[k];
    fit.flops_per_s /= scale[k];
    fit.bytes_per_s /= scale[k];
    if (isMatrixProduct(fit.kind) && base.core_peak_flops > 0)
      fit.flops_per_s = std::min(fit.flops_per_s, base.core_peak_flops);
    fit.samples = uses[k];
    fit.mean_abs_error_pct = sum_pct / static_cast<double>(tasks.size());
    fit.max_abs_error_pct = max_pct;
  }
  return refined;
}

CommFit fitNcclTests(const std::string& text, const std::string& source, const std::string& fallback_name) {
  const std::string marker = "Collective test starting:";
  std::string name = fallback_name;
  std::int64_t ranks = 0;
  struct Row {
    double bytes, seconds;
  };
  std::vector<Row> rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t content = line.find_first_not_of(" \t");
    if (content == std::string::npos) continue;
    if (line[content] == '#') {
      std::istringstream words(line.substr(content + 1));
      std::string first;
      std::int64_t rank = -1;
      if (words >> first && first == "Rank" && words >> rank) ranks = std::max(ranks, rank + 1);
      if (const std::size_t at = line.find(marker); at != std::string::npos)
        name = line.substr(at + marker.size());
      continue;
    }
    // Only lines that parse fully: size count type redop root time algbw busbw.
    std::istringstream words(line);
    std::int64_t size = 0, count = 0, root = 0;
    std::string type, redop;
    double time_us = 0, algbw = 0, busbw = 0;
    if (!(words >> size >> count >> type >> redop >> root >> time_us >> algbw >> busbw)) continue;
    if (size > 0 && time_us > 0) rows.push_back({static_cast<double>(size), time_us * 1e-6});
  }
  std::optional<CommKind> kind;
  const std::pair<const char*, CommKind> known[] = {{"all_reduce", CommKind::AllReduce},
                                                    {"all_gather", CommKind::AllGather},
                                                    {"reduce_scatter", CommKind::ReduceScatter},
                                                    {"alltoall", CommKind::AllToAll},
                                                    {"sendrecv", CommKind::Send}};
  for (const auto& [word, value] : known) {
    if (name.find(word) != std::string::npos) kind = value;
  }
  if (!kind)
    throw Error(ErrorKind::BadInput,
                fmt::format("which collective is it? '{}' names none of all_reduce, all_gather, "
                            "reduce_scatter, alltoall, sendrecv; "
                            "the file has no line '# {} NAME' and its own name does not say either",
                            name, marker),
                source);
  if (ranks < 2)
    throw Error(ErrorKind::BadInput,
                fmt::format("lists {} ranks ('#  Rank' lines); at least 2 are needed", ranks), source);
  if (rows.size() < 2)
    throw Error(ErrorKind::BadInput,
                fmt::format("holds {} rows of results (size count type redop root time algbw busbw ...); at "
                            "least 2 are needed",
                            rows.size()),
                source);
  // Ring algorithms; size is the full buffer for all of these (NVIDIA, nccl-tests doc/PERFORMANCE.md).
  const auto n = static_cast<double>(ranks);
  std::vector<CommSample> samples;
  for (const Row& row : rows) {
    switch (*kind) {
      case CommKind::AllReduce:
        samples.push_back({2 * (n - 1), 2 * (n - 1) / n * row.bytes, row.seconds});
        break;
      case CommKind::AllGather:
      case CommKind::ReduceScatter:
      case CommKind::AllToAll:
        samples.push_back({n - 1, (n - 1) / n * row.bytes, row.seconds});
        break;
      case CommKind::Send:
      case CommKind::Recv:
      case CommKind::Shift:
        samples.push_back({1, row.bytes, row.seconds});
        break;
    }
  }
  return fitComm(*kind, "nccl", samples);
}

std::string profileToText(const CostProfile& profile) {
  std::string out = fmt::format("{}\n{}\n\n", profile.name, profile.source);
  const auto add = [&out]<typename... Args>(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
  };
  const auto rate = [](double value, const char* unit) {
    return value > 0 ? formatRate(value, unit) : std::string("-");
  };
  add("{:<24}{:>14.0f}\n", "cores", profile.cores);
  add("{:<24}{:>14}\n", "peak of one core", rate(profile.core_peak_flops, "FLOP"));
  add("{:<24}{:>14}\n", "memory, read + write", rate(profile.memory_bandwidth, "B"));
  add("{:<24}{:>14}\n", "overhead per task", formatDuration(profile.task_overhead_s));
  add("{:<24}{:>12.1f} %\n", "all cores busy", 100 * profile.contention);
  add("\n{:<24}{:>9}{:>12}{:>16}{:>14}{:>12}{:>12}\n", "op", "samples", "overhead", "flops", "bytes",
      "mean error", "max error");
  for (const OpFit& fit : profile.ops) {
    add("{:<24}{:>9}{:>12}{:>16}{:>14}", toString(fit.kind), fit.samples, formatDuration(fit.overhead_s),
        rate(fit.flops_per_s, "FLOP"), rate(fit.bytes_per_s, "B"));
    if (fit.samples > 0) {
      add("{:>10.1f} %{:>10.1f} %\n", fit.mean_abs_error_pct, fit.max_abs_error_pct);
    } else {
      add("{:>24}\n", "not measured: assumed");
    }
  }
  add("\n{:<24}{:>9}{:>12}{:>16}{:>14}{:>12}{:>12}\n", "communication", "samples", "per step", "over",
      "bytes", "mean error", "max error");
  for (const CommFit& fit : profile.comms) {
    add("{:<24}{:>9}{:>12}{:>16}{:>14}{:>10.1f} %{:>10.1f} %\n", toString(fit.kind), fit.samples,
        formatDuration(fit.alpha_s), fit.transport, rate(fit.bytes_per_s, "B"), fit.mean_abs_error_pct,
        fit.max_abs_error_pct);
  }
  return out;
}

}  // namespace bmt::trace
