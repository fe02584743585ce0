// Initial parameters: known answers from Python, moments, and independence of the shard.
#include "executor/init.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace bmt::exec {
namespace {

float element(std::uint64_t seed, const char* name, std::int64_t index) {
  float value = 0;
  initNormal(&value, 1, seed, name, index, 0.02);
  return value;
}

// Python, M = 2**64 - 1:
//   h = fnv1a64(name) ^ (seed * 0x9E3779B97F4A7C15 & M);  u1 = ((sm(h + 2*i & M) >> 11) + 1) * 2.0**-53
//   u2 = (sm(h + 2*i + 1 & M) >> 11) * 2.0**-53;  0.02 * sqrt(-2 * log(u1)) * cos(2 * pi * u2)
TEST(Init, KnownAnswers) {
  EXPECT_FLOAT_EQ(element(1, "layers.0.attn.qkv.weight", 0), 0.0071911500816052906f);
  EXPECT_FLOAT_EQ(element(1, "layers.0.attn.qkv.weight", 1), 0.004005084775144622f);
  EXPECT_FLOAT_EQ(element(2, "layers.0.attn.qkv.weight", 0), 0.014430956400975347f);
  EXPECT_FLOAT_EQ(element(1, "embed.weight", 1000000000000), -0.010134900086928992f);
}

// Of n normal values the mean lies within 5 std / sqrt(n), the variance within 5 sqrt(2 / n) (six sigma
// events aside).
TEST(Init, MomentsOfTheNormalDistribution) {
  constexpr std::int64_t kCount = 200000;
  std::vector<float> values(kCount);
  initNormal(values.data(), kCount, 3, "w", 0, 0.5);
  double sum = 0, squares = 0, cubes = 0;
  for (const float v : values) sum += v, squares += v * v, cubes += v * v * v;
  const double n = kCount;
  EXPECT_NEAR(sum / n, 0, 5 * 0.5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 0.25, 0.25 * 5 * std::sqrt(2 / n));
  EXPECT_NEAR(cubes / n, 0, 0.125 * 5 * std::sqrt(15 / n));
}

ModelSpec twoLayers() {
  ModelSpec model;
  model.layers = 8;
  return model;
}

TEST(Init, AShardIsItsPartOfTheWhole) {
  ParamShard whole;
  whole.name = "layers.1.mlp.up.weight";
  whole.global_rows = whole.rows = 6, whole.global_cols = whole.cols = 8;
  std::vector<float> all(48), part(8);
  initShard(all.data(), whole, twoLayers(), 9, {});
  ParamShard shard = whole;
  shard.row_begin = 3, shard.rows = 2, shard.col_begin = 4, shard.cols = 4;
  initShard(part.data(), shard, twoLayers(), 9, {});
  for (std::size_t r = 0; r < 2; ++r) {
    for (std::size_t c = 0; c < 4; ++c) EXPECT_EQ(part[r * 4 + c], all[(3 + r) * 8 + 4 + c]);
  }
}

TEST(Init, ResidualProjectionsNormsAndBiases) {
  ParamShard p;
  p.global_cols = p.cols = 16;
  std::vector<float> values(16), plain(16);
  p.name = "layers.0.attn.out.weight";
  initShard(values.data(), p, twoLayers(), 1, {});
  initNormal(plain.data(), 16, 1, p.name, 0, 0.02);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_NEAR(values[i], plain[i] / 4, 1e-9);  // sqrt(2 * 8 layers)
  p.name = "layers.0.norm1.weight";
  initShard(values.data(), p, twoLayers(), 1, {});
  EXPECT_EQ(values, std::vector<float>(16, 1.0f));
  p.name = "layers.0.attn.out.bias";
  initShard(values.data(), p, twoLayers(), 1, {});
  for (const float v : values) EXPECT_FALSE(v != 0 || std::signbit(v));
}

}  // namespace
}  // namespace bmt::exec
