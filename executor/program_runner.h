// ProgramRunner: plays one rank's program on a backend. Captures the program once (pointers resolved into the
// arena), then replays it every step and reports what happened as a Trace with the program's task ids.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/task_graph.h"
#include "executor/backend.h"
#include "executor/communicator.h"
#include "traces/trace.h"

namespace bmt::exec {

class ProgramRunner {
 public:
  // Called in the middle of every step on the Compute lane, with the name of the task that follows (fault
  // injection).
  using MidStep = std::function<void(const std::string& task)>;

  // `graph` and `program` must outlive the runner. Allocates program.arena bytes, zeroed.
  ProgramRunner(const TaskGraph& graph, const RankProgram& program, Backend& backend,
                Communicator& communicator, MidStep mid_step = {});
  ~ProgramRunner();
  ProgramRunner(const ProgramRunner&) = delete;
  ProgramRunner& operator=(const ProgramRunner&) = delete;

  void step() { backend_.replay(); }

  // Pointer to a well-known buffer (program.weights, tokens, scalars, ...).
  void* data(BufferId buffer) const;
  template <typename T>
  T* data(BufferId buffer) const {
    return static_cast<T*>(data(buffer));
  }

  // Spans of the last step; times are absolute (Backend::now).
  std::vector<trace::Span> spans() const;
  // Highest arena byte written since poison(), rounded up to kArenaAlignment: the measured twin of
  // program.arena.
  Bytes touchedHighWater() const;
  // Bytes that this rank sends per step, by TaskKind: an all-reduce sends 2 (n - 1) / n of its buffer, a
  // gather or scatter (n - 1) / n (Patarasuk and Yuan 2009).
  std::vector<Bytes> commBytes() const;
  // Fills everything that is not persistent with NaN, so that a wrong lifetime shows and touched memory can
  // be told.
  void poison();

 private:
  void capture(const MidStep& mid_step);
  void captureOps(const Task& task);
  void* resolve(const Arg& arg);
  Bytes persistentEnd() const;  // persistent buffers lie below
  EventId startEvent(TaskId task) const { return 2 * task; }
  EventId endEvent(TaskId task) const { return 2 * task + 1; }

  const TaskGraph& graph_;
  const RankProgram& program_;
  Backend& backend_;
  Communicator& communicator_;
  char* arena_ = nullptr;
};

}  // namespace bmt::exec
