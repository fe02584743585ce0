// In-process communicator: ranks are threads of one process and read each other's buffers directly.
// Reductions add in rank order, so results are the same in every run and on every rank.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "executor/backend.h"
#include "executor/communicator.h"
#include "executor/wait.h"

namespace bmt::exec {

// Where the members of one (group, seq) meet, every step again.
struct Meeting {
  explicit Meeting(std::size_t n) : num_members(static_cast<std::uint32_t>(n)), src(n), dst(n), arrivals(n) {}
  std::uint32_t num_members;
  Word count{0};                 // barrier arrivals since the start
  std::vector<const void*> src;  // published before the first barrier
  std::vector<void*> dst;
  std::vector<std::atomic<std::uint32_t>> arrivals;  // per member: how often it posted
};

// Shared by all ranks of a process.
class InProcessWorld {
 public:
  explicit InProcessWorld(double deadline_s = 30) : deadline_s_(deadline_s) {}
  std::shared_ptr<Meeting> meeting(GroupId group, std::uint64_t seq, std::size_t members);
  void abort(const std::string& reason);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  std::string reason() const;
  double deadline() const { return deadline_s_; }
  void setDeadline(double seconds) { deadline_s_ = seconds; }

 private:
  std::atomic<double> deadline_s_;
  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_;
  std::string reason_;
  std::map<std::pair<GroupId, std::uint64_t>, std::shared_ptr<Meeting>> meetings_;
};

class InProcessCommunicator final : public Communicator {
 public:
  InProcessCommunicator(InProcessWorld& world, Backend& backend, RankId rank)
      : world_(world), backend_(backend), rank_(rank) {}
  void run(Lane lane, const CommCall& call) override;
  void abort(const std::string& reason) override { world_.abort(reason); }
  Ns postedAt(std::int32_t order) const override { return times_[static_cast<std::size_t>(order)]->posted; }
  Ns startedAt(std::int32_t order) const override { return times_[static_cast<std::size_t>(order)]->started; }
  void beginStep(double deadline_s) override {
    world_.setDeadline(deadline_s);
    posted_.store(0, std::memory_order_release);
  }

 private:
  struct Times {
    Ns posted = 0, started = 0;
  };
  void execute(const CommCall& call, Meeting& meeting, Times& times);
  void waitForTurn(const CommCall& call);
  void barrier(const CommCall& call, Meeting& meeting);
  [[noreturn]] void fail(const CommCall& call, const std::string& what) const;

  InProcessWorld& world_;
  Backend& backend_;
  RankId rank_;
  Word posted_{0};  // communications that this rank has posted in this step (rule R4)
  std::vector<std::unique_ptr<Times>> times_;
};

}  // namespace bmt::exec
