// The engine: plays all rank programs against a clock, under the contract R1-R5 of DESIGN.md section 2.
//
// Running activities (a compute task, or a communication with all its members) share resources max-min
// fairly: all rates rise together until a resource is full, its users freeze, and so on; without contention
// every rate is 1 and the result is the longest path. Completions are rounded up to whole nanoseconds, so
// time always advances. Deterministic: events are ordered by (time, sequence number).
//
// State is flat arrays over all tasks of all ranks, sized once: time and memory grow linearly with tasks
// (times the logarithm of what runs at once).
#pragma once

#include <cstdint>
#include <vector>

#include "core/task_graph.h"
#include "simulator/cost_model.h"
#include "traces/trace.h"

namespace bmt::sim {

// What the engine needs to know of a task; indices as in TaskGraph::ranks and RankProgram::tasks.
using CostTable = std::vector<std::vector<TaskCost>>;
CostTable costTable(const TaskGraph& graph, const CostModel& model);

struct SimOptions {
  bool details = true;  // names of the spans and memory over time; a sweep does without
};

struct SimResult {
  trace::Trace trace;
  std::int64_t num_tasks = 0, num_events = 0;
};

// Throws Error{BadInput} naming the waiting tasks if the programs deadlock (verify() finds it first).
SimResult simulate(const TaskGraph& graph, const CostTable& costs, const std::vector<Resource>& resources,
                   const SimOptions& options = {});

}  // namespace bmt::sim
