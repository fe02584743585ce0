// Initial parameters, independent of the parallel layout: element i (row-major, in the global tensor) of
// parameter `name` is
//   h = fnv1a64(name) xor (seed * 0x9E3779B97F4A7C15)
//   u1 = ((splitmix64(h + 2i) >> 11) + 1) / 2^53,  u2 = (splitmix64(h + 2i + 1) >> 11) / 2^53
//   value = std * sqrt(-2 ln u1) * cos(2 pi u2)                                                       (Box
//   and Muller 1958)
// tests/reference/make_golden.py computes the same in Python.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/model_spec.h"
#include "core/task_graph.h"

namespace bmt::exec {

// out[0, count) = elements [first, first + count) of the parameter.
void initNormal(float* out, std::int64_t count, std::uint64_t seed, std::string_view name, std::int64_t first,
                double std);

struct InitRule {
  double weight_std = 0.02;  // "*.attn.out.weight" and "*.mlp.down.weight": divided by sqrt(2 * layers)
  double bias_std = 0;
  double norm_std = 0;  // norm weights are 1 + normal(norm_std)
};

// Fills this rank's shard [rows, cols] of a parameter.
void initShard(float* out, const ParamShard& shard, const ModelSpec& model, std::uint64_t seed,
               const InitRule& rule);

}  // namespace bmt::exec
