#include "simulator/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <queue>
#include <unordered_map>

#include "core/error.h"
#include "core/memory_plan.h"
#include "simulator/fluid.h"

namespace bmt::sim {
namespace {

struct TaskId2 {
  std::int32_t rank = -1;  // index in graph.ranks
  TaskId task = -1;
};

// A compute task, or a communication of several members that start and end together.
struct Activity {
  std::vector<TaskId2> members;
  std::uint32_t expected = 1;  // members that must post
  double remaining = 0;        // ns at full speed
  double rate = 1;
  Ns updated = 0;
  std::uint32_t epoch = 0;  // invalidates older completion events
  bool running = false;
};

struct Event {
  Ns time;
  std::int64_t seq;
  std::int32_t activity;
  std::uint32_t epoch;
  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : seq > other.seq;
  }
};

struct KeyHash {
  std::size_t operator()(const std::pair<GroupId, std::uint64_t>& key) const {
    return std::hash<std::uint64_t>{}(key.second * 0x9E3779B97F4A7C15ULL ^
                                      static_cast<std::uint64_t>(key.first));
  }
};

struct RankState {
  std::array<std::vector<TaskId>, kNumLanes> queue;
  std::array<std::size_t, kNumLanes> head{};
  std::array<TaskId, kNumLanes> last_done;  // latest finished task of the lane: a cause
  std::array<bool, kNumLanes> busy{};       // the head has started or posted
  std::vector<TaskId> comms;                // in issue order
  std::size_t posted = 0;
  std::vector<std::int32_t> missing_deps;
  std::vector<TaskId> last_dep;               // the dependency that finished last: a cause
  std::vector<std::int32_t> first_dependent;  // CSR over dependents
  std::vector<TaskId> dependents;
};

class Engine {
 public:
  Engine(const TaskGraph& graph, const CostTable& costs, const std::vector<Resource>& resources)
      : graph_(graph),
        costs_(costs),
        resources_(resources),
        users_(resources.size()),
        load_(resources.size(), 0) {}

  SimResult run() {
    prepare();
    for (std::size_t r = 0; r < states_.size(); ++r) advance(static_cast<std::int32_t>(r));
    resolveDirty();
    while (!events_.empty()) {
      const Ns time = events_.top().time;
      now_ = time;
      std::vector<std::int32_t> touched;
      while (!events_.empty() && events_.top().time == time) {
        const Event event = events_.top();
        events_.pop();
        ++num_events_;
        Activity& activity = activities_[static_cast<std::size_t>(event.activity)];
        if (!activity.running || event.epoch != activity.epoch) continue;
        finish(event.activity, touched);
      }
      for (const std::int32_t rank : touched) advance(rank);
      resolveDirty();
    }
    checkFinished();
    return report();
  }

 private:
  void prepare() {
    states_.resize(graph_.ranks.size());
    spans_.resize(graph_.ranks.size());
    std::unordered_map<std::pair<GroupId, std::uint64_t>, std::int32_t, KeyHash> meetings;
    activity_of_.resize(graph_.ranks.size());
    for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
      const RankProgram& program = graph_.ranks[r];
      RankState& s = states_[r];
      const std::size_t n = program.tasks.size();
      s.last_done.fill(-1);
      s.missing_deps.assign(n, 0);
      s.last_dep.assign(n, -1);
      s.first_dependent.assign(n + 1, 0);
      activity_of_[r].assign(n, -1);
      spans_[r].resize(n);
      for (const TaskId dep : program.deps) ++s.first_dependent[static_cast<std::size_t>(dep) + 1];
      for (std::size_t i = 0; i < n; ++i) s.first_dependent[i + 1] += s.first_dependent[i];
      s.dependents.resize(program.deps.size());
      std::vector<std::int32_t> fill(s.first_dependent.begin(), s.first_dependent.end() - 1);
      for (std::size_t i = 0; i < n; ++i) {
        const Task& task = program.tasks[i];
        s.missing_deps[i] = task.num_deps;
        for (const TaskId dep : program.depsOf(task))
          s.dependents[static_cast<std::size_t>(fill[static_cast<std::size_t>(dep)]++)] =
              static_cast<TaskId>(i);
        s.queue[static_cast<std::size_t>(task.lane)].push_back(static_cast<TaskId>(i));
        if (task.comm < 0) continue;
        s.comms.push_back(static_cast<TaskId>(i));
        const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
        const auto [entry, inserted] =
            meetings.try_emplace({comm.group, comm.seq}, static_cast<std::int32_t>(activities_.size()));
        if (inserted) {
          activities_.emplace_back();
          activities_.back().expected = 0;
        }
        ++activities_[static_cast<std::size_t>(entry->second)].expected;
        activity_of_[r][i] = entry->second;
      }
    }
  }

  // Starts and posts everything that R1, R2 and R4 allow on a rank.
  void advance(std::int32_t r) {
    RankState& s = states_[static_cast<std::size_t>(r)];
    const RankProgram& program = graph_.ranks[static_cast<std::size_t>(r)];
    bool progress = true;
    while (progress) {
      progress = false;
      for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
        if (s.busy[lane] || s.head[lane] >= s.queue[lane].size()) continue;
        const TaskId t = s.queue[lane][s.head[lane]];
        if (s.missing_deps[static_cast<std::size_t>(t)] > 0) continue;
        const Task& task = program.tasks[static_cast<std::size_t>(t)];
        if (task.comm >= 0 && s.comms[s.posted] != t) continue;  // R4
        s.busy[lane] = true;
        post(r, t, task);
        progress = true;
      }
    }
  }

  void post(std::int32_t r, TaskId t, const Task& task) {
    RankState& s = states_[static_cast<std::size_t>(r)];
    trace::Span& span = spans_[static_cast<std::size_t>(r)][static_cast<std::size_t>(t)];
    span.posted = now_;
    std::int32_t id = activity_of_[static_cast<std::size_t>(r)][static_cast<std::size_t>(t)];
    if (task.comm < 0) {
      id = static_cast<std::int32_t>(activities_.size());
      activities_.emplace_back();
      activity_of_[static_cast<std::size_t>(r)][static_cast<std::size_t>(t)] = id;
    } else {
      ++s.posted;
    }
    Activity& activity = activities_[static_cast<std::size_t>(id)];
    activity.members.push_back({r, t});
    const Ns duration = costs_[static_cast<std::size_t>(r)][static_cast<std::size_t>(t)].duration;
    activity.remaining = std::max(activity.remaining, static_cast<double>(duration));
    if (activity.members.size() < activity.expected) return;
    // The cause of a start: what released its last member, either its lane's previous task or a dependency.
    const TaskId on_lane = s.last_done[static_cast<std::size_t>(task.lane)];
    const TaskId dep = s.last_dep[static_cast<std::size_t>(t)];
    const auto& ends = spans_[static_cast<std::size_t>(r)];
    TaskId released = dep;
    if (dep < 0 || (on_lane >= 0 &&
                    ends[static_cast<std::size_t>(on_lane)].end >= ends[static_cast<std::size_t>(dep)].end))
      released = on_lane;
    for (const TaskId2& member : activity.members) {
      trace::Span& own = spans_[static_cast<std::size_t>(member.rank)][static_cast<std::size_t>(member.task)];
      own.start = now_;
      own.cause = {released >= 0 ? graph_.ranks[static_cast<std::size_t>(r)].rank : -1, released};
    }
    activity.running = true;
    activity.updated = now_;
    for (const TaskId2& member : activity.members) addLoad(member, id);
    schedule(id);  // a re-solve in the same instant replaces the event by its epoch
  }

  const Use& useOf(const TaskId2& member) const {
    return costs_[static_cast<std::size_t>(member.rank)][static_cast<std::size_t>(member.task)].use;
  }

  void addLoad(const TaskId2& member, std::int32_t id) {
    const Use& use = useOf(member);
    if (use.resource < 0) return;
    const auto r = static_cast<std::size_t>(use.resource);
    users_[r].push_back(id);
    load_[r] += use.demand;
    if (load_[r] > resources_[r].capacity * (1 + 1e-12)) markDirty(use.resource);
  }

  void removeLoad(const TaskId2& member, std::int32_t id) {
    const Use& use = useOf(member);
    if (use.resource < 0) return;
    const auto r = static_cast<std::size_t>(use.resource);
    if (load_[r] > resources_[r].capacity * (1 + 1e-12))
      markDirty(use.resource);  // it was contended: rates rise
    users_[r].erase(std::find(users_[r].begin(), users_[r].end(), id));
    load_[r] -= use.demand;
    if (users_[r].empty()) load_[r] = 0;
  }

  void markDirty(ResourceId resource) {
    if (std::find(dirty_.begin(), dirty_.end(), resource) == dirty_.end()) dirty_.push_back(resource);
  }

  // Re-solves the activities that are connected to a resource whose contention changed.
  void resolveDirty() {
    if (dirty_.empty()) return;
    std::vector<std::int32_t> members;
    std::vector<ResourceId> found = dirty_;
    std::unordered_map<std::int32_t, char> seen;
    for (std::size_t i = 0; i < found.size(); ++i) {
      for (const std::int32_t id : users_[static_cast<std::size_t>(found[i])]) {
        if (!seen.try_emplace(id, 1).second) continue;
        members.push_back(id);
        for (const TaskId2& member : activities_[static_cast<std::size_t>(id)].members) {
          const ResourceId resource = useOf(member).resource;
          if (resource >= 0 && std::find(found.begin(), found.end(), resource) == found.end())
            found.push_back(resource);
        }
      }
    }
    dirty_.clear();
    std::sort(members.begin(), members.end());
    std::sort(found.begin(), found.end());
    std::vector<double> capacities;
    for (const ResourceId resource : found)
      capacities.push_back(resources_[static_cast<std::size_t>(resource)].capacity);
    std::vector<std::vector<Use>> uses;
    for (const std::int32_t id : members) {
      std::vector<Use> all;
      for (const TaskId2& member : activities_[static_cast<std::size_t>(id)].members) {
        Use use = useOf(member);
        if (use.resource < 0) continue;
        use.resource = static_cast<ResourceId>(std::lower_bound(found.begin(), found.end(), use.resource) -
                                               found.begin());
        const auto same =
            std::find_if(all.begin(), all.end(), [&](const Use& u) { return u.resource == use.resource; });
        if (same != all.end()) {
          same->demand += use.demand;
        } else {
          all.push_back(use);
        }
      }
      uses.push_back(std::move(all));
    }
    const std::vector<double> rates = maxMinRates(uses, capacities);
    for (std::size_t i = 0; i < members.size(); ++i) {
      Activity& activity = activities_[static_cast<std::size_t>(members[i])];
      if (std::fabs(activity.rate - rates[i]) <= 1e-12) continue;
      activity.remaining =
          std::max(0.0, activity.remaining - static_cast<double>(now_ - activity.updated) * activity.rate);
      activity.updated = now_;
      activity.rate = rates[i];
      schedule(members[i]);
    }
  }

  void schedule(std::int32_t id) {
    Activity& activity = activities_[static_cast<std::size_t>(id)];
    ++activity.epoch;
    // Guards against 1e-9 of rounding turning a whole number into the next one.
    const double wait = std::ceil(activity.remaining / activity.rate - 1e-6);
    events_.push({activity.updated + static_cast<Ns>(std::max(0.0, wait)), next_seq_++, id, activity.epoch});
  }

  void finish(std::int32_t id, std::vector<std::int32_t>& touched) {
    // Taken by value: posting grows the list of activities.
    activities_[static_cast<std::size_t>(id)].running = false;
    const std::vector<TaskId2> members = activities_[static_cast<std::size_t>(id)].members;
    for (const TaskId2& member : members) {
      removeLoad(member, id);
      RankState& s = states_[static_cast<std::size_t>(member.rank)];
      const Task& task =
          graph_.ranks[static_cast<std::size_t>(member.rank)].tasks[static_cast<std::size_t>(member.task)];
      const auto lane = static_cast<std::size_t>(task.lane);
      spans_[static_cast<std::size_t>(member.rank)][static_cast<std::size_t>(member.task)].end = now_;
      s.busy[lane] = false;
      ++s.head[lane];
      s.last_done[lane] = member.task;
      ++num_done_;
      const auto t = static_cast<std::size_t>(member.task);
      for (std::int32_t i = s.first_dependent[t]; i < s.first_dependent[t + 1]; ++i) {
        const TaskId dependent = s.dependents[static_cast<std::size_t>(i)];
        --s.missing_deps[static_cast<std::size_t>(dependent)];
        s.last_dep[static_cast<std::size_t>(dependent)] = member.task;
      }
      if (std::find(touched.begin(), touched.end(), member.rank) == touched.end())
        touched.push_back(member.rank);
    }
  }

  void checkFinished() const {
    std::string waiting;
    for (std::size_t r = 0; r < states_.size(); ++r) {
      for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
        if (states_[r].head[lane] >= states_[r].queue[lane].size()) continue;
        const RankProgram& program = graph_.ranks[r];
        waiting += fmt::format("\n  rank {}: {}", program.rank,
                               taskName(graph_, program, states_[r].queue[lane][states_[r].head[lane]]));
      }
    }
    if (!waiting.empty())
      throw Error(ErrorKind::BadInput, "the programs deadlock; these tasks never start:" + waiting);
  }

  SimResult report() {
    SimResult result;
    trace::Trace& t = result.trace;
    t.model = graph_.model.name;
    t.plan = planToText(graph_.plan);
    t.num_ranks = static_cast<std::int32_t>(graph_.ranks.size());
    t.stages = graph_.plan.pp;
    for (const RankProgram& program : graph_.ranks) t.peak_memory = std::max(t.peak_memory, program.arena);
    std::unordered_map<std::string, std::uint32_t> names;
    for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
      const RankProgram& program = graph_.ranks[r];
      const auto live = liveBytesByTask(program);
      for (std::size_t i = 0; i < program.tasks.size(); ++i) {
        const Task& task = program.tasks[i];
        trace::Span& span = spans_[r][i];
        span.rank = program.rank;
        span.task = static_cast<TaskId>(i);
        span.lane = task.lane;
        span.kind = task.kind;
        span.slot = task.slot;
        span.layer = task.layer;
        if (task.comm >= 0) span.bytes = program.comms[static_cast<std::size_t>(task.comm)].bytes();
        const auto [entry, inserted] = names.try_emplace(taskName(graph_, program, static_cast<TaskId>(i)),
                                                         static_cast<std::uint32_t>(t.names.size()));
        if (inserted) t.names.push_back(entry->first);
        span.name = entry->second;
        t.step_time = std::max(t.step_time, span.end);
        if (task.lane == Lane::Compute) t.memory.push_back({program.rank, span.start, live[i]});
        t.spans.push_back(span);
      }
    }
    result.num_tasks = num_done_;
    result.num_events = num_events_;
    return result;
  }

  const TaskGraph& graph_;
  const CostTable& costs_;
  const std::vector<Resource>& resources_;
  std::vector<RankState> states_;
  std::vector<std::vector<trace::Span>> spans_;
  std::vector<std::vector<std::int32_t>> activity_of_;
  std::vector<Activity> activities_;
  std::vector<std::vector<std::int32_t>> users_;  // running activities per resource
  std::vector<double> load_;                      // sum of demands per resource
  std::vector<ResourceId> dirty_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Ns now_ = 0;
  std::int64_t next_seq_ = 0, num_events_ = 0, num_done_ = 0;
};

}  // namespace

CostTable costTable(const TaskGraph& graph, const CostModel& model) {
  CostTable costs(graph.ranks.size());
  for (std::size_t r = 0; r < graph.ranks.size(); ++r) {
    const RankProgram& program = graph.ranks[r];
    costs[r].reserve(program.tasks.size());
    for (const Task& task : program.tasks) {
      costs[r].push_back(
          task.comm < 0 ? model.compute(program, task)
                        : model.communication(program, program.comms[static_cast<std::size_t>(task.comm)]));
    }
  }
  return costs;
}

SimResult simulate(const TaskGraph& graph, const CostTable& costs, const std::vector<Resource>& resources) {
  return Engine(graph, costs, resources).run();
}

}  // namespace bmt::sim
