// Cross-entropy over a vocabulary that is sharded by columns: every shard reports (max, sum of exponentials,
// target logit); the gradient overwrites the logits, so no probability tensor exists.
#include <cmath>

#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/simd.h"

namespace bmt::kernels::cpu::BMT_ISA {

void crossEntropyStats(float* stats, const float* logits, const std::int32_t* targets, Int n, Int v,
                       Int v_begin, Int valid) {
  for (Int i = 0; i < n; ++i) {
    const float* const row = logits + i * v;
    Vec best = splat(-INFINITY);
    Int j = 0;
    for (; j + kWidth <= valid; j += kWidth) best = maxOf(best, load(row + j));
    if (j < valid) best = maxOf(best, loadPart(row + j, valid - j, -INFINITY));
    const float max = maxLane(best);
    Vec sum{};
    for (j = 0; j + kWidth <= valid; j += kWidth) sum += expOf(load(row + j) - max);
    if (j < valid) sum += expOf(loadPart(row + j, valid - j, -INFINITY) - max);
    const Int target = targets[i] - v_begin;
    stats[i * 3] = max;
    stats[i * 3 + 1] = valid > 0 ? sumOf(sum) : 0;
    stats[i * 3 + 2] = targets[i] >= 0 && target >= 0 && target < valid ? row[target] : 0;
  }
}

void crossEntropyBackward(float* logits, const float* stats, const std::int32_t* targets, double* loss_sum,
                          Int n, Int v, Int v_begin, Int valid, Int r, float scale) {
  double loss = 0;
  for (Int i = 0; i < n; ++i) {
    float* const row = logits + i * v;
    if (targets[i] < 0) {
      std::memset(row, 0, static_cast<std::size_t>(v) * 4);
      continue;
    }
    float max = -INFINITY, target_logit = 0;
    for (Int s = 0; s < r; ++s) {
      const float* const stat = stats + (s * n + i) * 3;
      max = stat[0] > max ? stat[0] : max;
      target_logit += stat[2];
    }
    float sum = 0;
    for (Int s = 0; s < r; ++s) {
      const float* const stat = stats + (s * n + i) * 3;
      if (stat[1] > 0) sum += stat[1] * std::exp(stat[0] - max);
    }
    const float factor = scale / sum;
    loss += static_cast<double>(max) + std::log(static_cast<double>(sum)) - static_cast<double>(target_logit);
    Int j = 0;
    for (; j + kWidth <= valid; j += kWidth) store(row + j, expOf(load(row + j) - max) * factor);
    if (j < valid) storePart(row + j, expOf(loadPart(row + j, valid - j, 0) - max) * factor, valid - j);
    for (j = valid; j < v; ++j) row[j] = 0;
    const Int target = targets[i] - v_begin;
    if (target >= 0 && target < valid) row[target] -= scale;
  }
  if (loss_sum != nullptr) *loss_sum += loss;
}

}  // namespace bmt::kernels::cpu::BMT_ISA
