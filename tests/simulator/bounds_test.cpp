// Bounds never exceed what is simulated, and pruning by them loses none of the best plans.
#include "simulator/bounds.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

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

// Small spaces of several models and clusters, everything simulated against what pruning leaves.
class SearchProperty : public testing::TestWithParam<std::tuple<const char*, int, bool>> {};

TEST_P(SearchProperty, PruningLosesNoneOfTheBest) {
  const auto [name, devices, by_memory] = GetParam();
  ModelSpec model = loadModel(name);
  model.layers = std::min<std::int64_t>(model.layers, 4);
  const ClusterSpec cluster = gpus(devices);
  const trace::CostProfile profile = chooseProfile(cluster, "");
  SearchOptions options;
  options.global_batch = 16;
  options.micro_batches = {2};
  options.precision = DType::BF16;
  options.memory_limit = 0.3;
  options.by_memory = by_memory;
  const SearchResult all = search(model, cluster, profile, options);
  for (const bool pareto : {false, true}) {
    options.top = 5;
    options.pareto = pareto;
    const SearchResult pruned = search(model, cluster, profile, options);
    EXPECT_EQ(pruned.space_size, all.space_size);
    EXPECT_EQ(pruned.legal, all.legal);
    EXPECT_LT(pruned.evaluated, all.evaluated);
    ASSERT_GE(pruned.plans.size(), 5U);
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(planToText(pruned.plans[i].first), planToText(all.plans[i].first));
      EXPECT_EQ(pruned.plans[i].second.step_time_s, all.plans[i].second.step_time_s);
    }
    std::int64_t rejected = 0;
    for (const auto& [reason, count] : pruned.rejected) rejected += count;
    EXPECT_EQ(pruned.feasible + rejected, pruned.space_size);
    if (!pareto) continue;
    ASSERT_EQ(pruned.pareto.size(), all.pareto.size());
    for (std::size_t i = 0; i < all.pareto.size(); ++i) {
      const Report &a = pruned.plans[pruned.pareto[i]].second, &b = all.plans[all.pareto[i]].second;
      EXPECT_EQ(a.step_time_s, b.step_time_s);
      EXPECT_EQ(a.peak_memory, b.peak_memory);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Spaces, SearchProperty,
                         testing::Combine(testing::Values("gpt2-1.5b", "llama2-7b"), testing::Values(2, 4),
                                          testing::Bool()));

TEST(PlanSpace, NumbersEveryPlanOnce) {
  const ModelSpec model = loadModel("mixtral-8x7b");
  const ClusterSpec cluster = gpus(8);
  SpaceOptions options;
  options.global_batch = 8;
  options.precision = DType::BF16;
  const PlanSpace space(model, cluster, options);
  std::set<std::string> texts;
  std::size_t at = 0;
  for (const PlanSpace::Run& run : space.runs()) {
    EXPECT_EQ(run.begin, at);
    for (at = run.begin; at < run.end; ++at) {
      const Plan plan = space.at(at);
      EXPECT_EQ(plan.numRanks(), 8);
      EXPECT_EQ(plan.tp, space.at(run.begin).tp);
      texts.insert(planToText(plan));
    }
  }
  EXPECT_EQ(at, space.size());
  EXPECT_EQ(texts.size(), space.size());
}

}  // namespace
}  // namespace bmt::sim
