#include "executor/cpu/core_speed.h"

#include <algorithm>
#include <chrono>

#include "kernels/cpu/kernels.h"

namespace bmt::exec {

std::string instructionSet() {
  return kernels::cpu::kernels().name;
}

double measureFmaPeak(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  double best = 0;
  float sink = 0;
  const Clock::time_point begin = Clock::now();
  for (int round = 0; round < 5 || since(begin) < seconds; ++round) {
    const Clock::time_point start = Clock::now();
    const double flops = kernels::cpu::kernels().fmaPeak(2000000, &sink);
    best = std::max(best, flops / since(start));
  }
  return best;
}

}  // namespace bmt::exec
