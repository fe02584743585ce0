// bmtrain simulate and scenario as a user runs them.
#include <gtest/gtest.h>

#include "core/json.h"
#include "tests/support/run_program.h"

namespace bmt {
namespace {

test::ProgramResult simulate(std::vector<std::string> more) {
  std::vector<std::string> arguments{
      "simulate",  "--model",       "gpt2-124m", "--plan", "dp=8,gb=64,precision=bf16",
      "--cluster", "dgx-a100-80g:1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return test::runBmtrain(arguments);
}

TEST(Simulate, ReportExplainsTheStepAndPricesTheRun) {
  const test::ProgramResult run =
      simulate({"--json", "--tokens", "1e9", "--price", "2", "--mtbf-hours", "0"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = parseJson(run.out, "report");
  EXPECT_EQ(json["schema"], "bmtrain.report/1");
  std::int64_t total = 0;
  for (const Json& part : json["explanation"]["parts"]) total += part["total_ns"].get<std::int64_t>();
  EXPECT_EQ(total, json["explanation"]["step_ns"].get<std::int64_t>() *
                       json["explanation"]["ranks"].get<std::int64_t>());
  EXPECT_NEAR(json["training"]["cost"].get<double>(), 2 * json["training"]["device_hours"].get<double>(),
              1e-9);
  EXPECT_EQ(json["training"]["goodput"].get<double>(), 1);
  EXPECT_EQ(json["executed"], true);
}

TEST(Simulate, SlowPartsAndJitter) {
  const Json healthy = parseJson(simulate({"--json"}).out, "report");
  const Json slow = parseJson(simulate({"--json", "--slow", "rank=3:1.5"}).out, "report");
  EXPECT_EQ(healthy["num_ranks_simulated"], 1);
  EXPECT_EQ(slow["num_ranks_simulated"], 8);
  EXPECT_GT(slow["step_time_s"].get<double>(), 1.2 * healthy["step_time_s"].get<double>());
  const Json jitter = parseJson(simulate({"--json", "--jitter", "0.05", "--draws", "5"}).out, "report");
  EXPECT_GT(jitter["jitter"]["p95_step_s"].get<double>(), jitter["jitter"]["min_step_s"].get<double>());
  const test::ProgramResult bad = simulate({"--slow", "rank=8:1.5"});
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_NE(bad.err.find("device 8 of 8, numbered 0 to 7"), std::string::npos) << bad.err;
  const test::ProgramResult folded = simulate({"--slow", "rank=3:1.5", "--ranks", "folded"});
  EXPECT_EQ(folded.exit_code, 2);
  EXPECT_NE(folded.err.find("a device is slow"), std::string::npos) << folded.err;
}

TEST(Simulate, AdviceAndCriticalPath) {
  const test::ProgramResult run = simulate({"--json", "--advise", "--top", "3", "--granularity", "stage"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = parseJson(run.out, "advice");
  EXPECT_EQ(json["schema"], "bmtrain.advice/1");
  EXPECT_GT(json["changes"].size(), 0U);
  EXPECT_LE(json["changes"].size(), 3U);
  const test::ProgramResult path = simulate({"--critical-path"});
  EXPECT_NE(path.out.find("critical path by task"), std::string::npos) << path.out;
}

TEST(ScenarioCommand, RefusesTheNineDays) {
  const test::ProgramResult run =
      test::runBmtrain({"scenario", std::string(BMT_SOURCE_DIR) + "/scenarios/175b-30-to-9-days.json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("refused: 9 days need 127 % of the peak of 1024 devices"), std::string::npos)
      << run.out;
  EXPECT_NE(run.out.find("target 3-5x: not met"), std::string::npos) << run.out;
}

}  // namespace
}  // namespace bmt
