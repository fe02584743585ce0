// What every kernel test shares: buffers between guard zones whose every float starts as NaN (so a kernel
// that skips an output, reads past an input or writes outside shows), random values, comparison with a double
// reference, and gradients by central differences of a double reference: dL/dx ~ (L(x + h) - L(x - h)) / 2h,
// whose error is O(h^2) + 1e-16 / h.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"

namespace bmt::test {

using kernels::cpu::Int;
using kernels::cpu::Table;
using Doubles = std::vector<double>;

inline std::size_t at(Int index) {
  return static_cast<std::size_t>(index);
}

// Runs body(table) for the kernels of every instruction set that this CPU has.
template <typename Body>
void forEachTable(Body body) {
  const auto tables = kernels::cpu::availableTables();
  for (int i = 0; i < tables.count; ++i) {
    SCOPED_TRACE(tables.table[i]->name);
    body(*tables.table[i]);
  }
}

template <typename... Ints>
std::string shape(Ints... dims) {
  std::string text = "shape";
  ((text += " " + std::to_string(dims)), ...);
  return text;
}

// n floats between guard zones; a NaN with a payload marks guards and floats not yet written.
class Buffer {
 public:
  explicit Buffer(Int n) : floats_(at(n) + 2 * kGuard, std::bit_cast<float>(kPoison)), n_(at(n)) {}
  Buffer(Int n, std::mt19937& random, float scale = 1, float shift = 0) : Buffer(n) {
    std::normal_distribution<float> normal(shift, scale);
    for (std::size_t i = 0; i < n_; ++i) floats_[kGuard + i] = normal(random);
  }
  operator float*() { return floats_.data() + kGuard; }
  std::size_t size() const { return n_; }
  Doubles values() const {
    return {floats_.begin() + kGuard, floats_.begin() + kGuard + static_cast<std::ptrdiff_t>(n_)};
  }
  void expectGuardsIntact(const char* what) const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(floats_[i]), kPoison)
          << what << ": written " << kGuard - i << " before";
      ASSERT_EQ(std::bit_cast<std::uint32_t>(floats_[kGuard + n_ + i]), kPoison)
          << what << ": written " << i << " past";
    }
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::uint32_t kPoison = 0x7fc0beef;
  std::vector<float> floats_;
  std::size_t n_;
};

// Every element within tolerance * (largest |expected|), and the guards of `actual` intact.
inline void expectClose(const char* what, const Buffer& actual, const Doubles& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  actual.expectGuardsIntact(what);
  double largest = 1e-30;
  for (const double e : expected) largest = std::max(largest, std::abs(e));
  const Doubles values = actual.values();
  for (std::size_t i = 0; i < values.size(); ++i) {
    // Written so that NaN fails.
    if (!(std::abs(values[i] - expected[i]) <= tolerance * largest)) {
      FAIL() << what << "[" << i << "] = " << values[i] << ", expected " << expected[i] << " (largest "
             << largest << ")";
    }
  }
}

// Checks `actual` against the derivative of loss(x) at x: every element if there are at most 256, otherwise
// 32 random ones and the derivative along 4 random directions, in which every element takes part.
template <typename Loss>
void expectGradient(const char* what, const Buffer& actual, const Doubles& x, Loss loss,
                    double tolerance = 2e-5) {
  ASSERT_EQ(actual.size(), x.size()) << what;
  actual.expectGuardsIntact(what);
  const double h = 1e-5;
  const Doubles gradient = actual.values();
  double largest = 1e-3;
  for (const double g : gradient) largest = std::max(largest, std::abs(g));
  Doubles probe = x;
  std::mt19937 random(7);
  const bool all = x.size() <= 256;
  for (std::size_t trial = 0; trial < (all ? x.size() : 32); ++trial) {
    const std::size_t i = all ? trial : random() % x.size();
    probe[i] = x[i] + h;
    const double above = loss(probe);
    probe[i] = x[i] - h;
    const double slope = (above - loss(probe)) / (2 * h);
    probe[i] = x[i];
    if (!(std::abs(gradient[i] - slope) <= tolerance * largest)) {
      FAIL() << what << "[" << i << "] = " << gradient[i] << ", central difference " << slope;
    }
  }
  for (int trial = 0; !all && trial < 4; ++trial) {
    std::normal_distribution<double> normal;
    double expected = 0, norm = 0;
    Doubles minus = x;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double direction = normal(random);
      probe[i] = x[i] + h * direction;
      minus[i] = x[i] - h * direction;
      expected += gradient[i] * direction;
      norm += gradient[i] * gradient[i];
    }
    const double slope = (loss(probe) - loss(minus)) / (2 * h);
    if (!(std::abs(slope - expected) <= 10 * tolerance * std::sqrt(norm) + 1e-6)) {
      FAIL() << what << " along direction " << trial << ": " << expected << ", central difference " << slope;
    }
  }
}

inline double dot(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline Doubles plus(Doubles a, const Doubles& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

}  // namespace bmt::test
