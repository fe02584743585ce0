// Backend: a device that runs the ops of one rank. A step is captured once as commands on lanes (in-order
// queues: CUDA streams, or worker threads on CPU) and replayed every step, which is what a CUDA graph does as
// well.
//
//   beginCapture();  for every task: wait(...), record, launch / enqueue, record;  endCapture();
//   every step: replay();   // returns when all lanes are done, or throws the first error
//
// Events are numbered by the caller; an event is done once per replay.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "core/op.h"
#include "core/task_graph.h"
#include "core/units.h"

namespace bmt::exec {

using EventId = std::int32_t;
using OperandPointers = std::array<void*, kMaxOperands>;

class Backend {
 public:
  virtual ~Backend() = default;

  // Device memory, zeroed. Throws Error{Runtime} with the bytes asked for.
  virtual void* allocate(Bytes bytes) = 0;
  virtual void release(void* memory) = 0;

  virtual void beginCapture(std::int32_t num_events) = 0;
  virtual void endCapture() = 0;
  virtual void launch(Lane lane, const Op& op, const OperandPointers& operands) = 0;
  virtual void copy(Lane lane, void* to, const void* from, Bytes bytes) = 0;
  // A function of the host, in lane order (communication on CPU).
  virtual void enqueue(Lane lane, std::function<void()> function) = 0;
  virtual void record(Lane lane, EventId event) = 0;
  virtual void wait(Lane lane, EventId event) = 0;

  virtual void replay() = 0;
  // When the event happened in the last replay, on the clock of now().
  virtual Ns timeOf(EventId event) const = 0;
  virtual Ns now() const = 0;
  // Stops a replay in progress on all lanes (another rank failed).
  virtual void abort() = 0;
  virtual std::string description() const = 0;
};

}  // namespace bmt::exec
