// Joins and tables of compare.h.
#include "traces/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <unordered_map>

#include "core/error.h"
#include "core/json.h"

namespace bmt::trace {
namespace {

double errorOf(double predicted, double measured) {
  return measured > 0 ? 100 * (predicted - measured) / measured : 0;
}

std::uint64_t keyOf(const Span& span) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(span.rank)) << 32) |
         static_cast<std::uint32_t>(span.task);
}

std::string nameOf(const Trace& trace, const Span& span) {
  if (span.name < trace.names.size()) return trace.names[span.name];
  return fmt::format("{} {}", toString(span.kind), toString(span.slot));
}

[[noreturn]] void refuse(const char* what, const std::string& predicted, const std::string& measured) {
  throw Error(ErrorKind::BadInput,
              fmt::format("the traces are of different {}: predicted '{}', measured '{}'", what, predicted,
                          measured));
}

void checkComparable(const Trace& predicted, const Trace& measured) {
  const auto name = [](const Trace& trace) {
    return trace.source == Source::Predicted ? "predicted" : "measured";
  };
  if (predicted.source != Source::Predicted || measured.source != Source::Measured)
    throw Error(
        ErrorKind::BadInput,
        fmt::format(
            "the first trace is {} and the second {}; give the predicted one first, then the measured one",
            name(predicted), name(measured)));
  if (predicted.model != measured.model) refuse("models", predicted.model, measured.model);
  if (predicted.plan != measured.plan) refuse("plans", predicted.plan, measured.plan);
  if (predicted.num_ranks != measured.num_ranks)
    refuse("numbers of ranks", std::to_string(predicted.num_ranks), std::to_string(measured.num_ranks));
}

void addTo(CompareRow& row, double predicted_s, double measured_s) {
  ++row.count;
  row.predicted_s += predicted_s;
  row.measured_s += measured_s;
}

template <std::size_t N, typename Kind>
std::vector<CompareRow> namedRows(const std::array<CompareRow, N>& rows) {
  std::vector<CompareRow> named;
  for (std::size_t i = 0; i < N; ++i) {
    if (rows[i].count == 0) continue;
    named.push_back(rows[i]);
    named.back().name = std::string(toString(static_cast<Kind>(i)));
  }
  return named;
}

}  // namespace

double CompareRow::errorPct() const {
  return errorOf(predicted_s, measured_s);
}
double Comparison::errorPct() const {
  return errorOf(predicted_step_s, measured_step_s);
}

Comparison compareTraces(const Trace& predicted, const Trace& measured, std::size_t num_worst) {
  checkComparable(predicted, measured);
  Comparison result;
  result.model = measured.model;
  result.cluster = measured.cluster;
  result.plan = measured.plan;
  result.profile = predicted.profile;
  result.predicted_step_s = toSeconds(predicted.step_time);
  result.measured_step_s = toSeconds(measured.step_time);
  result.predicted_shares = stepShares(predicted);
  result.measured_shares = stepShares(measured);
  result.predicted_peak = predicted.peak_memory;
  result.measured_peak = measured.peak_memory;

  std::unordered_map<std::uint64_t, const Span*> by_key;
  by_key.reserve(predicted.spans.size());
  for (const Span& span : predicted.spans) by_key.emplace(keyOf(span), &span);
  std::array<CompareRow, kNumTaskKinds> kinds;
  std::array<CompareRow, kNumLanes> lanes;
  for (const Span& m : measured.spans) {
    const auto found = by_key.find(keyOf(m));
    if (found == by_key.end()) {
      ++result.only_measured;
      continue;
    }
    const Span& p = *found->second;
    if (p.kind != m.kind || p.lane != m.lane || !(p.slot == m.slot) || p.layer != m.layer)
      throw Error(
          ErrorKind::BadInput,
          fmt::format(
              "task {} of rank {} is '{}' in the predicted and '{}' in the measured trace: the programs "
              "differ (another version or granularity); make both again with one version",
              m.task, m.rank, nameOf(predicted, p), nameOf(measured, m)));
    ++result.joined;
    const double predicted_s = toSeconds(p.end - p.start), measured_s = toSeconds(m.end - m.start);
    addTo(kinds[static_cast<std::size_t>(m.kind)], predicted_s, measured_s);
    addTo(lanes[static_cast<std::size_t>(m.lane)], predicted_s, measured_s);
    result.worst.push_back({{m.rank, m.task}, nameOf(measured, m), m.kind, m.lane, predicted_s, measured_s});
  }
  if (result.joined == 0)
    throw Error(ErrorKind::BadInput, fmt::format("no task is in both traces: {} predicted, {} measured",
                                                 predicted.spans.size(), measured.spans.size()));
  result.only_predicted = static_cast<std::int64_t>(predicted.spans.size()) - result.joined;
  result.by_kind = namedRows<kNumTaskKinds, TaskKind>(kinds);
  result.by_lane = namedRows<kNumLanes, Lane>(lanes);
  const auto larger = [](const TaskMiss& a, const TaskMiss& b) {
    const double miss_a = std::abs(a.predicted_s - a.measured_s),
                 miss_b = std::abs(b.predicted_s - b.measured_s);
    if (miss_a != miss_b) return miss_a > miss_b;
    return a.task.rank != b.task.rank ? a.task.rank < b.task.rank : a.task.task < b.task.task;
  };
  const std::size_t keep = std::min(num_worst, result.worst.size());
  std::partial_sort(result.worst.begin(), result.worst.begin() + static_cast<std::ptrdiff_t>(keep),
                    result.worst.end(), larger);
  result.worst.resize(keep);
  return result;
}

std::string comparisonToJson(const Comparison& c) {
  const auto shares = [](const Shares& s) {
    return Json{
        {"compute_fraction", s.compute}, {"bubble_fraction", s.bubble}, {"exposed_comm_fraction", s.exposed}};
  };
  const auto rows = [](const std::vector<CompareRow>& list, const char* key) {
    Json out = Json::array();
    for (const CompareRow& row : list) {
      const auto n = static_cast<double>(row.count);
      out.push_back({{key, row.name},
                     {"count", row.count},
                     {"predicted_s", row.predicted_s},
                     {"measured_s", row.measured_s},
                     {"predicted_mean_s", row.predicted_s / n},
                     {"measured_mean_s", row.measured_s / n},
                     {"error_pct", row.errorPct()}});
    }
    return out;
  };
  Json json;
  json["schema"] = "bmtrain.compare/1";
  json["model"] = c.model;
  json["cluster"] = c.cluster;
  json["plan"] = c.plan;
  json["profile"] = c.profile;
  json["predicted_step_s"] = c.predicted_step_s;
  json["measured_step_s"] = c.measured_step_s;
  json["error_pct"] = c.errorPct();
  json["predicted"] = shares(c.predicted_shares);
  json["measured"] = shares(c.measured_shares);
  json["predicted"]["peak_memory_bytes"] = c.predicted_peak;
  json["measured"]["peak_memory_bytes"] = c.measured_peak;
  json["joined_tasks"] = c.joined;
  json["only_predicted_tasks"] = c.only_predicted;
  json["only_measured_tasks"] = c.only_measured;
  json["by_kind"] = rows(c.by_kind, "kind");
  json["by_lane"] = rows(c.by_lane, "lane");
  json["worst"] = Json::array();
  for (const TaskMiss& miss : c.worst) {
    json["worst"].push_back({{"rank", miss.task.rank},
                             {"task", miss.task.task},
                             {"name", miss.name},
                             {"kind", toString(miss.kind)},
                             {"lane", toString(miss.lane)},
                             {"predicted_s", miss.predicted_s},
                             {"measured_s", miss.measured_s},
                             {"miss_s", miss.predicted_s - miss.measured_s},
                             {"error_pct", errorOf(miss.predicted_s, miss.measured_s)}});
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string comparisonToText(const Comparison& c) {
  std::string out;
  const auto add = [&out]<typename... Args>(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
  };
  const auto duration = [](double seconds) { return formatDuration(seconds); };
  const auto bytes = [](Bytes value) { return value > 0 ? formatBytes(value) : std::string("not in trace"); };
  add("model    {}\nplan     {}\nprofile  {}\n\n", c.model, c.plan, c.profile);
  add("{:<24}{:>14}{:>14}{:>12}\n", "", "predicted", "measured", "error");
  add("{:<24}{:>14}{:>14}{:>10.1f} %\n", "step time", duration(c.predicted_step_s),
      duration(c.measured_step_s), c.errorPct());
  const auto share = [&](const char* name, double p, double m) {
    add("{:<24}{:>12.1f} %{:>12.1f} %{:>+10.1f} points\n", name, 100 * p, 100 * m, 100 * (p - m));
  };
  share("compute share", c.predicted_shares.compute, c.measured_shares.compute);
  share("bubble share", c.predicted_shares.bubble, c.measured_shares.bubble);
  share("exposed communication", c.predicted_shares.exposed, c.measured_shares.exposed);
  add("{:<24}{:>14}{:>14}", "peak memory", bytes(c.predicted_peak), bytes(c.measured_peak));
  if (c.predicted_peak > 0 && c.measured_peak > 0)
    add("{:>10.1f} %", errorOf(static_cast<double>(c.predicted_peak), static_cast<double>(c.measured_peak)));
  out += "\n";
  const auto table = [&](const char* title, const std::vector<CompareRow>& rows) {
    add("\n{:<16}{:>8}{:>14}{:>14}{:>12}{:>16}{:>16}\n", title, "tasks", "predicted", "measured", "error",
        "predicted mean", "measured mean");
    for (const CompareRow& row : rows) {
      const auto n = static_cast<double>(row.count);
      add("{:<16}{:>8}{:>14}{:>14}{:>10.1f} %{:>16}{:>16}\n", row.name, row.count, duration(row.predicted_s),
          duration(row.measured_s), row.errorPct(), duration(row.predicted_s / n),
          duration(row.measured_s / n));
    }
  };
  table("kind of task", c.by_kind);
  table("lane", c.by_lane);
  if (!c.worst.empty()) {
    add("\n{:<6}{:>8}  {:<34}{:>12}{:>14}{:>14}\n", "rank", "task", "largest misses", "predicted", "measured",
        "miss");
    for (const TaskMiss& miss : c.worst) {
      const double difference = miss.predicted_s - miss.measured_s;
      add("{:<6}{:>8}  {:<34}{:>12}{:>14}{:>14}\n", miss.task.rank, miss.task.task, miss.name,
          duration(miss.predicted_s), duration(miss.measured_s),
          (difference < 0 ? "-" : "+") + duration(std::abs(difference)));
    }
  }
  if (c.only_predicted > 0 || c.only_measured > 0)
    add("\n{} tasks are only in the predicted and {} only in the measured trace\n", c.only_predicted,
        c.only_measured);
  return out;
}

}  // namespace bmt::trace
