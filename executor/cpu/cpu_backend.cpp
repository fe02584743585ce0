#include "executor/cpu/cpu_backend.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>

#include "core/error.h"
#include "kernels/cpu/kernels.h"

namespace bmt::exec {
namespace {

constexpr int kWakeUpMs = 50;          // how often a sleeping thread looks for an abort
constexpr std::size_t kHeader = 4096;  // in front of every allocation: its size

}  // namespace

CpuBackend::CpuBackend() = default;
CpuBackend::~CpuBackend() {
  stopWorkers();
}

Ns CpuBackend::steadyNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string CpuBackend::description() const {
  return fmt::format("cpu ({})", kernels::cpu::kernels().name);
}

void* CpuBackend::allocate(Bytes bytes) {
  // Anonymous memory is zeroed by the kernel and becomes resident when touched.
  const std::size_t size = static_cast<std::size_t>(bytes) + kHeader;
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw Error(ErrorKind::Runtime,
                fmt::format("cannot allocate {}: {}", formatBytes(bytes), std::strerror(errno)));
  ::madvise(memory, size, MADV_HUGEPAGE);  // best effort
  std::memcpy(memory, &size, sizeof(size));
  return static_cast<char*>(memory) + kHeader;
}

void CpuBackend::release(void* memory) {
  if (memory == nullptr) return;
  char* const base = static_cast<char*>(memory) - kHeader;
  std::size_t size = 0;
  std::memcpy(&size, base, sizeof(size));
  ::munmap(base, size);
}

void CpuBackend::beginCapture(std::int32_t num_events) {
  stopWorkers();
  for (auto& lane : items_) lane.clear();
  calls_.clear();
  events_ = std::make_unique<Event[]>(static_cast<std::size_t>(num_events));
  epoch_ = 0;
  start_ = 0;
}

void CpuBackend::endCapture() {
  for (std::size_t lane = 1; lane < kNumLanes; ++lane) {
    if (!items_[lane].empty()) workers_.emplace_back(&CpuBackend::worker, this, lane);
  }
}

void CpuBackend::launch(Lane lane, const Op& op, const OperandPointers& operands) {
  Item item{Command::Launch};
  item.op = op;
  item.operands = operands;
  push(lane, item);
}

void CpuBackend::copy(Lane lane, void* to, const void* from, Bytes bytes) {
  Item item{Command::Copy};
  item.operands[0] = to;
  item.operands[1] = const_cast<void*>(from);
  item.bytes = bytes;
  push(lane, item);
}

void CpuBackend::enqueue(Lane lane, std::function<void()> function) {
  Item item{Command::Call};
  item.call = static_cast<std::int32_t>(calls_.size());
  calls_.push_back(std::move(function));
  push(lane, item);
}

void CpuBackend::record(Lane lane, EventId event) {
  Item item{Command::Record};
  item.event = event;
  push(lane, item);
}

void CpuBackend::wait(Lane lane, EventId event) {
  Item item{Command::Wait};
  item.event = event;
  push(lane, item);
}

void CpuBackend::waitFor(Event& event) {
  for (;;) {
    const std::uint32_t seen = event.epoch.load(std::memory_order_acquire);
    if (seen == epoch_) return;
    if (aborted_.load(std::memory_order_relaxed))
      throw Error(ErrorKind::Runtime, "stopped because another lane failed");
    sleepOn(event.epoch, seen, kWakeUpMs);
  }
}

void CpuBackend::runLane(std::size_t lane) {
  for (Item& item : items_[lane]) {
    switch (item.command) {
      case Command::Launch:
        runOp(item.op, item.operands);
        break;
      case Command::Copy:
        std::memcpy(item.operands[0], item.operands[1], static_cast<std::size_t>(item.bytes));
        break;
      case Command::Call:
        calls_[static_cast<std::size_t>(item.call)]();
        break;
      case Command::Record: {
        Event& event = events_[static_cast<std::size_t>(item.event)];
        event.time = steadyNow();
        event.epoch.store(epoch_, std::memory_order_release);
        wakeAll(event.epoch);
        break;
      }
      case Command::Wait:
        waitFor(events_[static_cast<std::size_t>(item.event)]);
        break;
    }
    if (aborted_.load(std::memory_order_relaxed))
      throw Error(ErrorKind::Runtime, "stopped because another rank failed");
  }
}

void CpuBackend::runLaneGuarded(std::size_t lane) {
  try {
    runLane(lane);
  } catch (const std::exception& failure) {
    bool first = false;
    {
      const std::lock_guard lock(error_mutex_);
      first = error_ == nullptr;
      if (first) error_ = std::current_exception();
    }
    const bool was_aborted = aborted_.exchange(true);
    if (first && !was_aborted && on_failure_) on_failure_(failure.what());
  }
}

void CpuBackend::worker(std::size_t lane) {
  std::uint32_t done = 0;
  for (;;) {
    std::uint32_t now = start_.load(std::memory_order_acquire);
    while (now == done && !stop_.load()) {
      sleepOn(start_, now, 1000);
      now = start_.load(std::memory_order_acquire);
    }
    if (stop_.load()) return;
    done = now;
    runLaneGuarded(lane);
    running_.fetch_sub(1, std::memory_order_acq_rel);
    wakeAll(running_);
  }
}

void CpuBackend::replay() {
  if (error_) std::rethrow_exception(error_);
  ++epoch_;
  running_.store(static_cast<std::uint32_t>(workers_.size()), std::memory_order_relaxed);
  start_.store(epoch_, std::memory_order_release);
  wakeAll(start_);
  runLaneGuarded(static_cast<std::size_t>(Lane::Compute));
  for (;;) {
    const std::uint32_t left = running_.load(std::memory_order_acquire);
    if (left == 0) break;
    sleepOn(running_, left, kWakeUpMs);
  }
  if (error_) std::rethrow_exception(error_);
}

Ns CpuBackend::timeOf(EventId event) const {
  return events_[static_cast<std::size_t>(event)].time;
}

void CpuBackend::abort() {
  aborted_ = true;
}

void CpuBackend::stopWorkers() {
  stop_ = true;
  wakeAll(start_);
  for (std::thread& thread : workers_) thread.join();
  workers_.clear();
  stop_ = false;
}

}  // namespace bmt::exec
