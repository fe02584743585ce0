// Vocabulary-parallel cross-entropy against its definition in double: any number of shards gives the loss and
// gradient of one.
#include "tests/kernels/check.h"

namespace bmt::test {
namespace {

// Sum over unmasked rows of log(sum_j exp(l_j)) - l_target over the first `valid` columns.
double lossOf(const Doubles& logits, const std::vector<std::int32_t>& targets, Int v, Int valid) {
  double loss = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] < 0) continue;
    const auto row = logits.begin() + static_cast<Int>(i) * v;
    const double max = *std::max_element(row, row + valid);
    double sum = 0;
    for (Int j = 0; j < valid; ++j) sum += std::exp(row[j] - max);
    loss += max + std::log(sum) - row[targets[i]];
  }
  return loss;
}

struct Case {
  Int n, v, valid, shards;  // v = padded vocabulary, a multiple of shards
};

void check(const Table& table, const Case& c, float spread) {
  SCOPED_TRACE(shape(c.n, c.v, c.valid, c.shards));
  const Int local = c.v / c.shards;
  const float scale = 0.125f;
  std::mt19937 random(1);
  Buffer logits(c.n * c.v, random, spread);
  std::vector<std::int32_t> targets;
  for (Int i = 0; i < c.n; ++i) {
    targets.push_back(i % 5 == 3 ? -1 : static_cast<std::int32_t>(random() % static_cast<unsigned>(c.valid)));
  }
  if (c.n > 1) targets[1] = static_cast<std::int32_t>(c.valid - 1);

  Buffer stats(c.shards * c.n * 3), gradient(c.n * c.v);
  std::vector<Buffer> parts;
  for (Int s = 0; s < c.shards; ++s) {
    Buffer& part = parts.emplace_back(c.n * local);
    for (Int i = 0; i < c.n; ++i) std::copy_n(logits + (i * c.v + s * local), local, part + i * local);
    const Int valid = std::clamp(c.valid - s * local, Int{0}, local);
    table.crossEntropyStats(stats + s * c.n * 3, part, targets.data(), c.n, local, s * local, valid);
  }
  for (Int s = 0; s < c.shards; ++s) {
    Buffer& part = parts[at(s)];
    double loss = 10;  // it is added to, not overwritten
    const Int valid = std::clamp(c.valid - s * local, Int{0}, local);
    table.crossEntropyBackward(part, stats, targets.data(), s % 2 == 0 ? &loss : nullptr, c.n, local,
                               s * local, valid, c.shards, scale);
    part.expectGuardsIntact("shard");
    if (s % 2 == 0) {
      const double expected = lossOf(logits.values(), targets, c.v, c.valid);
      EXPECT_NEAR(loss - 10, expected, 2e-6 * (std::abs(expected) + static_cast<double>(c.n) * (1 + spread)));
    }
    for (Int i = 0; i < c.n; ++i) std::copy_n(part + i * local, local, gradient + (i * c.v + s * local));
  }
  stats.expectGuardsIntact("stats");
  expectGradient("dlogits", gradient, logits.values(), [&](const Doubles& x) {
    return static_cast<double>(scale) * lossOf(x, targets, c.v, c.valid);
  });
  for (Int i = 0; i < c.n; ++i) {
    for (Int j = 0; j < c.v; ++j) {
      if (targets[at(i)] < 0 || j >= c.valid) {
        ASSERT_EQ(gradient[i * c.v + j], 0.0f) << i << " " << j;
      }
    }
  }
}

TEST(CrossEntropy, anyNumberOfShardsMatchesFiniteDifferences) {
  forEachTable([](const Table& table) {
    for (const Case& c :
         {Case{1, 1, 1, 1}, Case{1, 2, 2, 1}, Case{3, 17, 17, 1}, Case{5, 64, 50, 1}, Case{4, 65, 65, 1},
          Case{5, 64, 50, 2}, Case{5, 64, 50, 4}, Case{3, 64, 30, 4}, Case{9, 260, 257, 4}}) {
      check(table, c, 2.0f);
    }
  });
}

TEST(CrossEntropy, largeLogitsDoNotOverflow) {
  forEachTable([](const Table& table) {
    check(table, {3, 34, 33, 1}, 300.0f);
    check(table, {3, 34, 33, 2}, 300.0f);
  });
}

// Uniform logits: loss = ln V for each row, the gradient 1/V and 1/V - 1.
TEST(CrossEntropy, uniformLogitsGiveLogV) {
  const Int v = 50257;
  forEachTable([&](const Table& table) {
    Buffer logits(v), stats(3);
    for (Int j = 0; j < v; ++j) logits[j] = -7.5f;
    const std::int32_t target = 50000;
    table.crossEntropyStats(stats, logits, &target, 1, v, 0, v);
    EXPECT_FLOAT_EQ(stats[0], -7.5f);
    EXPECT_FLOAT_EQ(stats[1], 50257.0f);
    EXPECT_FLOAT_EQ(stats[2], -7.5f);
    double loss = 0;
    table.crossEntropyBackward(logits, stats, &target, &loss, 1, v, 0, v, 1, 1.0f);
    EXPECT_NEAR(loss, std::log(50257.0), 1e-6);
    EXPECT_NEAR(logits[0], 1 / 50257.0, 1e-11);
    EXPECT_NEAR(logits[target], 1 / 50257.0 - 1, 1e-7);
  });
}

// exp through the sum of a single shifted logit: sum = 1 + e^x for x in [-87, 0], relative accuracy of e^x
// itself from the gradient of a two-column row, e^x / (1 + e^x).
TEST(CrossEntropy, vectorExponentialIsAccurate) {
  forEachTable([](const Table& table) {
    const Int n = 4000;
    Buffer logits(2 * n), stats(3 * n);
    std::vector<std::int32_t> targets(at(n), 1);
    std::vector<double> exact;
    for (Int i = 0; i < n; ++i) {
      const float x = -86.9f * static_cast<float>(i) / static_cast<float>(n);
      logits[2 * i] = x;
      logits[2 * i + 1] = 0;
      exact.push_back(std::exp(static_cast<double>(x)) / (1 + std::exp(static_cast<double>(x))));
    }
    table.crossEntropyStats(stats, logits, targets.data(), n, 2, 0, 2);
    table.crossEntropyBackward(logits, stats, targets.data(), nullptr, n, 2, 0, 2, 1, 1.0f);
    for (Int i = 0; i < n; ++i) {
      ASSERT_LE(std::abs(static_cast<double>(logits[2 * i]) / exact[at(i)] - 1), 4e-7) << "element " << i;
    }
  });
}

}  // namespace
}  // namespace bmt::test
