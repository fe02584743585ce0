#include "core/memory_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/error.h"

namespace bmt {
namespace {

using LaneTasks = std::array<TaskId, kNumLanes>;  // per lane: the highest task index, -1 = none

constexpr LaneTasks kNone{-1, -1, -1, -1, -1, -1, -1, -1};

std::size_t laneOf(const Task& task) {
  return static_cast<std::size_t>(task.lane);
}

void raise(LaneTasks& into, const LaneTasks& from) {
  for (std::size_t lane = 0; lane < into.size(); ++lane) into[lane] = std::max(into[lane], from[lane]);
}

// The last task, or the first, of every lane that uses each buffer.
std::vector<LaneTasks> usersOfBuffers(const RankProgram& program, bool first = false) {
  std::vector<LaneTasks> users(program.buffers.size(), kNone);
  const auto use = [&](BufferId buffer, TaskId task, std::size_t lane) {
    if (buffer < 0) return;
    TaskId& user = users[static_cast<std::size_t>(buffer)][lane];
    if (!first || user < 0) user = task;
  };
  for (TaskId t = 0; t < static_cast<TaskId>(program.tasks.size()); ++t) {
    const Task& task = program.tasks[static_cast<std::size_t>(t)];
    if (task.comm >= 0) {
      const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
      use(comm.src.buffer, t, laneOf(task));
      use(comm.dst.buffer, t, laneOf(task));
    } else if (task.first_binding >= 0) {
      for (const Arg& arg : program.bindingsOf(task)) use(arg.buffer, t, laneOf(task));
    }
  }
  return users;
}

// Free ranges of the arena. Each remembers the last users of the memory, whom the next owner must follow.
class FreeList {
 public:
  struct Range {
    Bytes offset = 0, size = 0;
    LaneTasks users = kNone;
  };

  void add(Range range) {
    auto next = ranges_.lower_bound(range.offset);
    if (next != ranges_.begin()) {
      const auto previous = std::prev(next);
      if (previous->second.offset + previous->second.size == range.offset) {
        range.offset = previous->second.offset;
        range.size += previous->second.size;
        raise(range.users, previous->second.users);
        erase(previous);
      }
    }
    next = ranges_.lower_bound(range.offset);
    if (next != ranges_.end() && range.offset + range.size == next->second.offset) {
      range.size += next->second.size;
      raise(range.users, next->second.users);
      erase(next);
    }
    by_size_.insert({range.size, range.offset});
    ranges_[range.offset] = range;
  }

  // Smallest range that holds `size`, lowest offset first.
  std::optional<Range> take(Bytes size) {
    const auto best = by_size_.lower_bound({size, 0});
    if (best == by_size_.end()) return std::nullopt;
    return cut(best->second, size);
  }

  // The range that ends at the top of the arena, to be extended.
  std::optional<Range> takeTop(Bytes top) {
    if (ranges_.empty()) return std::nullopt;
    const Range last = ranges_.rbegin()->second;
    if (last.offset + last.size != top) return std::nullopt;
    return cut(last.offset, last.size);
  }

 private:
  Range cut(Bytes offset, Bytes size) {
    const auto at = ranges_.find(offset);
    Range range = at->second;
    erase(at);
    if (range.size > size) {
      const Range rest{range.offset + size, range.size - size, range.users};
      by_size_.insert({rest.size, rest.offset});
      ranges_[rest.offset] = rest;
    }
    range.size = size;
    return range;
  }

  void erase(std::map<Bytes, Range>::iterator at) {
    by_size_.erase({at->second.size, at->second.offset});
    ranges_.erase(at);
  }

  std::map<Bytes, Range> ranges_;
  std::set<std::pair<Bytes, Bytes>> by_size_;
};

// Memory that another lane used last becomes available this many slots later (pipeline lanes), or blocks
// later (Tensor and Data lanes, which work for one block at a time): by then that lane is normally done, so
// the added dependency costs nothing (double buffering of what is sent).
constexpr std::int32_t kReuseDistance = 2;

class Planner {
 public:
  explicit Planner(RankProgram& program) : program_(program), users_(usersOfBuffers(program)) {}

  void run() {
    const auto num_tasks = program_.tasks.size();
    std::vector<std::vector<BufferId>> begins(num_tasks), ends(num_tasks);
    for (BufferId id = 0; id < static_cast<BufferId>(program_.buffers.size()); ++id) {
      Buffer& buffer = program_.buffers[static_cast<std::size_t>(id)];
      if (buffer.persistent || buffer.first_task < 0) {
        buffer.offset = top_;
        top_ += roundUp(buffer.bytes, kArenaAlignment);
        continue;
      }
      begins[static_cast<std::size_t>(buffer.first_task)].push_back(id);
      ends[static_cast<std::size_t>(buffer.last_task)].push_back(id);
    }
    // A buffer's later lanes need the same care as its first user, who says nothing of them.
    std::vector<std::vector<BufferId>> joins(num_tasks);
    const std::vector<LaneTasks> first = usersOfBuffers(program_, true);
    for (std::size_t id = 0; id < first.size(); ++id) {
      if (program_.buffers[id].persistent) continue;
      for (const TaskId task : first[id]) {
        if (task > program_.buffers[id].first_task)
          joins[static_cast<std::size_t>(task)].push_back(static_cast<BufferId>(id));
      }
    }
    took_over_.assign(program_.buffers.size(), kNone);
    clocks_.assign(num_tasks, kNone);
    added_.resize(num_tasks);
    LaneTasks last_on_lane = kNone;
    for (std::size_t t = 0; t < num_tasks; ++t) {
      const Task& task = program_.tasks[t];
      if (task.lane == Lane::Compute) {
        const bool new_slot = task.slot != current_slot_;
        if (new_slot) ++slot_count_;
        if (new_slot || task.layer != current_layer_) ++block_count_;
        current_slot_ = task.slot;
        current_layer_ = task.layer;
      }
      // What is surely finished when this task starts: its lane's past and its dependencies' past.
      LaneTasks& clock = clocks_[t];
      follow(clock, last_on_lane[laneOf(task)]);
      for (const TaskId dep : program_.depsOf(task)) follow(clock, dep);
      releaseQuarantine();
      for (const BufferId id : begins[t]) place(id, t, clock);
      for (const BufferId id : joins[t]) followUsers(took_over_[static_cast<std::size_t>(id)], t, clock);
      last_on_lane[laneOf(task)] = static_cast<TaskId>(t);
      for (const BufferId id : ends[t]) release(id);
    }
    program_.arena = top_;
    rebuildDeps();
  }

 private:
  struct Quarantined {
    FreeList::Range range;
    bool slots = true;  // or blocks
    std::int32_t until = 0;
  };

  // `earlier` and everything before it is finished.
  void follow(LaneTasks& clock, TaskId earlier) {
    if (earlier < 0) return;
    raise(clock, clocks_[static_cast<std::size_t>(earlier)]);
    TaskId& own = clock[laneOf(program_.tasks[static_cast<std::size_t>(earlier)])];
    own = std::max(own, earlier);
  }

  void release(BufferId id) {
    const Buffer& buffer = program_.buffers[static_cast<std::size_t>(id)];
    const FreeList::Range range{buffer.offset, roundUp(buffer.bytes, kArenaAlignment),
                                users_[static_cast<std::size_t>(id)]};
    const TaskId computed = range.users[static_cast<std::size_t>(Lane::Compute)];
    bool other_lanes = false, pipe = false;
    for (std::size_t lane = 0; lane < range.users.size(); ++lane) {
      if (static_cast<Lane>(lane) == Lane::Compute || range.users[lane] <= computed) continue;
      other_lanes = true;
      pipe = pipe || (static_cast<Lane>(lane) != Lane::Tensor && static_cast<Lane>(lane) != Lane::Data);
    }
    if (!other_lanes) return free_.add(range);
    quarantine_.push_back({range, pipe, (pipe ? slot_count_ : block_count_) + kReuseDistance});
  }

  void releaseQuarantine() {
    std::size_t kept = 0;
    for (Quarantined& item : quarantine_) {
      if (item.until <= (item.slots ? slot_count_ : block_count_)) {
        free_.add(item.range);
      } else {
        quarantine_[kept++] = item;
      }
    }
    quarantine_.resize(kept);
  }

  void place(BufferId id, std::size_t task, LaneTasks& clock) {
    Buffer& buffer = program_.buffers[static_cast<std::size_t>(id)];
    const Bytes size = roundUp(std::max<Bytes>(buffer.bytes, 1), kArenaAlignment);
    std::optional<FreeList::Range> range = free_.take(size);
    if (!range) range = free_.takeTop(top_);
    if (!range) range = FreeList::Range{top_, 0, kNone};
    buffer.offset = range->offset;
    top_ = std::max(top_, buffer.offset + size);
    took_over_[static_cast<std::size_t>(id)] = range->users;
    followUsers(range->users, task, clock);
  }

  void followUsers(const LaneTasks& users, std::size_t task, LaneTasks& clock) {
    for (std::size_t lane = 0; lane < users.size(); ++lane) {
      const TaskId user = users[lane];
      if (user < 0 || lane == laneOf(program_.tasks[task]) || clock[lane] >= user) continue;
      added_[task].push_back(user);
      follow(clock, user);
    }
  }

  void rebuildDeps() {
    std::vector<TaskId> deps;
    deps.reserve(program_.deps.size());
    for (std::size_t t = 0; t < program_.tasks.size(); ++t) {
      Task& task = program_.tasks[t];
      const auto old = program_.depsOf(task);
      const auto first = static_cast<std::int32_t>(deps.size());
      deps.insert(deps.end(), old.begin(), old.end());
      deps.insert(deps.end(), added_[t].begin(), added_[t].end());
      std::sort(deps.begin() + first, deps.end());
      deps.erase(std::unique(deps.begin() + first, deps.end()), deps.end());
      task.first_dep = first;
      task.num_deps = static_cast<std::int32_t>(deps.size()) - first;
    }
    program_.deps = std::move(deps);
  }

  RankProgram& program_;
  std::vector<LaneTasks> users_;
  std::vector<LaneTasks> took_over_;  // per buffer: the last users of the memory it lies in
  std::vector<LaneTasks> clocks_;
  std::vector<std::vector<TaskId>> added_;
  std::vector<Quarantined> quarantine_;
  FreeList free_;
  Slot current_slot_{Phase::W, -1, -1};
  std::int32_t slot_count_ = 0, block_count_ = 0, current_layer_ = -1;
  Bytes top_ = 0;
};

// Calls change(task, kind, bytes): bytes > 0 that live from the start of `task` on, or < 0 that are free from
// then on, which may be one past the last task.
template <typename Change>
void forEachChange(const RankProgram& program, const Change& change) {
  for (const Buffer& buffer : program.buffers) {
    const auto kind = static_cast<std::size_t>(buffer.kind);
    if (buffer.persistent || buffer.first_task < 0) {
      change(std::size_t{0}, kind, buffer.bytes);
    } else {
      change(static_cast<std::size_t>(buffer.first_task), kind, buffer.bytes);
      change(static_cast<std::size_t>(buffer.last_task) + 1, kind, -buffer.bytes);
    }
  }
}

}  // namespace

void planMemory(RankProgram& program) {
  // Stage granularity is not executed: no placement, the peak of live bytes is its arena.
  const bool executable = std::any_of(program.tasks.begin(), program.tasks.end(),
                                      [](const Task& task) { return task.first_binding >= 0; });
  if (executable) {
    Planner(program).run();
  } else {
    program.arena = memoryUse(program).peak_live;
  }
}

std::vector<std::array<Bytes, kNumBufferKinds>> liveBytesByTask(const RankProgram& program) {
  std::vector<std::array<Bytes, kNumBufferKinds>> live(program.tasks.size() + 1);
  forEachChange(program, [&](std::size_t task, std::size_t kind, Bytes bytes) { live[task][kind] += bytes; });
  for (std::size_t t = 1; t < live.size(); ++t) {
    for (std::size_t kind = 0; kind < live[t].size(); ++kind) live[t][kind] += live[t - 1][kind];
  }
  live.pop_back();
  return live;
}

MemoryUse memoryUse(const RankProgram& program) {
  MemoryUse use;
  use.arena = program.arena;
  if (program.tasks.empty()) return use;
  // The sum over kinds finds the peak; the kinds are only told apart there. A sweep asks for nothing else.
  std::vector<Bytes> change(program.tasks.size() + 1);
  forEachChange(program, [&](std::size_t task, std::size_t, Bytes bytes) { change[task] += bytes; });
  Bytes total = 0;
  std::size_t peak = 0;
  for (std::size_t t = 0; t < program.tasks.size(); ++t) {
    total += change[t];
    if (total > use.peak_live) {
      use.peak_live = total;
      peak = t;
    }
  }
  if (use.peak_live > 0) {
    forEachChange(program, [&](std::size_t task, std::size_t kind, Bytes bytes) {
      if (task <= peak) use.at_peak[kind] += bytes;
    });
  }
  return use;
}

}  // namespace bmt
