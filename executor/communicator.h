// Communicator: carries out the communication tasks of one rank, on the lanes of its backend.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/task_graph.h"
#include "core/units.h"

namespace bmt::exec {

// A communication task with its pointers resolved. Semantics of count, src and dst: Comm in
// core/task_graph.h.
struct CommCall {
  CommKind kind = CommKind::AllReduce;
  GroupId group = -1;
  std::uint64_t seq = 0;
  std::vector<RankId> members;  // in group order; Send/Recv: {sender, receiver}
  std::int32_t index = 0;       // of this rank in members
  std::int64_t count = 0;
  DType dtype = DType::F32;
  void* src = nullptr;
  void* dst = nullptr;
  std::int32_t order = 0;  // position among the rank's communications (rule R4)
  std::string name;        // for errors: "all_reduce data F0.3 L5"
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  // Adds the call to the lane during capture. Throws nothing then; a failure at run time (deadline, dead
  // rank) surfaces from Backend::replay as Error{Runtime} that names rank, task and who did not arrive.
  virtual void run(Lane lane, const CommCall& call) = 0;
  // Before every replay: communications are posted in order from 0 again; each may take `deadline_s`.
  virtual void beginStep(double deadline_s) = 0;
  // Marks all ranks as failed and wakes whoever waits. Safe from any thread.
  virtual void abort(const std::string& reason) = 0;
  // When the call of that order was posted by this rank, and when it began, in the last replay. Where a rank
  // cannot see the others (MPI), the start is refined when the traces are put together.
  virtual Ns postedAt(std::int32_t order) const = 0;
  virtual Ns startedAt(std::int32_t order) const = 0;
};

}  // namespace bmt::exec
