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

// A tiny model (both families) and a legal plan of at most `max_ranks` ranks.
Case randomCase(std::uint32_t seed, int max_ranks);
ModelSpec tinyModel(Family family);

}  // namespace bmt::test
