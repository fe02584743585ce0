// Where the time of a step goes. Every nanosecond of every rank's step falls into exactly one part, so the
// parts, as means over ranks, add up to the step.
//   compute        ops on the Compute lane, by op kind
//   recompute      forward ops inside a backward slot
//   optimizer      gradient norm and parameter update
//   launch         gaps between kernels, the host's pace, task overhead
//   contention     compute stretched because ranks share cores or a device is shared with communication
//   slow           compute stretched by the cluster's slow-device factors
//   communication  by axis: a collective on the Compute lane, or one that an idle Compute lane waits for,
//                  from the moment all members have arrived
//   waiting        by axis: for members of the same stage to arrive at a collective (imbalance)
//   bubble         the rest: waiting for another stage
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/task_graph.h"
#include "simulator/cost_model.h"
#include "traces/trace.h"

namespace bmt::sim {

struct TimePart {
  std::string group;  // as above
  std::string name;   // op kind or axis; empty for groups of one part
  Ns total = 0;       // summed over ranks: over all parts exactly step * ranks
  double mean_s = 0;  // per rank
};

struct Explanation {
  Ns step = 0;
  std::int64_t ranks = 0;
  std::vector<TimePart> parts;  // by group in the order above, largest first within a group

  double seconds(const std::string& group) const;  // mean per rank; 0 when absent
};

struct TaskCostParts {
  Ns healthy = 0;  // alone on a healthy device
  Ns alone = 0;    // alone on this one
};

// `cost(rank index, task)` and `parts(rank, segment)` as charged to the tasks of `t`, whose spans are those
// of `graph` by rank and task.
Explanation explain(const TaskGraph& graph, const trace::Trace& t,
                    const std::function<TaskCostParts(std::size_t, TaskId)>& cost,
                    const std::function<std::vector<CostPart>(RankId, SegmentId)>& parts);

// "tensor", "data", "pipeline", ...: the axis whose link a communication uses.
std::string axisName(GroupKind kind);

// The chain of tasks that decides the step, first to last; the times are adjacent and add up to the step.
struct CriticalTask {
  RankId rank = 0;
  std::string cause;  // "forward", "tensor_comm", ..., or "waiting" (nothing recorded released the next one)
  std::string task;   // name; empty for waiting
  std::string slot;   // "F0.3"; empty for waiting
  Ns begin = 0, end = 0;
};
std::vector<CriticalTask> criticalPath(const trace::Trace& t);

}  // namespace bmt::sim
