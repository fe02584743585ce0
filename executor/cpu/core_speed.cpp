#include "executor/cpu/core_speed.h"

#include <algorithm>
#include <chrono>

#include "kernels/cpu/kernels.h"

namespace bmt::exec {

std::string instructionSet() {
  return kernels::cpu::kernels().name;
}

double measureFmaPeak() {
  using Clock = std::chrono::steady_clock;
  double best = 0;
  float sink = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    const Clock::time_point start = Clock::now();
    const double flops = kernels::cpu::kernels().fmaPeak(2000000, &sink);
    best = std::max(best, flops / std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

}  // namespace bmt::exec
