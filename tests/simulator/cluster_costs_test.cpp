// Clusters of several device types, slow parts and jitter.
#include "simulator/cluster_costs.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/lower.h"
#include "simulator/report.h"
#include "tests/support/random_plan.h"

namespace bmt::sim {
namespace {

using test::Case;
using test::randomCase;

std::vector<trace::CostProfile> datasheets(const ClusterSpec& cluster) {
  std::vector<trace::CostProfile> profiles;
  for (const NodeGroup& group : cluster.groups) profiles.push_back(trace::datasheetProfile(group.device));
  return profiles;
}

Report play(const std::string& cluster_text, const std::string& plan_text,
            const std::string& model = "gpt3-1.3b") {
  const ClusterSpec cluster = loadCluster(cluster_text);
  const Plan plan = planFromText(plan_text);
  const ModelSpec spec = loadModel(model);
  throwIfAny(validatePlan(spec, cluster, plan), "plan");
  SimulateOptions options;
  options.granularity = Granularity::Stage;
  return simulatePlan(spec, cluster, plan, datasheets(cluster), options).report;
}

TEST(Heterogeneous, TwoEqualGroupsAreOneGroup) {
  const char* const plan = "dp=2,tp=4,pp=2,mb=1,gb=8,precision=fp16";
  const Report two = play("dgx-a100-80g:1+dgx-a100-80g:1", plan);
  const Report one = play("dgx-a100-80g:2", plan);
  EXPECT_EQ(two.num_ranks, 16);  // folding is not used
  EXPECT_EQ(one.num_ranks, 2);
  EXPECT_NEAR(two.step_time_s, one.step_time_s, 1e-3 * one.step_time_s);
  EXPECT_EQ(two.peak_memory, one.peak_memory);
}

TEST(Heterogeneous, EveryRankIsCostedByItsOwnDevice) {
  const ClusterSpec mixed = loadCluster("dgx-a100-80g:1+dgx-v100-32g:1");
  const Plan plan = planFromText("tp=8,pp=2,mb=1,gb=4,precision=fp16");
  const ModelSpec model = loadModel("gpt3-1.3b");
  const TaskGraph graph = lower(model, mixed, plan, RankSelection::All, Granularity::Layer);
  const CostTable costs = ClusterCosts(graph, mixed, datasheets(mixed)).table();
  for (const char* text : {"dgx-a100-80g:2", "dgx-v100-32g:2"}) {
    const ClusterSpec pure = loadCluster(text);
    const CostTable own = ClusterCosts(graph, pure, datasheets(pure)).table();
    const std::size_t first = std::string(text) == "dgx-a100-80g:2" ? 0 : 8;
    for (std::size_t r = first; r < first + 8; ++r) {
      for (std::size_t t = 0; t < own[r].size(); ++t) {
        const Task& task = graph.ranks[r].tasks[t];
        if (task.comm < 0) {
          ASSERT_EQ(costs[r][t].duration, own[r][t].duration);
        } else {
          ASSERT_GE(costs[r][t].duration, own[r][t].duration);  // the slowest member decides
        }
      }
    }
  }
}

TEST(Heterogeneous, MemoryIsThatOfEachDevice) {
  // The same bytes on both: too much for a V100, not for an A100.
  const char* const plan = "dp=16,mb=32,gb=512,precision=fp16,zero=1,recompute=full";
  const Report mixed = play("dgx-a100-80g:1+dgx-v100-16g:1", plan);
  EXPECT_FALSE(mixed.fits);
  EXPECT_EQ(mixed.device_memory, 16 * kGiB);
  EXPECT_GE(mixed.worst_rank, 8);
  EXPECT_TRUE(play("dgx-a100-80g:2", plan).fits);
}

TEST(Heterogeneous, UnequalSharesAndStagesHelp) {
  const char* const cluster = "dgx-a100-80g:1+dgx-v100-32g:1";
  const Report even = play(cluster, "dp=2,tp=8,mb=1,gb=16,precision=fp16");
  const Report shares = play(cluster, "dp=2,tp=8,mb=1,gb=16,precision=fp16,shares=11/5");
  EXPECT_LT(shares.step_time_s, 0.9 * even.step_time_s);
  const Report stages = play(cluster, "tp=8,pp=2,mb=1,gb=16,precision=fp16");
  const Report layers = play(cluster, "tp=8,pp=2,mb=1,gb=16,precision=fp16,layers=16/8");
  EXPECT_LT(layers.step_time_s, 0.95 * stages.step_time_s);
}

TEST(Heterogeneous, FoldingIsRefusedWhereRanksDiffer) {
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1+dgx-v100-32g:1");
  const Plan plan = planFromText("dp=16,gb=16,precision=fp16");
  SimulateOptions options;
  options.selection = RankSelection::Folded;
  try {
    simulatePlan(loadModel("gpt2-124m"), cluster, plan, datasheets(cluster), options);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("2 node groups"), std::string::npos) << error.what();
  }
}

TEST(Heterogeneous, NpuReportsSayNotExecuted) {
  const Report r = play("ascend-910b:1", "dp=8,gb=8,precision=fp16", "gpt2-124m");
  EXPECT_FALSE(r.executed);
  EXPECT_NE(reportToText(r).find("not executed"), std::string::npos);
  EXPECT_NE(reportToJson(r).find("\"executed\": false"), std::string::npos);
}

class Imperfect : public testing::TestWithParam<std::uint32_t> {};

TEST_P(Imperfect, ASlowerDeviceOrLinkNeverMakesTheStepShorter) {
  Case c = randomCase(GetParam(), 8);
  SCOPED_TRACE(planToText(c.plan));
  c.cluster = loadCluster("dgx-a100-80g:1");
  c.cluster.groups[0].devices_per_node = c.plan.numRanks();
  c.plan.precision = DType::BF16;
  const TaskGraph graph = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Layer);
  const auto step = [&] {
    CostTable costs = ClusterCosts(graph, c.cluster, datasheets(c.cluster)).table();
    for (auto& rank : costs) {
      for (TaskCost& cost : rank) cost.use = {};  // no contention
    }
    return simulate(graph, costs, {}).trace.step_time;
  };
  Ns last = step();
  const Ns healthy = last;
  const auto victim = static_cast<std::int32_t>(GetParam()) % c.plan.numRanks();
  for (const double factor : {1.1, 1.5, 3.0}) {
    c.cluster.slow_devices = {{victim, factor}};
    const Ns slower = step();
    EXPECT_GE(slower, last);
    EXPECT_LE(static_cast<double>(slower), factor * static_cast<double>(healthy) * (1 + 1e-6) + 1e4);
    last = slower;
  }
  c.cluster.slow_links = {{-1, victim, 2.0}};
  EXPECT_GE(step(), last);
}

INSTANTIATE_TEST_SUITE_P(Random, Imperfect, testing::Range(500U, 520U));

TEST(SlowLink, OnlyTrafficBetweenNodesPassesTheNics) {
  ClusterSpec cluster = loadCluster("dgx-a100-80g:2");
  const Plan plan = planFromText("dp=2,tp=8,gb=2,precision=bf16");
  const TaskGraph graph =
      lower(loadModel("gpt3-1.3b"), cluster, plan, RankSelection::All, Granularity::Layer);
  const CostTable before = ClusterCosts(graph, cluster, datasheets(cluster)).table();
  cluster.slow_links = {{1, -1, 3.0}};
  const CostTable after = ClusterCosts(graph, cluster, datasheets(cluster)).table();
  for (std::size_t t = 0; t < before[0].size(); ++t) {
    const Task& task = graph.ranks[0].tasks[t];
    const bool across = task.comm >= 0 && task.kind == TaskKind::DataComm;
    EXPECT_EQ(after[0][t].duration, before[0][t].duration * (across ? 3 : 1))
        << taskName(graph, graph.ranks[0], static_cast<TaskId>(t));
  }
}

TEST(Jitter, IsSeededHasMeanOneAndDoesNotDependOnThreads) {
  const ModelSpec model = loadModel("gpt3-1.3b");
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1");
  const Plan plan = planFromText("pp=4,dp=2,mb=1,gb=16,precision=bf16");
  SimulateOptions options;
  options.granularity = Granularity::Stage;
  options.jitter = 0.1;
  options.draws = 40;
  const auto play = [&] {
    return *simulatePlan(model, cluster, plan, datasheets(cluster), options).report.jitter;
  };
  const JitterResult one = play();
  options.jobs = 4;
  const JitterResult four = play();
  EXPECT_EQ(one.mean_s, four.mean_s);
  EXPECT_EQ(one.p95_s, four.p95_s);
  options.seed = 2;
  EXPECT_NE(play().mean_s, one.mean_s);
  EXPECT_LE(one.min_s, one.mean_s);
  EXPECT_LE(one.mean_s, one.p95_s);
  EXPECT_LE(one.p95_s, one.max_s);

  // Durations keep their mean: exp(sigma z - sigma^2 / 2), and log's standard deviation is sigma.
  const TaskGraph graph = lower(model, cluster, plan, RankSelection::All, Granularity::Layer);
  CostTable unit(graph.ranks.size());
  for (std::size_t r = 0; r < unit.size(); ++r) unit[r].assign(graph.ranks[r].tasks.size(), {1000000, {}});
  double sum = 0, squares = 0, n = 0;
  for (const auto& rank : withJitter(graph, unit, 0.1, 7, 0)) {
    for (const TaskCost& cost : rank) {
      const double x = static_cast<double>(cost.duration) * 1e-6;
      sum += x;
      squares += std::log(x) * std::log(x);
      n += 1;
    }
  }
  ASSERT_GT(n, 1000);
  EXPECT_NEAR(sum / n, 1.0, 0.01);
  EXPECT_NEAR(std::sqrt(squares / n), 0.1, 0.01);
}

}  // namespace
}  // namespace bmt::sim
