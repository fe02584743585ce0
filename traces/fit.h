// Fits cost constants to measured samples: non-negative least squares on relative errors, so that small and
// large shapes count alike.
#pragma once

#include <vector>

#include "traces/cost_profile.h"

namespace bmt::trace {

struct OpSample {
  Op op;
  double seconds = 0;  // alone on an idle machine
};
// t = overhead + flops / F + bytes / B for one kind; terms that would be negative are dropped.
OpFit fitOp(OpKind kind, const std::vector<OpSample>& samples);

struct CommSample {
  double steps = 0;  // algorithm steps
  double bytes = 0;  // sent per rank
  double seconds = 0;
};
// t = steps * alpha + bytes / bandwidth
CommFit fitComm(CommKind kind, const std::string& transport, const std::vector<CommSample>& samples);

// x >= 0 that minimises |A x - b|, rows of A given one after the other (n columns); exact by trying all
// supports (n <= 3).
std::vector<double> nonNegativeLeastSquares(const std::vector<double>& a, const std::vector<double>& b,
                                            std::size_t n);

}  // namespace bmt::trace
