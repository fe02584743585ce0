// Names for the integers that identify things. Plain integers where arithmetic is natural (ranks, tasks are
// indices), documented ranges everywhere.
#pragma once

#include <cstdint>

namespace bmt {

using RankId = std::int32_t;     // 0 .. world size - 1
using TaskId = std::int32_t;     // index in RankProgram::tasks; -1 = none
using BufferId = std::int32_t;   // index in RankProgram::buffers; -1 = none
using SegmentId = std::int32_t;  // index in TaskGraph::segments; -1 = none (a communication task)
using GroupId = std::int32_t;    // mesh.h: kind and anchor rank packed; -1 = none

}  // namespace bmt
