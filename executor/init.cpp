#include "executor/init.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

namespace bmt::exec {
namespace {

std::uint64_t fnv1a64(std::string_view text) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace

void initNormal(float* out, std::int64_t count, std::uint64_t seed, std::string_view name, std::int64_t first,
                double std) {
  if (std == 0) {  // exact zeros, without signs
    std::fill(out, out + count, 0.0f);
    return;
  }
  const std::uint64_t h = fnv1a64(name) ^ (seed * 0x9E3779B97F4A7C15ULL);
  constexpr double kUnit = 1.0 / 9007199254740992.0;  // 2^-53
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t at = h + 2 * static_cast<std::uint64_t>(first + i);
    const double u1 = static_cast<double>((splitmix64(at) >> 11) + 1) * kUnit;
    const double u2 = static_cast<double>(splitmix64(at + 1) >> 11) * kUnit;
    out[i] = static_cast<float>(std * std::sqrt(-2.0 * std::log(u1)) * std::cos(2.0 * std::numbers::pi * u2));
  }
}

void initShard(float* out, const ParamShard& p, const ModelSpec& model, std::uint64_t seed,
               const InitRule& rule) {
  const std::string_view name = p.name;
  const bool norm = name.find("norm") != std::string_view::npos && name.ends_with(".weight");
  double std = rule.weight_std;
  if (name.ends_with(".bias")) std = rule.bias_std;
  if (norm) std = rule.norm_std;
  if (name.ends_with("attn.out.weight") || name.ends_with("mlp.down.weight"))
    std /= std::sqrt(2.0 * static_cast<double>(model.layers));
  for (std::int64_t row = 0; row < p.rows; ++row) {
    float* const to = out + row * p.cols;
    initNormal(to, p.cols, seed, name, (p.row_begin + row) * p.global_cols + p.col_begin, std);
    if (!norm) continue;
    for (std::int64_t col = 0; col < p.cols; ++col) to[col] += 1.0f;
  }
}

}  // namespace bmt::exec
