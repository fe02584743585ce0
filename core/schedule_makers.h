// Inside of makeSchedule: makers that have a file of their own. Nothing but core/schedule*.cpp includes this.
#pragma once

#include <cstdint>
#include <vector>

#include "core/schedule.h"

namespace bmt {

inline Slot makeSlot(Phase phase, std::int32_t chunk, std::int32_t microbatch) {
  return {phase, static_cast<std::int16_t>(chunk), microbatch};
}

// ZB-H1 (depth 1) and ZB-H2 (depth 2); see schedule_zero_bubble.cpp.
std::vector<Slot> zeroBubbleStage(std::int32_t pp, std::int32_t stage, std::int32_t m, std::int32_t depth);
std::vector<Slot> dualPipeVStage(std::int32_t pp, std::int32_t stage, std::int32_t m);

}  // namespace bmt
