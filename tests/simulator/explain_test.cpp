// Explanations add up to the step, nanosecond by nanosecond, and name the closed-form bubble; advice repeats
// what simulating the changed plan says.
#include "simulator/explain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/lower.h"
#include "simulator/advise.h"
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

class ExplainProperty : public testing::TestWithParam<std::uint32_t> {};

TEST_P(ExplainProperty, PartsAddUpToTheStep) {
  Case c = randomCase(GetParam(), 8);
  SCOPED_TRACE(planToText(c.plan));
  c.cluster = loadCluster("dgx-a100-80g:1");
  c.cluster.groups[0].devices_per_node = c.plan.numRanks();
  c.plan.precision = DType::BF16;
  if (GetParam() % 3 == 0) c.cluster.slow_devices.push_back({0, 1.5});
  for (const Granularity granularity : {Granularity::Layer, Granularity::Stage}) {
    SimulateOptions options;
    options.granularity = granularity;
    options.selection = RankSelection::All;
    options.explain = true;
    options.critical_tasks = true;
    const Report r = simulatePlan(c.model, c.cluster, c.plan, datasheets(c.cluster), options).report;
    ASSERT_TRUE(r.explanation.has_value());
    Ns total = 0;
    double seconds = 0;
    for (const TimePart& part : r.explanation->parts) {
      EXPECT_GT(part.total, 0) << part.group << " " << part.name;
      total += part.total;
      seconds += part.mean_s;
    }
    EXPECT_EQ(total, r.explanation->step * r.explanation->ranks);
    EXPECT_NEAR(seconds / r.step_time_s, 1.0, 1e-12);
    EXPECT_EQ(r.explanation->seconds("slow") > 0, !c.cluster.slow_devices.empty());
    if (granularity == Granularity::Layer) {
      double busy = 0;
      for (const char* group : {"compute", "recompute", "optimizer", "launch", "contention", "slow"})
        busy += r.explanation->seconds(group);
      EXPECT_NEAR(busy, r.shares.compute * r.step_time_s, 1e-9 * r.step_time_s);
    }
    if (c.plan.recompute == Recompute::None) {
      EXPECT_EQ(r.explanation->seconds("recompute"), 0);
    } else {
      EXPECT_GT(r.explanation->seconds("recompute"), 0);
    }
    if (c.plan.pp == 1) {
      EXPECT_EQ(r.explanation->seconds("bubble"), 0);
    }
    Ns at = 0;
    for (const CriticalTask& task : r.critical_tasks) {
      EXPECT_EQ(task.begin, at);
      at = task.end;
    }
    EXPECT_EQ(at, r.explanation->step);
  }
}

INSTANTIATE_TEST_SUITE_P(Random, ExplainProperty, testing::Range(300U, 330U));

TEST(Explain, BubbleOfEqualStagesIsTheClosedForm) {
  // FACTS section 1.1: (p - 1)(F + B) of (m + p - 1)(F + B), here without communication time.
  const std::int32_t p = 4, m = 8;
  Plan plan;
  plan.pp = p;
  plan.global_batch = m;
  ModelSpec model = test::tinyModel(Family::Llama);
  model.layers = 4;
  const TaskGraph graph = lower(model, localCluster(p), plan, RankSelection::All, Granularity::Stage);
  const Ns f = 1000, b = 2000;
  CostTable costs(graph.ranks.size());
  for (std::size_t r = 0; r < graph.ranks.size(); ++r) {
    for (const Task& task : graph.ranks[r].tasks) {
      const Ns time = task.kind == TaskKind::Forward ? f : task.kind == TaskKind::Backward ? b : 0;
      costs[r].push_back({time, {}});
    }
  }
  const trace::Trace t = simulate(graph, costs, {}).trace;
  const Explanation e = explain(
      graph, t,
      [&](std::size_t r, TaskId task) {
        const Ns time = costs[r][static_cast<std::size_t>(task)].duration;
        return TaskCostParts{time, time};
      },
      [](RankId, SegmentId) {
        return std::vector<CostPart>{{CostPart::Work, OpKind::LinearForward, GroupKind::Tensor, 1}};
      });
  ASSERT_EQ(e.step, (m + p - 1) * (f + b));
  Ns bubble = 0;
  for (const TimePart& part : e.parts) bubble += part.group == "bubble" ? part.total : 0;
  EXPECT_EQ(bubble, p * (p - 1) * (f + b));
}

TEST(Advise, ChangesAreWhatSimulatingThemSays) {
  const ModelSpec model = loadModel("gpt3-1.3b");
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1");
  const auto profiles = datasheets(cluster);
  const Plan plan = planFromText("dp=2,pp=4,mb=1,gb=16,precision=bf16");
  SimulateOptions options;
  options.granularity = Granularity::Stage;
  const Advice one = advise(model, cluster, plan, profiles, options);
  options.jobs = 3;
  const Advice advice = advise(model, cluster, plan, profiles, options);
  EXPECT_EQ(adviceToJson(one, 100), adviceToJson(advice, 100));
  ASSERT_TRUE(advice.base.fits);
  ASSERT_FALSE(advice.changes.empty());
  bool zero = false, chunks = false;
  for (const Change& c : advice.changes) {
    const Report r = simulatePlan(model, cluster, c.plan, profiles, options).report;
    EXPECT_EQ(r.step_time_s, c.report.step_time_s) << c.name;
    EXPECT_EQ(advice.base.peak_memory - r.peak_memory, c.memory_freed) << c.name;
    EXPECT_TRUE(r.fits) << c.name;
    EXPECT_NE(c.plan, plan);
    zero = zero || (c.name == "zero=1" && c.memory_freed > 0 && c.effect.find("frees") != std::string::npos);
    chunks = chunks || (c.plan.chunks > 1 && c.report.shares.bubble < advice.base.shares.bubble &&
                        c.effect.find("bubble") != std::string::npos);
  }
  EXPECT_TRUE(zero);
  EXPECT_TRUE(chunks);
}

TEST(Advise, WhatMakesAPlanFitComesCheapestFirst) {
  const ModelSpec model = loadModel("gpt3-6.7b");
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1");
  const Plan plan = planFromText("dp=8,mb=4,gb=64,precision=bf16");
  SimulateOptions options;
  options.granularity = Granularity::Stage;
  const Advice advice = advise(model, cluster, plan, datasheets(cluster), options);
  ASSERT_FALSE(advice.base.fits);
  ASSERT_FALSE(advice.changes.empty());
  double last = 0;
  for (const Change& c : advice.changes) {
    EXPECT_TRUE(c.report.fits) << c.name;
    EXPECT_GE(c.step_ratio, last) << c.name;
    last = c.step_ratio;
  }
  EXPECT_NE(adviceToText(advice, 5).find("what makes it fit, cheapest first"), std::string::npos);
}

TEST(Advise, UnequalDevicesAreOfferedUnequalWork) {
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1+dgx-v100-32g:1");
  const Plan plan = planFromText("dp=2,tp=8,mb=1,gb=14,precision=fp16");
  SimulateOptions options;
  options.granularity = Granularity::Stage;
  const Advice advice = advise(loadModel("gpt3-1.3b"), cluster, plan, datasheets(cluster), options);
  const auto shares = std::find_if(advice.changes.begin(), advice.changes.end(),
                                   [](const Change& c) { return c.name == "shares=10/4"; });  // 312 : 125
  ASSERT_NE(shares, advice.changes.end());
  EXPECT_LT(shares->step_ratio, 0.9);
}

}  // namespace
}  // namespace bmt::sim
