// Where a step's time goes, by one definition for predicted and measured traces. Per rank, as shares of the
// step:
//   compute   ops on the Compute lane
//   exposed   collectives that run on the Compute lane, and idle time of the Compute lane while a collective
//   of the Data or
//             Tensor lane of the same rank is running (from the moment all members have arrived)
//   bubble    the rest: waiting for a neighbour stage or for other ranks to arrive
// Averaged over ranks; compute + exposed + bubble = 1.
#pragma once

#include "traces/trace.h"

namespace bmt::trace {

struct Shares {
  double compute = 0, exposed = 0, bubble = 0;
};
Shares stepShares(const Trace& trace);

}  // namespace bmt::trace
