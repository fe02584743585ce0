#include "traces/shares.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace bmt::trace {
namespace {

using Interval = std::pair<Ns, Ns>;

std::vector<Interval> merged(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::vector<Interval> result;
  for (const Interval& i : intervals) {
    if (!result.empty() && i.first <= result.back().second) {
      result.back().second = std::max(result.back().second, i.second);
    } else if (i.second > i.first) {
      result.push_back(i);
    }
  }
  return result;
}

Ns total(const std::vector<Interval>& intervals) {
  Ns sum = 0;
  for (const Interval& i : intervals) sum += i.second - i.first;
  return sum;
}

// Time covered by both; each list is merged.
Ns overlap(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  Ns sum = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max<Ns>(0, std::min(a[i].second, b[j].second) - std::max(a[i].first, b[j].first));
    (a[i].second < b[j].second ? i : j) += 1;
  }
  return sum;
}

}  // namespace

Shares stepShares(const Trace& trace) {
  Shares shares;
  if (trace.num_ranks == 0 || trace.step_time <= 0) return shares;
  std::vector<std::vector<Interval>> compute(static_cast<std::size_t>(trace.num_ranks)), blocking = compute,
                                                                                         side = compute;
  std::vector<RankId> ids;
  for (const Span& span : trace.spans) {
    if (ids.empty() || ids.back() != span.rank) ids.push_back(span.rank);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const Span& span : trace.spans) {
    const auto rank =
        static_cast<std::size_t>(std::lower_bound(ids.begin(), ids.end(), span.rank) - ids.begin());
    const bool comm = span.kind == TaskKind::TensorComm || span.kind == TaskKind::DataComm ||
                      span.kind == TaskKind::ContextComm || span.kind == TaskKind::ExpertComm;
    if (span.lane == Lane::Compute) {
      (comm ? blocking : compute)[rank].emplace_back(span.start, span.end);
    } else if (comm) {
      side[rank].emplace_back(span.start, span.end);
    }
  }
  const double n = static_cast<double>(ids.size()) * static_cast<double>(trace.step_time);
  for (std::size_t rank = 0; rank < ids.size(); ++rank) {
    const auto busy = merged(compute[rank]);
    auto comms = blocking[rank];
    comms.insert(comms.end(), side[rank].begin(), side[rank].end());
    const auto running = merged(comms);
    const double computed = static_cast<double>(total(busy));
    const double exposed = static_cast<double>(total(running) - overlap(running, busy));
    shares.compute += computed / n;
    shares.exposed += exposed / n;
    shares.bubble += (static_cast<double>(trace.step_time) - computed - exposed) / n;
  }
  return shares;
}

}  // namespace bmt::trace
