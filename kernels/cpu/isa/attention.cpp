// Causal attention on blocks of queries against the keys they see (Dao et al. 2022 for the backward
// recomputation from the log-sum-exp). Products of a block are Eigen's.
#include <Eigen/Core>
#include <cmath>

#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/simd.h"

namespace bmt::kernels::cpu::BMT_ISA {
namespace {

constexpr Int kQueryBlock = 64;

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using View = Eigen::Map<Matrix, 0, Eigen::OuterStride<>>;
using ConstView = Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>;

View view(float* p, Int rows, Int cols, Int stride) {
  return {p, rows, cols, Eigen::OuterStride<>(stride)};
}
ConstView view(const float* p, Int rows, Int cols, Int stride) {
  return {p, rows, cols, Eigen::OuterStride<>(stride)};
}

// row[0, n) -> exp(row * scale - shift); returns the sum.
float expRow(float* row, Int n, float scale, float shift) {
  Vec sum{};
  Int j = 0;
  for (; j + kWidth <= n; j += kWidth) {
    const Vec e = expOf(load(row + j) * scale - shift);
    store(row + j, e);
    sum += e;
  }
  if (j < n) {
    Vec e = expOf(loadPart(row + j, n - j, 0) * scale - shift);
    storePart(row + j, e, n - j);
    e = loadPart(row + j, n - j, 0);
    sum += e;
  }
  return sumOf(sum);
}

float maxRow(const float* row, Int n) {
  Vec best = splat(-INFINITY);
  Int j = 0;
  for (; j + kWidth <= n; j += kWidth) best = maxOf(best, load(row + j));
  if (j < n) best = maxOf(best, loadPart(row + j, n - j, -INFINITY));
  return maxLane(best);
}

}  // namespace

void attentionForward(float* out, float* lse, const float* qkv, Int b, Int t, Int hq, Int hkv, Int d) {
  const Int stride = (hq + 2 * hkv) * d, group = hq / hkv, out_stride = hq * d;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  float* const scores = scratch(0, kQueryBlock * t);
  for (Int batch = 0; batch < b; ++batch) {
    const float* const rows = qkv + batch * t * stride;
    for (Int head = 0; head < hq; ++head) {
      const float* const q = rows + head * d;
      const float* const k = rows + (hq + head / group) * d;
      const float* const v = k + hkv * d;
      for (Int first = 0; first < t; first += kQueryBlock) {
        const Int n = t - first < kQueryBlock ? t - first : kQueryBlock;
        const Int keys = first + n;
        View s(scores, n, keys, Eigen::OuterStride<>(keys));
        s.noalias() = view(q + first * stride, n, d, stride) * view(k, keys, d, stride).transpose();
        float inverse[kQueryBlock];
        for (Int i = 0; i < n; ++i) {
          float* const row = scores + i * keys;
          const Int seen = first + i + 1;
          const float max = maxRow(row, seen) * scale;
          const float sum = expRow(row, seen, scale, max);
          std::memset(row + seen, 0, static_cast<std::size_t>(keys - seen) * 4);
          inverse[i] = 1.0f / sum;
          lse[(batch * hq + head) * t + first + i] = max + std::log(sum);
        }
        float* const o = out + (batch * t + first) * out_stride + head * d;
        view(o, n, d, out_stride).noalias() = s * view(v, keys, d, stride);
        for (Int i = 0; i < n; ++i) {
          for (Int j = 0; j < d; ++j) o[i * out_stride + j] *= inverse[i];
        }
      }
    }
  }
}

void attentionBackward(float* dqkv, const float* dout, const float* qkv, const float* out, const float* lse,
                       Int b, Int t, Int hq, Int hkv, Int d) {
  const Int stride = (hq + 2 * hkv) * d, group = hq / hkv, out_stride = hq * d;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  float* const probs = scratch(0, kQueryBlock * t);
  float* const grads = scratch(1, kQueryBlock * t);
  for (Int row = 0; row < b * t; ++row)
    std::memset(dqkv + row * stride + hq * d, 0, static_cast<std::size_t>(2 * hkv * d) * 4);
  for (Int batch = 0; batch < b; ++batch) {
    const float* const rows = qkv + batch * t * stride;
    float* const drows = dqkv + batch * t * stride;
    for (Int head = 0; head < hq; ++head) {
      const Int kv = (hq + head / group) * d;
      const float* const q = rows + head * d;
      const float* const k = rows + kv;
      const float* const v = k + hkv * d;
      for (Int first = 0; first < t; first += kQueryBlock) {
        const Int n = t - first < kQueryBlock ? t - first : kQueryBlock;
        const Int keys = first + n;
        const Int row0 = batch * t + first;
        const auto q_block = view(q + first * stride, n, d, stride);
        const auto k_block = view(k, keys, d, stride);
        const auto do_block = view(dout + row0 * out_stride + head * d, n, d, out_stride);
        View p(probs, n, keys, Eigen::OuterStride<>(keys)), ds(grads, n, keys, Eigen::OuterStride<>(keys));
        p.noalias() = q_block * k_block.transpose();
        ds.noalias() = do_block * view(v, keys, d, stride).transpose();
        for (Int i = 0; i < n; ++i) {
          float* const p_row = probs + i * keys;
          float* const ds_row = grads + i * keys;
          const Int seen = first + i + 1;
          expRow(p_row, seen, scale, lse[(batch * hq + head) * t + first + i]);
          const float* const o_row = out + (row0 + i) * out_stride + head * d;
          const float* const do_row = dout + (row0 + i) * out_stride + head * d;
          float dot = 0;  // sum_j P_ij dP_ij = dO . O
          for (Int j = 0; j < d; ++j) dot += o_row[j] * do_row[j];
          for (Int j = 0; j < seen; ++j) ds_row[j] = p_row[j] * (ds_row[j] - dot) * scale;
          std::memset(p_row + seen, 0, static_cast<std::size_t>(keys - seen) * 4);
          std::memset(ds_row + seen, 0, static_cast<std::size_t>(keys - seen) * 4);
        }
        view(drows + first * stride + head * d, n, d, stride).noalias() = ds * k_block;
        view(drows + kv, keys, d, stride).noalias() += ds.transpose() * q_block;
        view(drows + kv + hkv * d, keys, d, stride).noalias() += p.transpose() * do_block;
      }
    }
  }
}

}  // namespace bmt::kernels::cpu::BMT_ISA
