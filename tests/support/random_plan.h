// Seeded random models and legal plans for property tests. A failing seed is printed by the test's parameter.
#pragma once

#include <cstdint>

#include "core/cluster_spec.h"
#include "core/model_spec.h"
#include "core/plan.h"

namespace bmt::test {

struct Case {
  ModelSpec model;
  ClusterSpec cluster;
  Plan plan;
};

// A tiny model (gpt2, llama) and a legal plan of at most `max_ranks` ranks that the CPU executes.
Case randomCase(std::uint32_t seed, int max_ranks);
// Models and axes that are simulated only, too: context and expert parallelism, experts, latent attention,
// BERT, ViT, T5, overlapped tensor parallelism.
Case randomSimulatedCase(std::uint32_t seed, int max_ranks);
ModelSpec tinyModel(Family family);

}  // namespace bmt::test
