// Bounds never exceed what is simulated, and pruning by them loses none of the best plans.
#include "simulator/bounds.h"

#include <gtest/gtest.h>

#include "core/lower.h"
#include "simulator/search.h"
#include "tests/support/random_plan.h"

namespace bmt::sim {
namespace {

ClusterSpec gpus(std::int32_t count) {
  ClusterSpec cluster = loadCluster("dgx-a100-80g:1");
  cluster.groups.front().devices_per_node = std::min(count, 8);
  cluster.groups.front().num_nodes = std::max(1, count / 8);
  return cluster;
}

class BoundsProperty : public testing::TestWithParam<std::uint32_t> {};

TEST_P(BoundsProperty, NeverExceedThePrediction) {
  test::Case c = test::randomCase(GetParam() + 500, 16);
  if (c.plan.numRanks() > 8 && c.plan.numRanks() % 8 != 0) GTEST_SKIP() << "no cluster of whole nodes";
  c.cluster = gpus(c.plan.numRanks());
  if (c.plan.precision == DType::F32) c.plan.precision = DType::BF16;
  ASSERT_EQ(formatIssues(validatePlan(c.model, c.cluster, c.plan)), "");
  SCOPED_TRACE(planToText(c.plan));
  const trace::CostProfile profile = chooseProfile(c.cluster, "");
  Bounds bounds(c.model, c.cluster, profile);
  const Report report =
      simulatePlan(c.model, c.cluster, c.plan, profile, RankSelection::Folded, Granularity::Stage).report;
  EXPECT_LE(bounds.memory(c.plan), report.peak_memory);
  EXPECT_GT(bounds.memory(c.plan), report.peak_memory / 10);
  EXPECT_LE(bounds.stepSeconds(c.plan), report.step_time_s * (1 + 1e-9));
  EXPECT_GT(bounds.stepSeconds(c.plan), 0);
}

INSTANTIATE_TEST_SUITE_P(Random, BoundsProperty, testing::Range(0U, 60U));

TEST(Search, PruningLosesNoneOfTheBest) {
  const ModelSpec model = loadModel("gpt2-1.5b");
  const ClusterSpec cluster = loadCluster("dgx-v100-16g:1");
  const trace::CostProfile profile = chooseProfile(cluster, "");
  SearchOptions options;
  options.global_batch = 32;
  options.micro_batches = {1, 4};
  options.precision = DType::F16;
  for (const bool by_memory : {false, true}) {
    options.by_memory = by_memory;
    options.top = 0;
    const SearchResult all = search(model, cluster, profile, options);
    options.top = 5;
    const SearchResult pruned = search(model, cluster, profile, options);
    EXPECT_LT(pruned.evaluated, all.evaluated);
    ASSERT_GE(pruned.plans.size(), 5U);
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(planToText(pruned.plans[i].first), planToText(all.plans[i].first));
      EXPECT_EQ(pruned.plans[i].second.step_time_s, all.plans[i].second.step_time_s);
    }
    ASSERT_EQ(pruned.pareto.size(), all.pareto.size());
    for (std::size_t i = 0; i < all.pareto.size(); ++i) {
      const Report &a = pruned.plans[pruned.pareto[i]].second, &b = all.plans[all.pareto[i]].second;
      EXPECT_EQ(a.step_time_s, b.step_time_s);
      EXPECT_EQ(a.peak_memory, b.peak_memory);
    }
    std::int64_t rejected = 0;
    for (const auto& [reason, count] : pruned.rejected) rejected += count;
    EXPECT_EQ(pruned.feasible + rejected, pruned.space_size);
  }
}

}  // namespace
}  // namespace bmt::sim
