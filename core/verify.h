// verify: the deadlock checker of both simulator and executor. Run on every graph before it is executed.
#pragma once

#include <vector>

#include "core/error.h"
#include "core/task_graph.h"

namespace bmt {

// Checks, for the ranks that are present: deps point backwards; every (group, seq) is issued once by each
// present member with equal kind, count and dtype; playing the programs under R1-R4 reaches the end (no
// deadlock; an issue names the ranks and tasks that wait for each other); buffers that overlap in memory do
// not overlap in time, even when lanes run asynchronously; every bound argument lies inside its buffer and
// lifetime.
std::vector<Issue> verify(const TaskGraph& graph);

}  // namespace bmt
