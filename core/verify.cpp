#include "core/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>

namespace bmt {
namespace {

constexpr std::size_t kMaxIssues = 20;  // enough to see the pattern

using LaneTasks = std::array<TaskId, kNumLanes>;
constexpr LaneTasks kNone{-1, -1, -1, -1, -1, -1, -1, -1};

struct CommKey {
  GroupId group;
  std::uint64_t seq;
  bool operator==(const CommKey&) const = default;
};
struct CommKeyHash {
  std::size_t operator()(const CommKey& key) const {
    return std::hash<std::uint64_t>{}(key.seq * 0x9E3779B97F4A7C15ULL ^
                                      static_cast<std::uint64_t>(key.group));
  }
};

struct Member {
  std::size_t rank;  // index in graph.ranks
  TaskId task;
};

class Verifier {
 public:
  explicit Verifier(const TaskGraph& graph) : graph_(graph) {}

  std::vector<Issue> run() {
    for (const RankProgram& program : graph_.ranks) {
      checkDeps(program);
      if (issues_.empty()) checkMemory(program);
    }
    matchCommunication();
    if (issues_.empty()) play();
    return std::move(issues_);
  }

 private:
  void report(const RankProgram& program, TaskId task, const std::string& what) {
    if (issues_.size() >= kMaxIssues) return;
    issues_.push_back(
        {fmt::format("rank {} task {} ({})", program.rank, task, taskName(graph_, program, task)), what});
  }

  void checkDeps(const RankProgram& program) {
    for (TaskId t = 0; t < static_cast<TaskId>(program.tasks.size()); ++t) {
      const Task& task = program.tasks[static_cast<std::size_t>(t)];
      for (const TaskId dep : program.depsOf(task)) {
        if (dep < 0 || dep >= t)
          report(program, t, fmt::format("depends on task {}, which is not earlier", dep));
      }
      if ((task.comm < 0) == (task.segment < 0))
        report(program, t,
               fmt::format("must be either compute or communication: segment {}, comm {}", task.segment,
                           task.comm));
    }
  }

  // ---- memory
  // -------------------------------------------------------------------------------------------------------
  void checkMemory(const RankProgram& program) {
    const auto num_buffers = program.buffers.size();
    std::vector<LaneTasks> first(num_buffers, kNone), last(num_buffers, kNone);
    const auto use = [&](TaskId t, const Arg& arg, Bytes bytes) {
      if (arg.buffer < 0) return;
      const auto id = static_cast<std::size_t>(arg.buffer);
      const Buffer& buffer = program.buffers[id];
      if (arg.offset < 0 || arg.offset + bytes > buffer.bytes)
        report(program, t,
               fmt::format("uses bytes {} to {} of buffer {}, which has {}", arg.offset, arg.offset + bytes,
                           arg.buffer, buffer.bytes));
      if (!buffer.persistent && (t < buffer.first_task || t > buffer.last_task))
        report(program, t,
               fmt::format("uses buffer {} outside its lifetime, tasks {} to {}", arg.buffer,
                           buffer.first_task, buffer.last_task));
      const auto lane = static_cast<std::size_t>(program.tasks[static_cast<std::size_t>(t)].lane);
      if (first[id][lane] < 0) first[id][lane] = t;
      last[id][lane] = t;
    };
    bool executable = false;
    std::vector<LaneTasks> clocks(program.tasks.size(), kNone);
    LaneTasks last_on_lane = kNone;
    for (TaskId t = 0; t < static_cast<TaskId>(program.tasks.size()); ++t) {
      const Task& task = program.tasks[static_cast<std::size_t>(t)];
      const auto follow = [&](TaskId earlier) {
        if (earlier < 0) return;
        LaneTasks& clock = clocks[static_cast<std::size_t>(t)];
        const LaneTasks& from = clocks[static_cast<std::size_t>(earlier)];
        for (std::size_t lane = 0; lane < clock.size(); ++lane)
          clock[lane] = std::max(clock[lane], from[lane]);
        TaskId& own = clock[static_cast<std::size_t>(program.tasks[static_cast<std::size_t>(earlier)].lane)];
        own = std::max(own, earlier);
      };
      follow(last_on_lane[static_cast<std::size_t>(task.lane)]);
      for (const TaskId dep : program.depsOf(task)) follow(dep);
      last_on_lane[static_cast<std::size_t>(task.lane)] = t;
      if (task.comm >= 0) {
        const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
        const auto n = static_cast<Bytes>(graph_.mesh.members(comm.group).size());
        if (graph_.granularity == Granularity::Layer) {
          use(t, comm.src, comm.kind == CommKind::AllGather ? comm.bytes() / n : comm.bytes());
          use(t, comm.dst, comm.kind == CommKind::ReduceScatter ? comm.bytes() / n : comm.bytes());
        }
      } else if (task.first_binding >= 0) {
        executable = true;
        const auto bindings = program.bindingsOf(task);
        for (const Arg& arg : bindings) use(t, arg, 0);
        for (const OpCall& call : graph_.segments[static_cast<std::size_t>(task.segment)].ops) {
          for (const Operand& operand : call.operands) {
            if (operand.region == Region::None) continue;
            Arg arg = bindings[static_cast<std::size_t>(operand.region)];
            if (arg.buffer < 0)
              report(program, t,
                     fmt::format("{} uses region {}, which is not bound", toString(call.op.kind),
                                 static_cast<int>(operand.region)));
            arg.offset += operand.offset;
            use(t, arg, 1);
          }
        }
      }
    }
    if (executable) checkReuse(program, first, last, clocks);
  }

  // Buffers in the order in which they come to life; whoever owned the memory before must be done, on every
  // lane.
  void checkReuse(const RankProgram& program, const std::vector<LaneTasks>& first,
                  const std::vector<LaneTasks>& last, const std::vector<LaneTasks>& clocks) {
    std::vector<BufferId> order;
    for (BufferId id = 0; id < static_cast<BufferId>(program.buffers.size()); ++id) order.push_back(id);
    const auto start = [&](BufferId id) {
      const Buffer& buffer = program.buffers[static_cast<std::size_t>(id)];
      return buffer.persistent ? -1 : buffer.first_task;
    };
    std::stable_sort(order.begin(), order.end(), [&](BufferId a, BufferId b) { return start(a) < start(b); });
    std::map<Bytes, std::pair<Bytes, BufferId>> owners;  // begin -> (end, buffer)
    for (const BufferId id : order) {
      const Buffer& buffer = program.buffers[static_cast<std::size_t>(id)];
      const Bytes begin = buffer.offset, end = buffer.offset + buffer.bytes;
      if (begin < 0 || end > program.arena)
        report(
            program, std::max(0, start(id)),
            fmt::format("buffer {} lies at {} to {} of an arena of {} bytes", id, begin, end, program.arena));
      auto at = owners.upper_bound(begin);
      if (at != owners.begin() && std::prev(at)->second.first > begin) --at;
      while (at != owners.end() && at->first < end) {
        const auto [owner_begin, owner] = *at;
        const auto [owner_end, owner_id] = owner;
        requireOrder(program, owner_id, id, first, last, clocks);
        at = owners.erase(at);
        if (owner_begin < begin) owners[owner_begin] = {begin, owner_id};
        if (owner_end > end) at = owners.insert({end, {owner_end, owner_id}}).first;
      }
      owners[begin] = {end, id};
    }
  }

  void requireOrder(const RankProgram& program, BufferId before, BufferId after,
                    const std::vector<LaneTasks>& first, const std::vector<LaneTasks>& last,
                    const std::vector<LaneTasks>& clocks) {
    const Buffer& old_buffer = program.buffers[static_cast<std::size_t>(before)];
    if (old_buffer.persistent) {
      report(program, std::max(0, program.buffers[static_cast<std::size_t>(after)].first_task),
             fmt::format("buffer {} overlaps persistent buffer {} in memory", after, before));
      return;
    }
    for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
      const TaskId user = first[static_cast<std::size_t>(after)][lane];
      if (user < 0) continue;
      for (std::size_t other = 0; other < kNumLanes; ++other) {
        const TaskId previous = last[static_cast<std::size_t>(before)][other];
        const TaskId known = other == lane ? user - 1 : clocks[static_cast<std::size_t>(user)][other];
        if (previous > known)
          report(program, user,
                 fmt::format("takes over the memory of buffer {} while task {} may still use it", before,
                             previous));
      }
    }
  }

  // ---- communication
  // ------------------------------------------------------------------------------------------------
  static bool sameOperation(const Comm& a, const Comm& b) {
    const bool pair = (a.kind == CommKind::Send && b.kind == CommKind::Recv) ||
                      (a.kind == CommKind::Recv && b.kind == CommKind::Send);
    const bool collective = a.kind == b.kind && a.kind != CommKind::Send && a.kind != CommKind::Recv;
    return (pair || collective) && a.count == b.count && a.dtype == b.dtype;
  }

  void matchCommunication() {
    std::unordered_map<RankId, std::size_t> index_of;
    for (std::size_t r = 0; r < graph_.ranks.size(); ++r) index_of[graph_.ranks[r].rank] = r;
    for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
      const RankProgram& program = graph_.ranks[r];
      for (TaskId t = 0; t < static_cast<TaskId>(program.tasks.size()); ++t) {
        const std::int32_t comm = program.tasks[static_cast<std::size_t>(t)].comm;
        if (comm < 0) continue;
        const Comm& c = program.comms[static_cast<std::size_t>(comm)];
        meetings_[{c.group, c.seq}].push_back({r, t});
      }
    }
    for (const auto& [key, members] : meetings_) {
      std::vector<RankId> expected;
      for (const RankId rank : graph_.mesh.members(key.group)) {
        if (index_of.contains(rank)) expected.push_back(rank);
      }
      const RankProgram& program = graph_.ranks[members.front().rank];
      const TaskId task = members.front().task;
      std::vector<RankId> present;
      for (const Member& member : members) present.push_back(graph_.ranks[member.rank].rank);
      std::sort(present.begin(), present.end());
      std::sort(expected.begin(), expected.end());
      // A folded graph keeps one rank per stage: pairs stay complete, other groups have one member.
      if (present != expected)
        report(program, task,
               fmt::format("is issued by ranks [{}], but its group has [{}]", fmt::join(present, " "),
                           fmt::join(expected, " ")));
      for (const Member& member : members) {
        const Comm& a = commOf(members.front());
        const Comm& b = commOf(member);
        if (&a != &b && !sameOperation(a, b))
          report(program, task,
                 fmt::format("{} of {} elements meets {} of {} on rank {}", toString(a.kind), a.count,
                             toString(b.kind), b.count, graph_.ranks[member.rank].rank));
      }
    }
  }

  const Comm& commOf(const Member& member) const {
    const RankProgram& program = graph_.ranks[member.rank];
    return program.comms[static_cast<std::size_t>(program.tasks[static_cast<std::size_t>(member.task)].comm)];
  }

  // ---- play without a clock under R1-R4
  // -----------------------------------------------------------------------------
  struct RankState {
    std::array<std::vector<TaskId>, kNumLanes> queue;
    std::array<std::size_t, kNumLanes> head{};
    std::vector<TaskId> comms;  // in issue order
    std::size_t posted = 0;     // of comms
    std::vector<char> done;
  };

  void play() {
    std::vector<RankState> states(graph_.ranks.size());
    std::deque<std::size_t> work;
    for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
      const RankProgram& program = graph_.ranks[r];
      states[r].done.assign(program.tasks.size(), 0);
      for (TaskId t = 0; t < static_cast<TaskId>(program.tasks.size()); ++t) {
        const Task& task = program.tasks[static_cast<std::size_t>(t)];
        states[r].queue[static_cast<std::size_t>(task.lane)].push_back(t);
        if (task.comm >= 0) states[r].comms.push_back(t);
      }
      work.push_back(r);
    }
    std::unordered_map<CommKey, std::size_t, CommKeyHash> arrived;
    while (!work.empty()) {
      const std::size_t r = work.front();
      work.pop_front();
      advance(states, r, arrived, work);
    }
    std::size_t stuck = 0;
    for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
      const auto& done = states[r].done;
      const auto first = std::find(done.begin(), done.end(), 0);
      if (first == done.end()) continue;
      if (++stuck <= 4)
        report(graph_.ranks[r], static_cast<TaskId>(first - done.begin()),
               "never starts: the programs deadlock here");
    }
  }

  void advance(std::vector<RankState>& states, std::size_t r,
               std::unordered_map<CommKey, std::size_t, CommKeyHash>& arrived,
               std::deque<std::size_t>& work) {
    const RankProgram& program = graph_.ranks[r];
    RankState& state = states[r];
    bool progress = true;
    while (progress) {
      progress = false;
      for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
        while (state.head[lane] < state.queue[lane].size()) {
          const TaskId t = state.queue[lane][state.head[lane]];
          const Task& task = program.tasks[static_cast<std::size_t>(t)];
          if (state.done[static_cast<std::size_t>(t)] != 0) {
            ++state.head[lane];
            progress = true;
            continue;
          }
          const auto deps = program.depsOf(task);
          if (!std::all_of(deps.begin(), deps.end(),
                           [&](TaskId dep) { return state.done[static_cast<std::size_t>(dep)] != 0; }))
            break;
          if (task.comm < 0) {
            state.done[static_cast<std::size_t>(t)] = 1;
            continue;
          }
          if (state.posted >= state.comms.size() || state.comms[state.posted] != t)
            break;  // R4, or already posted
          ++state.posted;
          progress = true;
          const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
          const auto& members = meetings_.at({comm.group, comm.seq});
          if (++arrived[{comm.group, comm.seq}] < members.size()) break;
          for (const Member& member : members) {
            states[member.rank].done[static_cast<std::size_t>(member.task)] = 1;
            if (member.rank != r) work.push_back(member.rank);
          }
        }
      }
    }
  }

  const TaskGraph& graph_;
  std::vector<Issue> issues_;
  std::unordered_map<CommKey, std::vector<Member>, CommKeyHash> meetings_;
};

}  // namespace

std::vector<Issue> verify(const TaskGraph& graph) {
  return Verifier(graph).run();
}

}  // namespace bmt
