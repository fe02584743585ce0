// Causal grouped-query attention and rotary positions against their definitions in double; gradients by
// finite differences.
#include "tests/kernels/check.h"

namespace bmt::test {
namespace {

struct Shape {
  Int b, t, hq, hkv, d;
};
const Shape kShapes[] = {{1, 1, 1, 1, 1},    {2, 3, 1, 1, 2},    {1, 17, 2, 1, 8},
                         {2, 63, 3, 3, 5},   {1, 64, 4, 2, 16},  {2, 65, 2, 2, 17},
                         {1, 128, 2, 1, 64}, {1, 130, 6, 2, 12}, {1, 257, 1, 1, 32}};

struct Result {
  Doubles out, lse;
};

Result attention(const Doubles& qkv, const Shape& s) {
  const Int stride = (s.hq + 2 * s.hkv) * s.d;
  Result result{Doubles(at(s.b * s.t * s.hq * s.d)), Doubles(at(s.b * s.hq * s.t))};
  for (Int b = 0; b < s.b; ++b) {
    for (Int h = 0; h < s.hq; ++h) {
      const Int kv = h / (s.hq / s.hkv);
      for (Int i = 0; i < s.t; ++i) {
        const Int q = (b * s.t + i) * stride + h * s.d;
        Doubles scores;
        double max = -INFINITY, sum = 0;
        for (Int j = 0; j <= i; ++j) {
          const Int k = (b * s.t + j) * stride + (s.hq + kv) * s.d;
          double score = 0;
          for (Int x = 0; x < s.d; ++x) score += qkv[at(q + x)] * qkv[at(k + x)];
          scores.push_back(score / std::sqrt(static_cast<double>(s.d)));
          max = std::max(max, scores.back());
        }
        for (const double score : scores) sum += std::exp(score - max);
        result.lse[at((b * s.hq + h) * s.t + i)] = max + std::log(sum);
        for (Int j = 0; j <= i; ++j) {
          const Int v = (b * s.t + j) * stride + (s.hq + s.hkv + kv) * s.d;
          const double p = std::exp(scores[at(j)] - max) / sum;
          for (Int x = 0; x < s.d; ++x)
            result.out[at((b * s.t + i) * s.hq * s.d + h * s.d + x)] += p * qkv[at(v + x)];
        }
      }
    }
  }
  return result;
}

TEST(Attention, forwardMatchesReference) {
  forEachTable([](const Table& table) {
    for (const Shape& s : kShapes) {
      // A scale of 6 makes scores of some tens: the softmax must subtract the maximum.
      for (const float scale : {1.0f, 6.0f}) {
        SCOPED_TRACE(shape(s.b, s.t, s.hq, s.hkv, s.d));
        std::mt19937 random(1);
        Buffer qkv(s.b * s.t * (s.hq + 2 * s.hkv) * s.d, random, scale), out(s.b * s.t * s.hq * s.d),
            lse(s.b * s.hq * s.t);
        table.attentionForward(out, lse, qkv, s.b, s.t, s.hq, s.hkv, s.d);
        const Result expected = attention(qkv.values(), s);
        expectClose("out", out, expected.out, scale > 1 ? 5e-5 : 5e-6);
        expectClose("lse", lse, expected.lse, 2e-6);
      }
    }
  });
}

// What lies in the future must not reach a row's result, not even as NaN times zero.
TEST(Attention, futureRowsHaveNoInfluence) {
  const Shape s{1, 70, 2, 1, 8};
  const Int stride = (s.hq + 2 * s.hkv) * s.d, known = 40;
  forEachTable([&](const Table& table) {
    std::mt19937 random(2);
    Buffer qkv(s.t * stride, random), first(s.t * s.hq * s.d), second(s.t * s.hq * s.d), lse(s.hq * s.t);
    table.attentionForward(first, lse, qkv, 1, s.t, s.hq, s.hkv, s.d);
    for (Int k = known * stride; k < s.t * stride; ++k) qkv[k] *= -3;
    table.attentionForward(second, lse, qkv, 1, s.t, s.hq, s.hkv, s.d);
    for (Int k = 0; k < known * s.hq * s.d; ++k) ASSERT_EQ(first[k], second[k]) << k;
    EXPECT_NE(first[(s.t - 1) * s.hq * s.d], second[(s.t - 1) * s.hq * s.d]);
  });
}

TEST(Attention, gradientMatchesFiniteDifferences) {
  forEachTable([](const Table& table) {
    for (const Shape& s : {Shape{1, 1, 1, 1, 4}, Shape{2, 5, 2, 1, 3}, Shape{1, 17, 4, 2, 8},
                           Shape{1, 66, 2, 2, 5}, Shape{1, 130, 2, 1, 4}}) {
      SCOPED_TRACE(shape(s.b, s.t, s.hq, s.hkv, s.d));
      std::mt19937 random(3);
      Buffer qkv(s.b * s.t * (s.hq + 2 * s.hkv) * s.d, random), dout(s.b * s.t * s.hq * s.d, random);
      Buffer out(s.b * s.t * s.hq * s.d), lse(s.b * s.hq * s.t), dqkv(s.b * s.t * (s.hq + 2 * s.hkv) * s.d);
      table.attentionForward(out, lse, qkv, s.b, s.t, s.hq, s.hkv, s.d);
      table.attentionBackward(dqkv, dout, qkv, out, lse, s.b, s.t, s.hq, s.hkv, s.d);
      const Doubles upstream = dout.values();
      expectGradient("dqkv", dqkv, qkv.values(),
                     [&](const Doubles& v) { return dot(attention(v, s).out, upstream); });

      Buffer again(s.b * s.t * (s.hq + 2 * s.hkv) * s.d);
      table.attentionBackward(again, dout, qkv, out, lse, s.b, s.t, s.hq, s.hkv, s.d);
      EXPECT_EQ(dqkv.values(), again.values()) << "same inputs, other bits";
    }
  });
}

// x'_i = x_i cos - x_{i+D/2} sin, x'_{i+D/2} = x_{i+D/2} cos + x_i sin at angle position * theta^(-2i/D) (Su
// et al. 2021, in the half-split layout of Hugging Face models); v heads stay as they are. Backward is the
// inverse rotation.
TEST(Rope, matchesReferenceAndBackwardInverts) {
  const float theta = 10000;
  forEachTable([&](const Table& table) {
    for (const Shape& s :
         {Shape{1, 1, 1, 1, 2}, Shape{2, 17, 4, 2, 8}, Shape{3, 5, 1, 1, 6}, Shape{1, 65, 2, 1, 64}}) {
      SCOPED_TRACE(shape(s.b, s.t, s.hq, s.hkv, s.d));
      const Int heads = s.hq + 2 * s.hkv, n = s.b * s.t;
      std::mt19937 random(4);
      Buffer qkv(n * heads * s.d, random);
      const Doubles x = qkv.values();
      Doubles expected = x;
      for (Int row = 0; row < n; ++row) {
        for (Int h = 0; h < s.hq + s.hkv; ++h) {
          for (Int i = 0; i < s.d / 2; ++i) {
            const double angle = static_cast<double>(row % s.t) *
                                 std::pow(static_cast<double>(theta),
                                          -2.0 * static_cast<double>(i) / static_cast<double>(s.d));
            const std::size_t a = at((row * heads + h) * s.d + i), b = a + at(s.d / 2);
            expected[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
            expected[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
          }
        }
      }
      table.ropeForward(qkv, n, s.t, s.hq, s.hkv, s.d, theta);
      expectClose("rotated", qkv, expected, 1e-6);
      table.ropeBackward(qkv, n, s.t, s.hq, s.hkv, s.d, theta);
      expectClose("rotated back", qkv, x, 1e-6);
    }
  });
}

// Another theta and length after the first: no table of an earlier call may be reused.
TEST(Rope, callsWithOtherSettingsDoNotMix) {
  forEachTable([](const Table& table) {
    std::mt19937 random(5);
    Buffer first(3 * 3 * 4, random), second = first;
    table.ropeForward(first, 3, 3, 1, 1, 4, 10000);
    table.ropeForward(second, 3, 3, 1, 1, 4, 100);
    EXPECT_NE(first.values(), second.values());
    Buffer third(3 * 3 * 4);
    std::mt19937 same(5);
    third = Buffer(3 * 3 * 4, same);
    table.ropeForward(third, 3, 3, 1, 1, 4, 10000);
    EXPECT_EQ(first.values(), third.values());
  });
}

}  // namespace
}  // namespace bmt::test
