#include "executor/comm/in_process.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "executor/comm/reduce.h"

namespace bmt::exec {
namespace {

constexpr int kWakeUpMs = 50;  // how often a sleeping rank looks for an abort or its deadline

}  // namespace

std::shared_ptr<Meeting> InProcessWorld::meeting(GroupId group, std::uint64_t seq, std::size_t members) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Meeting>& entry = meetings_[{group, seq}];
  if (entry == nullptr) entry = std::make_shared<Meeting>(members);
  return entry;
}

void InProcessWorld::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!aborted_) reason_ = reason;
  aborted_.store(true, std::memory_order_release);
}

std::string InProcessWorld::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void InProcessCommunicator::run(Lane lane, const CommCall& call) {
  times_.push_back(std::make_unique<Times>());
  BMT_CHECK(static_cast<std::size_t>(call.order) + 1 == times_.size(),
            "communications are captured in order");
  backend_.enqueue(lane, [this, call, meeting = world_.meeting(call.group, call.seq, call.members.size()),
                          times = times_.back().get()] { execute(call, *meeting, *times); });
}

void InProcessCommunicator::fail(const CommCall& call, const std::string& what) const {
  throw Error(ErrorKind::Runtime, what, fmt::format("rank {} {}", rank_, call.name));
}

void InProcessCommunicator::waitForTurn(const CommCall& call) {
  const auto turn = static_cast<std::uint32_t>(call.order);
  for (;;) {
    const std::uint32_t now = posted_.load(std::memory_order_acquire);
    if (now == turn) return;
    if (world_.aborted()) fail(call, "stopped: " + world_.reason());
    sleepOn(posted_, now, kWakeUpMs);
  }
}

void InProcessCommunicator::barrier(const CommCall& call, Meeting& meeting) {
  const std::uint32_t mine = meeting.count.fetch_add(1, std::memory_order_acq_rel) + 1;
  const std::uint32_t n = meeting.num_members;
  const std::uint32_t target = (mine + n - 1) / n * n;
  if (mine == target) {
    wakeAll(meeting.count);
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const std::uint32_t now = meeting.count.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(now - target) >= 0) return;  // wraps safely
    if (world_.aborted()) fail(call, "stopped: " + world_.reason());
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (waited > world_.deadline()) {
      std::vector<RankId> missing;
      const std::uint32_t posts = meeting.arrivals[static_cast<std::size_t>(call.index)].load();
      for (std::size_t member = 0; member < meeting.arrivals.size(); ++member) {
        if (static_cast<std::int32_t>(meeting.arrivals[member].load() - posts) < 0)
          missing.push_back(call.members[member]);
      }
      fail(call, fmt::format("waited {:.1f} s (limit {} s) for rank(s) {}", waited, world_.deadline(),
                             missing.empty() ? std::string("in the middle of the transfer")
                                             : fmt::format("{}", fmt::join(missing, ", "))));
    }
    sleepOn(meeting.count, now, kWakeUpMs);
  }
}

void InProcessCommunicator::execute(const CommCall& call, Meeting& meeting, Times& times) {
  waitForTurn(call);
  times.posted = backend_.now();
  const auto index = static_cast<std::size_t>(call.index);
  const std::size_t n = call.members.size();
  meeting.src[index] = call.src;
  meeting.dst[index] = call.dst;
  meeting.arrivals[index].fetch_add(1);
  posted_.fetch_add(1, std::memory_order_acq_rel);
  wakeAll(posted_);
  barrier(call, meeting);
  times.started = backend_.now();

  const Bytes element = sizeOf(call.dtype);
  const auto shard = call.count / static_cast<std::int64_t>(n);
  const auto at = [&](void* base, std::int64_t offset) {
    return static_cast<char*>(base) + offset * element;
  };
  const auto read = [&](const void* base, std::int64_t offset) {
    return static_cast<const char*>(base) + offset * element;
  };
  switch (call.kind) {
    case CommKind::AllReduce: {
      // Every member sums one slice of all buffers, then collects the other slices. The last slice takes the
      // remainder.
      const auto slice = [&](std::size_t member) {
        const std::int64_t begin = static_cast<std::int64_t>(member) * shard;
        return std::pair(begin, member + 1 == n ? call.count - begin : shard);
      };
      const auto [begin, count] = slice(index);
      sumInOrder(meeting.src, begin, count, call.dtype, at(call.dst, begin));
      barrier(call, meeting);
      for (std::size_t member = 0; member < n; ++member) {
        if (member == index) continue;
        const auto [from, size] = slice(member);
        std::memcpy(at(call.dst, from), read(meeting.dst[member], from),
                    static_cast<std::size_t>(size * element));
      }
      break;
    }
    case CommKind::ReduceScatter:
      sumInOrder(meeting.src, static_cast<std::int64_t>(index) * shard, shard, call.dtype, call.dst);
      break;
    case CommKind::AllGather:
      for (std::size_t member = 0; member < n; ++member) {
        void* const to = at(call.dst, static_cast<std::int64_t>(member) * shard);
        if (to != meeting.src[member])
          std::memcpy(to, meeting.src[member], static_cast<std::size_t>(shard * element));
      }
      break;
    case CommKind::Recv:
      std::memcpy(call.dst, meeting.src[0], static_cast<std::size_t>(call.count * element));
      break;
    case CommKind::Send:
      break;  // the receiver reads
    case CommKind::AllToAll:
    case CommKind::Shift:
      BMT_CHECK(false, "refused by notExecutable");
  }
  barrier(call, meeting);
}

}  // namespace bmt::exec
