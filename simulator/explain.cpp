#include "simulator/explain.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace bmt::sim {
namespace {

constexpr std::array<const char*, 9> kGroups{"compute", "recompute",     "optimizer", "launch", "contention",
                                             "slow",    "communication", "waiting",   "bubble"};

bool isComm(const Task& task) {
  return task.comm >= 0;
}

class Explainer {
 public:
  Explainer(const TaskGraph& graph, const trace::Trace& t,
            const std::function<TaskCostParts(std::size_t, TaskId)>& cost,
            const std::function<std::vector<CostPart>(RankId, SegmentId)>& parts)
      : graph_(graph), trace_(t), cost_(cost), parts_(parts) {}

  Explanation run() {
    std::size_t first = 0;
    for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
      rank(r, &trace_.spans[first]);
      first += graph_.ranks[r].tasks.size();
    }
    Explanation e;
    e.step = trace_.step_time;
    e.ranks = static_cast<std::int64_t>(graph_.ranks.size());
    for (const auto& [key, total] : totals_) {
      if (total == 0) continue;
      e.parts.push_back({key.first, key.second, total,
                         static_cast<double>(total) / kNsPerSecond / static_cast<double>(e.ranks)});
    }
    const auto order = [](const std::string& group) {
      return std::find(kGroups.begin(), kGroups.end(), group) - kGroups.begin();
    };
    std::stable_sort(e.parts.begin(), e.parts.end(), [&](const TimePart& a, const TimePart& b) {
      return a.group != b.group ? order(a.group) < order(b.group) : a.total > b.total;
    });
    return e;
  }

 private:
  void add(const char* group, const std::string& name, Ns time) { totals_[{group, name}] += time; }

  GroupKind groupOf(const RankProgram& p, const Task& task) const {
    return groupKind(p.comms[static_cast<std::size_t>(task.comm)].group);
  }

  // Time in which a communication has posted and others have not.
  void addWait(GroupKind kind, Ns time) {
    const bool other_stage = kind == GroupKind::World || kind == GroupKind::Embedding ||
                             kind == GroupKind::ForwardPair || kind == GroupKind::BackwardPair;
    if (other_stage && graph_.plan.pp > 1) {
      add("bubble", "", time);
    } else {
      add("waiting", axisName(kind), time);
    }
  }

  void rank(std::size_t r, const trace::Span* spans) {
    const RankProgram& p = graph_.ranks[r];
    const std::size_t n = p.tasks.size();
    // What came before each task on its lane and, for communications, in issue order (rule R4).
    before_lane_.assign(n, -1);
    before_issue_.assign(n, -1);
    std::array<TaskId, kNumLanes> on_lane;
    on_lane.fill(-1);
    TaskId issued = -1, last = -1;
    for (TaskId t = 0; t < static_cast<TaskId>(n); ++t) {
      const auto i = static_cast<std::size_t>(t);
      TaskId& lane = on_lane[static_cast<std::size_t>(p.tasks[i].lane)];
      before_lane_[i] = lane;
      lane = t;
      if (isComm(p.tasks[i])) before_issue_[i] = std::exchange(issued, t);
      if (last < 0 || spans[i].end >= spans[last].end) last = t;
    }
    Ns done = 0;
    for (TaskId t = 0; t < static_cast<TaskId>(n); ++t) {
      const Task& task = p.tasks[static_cast<std::size_t>(t)];
      if (task.lane != Lane::Compute) continue;
      const trace::Span& span = spans[t];
      gap(p, spans, done, span.start, t);
      if (isComm(task)) {
        add("communication", axisName(groupOf(p, task)), span.end - span.start);
      } else {
        compute(r, p, task, t, span.end - span.start);
      }
      done = span.end;
    }
    // After the last op: communication that still runs, then waiting for the slowest rank.
    if (last >= 0 && spans[last].end > done && p.tasks[static_cast<std::size_t>(last)].lane != Lane::Compute)
      gap(p, spans, done, spans[last].end, last, true);
    if (last >= 0) done = std::max(done, spans[last].end);
    if (graph_.plan.pp > 1) {
      add("bubble", "", trace_.step_time - done);
    } else {
      add("waiting", "step end", trace_.step_time - done);
    }
  }

  // The Compute lane idles in [from, to) before `next` starts (or, with `own`, until side-lane task `next`
  // ends): walks back through what `next` waited for on this rank.
  void gap(const RankProgram& p, const trace::Span* spans, Ns from, Ns to, TaskId next, bool own = false) {
    if (from >= to) return;
    Ns cursor = to;
    const auto until = [&](Ns time) {  // the piece of the gap in [time, cursor)
      const Ns begin = std::max(from, std::min(time, cursor));
      const Ns piece = cursor - begin;
      cursor = begin;
      return piece;
    };
    const auto member = [&](TaskId t) {
      const GroupKind kind = groupOf(p, p.tasks[static_cast<std::size_t>(t)]);
      const Ns running = until(spans[t].start);
      if (running > 0) add("communication", axisName(kind), running);
      const Ns waiting = until(spans[t].posted);
      if (waiting > 0) addWait(kind, waiting);
    };
    TaskId at = next;
    const bool next_is_comm = isComm(p.tasks[static_cast<std::size_t>(next)]);
    if (own && next_is_comm) member(at);
    if (own && !next_is_comm) add("communication", "offload", until(spans[at].start));
    if (!own && next_is_comm)
      addWait(groupOf(p, p.tasks[static_cast<std::size_t>(at)]), until(spans[at].posted));
    while (cursor > from) {
      // The latest release among dependencies, the lane and the issue order.
      TaskId released = -1;
      Ns when = -1;
      bool by_post = false;
      const auto candidate = [&](TaskId t, Ns time, bool post) {
        if (t < 0 || time < when) return;
        released = t;
        when = time;
        by_post = post;
      };
      const Task& task = p.tasks[static_cast<std::size_t>(at)];
      if (isComm(task)) {
        const TaskId issue = before_issue_[static_cast<std::size_t>(at)];
        if (issue >= 0) candidate(issue, spans[issue].posted, true);
      }
      const TaskId lane = before_lane_[static_cast<std::size_t>(at)];
      if (lane >= 0) candidate(lane, spans[lane].end, false);
      for (const TaskId dep : p.depsOf(task)) candidate(dep, spans[dep].end, false);
      if (released < 0) break;
      const Ns unexplained = until(std::min(when, cursor));
      if (unexplained > 0) add("bubble", "", unexplained);
      at = released;
      if (by_post) continue;
      if (isComm(p.tasks[static_cast<std::size_t>(at)])) {
        member(at);
      } else if (p.tasks[static_cast<std::size_t>(at)].lane != Lane::Compute) {
        add("communication", "offload", until(spans[at].start));
      } else {
        break;  // an op on the Compute lane: it ended before the gap
      }
    }
    const Ns rest = until(from);
    if (rest > 0) add("bubble", "", rest);
  }

  void compute(std::size_t r, const RankProgram& p, const Task& task, TaskId id, Ns duration) {
    const TaskCostParts cost = cost_(r, id);
    // A zero-length or shortened task (jitter) has nothing of the later terms.
    const Ns healthy = std::min(duration, cost.healthy);
    const Ns slow = std::clamp<Ns>(cost.alone - healthy, 0, duration - healthy);
    if (slow > 0) add("slow", "", slow);
    if (duration > healthy + slow) add("contention", "", duration - healthy - slow);
    const auto [entry, inserted] = segments_.try_emplace({p.rank, task.segment});
    if (inserted) entry->second = parts_(p.rank, task.segment);
    double sum = 0;
    for (const CostPart& part : entry->second) sum += part.seconds;
    // Cumulative rounding: the pieces are whole nanoseconds and add up to the task.
    double before = 0;
    Ns given = 0;
    for (std::size_t i = 0; i < entry->second.size(); ++i) {
      const CostPart& part = entry->second[i];
      before += part.seconds;
      const bool last = i + 1 == entry->second.size() || sum <= 0;
      const Ns upto = last ? healthy : static_cast<Ns>(before / sum * static_cast<double>(healthy));
      const Ns piece = std::max<Ns>(0, upto - given);
      given += piece;
      if (piece > 0) charge(task, part, piece);
      if (sum <= 0) break;
    }
  }

  void charge(const Task& task, const CostPart& part, Ns time) {
    if (part.kind == CostPart::Communication) return add("communication", axisName(part.group), time);
    if (part.kind == CostPart::Launch) return add("launch", "", time);
    const std::string op(toString(part.op));
    const bool again =
        task.kind == TaskKind::Recompute || (task.kind == TaskKind::Backward && op.ends_with("_forward"));
    if (again) return add("recompute", op, time);
    add(task.kind == TaskKind::Optimizer ? "optimizer" : "compute", op, time);
  }

  const TaskGraph& graph_;
  const trace::Trace& trace_;
  const std::function<TaskCostParts(std::size_t, TaskId)>& cost_;
  const std::function<std::vector<CostPart>(RankId, SegmentId)>& parts_;
  std::map<std::pair<std::string, std::string>, Ns> totals_;
  std::map<std::pair<RankId, SegmentId>, std::vector<CostPart>> segments_;
  std::vector<TaskId> before_lane_, before_issue_;
};

}  // namespace

std::string axisName(GroupKind kind) {
  switch (kind) {
    case GroupKind::World:
    case GroupKind::Embedding:
    case GroupKind::ExpertData:
      return "data";
    case GroupKind::ForwardPair:
    case GroupKind::BackwardPair:
      return "pipeline";
    default:
      return std::string(toString(kind));
  }
}

double Explanation::seconds(const std::string& group) const {
  double sum = 0;
  for (const TimePart& part : parts) sum += part.group == group ? part.mean_s : 0;
  return sum;
}

Explanation explain(const TaskGraph& graph, const trace::Trace& t,
                    const std::function<TaskCostParts(std::size_t, TaskId)>& cost,
                    const std::function<std::vector<CostPart>(RankId, SegmentId)>& parts) {
  return Explainer(graph, t, cost, parts).run();
}

std::vector<CriticalTask> criticalPath(const trace::Trace& t) {
  std::map<RankId, std::size_t> first;
  for (std::size_t i = t.spans.size(); i-- > 0;) first[t.spans[i].rank] = i;
  const auto last =
      std::max_element(t.spans.begin(), t.spans.end(),
                       [](const trace::Span& a, const trace::Span& b) { return a.end < b.end; });
  std::vector<CriticalTask> path;
  if (last == t.spans.end()) return path;
  const trace::Span* span = &*last;
  Ns upper = t.step_time;
  while (span != nullptr) {
    path.push_back({span->rank, std::string(toString(span->kind)), t.names[span->name], toString(span->slot),
                    span->start, upper});
    upper = span->start;
    if (span->cause.task < 0) break;
    span = &t.spans[first.at(span->cause.rank) + static_cast<std::size_t>(span->cause.task)];
    if (span->end < upper) path.push_back({span->rank, "waiting", "", "", span->end, upper});
    upper = std::min(upper, span->end);
  }
  if (upper > 0) path.push_back({path.back().rank, "waiting", "", "", 0, upper});
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace bmt::sim
