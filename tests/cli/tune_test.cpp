// bmtrain tune as a user runs it: the same result for any number of jobs, files that hold what is listed, and
// exit code 3 when nothing is feasible.
#include <gtest/gtest.h>

#include "core/json.h"
#include "core/plan.h"
#include "tests/support/run_program.h"

namespace bmt {
namespace {

test::ProgramResult tune(std::vector<std::string> more) {
  std::vector<std::string> arguments{"tune",           "--model", "gpt2-124m", "--cluster", "dgx-a100-80g:1",
                                     "--global-batch", "64",      "--quiet",   "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return test::runBmtrain(arguments);
}

// What does not depend on the clock.
Json timeless(const std::string& text) {
  Json json = parseJson(text, "tune");
  for (const char* field : {"wall_s", "plans_per_s"}) json.erase(field);
  return json;
}

TEST(Tune, OneJobAndTwoGiveTheSameResult) {
  const test::ProgramResult one = tune({"--jobs", "1"}), two = tune({"--jobs", "2"});
  ASSERT_EQ(one.exit_code, 0) << one.err;
  ASSERT_EQ(two.exit_code, 0) << two.err;
  EXPECT_EQ(timeless(one.out), timeless(two.out));
  const Json json = parseJson(one.out, "tune");
  std::int64_t rejected = 0;
  for (const auto& [reason, count] : json["rejected"].items()) rejected += count.get<std::int64_t>();
  EXPECT_EQ(json["space_size"].get<std::int64_t>(), json["feasible"].get<std::int64_t>() + rejected);
  EXPECT_EQ(json["best"].size(), 10U);
  for (std::size_t i = 1; i < json["best"].size(); ++i)
    EXPECT_LE(json["best"][i - 1]["step_time_s"].get<double>(), json["best"][i]["step_time_s"].get<double>());
}

TEST(Tune, FilesHoldWhatIsListed) {
  const test::TemporaryFolder folder;
  const test::ProgramResult run =
      tune({"--csv", folder.path("p.csv"), "--plan-out", folder.path("best.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = parseJson(run.out, "tune");
  EXPECT_EQ(planToText(loadPlan(folder.path("best.json"))), json["best"][0]["plan"].get<std::string>());
  const std::string csv = readFile(folder.path("p.csv"));
  EXPECT_TRUE(csv.starts_with("plan,step_time_s,tokens_per_s,mfu,")) << csv.substr(0, 200);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 1 + json["feasible"].get<std::int64_t>());
  const std::string first = csv.substr(csv.find('\n') + 1);
  EXPECT_TRUE(first.starts_with("\"" + json["best"][0]["plan"].get<std::string>() + "\","))
      << first.substr(0, 200);
}

TEST(Tune, DaysAndCostOfATrainingRun) {
  const test::ProgramResult run = tune({"--objective", "cost", "--tokens", "1e12", "--price", "2.5"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = parseJson(run.out, "tune");
  double before = 0;
  for (const Json& entry : json["best"]) {
    const double days = entry["days"].get<double>();
    EXPECT_GE(days, before);
    EXPECT_NEAR(entry["cost"].get<double>(), days * 24 * 8 * 2.5, 1e-6 * days * 480);
    EXPECT_GE(days, 1e12 / entry["tokens_per_s"].get<double>() / 86400);
    before = days;
  }
  EXPECT_EQ(tune({"--objective", "cost", "--tokens", "1e12"}).exit_code, 2);
  EXPECT_EQ(tune({"--objective", "time"}).exit_code, 2);
}

TEST(Tune, NothingFeasibleIsExitCodeThree) {
  const test::ProgramResult run =
      test::runBmtrain({"tune", "--model", "gpt3-175b", "--cluster", "dgx-a100-40g:1", "--global-batch", "8",
                        "--micro-batch", "1", "--quiet"});
  EXPECT_EQ(run.exit_code, 3) << run.err;
  EXPECT_NE(run.err.find("no feasible plan among"), std::string::npos) << run.err;
  EXPECT_NE(run.out.find("does not fit in memory"), std::string::npos) << run.out;
}

}  // namespace
}  // namespace bmt
