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

using Index = std::int32_t;  // of a task among all tasks of all ranks, or of an activity

// A compute task, or a communication of several members that start and end together.
struct Activity {
  double remaining = 0;  // ns at full speed
  double rate = 1;
  Ns updated = 0;
  Index first_member = 0;  // in members_
  std::int32_t posted = 0, expected = 0;
  std::uint32_t epoch = 0;  // invalidates older completion events
  bool running = false;
};

struct Event {
  Ns time;
  std::int64_t seq;
  Index activity;
  std::uint32_t epoch;
  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : seq > other.seq;
  }
};

// (group, seq) -> activity, by open addressing in a table at most half full.
class Meetings {
 public:
  explicit Meetings(std::size_t num_comms) {
    std::size_t size = 16;
    while (size < 2 * num_comms) size *= 2;
    slots_.resize(size);
  }
  // The activity of the key; `next` when it is new.
  Index find(GroupId group, std::uint64_t seq, Index next) {
    std::uint64_t hash = (seq ^ (static_cast<std::uint64_t>(group) << 40)) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 29;
    for (std::size_t at = hash;; ++at) {
      Slot& slot = slots_[at & (slots_.size() - 1)];
      if (slot.activity < 0) slot = {seq, group, next};
      if (slot.seq == seq && slot.group == group) return slot.activity;
    }
  }

 private:
  struct Slot {
    std::uint64_t seq = 0;
    GroupId group = 0;
    Index activity = -1;
  };
  std::vector<Slot> slots_;
};

struct RankState {
  std::array<Index, kNumLanes> head{};  // in queue_: next task of the lane
  std::array<Index, kNumLanes> end{};
  std::array<Index, kNumLanes> last_done{};  // latest finished task of the lane, -1 = none: a cause
  std::array<bool, kNumLanes> busy{};        // the head has started or posted
  Index base = 0;                            // its first task
  Index next_comm = 0, end_comm = 0;         // in comms_: the communication that may post next (R4)
  std::uint32_t touched = 0;                 // instant in which it was last put on the list
};

class Engine {
 public:
  Engine(const TaskGraph& graph, const CostTable& costs, const std::vector<Resource>& resources)
      : graph_(graph),
        costs_(costs),
        resources_(resources),
        users_(resources.size()),
        load_(resources.size(), 0),
        local_(resources.size(), -1) {}

  SimResult run(const SimOptions& options) {
    prepare();
    for (std::size_t r = 0; r < ranks_.size(); ++r) advance(static_cast<std::int32_t>(r));
    resolveDirty();
    std::vector<std::int32_t> touched;
    while (!events_.empty()) {
      now_ = events_.top().time;
      touched.clear();
      ++instant_;
      while (!events_.empty() && events_.top().time == now_) {
        const Event event = events_.top();
        events_.pop();
        ++num_events_;
        const Activity& activity = activities_[static_cast<std::size_t>(event.activity)];
        if (activity.running && event.epoch == activity.epoch) finish(event.activity, touched);
      }
      for (const std::int32_t rank : touched) advance(rank);
      resolveDirty();
    }
    checkFinished();
    return report(options);
  }

 private:
  static std::size_t at(Index i) { return static_cast<std::size_t>(i); }

  void prepare() {
    std::size_t num_tasks = 0, num_deps = 0, num_comms = 0;
    for (const RankProgram& program : graph_.ranks) {
      num_tasks += program.tasks.size();
      num_deps += program.deps.size();
      num_comms += program.comms.size();
    }
    ranks_.resize(graph_.ranks.size());
    rank_of_.resize(num_tasks);
    lane_.resize(num_tasks);
    is_comm_.resize(num_tasks);
    missing_deps_.resize(num_tasks);
    last_dep_.assign(num_tasks, -1);
    activity_of_.resize(num_tasks);
    first_dependent_.assign(num_tasks + 1, 0);
    dependents_.resize(num_deps);
    queue_.resize(num_tasks);
    comms_.reserve(num_comms);
    start_.assign(num_tasks, 0);
    end_.assign(num_tasks, 0);
    posted_.assign(num_tasks, 0);
    cause_.assign(num_tasks, -1);
    members_.resize(num_tasks);
    activities_.reserve(num_tasks);
    Meetings meetings(num_comms);

    Index base = 0;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const RankProgram& program = graph_.ranks[r];
      RankState& s = ranks_[r];
      s.base = base;
      s.next_comm = static_cast<Index>(comms_.size());
      s.last_done.fill(-1);
      for (const Task& task : program.tasks) ++s.end[static_cast<std::size_t>(task.lane)];
      Index begin = base;
      for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
        const Index count = s.end[lane];
        s.head[lane] = s.end[lane] = begin;
        begin += count;
      }
      for (std::size_t i = 0; i < program.tasks.size(); ++i) {
        const Task& task = program.tasks[i];
        const Index id = base + static_cast<Index>(i);
        const auto lane = static_cast<std::size_t>(task.lane);
        rank_of_[at(id)] = static_cast<std::int32_t>(r);
        lane_[at(id)] = task.lane;
        is_comm_[at(id)] = task.comm >= 0 ? 1 : 0;
        missing_deps_[at(id)] = task.num_deps;
        queue_[at(s.end[lane]++)] = id;
        for (const TaskId dep : program.depsOf(task)) ++first_dependent_[at(base + dep) + 1];
        auto activity = static_cast<Index>(activities_.size());
        if (task.comm >= 0) {
          comms_.push_back(id);
          const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
          activity = meetings.find(comm.group, comm.seq, activity);
        }
        if (at(activity) == activities_.size()) activities_.emplace_back();
        ++activities_[at(activity)].expected;
        activity_of_[at(id)] = activity;
      }
      s.end_comm = static_cast<Index>(comms_.size());
      base += static_cast<Index>(program.tasks.size());
    }
    for (std::size_t i = 0; i < num_tasks; ++i) first_dependent_[i + 1] += first_dependent_[i];
    std::vector<Index> fill(first_dependent_.begin(), first_dependent_.end() - 1);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const RankProgram& program = graph_.ranks[r];
      for (std::size_t i = 0; i < program.tasks.size(); ++i) {
        for (const TaskId dep : program.depsOf(program.tasks[i]))
          dependents_[at(fill[at(ranks_[r].base + dep)]++)] = ranks_[r].base + static_cast<Index>(i);
      }
    }
    Index first = 0;
    for (Activity& activity : activities_) {
      activity.first_member = first;
      first += activity.expected;
    }
  }

  const TaskCost& costOf(Index task) const {
    const std::int32_t r = rank_of_[at(task)];
    return costs_[static_cast<std::size_t>(r)][at(task - ranks_[static_cast<std::size_t>(r)].base)];
  }

  // Starts and posts everything that R1, R2 and R4 allow on a rank.
  void advance(std::int32_t r) {
    RankState& s = ranks_[static_cast<std::size_t>(r)];
    bool progress = true;
    while (progress) {
      progress = false;
      for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
        if (s.busy[lane] || s.head[lane] == s.end[lane]) continue;
        const Index task = queue_[at(s.head[lane])];
        if (missing_deps_[at(task)] > 0) continue;
        const bool comm = is_comm_[at(task)] != 0;
        if (comm && comms_[at(s.next_comm)] != task) continue;  // R4
        s.busy[lane] = true;
        if (comm) ++s.next_comm;
        post(s, task);
        progress = true;
      }
    }
  }

  void post(RankState& s, Index task) {
    posted_[at(task)] = now_;
    Activity& activity = activities_[at(activity_of_[at(task)])];
    members_[at(activity.first_member + activity.posted++)] = task;
    activity.remaining = std::max(activity.remaining, static_cast<double>(costOf(task).duration));
    if (activity.posted < activity.expected) return;
    // The cause of a start: what released its last member, either its lane's previous task or a dependency.
    const Index on_lane = s.last_done[static_cast<std::size_t>(lane_[at(task)])], dep = last_dep_[at(task)];
    const bool lane_last = dep < 0 || (on_lane >= 0 && end_[at(on_lane)] >= end_[at(dep)]);
    const Index released = lane_last ? on_lane : dep;
    activity.running = true;
    activity.updated = now_;
    for (std::int32_t m = 0; m < activity.expected; ++m) {
      const Index member = members_[at(activity.first_member + m)];
      start_[at(member)] = now_;
      cause_[at(member)] = released;
      addLoad(member);
    }
    schedule(activity_of_[at(task)]);  // a re-solve in the same instant replaces the event by its epoch
  }

  void addLoad(Index task) {
    const Use& use = costOf(task).use;
    if (use.resource < 0) return;
    const auto r = static_cast<std::size_t>(use.resource);
    users_[r].push_back(activity_of_[at(task)]);
    load_[r] += use.demand;
    if (load_[r] > resources_[r].capacity * (1 + 1e-12)) markDirty(use.resource);
  }

  void removeLoad(Index task) {
    const Use& use = costOf(task).use;
    if (use.resource < 0) return;
    const auto r = static_cast<std::size_t>(use.resource);
    if (load_[r] > resources_[r].capacity * (1 + 1e-12))
      markDirty(use.resource);  // it was contended: rates rise
    users_[r].erase(std::find(users_[r].begin(), users_[r].end(), activity_of_[at(task)]));
    load_[r] -= use.demand;
    if (users_[r].empty()) load_[r] = 0;
  }

  void markDirty(ResourceId resource) {
    if (std::find(dirty_.begin(), dirty_.end(), resource) == dirty_.end()) dirty_.push_back(resource);
  }

  // Re-solves the activities that are connected to a resource whose contention changed.
  void resolveDirty() {
    if (dirty_.empty()) return;
    connected_.clear();
    found_.clear();
    const auto find = [&](ResourceId resource) {
      if (resource < 0 || local_[static_cast<std::size_t>(resource)] >= 0) return;
      local_[static_cast<std::size_t>(resource)] = 0;
      found_.push_back(resource);
    };
    for (const ResourceId resource : dirty_) find(resource);
    ++round_;
    seen_.resize(activities_.size(), 0);
    for (std::size_t i = 0; i < found_.size(); ++i) {
      for (const Index id : users_[static_cast<std::size_t>(found_[i])]) {
        if (seen_[at(id)] == round_) continue;
        seen_[at(id)] = round_;
        connected_.push_back(id);
        forMembers(id, [&](Index member) { find(costOf(member).use.resource); });
      }
    }
    dirty_.clear();
    std::sort(connected_.begin(), connected_.end());
    std::sort(found_.begin(), found_.end());
    problem_.clear();
    for (std::size_t i = 0; i < found_.size(); ++i) {
      local_[static_cast<std::size_t>(found_[i])] = static_cast<std::int32_t>(i);
      problem_.capacities.push_back(resources_[static_cast<std::size_t>(found_[i])].capacity);
    }
    for (const Index id : connected_) {
      problem_.beginActivity();
      forMembers(id, [&](Index member) {
        const Use& use = costOf(member).use;
        if (use.resource >= 0) problem_.add(local_[static_cast<std::size_t>(use.resource)], use.demand);
      });
    }
    for (const ResourceId resource : found_) local_[static_cast<std::size_t>(resource)] = -1;
    problem_.solve();
    for (std::size_t i = 0; i < connected_.size(); ++i) {
      Activity& activity = activities_[at(connected_[i])];
      const double rate = problem_.rates[i];
      if (std::fabs(activity.rate - rate) <= 1e-12) continue;
      activity.remaining =
          std::max(0.0, activity.remaining - static_cast<double>(now_ - activity.updated) * activity.rate);
      activity.updated = now_;
      activity.rate = rate;
      schedule(connected_[i]);
    }
  }

  template <typename Function>
  void forMembers(Index id, Function function) const {
    const Activity& activity = activities_[at(id)];
    for (std::int32_t m = 0; m < activity.expected; ++m) function(members_[at(activity.first_member + m)]);
  }

  void schedule(Index id) {
    Activity& activity = activities_[at(id)];
    ++activity.epoch;
    // Guards against 1e-9 of rounding turning a whole number into the next one.
    const double wait = std::ceil(activity.remaining / activity.rate - 1e-6);
    events_.push({activity.updated + static_cast<Ns>(std::max(0.0, wait)), next_seq_++, id, activity.epoch});
  }

  void finish(Index id, std::vector<std::int32_t>& touched) {
    activities_[at(id)].running = false;
    forMembers(id, [&](Index task) {
      removeLoad(task);
      RankState& s = ranks_[static_cast<std::size_t>(rank_of_[at(task)])];
      const auto lane = static_cast<std::size_t>(lane_[at(task)]);
      end_[at(task)] = now_;
      s.busy[lane] = false;
      ++s.head[lane];
      s.last_done[lane] = task;
      ++num_done_;
      for (Index i = first_dependent_[at(task)]; i < first_dependent_[at(task) + 1]; ++i) {
        const Index dependent = dependents_[at(i)];
        --missing_deps_[at(dependent)];
        last_dep_[at(dependent)] = task;
      }
      if (s.touched == instant_) return;
      s.touched = instant_;
      touched.push_back(rank_of_[at(task)]);
    });
  }

  void checkFinished() const {
    std::string waiting;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const RankState& s = ranks_[r];
      for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
        if (s.head[lane] == s.end[lane]) continue;
        const RankProgram& program = graph_.ranks[r];
        waiting += fmt::format("\n  rank {}: {}", program.rank,
                               taskName(graph_, program, queue_[at(s.head[lane])] - s.base));
      }
    }
    if (!waiting.empty())
      throw Error(ErrorKind::BadInput, "the programs deadlock; these tasks never start:" + waiting);
  }

  SimResult report(const SimOptions& options) const {
    SimResult result;
    trace::Trace& t = result.trace;
    t.model = graph_.model.name;
    t.plan = planToText(graph_.plan);
    t.num_ranks = static_cast<std::int32_t>(graph_.ranks.size());
    t.stages = graph_.plan.pp;
    t.spans.resize(rank_of_.size());
    std::unordered_map<std::string, std::uint32_t> names;
    for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
      const RankProgram& program = graph_.ranks[r];
      t.peak_memory = std::max(t.peak_memory, program.arena);
      const auto live = options.details ? liveBytesByTask(program) : decltype(liveBytesByTask(program)){};
      for (std::size_t i = 0; i < program.tasks.size(); ++i) {
        const Task& task = program.tasks[i];
        const Index id = ranks_[r].base + static_cast<Index>(i);
        trace::Span& span = t.spans[at(id)];
        span.rank = program.rank;
        span.task = static_cast<TaskId>(i);
        span.lane = task.lane;
        span.kind = task.kind;
        span.slot = task.slot;
        span.layer = task.layer;
        span.start = start_[at(id)];
        span.end = end_[at(id)];
        span.posted = posted_[at(id)];
        if (const Index cause = cause_[at(id)]; cause >= 0) {
          const auto by = static_cast<std::size_t>(rank_of_[at(cause)]);
          span.cause = {graph_.ranks[by].rank, cause - ranks_[by].base};
        }
        if (task.comm >= 0) span.bytes = program.comms[static_cast<std::size_t>(task.comm)].bytes();
        t.step_time = std::max(t.step_time, span.end);
        if (!options.details) continue;
        const auto [entry, inserted] = names.try_emplace(taskName(graph_, program, static_cast<TaskId>(i)),
                                                         static_cast<std::uint32_t>(t.names.size()));
        if (inserted) t.names.push_back(entry->first);
        span.name = entry->second;
        if (task.lane == Lane::Compute) t.memory.push_back({program.rank, span.start, live[i]});
      }
    }
    result.num_tasks = num_done_;
    result.num_events = num_events_;
    return result;
  }

  const TaskGraph& graph_;
  const CostTable& costs_;
  const std::vector<Resource>& resources_;
  // Per task of all ranks, rank by rank.
  std::vector<std::int32_t> rank_of_;
  std::vector<Lane> lane_;
  std::vector<char> is_comm_;
  std::vector<std::int32_t> missing_deps_;
  std::vector<Index> last_dep_;  // the dependency that finished last: a cause
  std::vector<Index> activity_of_;
  std::vector<Index> first_dependent_;  // CSR over dependents_
  std::vector<Index> dependents_;
  std::vector<Ns> start_, end_, posted_;
  std::vector<Index> cause_;
  std::vector<Index> queue_;    // tasks by rank and lane, in program order
  std::vector<Index> comms_;    // communications by rank, in issue order
  std::vector<Index> members_;  // by activity, in the order of posting
  std::vector<RankState> ranks_;
  std::vector<Activity> activities_;
  std::vector<std::vector<Index>> users_;  // running activities per resource
  std::vector<double> load_;               // sum of demands per resource
  std::vector<ResourceId> dirty_;
  // Scratch of resolveDirty: what is connected, resources by local number, activities by round.
  std::vector<Index> connected_;
  std::vector<ResourceId> found_;
  std::vector<std::int32_t> local_;
  std::vector<std::uint32_t> seen_;
  FairShare problem_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Ns now_ = 0;
  std::uint32_t instant_ = 0, round_ = 0;
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

SimResult simulate(const TaskGraph& graph, const CostTable& costs, const std::vector<Resource>& resources,
                   const SimOptions& options) {
  return Engine(graph, costs, resources).run(options);
}

}  // namespace bmt::sim
