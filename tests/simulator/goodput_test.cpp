// Checkpoint intervals, goodput and time to train against their closed forms and against drawn failures;
// the scenario file against the arithmetic of its claim.
#include "simulator/goodput.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/json.h"
#include "simulator/scenario.h"

namespace bmt::sim {
namespace {

TEST(Goodput, IntervalsAreTheClosedForms) {
  // delta 300 s, M 1 day: sqrt(2 * 300 * 86400) = 7200; Daly: 7200 (1 + (1/24)/3 + (1/576)/9) - 300.
  EXPECT_DOUBLE_EQ(youngInterval(300, 86400), 7200);
  EXPECT_NEAR(dalyInterval(300, 86400), 7200 * (1 + 1.0 / 72 + 1.0 / 5184) - 300, 1e-9);
  EXPECT_DOUBLE_EQ(dalyInterval(200, 100), 100);  // delta >= 2 M
  EXPECT_DOUBLE_EQ(dalyInterval(300, 100), 100);
}

TEST(Goodput, DalysIntervalIsNearTheOptimum) {
  for (const double delta : {5.0, 60.0, 600.0}) {
    for (const double mtbf : {3600.0, 20000.0, 500000.0}) {
      const double tau = dalyInterval(delta, mtbf), best = goodput(tau, delta, 300, mtbf);
      for (const double factor : {0.5, 0.8, 1.25, 2.0})
        EXPECT_GT(best, goodput(tau * factor, delta, 300, mtbf)) << delta << " " << mtbf << " " << factor;
    }
  }
  EXPECT_DOUBLE_EQ(goodput(900, 100, 60, std::numeric_limits<double>::infinity()), 0.9);
}

TEST(Goodput, EqualsDrawnFailures) {
  const double tau = 3000, delta = 120, restart = 600, mtbf = 10000;
  std::mt19937_64 random(20260);
  std::exponential_distribution<double> next(1 / mtbf);
  double wall = 0;
  const int segments = 200000;
  for (int i = 0; i < segments; ++i) {
    double needed = tau + delta;
    for (;;) {
      const double failure = next(random);
      if (failure >= needed) {
        wall += needed;
        break;
      }
      wall += failure;
      needed = restart;  // restart may fail as well; then the segment starts over
      for (double again = next(random); again < needed; again = next(random)) wall += again;
      wall += needed;
      needed = tau + delta;
    }
  }
  EXPECT_NEAR(goodput(tau, delta, restart, mtbf), segments * tau / wall, 0.003);
}

TEST(Goodput, Llama3) {
  // 419 unexpected interruptions in 54 days on 16,384 GPUs: one every 3.09 hours.
  EXPECT_NEAR(kLlama3MtbfHours, 50677, 1);
  Plan plan;
  plan.dp = 16384;
  plan.global_batch = 16384;
  plan.precision = DType::BF16;
  const ModelSpec model = loadModel("gpt3-175b");
  const TrainingRun run = trainingRun(model, loadCluster("dgx-h100:2048"), plan, 10, 3e12, {});
  EXPECT_NEAR(run.mtbf_s / 3600, 3.093, 0.001);
  EXPECT_NEAR(run.checkpoint_bytes, 14.0 * static_cast<double>(numParams(model)), 1);
  EXPECT_NEAR(run.checkpoint_s, run.checkpoint_bytes / 2e12, 1e-9);  // 2 TB/s for 2,048 nodes
  EXPECT_GT(run.goodput, 0.9);  // the paper: more than 90 % effective training time
  EXPECT_LT(run.goodput, 1.0);
}

TEST(Goodput, DaysAndCost) {
  Plan plan = planFromText("dp=8,gb=64,precision=bf16");
  ModelSpec model = loadModel("gpt2-124m");
  const double tokens_per_step = 64.0 * static_cast<double>(model.seq_len);
  FailureModel f;
  f.mtbf_device_h = 0;
  f.price_per_device_h = 2;
  const TrainingRun run =
      trainingRun(model, loadCluster("dgx-a100-80g:1"), plan, 0.5, 10000.5 * tokens_per_step, f);
  EXPECT_EQ(run.steps, 10001);
  EXPECT_DOUBLE_EQ(run.days, 10001 * 0.5 / 86400);
  EXPECT_EQ(run.days, run.compute_days);
  EXPECT_DOUBLE_EQ(run.device_hours, 10001 * 0.5 / 3600 * 8);
  EXPECT_DOUBLE_EQ(run.cost, 2 * run.device_hours);
  EXPECT_THROW(trainingRun(model, loadCluster("dgx-a100-80g:1"), plan, 0.5, -1, f), Error);
}

TEST(Scenario, ThirtyDaysAreReachableNineAreRefused) {
  const std::string path = std::string(BMT_SOURCE_DIR) + "/scenarios/175b-30-to-9-days.json";
  const ScenarioReport r = runScenario(scenarioFromJson(readFile(path), path), 2);
  // R12: 3.15e23 FLOP at 300B tokens; 38 % then 127 % of 1,024 A100.
  EXPECT_NEAR(r.flops / 3.15e23, 1, 0.01);
  EXPECT_NEAR(r.peak_flops_per_s, 1024 * 312e12, 1);
  EXPECT_NEAR(r.baseline.needed_share, 0.38, 0.002);
  EXPECT_NEAR(r.tuned.needed_share, 1.265, 0.003);
  EXPECT_FALSE(r.tuned.reachable);
  EXPECT_NE(r.tuned.text.find("refused: 9 days need 127 % of the peak"), std::string::npos) << r.tuned.text;
  EXPECT_NEAR(r.claimed_speed_up, 10.0 / 3, 1e-12);
  ASSERT_TRUE(r.baseline.report && r.tuned.report && r.best);
  EXPECT_TRUE(r.best->fits);
  EXPECT_LE(r.best->training->days, r.tuned.report->training->days);
  EXPECT_LT(r.best->mfu, 1);
  EXPECT_GT(r.best->training->days, 9);
  EXPECT_EQ(r.target, "target 3-5x: not met");
  EXPECT_FALSE(r.techniques.empty());
  const Json json = parseJson(scenarioToJson(r), "scenario");
  EXPECT_EQ(json["schema"], "bmtrain.scenario-report/1");
  EXPECT_EQ(json["tuned"]["reachable"], false);
  EXPECT_NE(scenarioToText(r).find("speed-up over Megatron 2021"), std::string::npos);
}

TEST(Scenario, BadFilesSayWhere) {
  for (const char* text :
       {"{}", R"({"schema": "bmtrain.scenario/1", "model": "gpt2-124m", "cluster": "dgx2:1"})",
        R"({"schema": "bmtrain.scenario/1", "model": "gpt2-124m", "cluster": "dgx2:1",
                               "tokens": 1e9, "baseline": "dp=16"})"}) {
    try {
      scenarioFromJson(text, "s.json");
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.exitCode(), 2);
      EXPECT_NE(std::string(error.what()).find("s.json"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace bmt::sim
