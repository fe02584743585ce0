// The arithmetic ceiling of one core: independent fused multiply-adds in registers.
#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/simd.h"

namespace bmt::kernels::cpu::BMT_ISA {

double fmaPeak(Int rounds, float* sink) {
  constexpr int kChains = 10;  // enough to hide the latency of two units, few enough to stay in registers
  Vec chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = splat(static_cast<float>(i));
  const Vec a = splat(0.999f), b = splat(0.001f);
  for (Int round = 0; round < rounds; ++round) {
    for (int i = 0; i < kChains; ++i) chain[i] = chain[i] * a + b;
  }
  Vec sum{};
  for (int i = 0; i < kChains; ++i) sum += chain[i];
  *sink = sumOf(sum);
  return 2.0 * kChains * kWidth * static_cast<double>(rounds);
}

}  // namespace bmt::kernels::cpu::BMT_ISA
