// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), row by row, with the residual sum fused
// in front. Statistics in f32 over vector partial sums.
#include <cmath>

#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/simd.h"

namespace bmt::kernels::cpu::BMT_ISA {
namespace {

// y = x + delta + bias; returns the row that holds y (x itself when nothing is added and y is not wanted).
const float* residualRow(float* y, float* spare, const float* x, const float* delta, const float* bias,
                         Int c) {
  if (delta == nullptr && bias == nullptr) {
    if (y == nullptr) return x;
    if (y != x) std::memcpy(y, x, static_cast<std::size_t>(c) * 4);
    return y;
  }
  float* const out = y != nullptr ? y : spare;
  for (Int j = 0; j < c; ++j)
    out[j] = x[j] + (delta != nullptr ? delta[j] : 0.0f) + (bias != nullptr ? bias[j] : 0.0f);
  return out;
}

template <typename F>
BMT_INLINE float reduce(Int c, F term) {
  Vec sum{};
  Int j = 0;
  for (; j + kWidth <= c; j += kWidth) sum += term(j, kWidth);
  if (j < c) sum += term(j, c - j);
  return sumOf(sum);
}

}  // namespace

void layerNormForward(float* out, float* y, float* mean, float* rstd, const float* x, const float* delta,
                      const float* bias, const float* w, const float* b, Int n, Int c, float eps) {
  float* const spare = scratch(0, c);
  for (Int i = 0; i < n; ++i) {
    const float* const row = residualRow(y != nullptr ? y + i * c : nullptr, spare, x + i * c,
                                         delta != nullptr ? delta + i * c : nullptr, bias, c);
    const float inverse = 1.0f / static_cast<float>(c);
    const float m = reduce(c, [&](Int j, Int k) { return part(row, j, k); }) * inverse;
    float var = 0;
    Vec squares{};
    Int j = 0;
    for (; j + kWidth <= c; j += kWidth) {
      const Vec centred = load(row + j) - m;
      squares += centred * centred;
    }
    var = sumOf(squares);
    for (; j < c; ++j) var += (row[j] - m) * (row[j] - m);
    const float r = 1.0f / std::sqrt(var * inverse + eps);
    mean[i] = m;
    rstd[i] = r;
    float* const o = out + i * c;
    for (j = 0; j < c; ++j) o[j] = (row[j] - m) * r * w[j] + b[j];
  }
}

void layerNormBackward(float* dx, float* dw, float* db, const float* dout, const float* y, const float* w,
                       const float* mean, const float* rstd, const float* dres, Int n, Int c,
                       bool accumulate) {
  if (!accumulate) {
    std::memset(dw, 0, static_cast<std::size_t>(c) * 4);
    std::memset(db, 0, static_cast<std::size_t>(c) * 4);
  }
  for (Int i = 0; i < n; ++i) {
    const float* const g = dout + i * c;
    const float* const row = y + i * c;
    const float m = mean[i], r = rstd[i];
    const float inverse = 1.0f / static_cast<float>(c);
    const float a = reduce(c, [&](Int j, Int k) { return part(g, j, k) * part(w, j, k); }) * inverse;
    const float s =
        reduce(c, [&](Int j, Int k) { return part(g, j, k) * part(w, j, k) * ((part(row, j, k) - m) * r); }) *
        inverse;
    const float* const res = dres != nullptr ? dres + i * c : nullptr;
    float* const d = dx + i * c;
    forEach(c, [&](Int j, Int k) {
      const Vec grad = part(g, j, k), normed = (part(row, j, k) - m) * r;
      put(dw, j, k, part(dw, j, k) + grad * normed);
      put(db, j, k, part(db, j, k) + grad);
      const Vec through = res != nullptr ? part(res, j, k) : Vec{};
      put(d, j, k, through + (grad * part(w, j, k) - a - normed * s) * r);
    });
  }
}

void rmsNormForward(float* out, float* y, float* rstd, const float* x, const float* delta, const float* bias,
                    const float* w, Int n, Int c, float eps) {
  float* const spare = scratch(0, c);
  for (Int i = 0; i < n; ++i) {
    const float* const row = residualRow(y != nullptr ? y + i * c : nullptr, spare, x + i * c,
                                         delta != nullptr ? delta + i * c : nullptr, bias, c);
    const float squares = reduce(c, [&](Int j, Int k) { return part(row, j, k) * part(row, j, k); });
    const float r = 1.0f / std::sqrt(squares / static_cast<float>(c) + eps);
    rstd[i] = r;
    float* const o = out + i * c;
    for (Int j = 0; j < c; ++j) o[j] = row[j] * r * w[j];
  }
}

void rmsNormBackward(float* dx, float* dw, const float* dout, const float* y, const float* w,
                     const float* rstd, const float* dres, Int n, Int c, bool accumulate) {
  if (!accumulate) std::memset(dw, 0, static_cast<std::size_t>(c) * 4);
  for (Int i = 0; i < n; ++i) {
    const float* const g = dout + i * c;
    const float* const row = y + i * c;
    const float r = rstd[i];
    const float s = reduce(c, [&](Int j, Int k) { return part(g, j, k) * part(w, j, k) * part(row, j, k); }) *
                    r * r / static_cast<float>(c);
    const float* const res = dres != nullptr ? dres + i * c : nullptr;
    float* const d = dx + i * c;
    forEach(c, [&](Int j, Int k) {
      const Vec grad = part(g, j, k), value = part(row, j, k);
      put(dw, j, k, part(dw, j, k) + grad * value * r);
      const Vec through = res != nullptr ? part(res, j, k) : Vec{};
      put(d, j, k, through + (grad * part(w, j, k) - value * s) * r);
    });
  }
}

void residualAdd(float* out, const float* x, const float* delta, const float* bias, Int n, Int c) {
  for (Int i = 0; i < n; ++i) {
    for (Int j = 0; j < c; ++j)
      out[i * c + j] = x[i * c + j] + delta[i * c + j] + (bias != nullptr ? bias[j] : 0.0f);
  }
}

}  // namespace bmt::kernels::cpu::BMT_ISA
