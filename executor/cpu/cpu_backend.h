// CPU backend: the Compute lane runs on the thread that calls replay(), every other lane that the program
// uses has a worker thread. Waiting threads sleep, because ranks x lanes exceed the cores.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "executor/backend.h"
#include "executor/wait.h"

namespace bmt::exec {

class CpuBackend final : public Backend {
 public:
  CpuBackend();
  ~CpuBackend() override;
  CpuBackend(const CpuBackend&) = delete;
  CpuBackend& operator=(const CpuBackend&) = delete;

  void* allocate(Bytes bytes) override;
  void release(void* memory) override;
  void beginCapture(std::int32_t num_events) override;
  void endCapture() override;
  void launch(Lane lane, const Op& op, const OperandPointers& operands) override;
  void copy(Lane lane, void* to, const void* from, Bytes bytes) override;
  void enqueue(Lane lane, std::function<void()> function) override;
  void record(Lane lane, EventId event) override;
  void wait(Lane lane, EventId event) override;
  void replay() override;
  Ns timeOf(EventId event) const override;
  Ns now() const override { return steadyNow(); }
  void abort() override;
  std::string description() const override;

  static Ns steadyNow();
  // Called (once) when a lane fails, before replay returns: lets the owner abort its communicator.
  void onFailure(std::function<void(const std::string&)> callback) { on_failure_ = std::move(callback); }

 private:
  enum class Command : std::uint8_t { Launch, Copy, Call, Record, Wait };
  struct Item {
    Command command = Command::Wait;
    EventId event = -1;
    Op op{};
    OperandPointers operands{};
    Bytes bytes = 0;
    std::int32_t call = -1;  // index in calls_
  };
  struct Event {
    Word epoch{0};  // number of the last replay in which it happened
    Ns time = 0;
  };

  void push(Lane lane, Item item) { items_[static_cast<std::size_t>(lane)].push_back(item); }
  void runLane(std::size_t lane);
  void runLaneGuarded(std::size_t lane);
  void waitFor(Event& event);
  void worker(std::size_t lane);
  void stopWorkers();

  std::array<std::vector<Item>, kNumLanes> items_;
  std::vector<std::function<void()>> calls_;
  std::unique_ptr<Event[]> events_;
  std::vector<std::thread> workers_;
  std::function<void(const std::string&)> on_failure_;
  std::uint32_t epoch_ = 0;  // number of the current replay
  Word start_{0};            // = epoch_ when workers may run
  Word running_{0};          // workers that have not finished this replay
  std::atomic<bool> stop_{false}, aborted_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

// Runs one op right away on the calling thread (also used by calibrate). Operands as listed in core/op.h.
void runOp(const Op& op, const OperandPointers& operands);

}  // namespace bmt::exec
