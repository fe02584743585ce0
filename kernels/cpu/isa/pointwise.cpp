// Embeddings, rotary positions, activations, optimizer.
#include <cmath>

#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/simd.h"

namespace bmt::kernels::cpu::BMT_ISA {
namespace {

constexpr float kGelu = 0.7978845608f;  // sqrt(2/pi)
constexpr float kCubic = 0.044715f;

// sign = 1 rotates forward, -1 back. cos and sin of one position are computed once per row.
void rope(float* qkv, Int n, Int t, Int hq, Int hkv, Int d, float theta, float sign) {
  const Int half = d / 2, stride = (hq + 2 * hkv) * d;
  float* const cosines = scratch(2, t * half);
  float* const sines = scratch(3, t * half);
  for (Int position = 0; position < t && position < n; ++position) {
    for (Int i = 0; i < half; ++i) {
      const double frequency =
          std::pow(static_cast<double>(theta), -2.0 * static_cast<double>(i) / static_cast<double>(d));
      const double angle = static_cast<double>(position) * frequency;
      cosines[position * half + i] = static_cast<float>(std::cos(angle));
      sines[position * half + i] = sign * static_cast<float>(std::sin(angle));
    }
  }
  for (Int row = 0; row < n; ++row) {
    const float* const c = cosines + row % t * half;
    const float* const s = sines + row % t * half;
    for (Int head = 0; head < hq + hkv; ++head) {
      float* const a = qkv + row * stride + head * d;
      float* const b = a + half;
      for (Int i = 0; i < half; ++i) {
        const float x = a[i], y = b[i];
        a[i] = x * c[i] - y * s[i];
        b[i] = y * c[i] + x * s[i];
      }
    }
  }
}

}  // namespace

void embeddingForward(float* out, const std::int32_t* tokens, const float* table, Int n, Int c, Int row_begin,
                      Int rows) {
  for (Int i = 0; i < n; ++i) {
    const Int row = tokens[i] - row_begin;
    if (row < 0 || row >= rows) {
      std::memset(out + i * c, 0, static_cast<std::size_t>(c) * 4);
    } else {
      std::memcpy(out + i * c, table + row * c, static_cast<std::size_t>(c) * 4);
    }
  }
}

void embeddingBackward(float* dtable, const std::int32_t* tokens, const float* dout, Int n, Int c,
                       Int row_begin, Int rows, bool accumulate) {
  if (!accumulate) std::memset(dtable, 0, static_cast<std::size_t>(rows * c) * 4);
  for (Int i = 0; i < n; ++i) {
    const Int row = tokens[i] - row_begin;
    if (row < 0 || row >= rows) continue;
    for (Int j = 0; j < c; ++j) dtable[row * c + j] += dout[i * c + j];
  }
}

void positionForward(float* x, const float* table, Int n, Int c, Int t, Int first) {
  for (Int i = 0; i < n; ++i) {
    const float* const row = table + (first + i) % t * c;
    for (Int j = 0; j < c; ++j) x[i * c + j] += row[j];
  }
}

void positionBackward(float* dtable, const float* dout, Int n, Int c, Int t, Int first, bool accumulate) {
  if (!accumulate) std::memset(dtable, 0, static_cast<std::size_t>(t * c) * 4);
  for (Int i = 0; i < n; ++i) {
    float* const row = dtable + (first + i) % t * c;
    for (Int j = 0; j < c; ++j) row[j] += dout[i * c + j];
  }
}

void ropeForward(float* qkv, Int n, Int t, Int hq, Int hkv, Int d, float theta) {
  rope(qkv, n, t, hq, hkv, d, theta, 1);
}
void ropeBackward(float* dqkv, Int n, Int t, Int hq, Int hkv, Int d, float theta) {
  rope(dqkv, n, t, hq, hkv, d, theta, -1);
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
void geluForward(float* out, const float* x, Int n) {
  forEach(n, [&](Int j, Int k) {
    const Vec v = part(x, j, k);
    put(out, j, k, v * sigmoidOf(2 * kGelu * (v + kCubic * v * v * v)));
  });
}

void geluBackward(float* dx, const float* dout, const float* x, Int n) {
  forEach(n, [&](Int j, Int k) {
    const Vec v = part(x, j, k);
    const Vec s = sigmoidOf(2 * kGelu * (v + kCubic * v * v * v));
    const Vec slope = s + v * s * (1.0f - s) * (2 * kGelu) * (1.0f + 3 * kCubic * v * v);
    put(dx, j, k, part(dout, j, k) * slope);
  });
}

void reluForward(float* out, const float* x, Int n) {
  for (Int i = 0; i < n; ++i) out[i] = x[i] > 0 ? x[i] : 0;
}

void reluBackward(float* dx, const float* dout, const float* x, Int n) {
  for (Int i = 0; i < n; ++i) dx[i] = x[i] > 0 ? dout[i] : 0;
}

void swigluForward(float* out, const float* gate_up, Int n, Int f) {
  for (Int i = 0; i < n; ++i) {
    const float* const gate = gate_up + i * 2 * f;
    forEach(f, [&](Int j, Int k) {
      const Vec g = part(gate, j, k);
      put(out + i * f, j, k, g * sigmoidOf(g) * part(gate + f, j, k));
    });
  }
}

void swigluBackward(float* dgate_up, const float* dout, const float* gate_up, Int n, Int f) {
  for (Int i = 0; i < n; ++i) {
    const float* const gate = gate_up + i * 2 * f;
    float* const dgate = dgate_up + i * 2 * f;
    forEach(f, [&](Int j, Int k) {
      const Vec g = part(gate, j, k), s = sigmoidOf(g), d = part(dout + i * f, j, k),
                u = part(gate + f, j, k);
      put(dgate, j, k, d * u * s * (1.0f + g * (1.0f - s)));
      put(dgate + f, j, k, d * g * s);
    });
  }
}

double sumOfSquares(const float* x, Int n) {
  // Vector partial sums of at most 4096 elements, added up in double.
  double total = 0;
  for (Int first = 0; first < n; first += 4096) {
    const Int count = n - first < 4096 ? n - first : 4096;
    Vec sum{};
    forEach(count, [&](Int j, Int k) {
      const Vec v = part(x + first, j, k);
      sum += v * v;
    });
    for (int i = 0; i < kWidth; ++i) total += static_cast<double>(sum[i]);
  }
  return total;
}

void adamW(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict g, Int n,
           float lr, float beta1, float beta2, float eps, float weight_decay, float correction1,
           float correction2, float grad_scale) {
  const float step = lr / correction1, decay = 1.0f - lr * weight_decay, root = 1.0f / std::sqrt(correction2);
  for (Int i = 0; i < n; ++i) {
    const float grad = g[i] * grad_scale;
    m[i] = beta1 * m[i] + (1.0f - beta1) * grad;
    v[i] = beta2 * v[i] + (1.0f - beta2) * grad * grad;
    p[i] = p[i] * decay - step * m[i] / (__builtin_sqrtf(v[i]) * root + eps);
  }
}

void add(float* out, const float* a, const float* b, Int n) {
  for (Int i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

}  // namespace bmt::kernels::cpu::BMT_ISA
