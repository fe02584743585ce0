// Vectors of the instruction set that this copy is compiled for, through GCC's vector extension. No std
// templates here: their inline functions could be merged across copies (see kernels/CMakeLists.txt).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"

namespace bmt::kernels::cpu::BMT_ISA {

#if defined(__AVX512F__)
inline constexpr int kWidth = 16;
#else
inline constexpr int kWidth = 8;
#endif
typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef std::int32_t VecI __attribute__((vector_size(kWidth * 4)));
typedef std::uint32_t VecU __attribute__((vector_size(kWidth * 4)));

#define BMT_INLINE static inline __attribute__((always_inline))

BMT_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
BMT_INLINE void store(float* p, Vec v) {
  std::memcpy(p, &v, sizeof(v));
}
BMT_INLINE Vec splat(float x) {
  return Vec{} + x;
}
BMT_INLINE Vec maxOf(Vec a, Vec b) {
  return a > b ? a : b;
}

// First n lanes from memory, `fill` in the others.
BMT_INLINE Vec loadPart(const float* p, Int n, float fill) {
  Vec v = splat(fill);
  std::memcpy(&v, p, static_cast<std::size_t>(n) * 4);
  return v;
}
BMT_INLINE void storePart(float* p, Vec v, Int n) {
  std::memcpy(p, &v, static_cast<std::size_t>(n) * 4);
}

// Applies f(offset, lanes) to [0, n) in vectors, explicitly (the compiler gives up on loops over many
// pointers that may alias); the last vector may be partial. part and put are its loads and stores.
template <typename F>
BMT_INLINE void forEach(Int n, F f) {
  Int j = 0;
  for (; j + kWidth <= n; j += kWidth) f(j, Int{kWidth});
  if (j < n) f(j, n - j);
}
BMT_INLINE Vec part(const float* p, Int j, Int n) {
  return n == kWidth ? load(p + j) : loadPart(p + j, n, 0);
}
BMT_INLINE void put(float* p, Int j, Int n, Vec v) {
  if (n == kWidth) {
    store(p + j, v);
  } else {
    storePart(p + j, v, n);
  }
}

BMT_INLINE float sumOf(Vec v) {
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += v[i];
  return sum;
}
BMT_INLINE float maxLane(Vec v) {
  float best = v[0];
  for (int i = 1; i < kWidth; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// e^x, relative error below 2e-7 on [-87, 88]; smaller arguments give 0. Range reduction x = n ln2 + r, |r|
// <= ln2/2, then the Taylor polynomial of degree 7 (remainder below 1e-8 there).
BMT_INLINE Vec expOf(Vec x) {
  const Vec low = splat(-87.0f), high = splat(88.0f);
  const VecI underflow = x < low;
  x = x > high ? high : x;
  x = x < low ? low : x;
  const Vec magic =
      splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const Vec shifted = x * 1.44269504089f + magic;
  const Vec n = shifted - magic;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // 2^n from the integer's bits, moved to the exponent. Multiplied, not added to the bits of p, so that NaN
  // stays NaN.
  const Vec result = p * (Vec)(((VecU)shifted << 23) + 0x3f800000u);
  return underflow ? Vec{} : result;
}

BMT_INLINE Vec sigmoidOf(Vec x) {
  return 1.0f / (1.0f + expOf(-x));
}

// Scratch memory of the calling thread, grown on demand and freed at thread exit. Slots 0-3 are independent.
float* scratch(int slot, Int floats);

}  // namespace bmt::kernels::cpu::BMT_ISA
