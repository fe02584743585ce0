// bmtrain train as a user runs it: threads and MPI processes give the same numbers bit by bit, and a rank
// that dies ends all others with a message that names rank and task.
#include <gtest/gtest.h>

#include <cstdlib>

#include "core/json.h"
#include "tests/support/run_program.h"

namespace bmt {
namespace {

bool haveMpi() {
#if defined(BMT_HAVE_MPI)
  return std::system("mpirun --version >/dev/null 2>&1") == 0;
#else
  return false;
#endif
}

class Train : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "mpi" && !haveMpi())
      GTEST_SKIP() << "no MPI in this build, or no mpirun on PATH";
    std::string text;
    for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919 % 1000) + " of the text\n";
    const test::ProgramResult prepared = test::runBmtrain(
        {"prepare", "--tokenizer", "bytes", "--out", folder_.path("t.bin"), folder_.write("t.txt", text)});
    ASSERT_EQ(prepared.exit_code, 0) << prepared.err;
    model_ = folder_.write("model.json", R"({"schema": "bmtrain.model/1", "name": "tiny", "family": "gpt2",
      "layers": 4, "d_model": 32, "heads": 8, "d_ff": 64, "vocab": 256, "seq_len": 16})");
  }

  test::ProgramResult train(const std::string& comm, const std::string& plan, std::vector<std::string> more) {
    std::vector<std::string> arguments{"train",  "--model", model_,   "--data", folder_.path("t.bin"),
                                       "--plan", plan,      "--comm", comm,     "--json",
                                       "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return test::runBmtrain(arguments);
  }

  test::TemporaryFolder folder_;
  std::string model_;
};

TEST_P(Train, LossesEqualThoseOfThreadsAndTheTraceHoldsAllRanks) {
  for (const char* plan : {"dp=2,tp=2,gb=4,zero=1,sp", "pp=2,dp=2,gb=8,schedule=1f1b"}) {
    const test::ProgramResult reference = train("threads", plan, {"--steps", "6"});
    ASSERT_EQ(reference.exit_code, 0) << reference.err;
    const test::ProgramResult run =
        train(GetParam(), plan, {"--steps", "6", "--trace", folder_.path("trace.json")});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    const Json expected = parseJson(reference.out, "reference"), json = parseJson(run.out, "run");
    EXPECT_EQ(json["schema"], "bmtrain.train/1");
    EXPECT_EQ(json["losses"].size(), 6U);
    EXPECT_EQ(json["losses"], expected["losses"]) << plan;
    EXPECT_EQ(json["grad_norms"], expected["grad_norms"]) << plan;
    EXPECT_EQ(json["peak_memory_bytes"], expected["peak_memory_bytes"]) << plan;
    EXPECT_EQ(json["bytes_on_wire"], expected["bytes_on_wire"]) << plan;
    const Json trace = parseJson(readFile(folder_.path("trace.json")), "trace");
    std::vector<bool> seen(4, false);
    for (const Json& event : trace["traceEvents"]) {
      if (event.contains("dur")) seen.at(event["pid"].get<std::size_t>()) = true;
    }
    EXPECT_EQ(seen, std::vector<bool>(4, true));
  }
}

TEST_P(Train, ARankThatDiesEndsAllAndIsNamedWithTheTask) {
  const test::ProgramResult run =
      train(GetParam(), "dp=2,tp=2,gb=4", {"--steps", "50", "--inject", "kill:1:3"});
  EXPECT_EQ(run.exit_code, 1) << run.err;
  EXPECT_NE(run.err.find("rank 1"), std::string::npos) << run.err;
  // The survivors' or the dead rank's task: a phase and micro-batch.
  EXPECT_TRUE(run.err.find(" F0.") != std::string::npos || run.err.find(" B0.") != std::string::npos)
      << run.err;
}

TEST_P(Train, ALossThatIsNotFiniteEndsTheRunWithTheStep) {
  const test::ProgramResult run =
      train(GetParam(), "dp=2,gb=4", {"--steps", "40", "--lr", "1e30", "--clip", "0", "--warmup", "0"});
  EXPECT_EQ(run.exit_code, 1) << run.err;
  EXPECT_NE(run.err.find("step "), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("not finite; lower --lr or raise --warmup"), std::string::npos) << run.err;
  EXPECT_EQ(run.out, "");
}

TEST_P(Train, MemoryThatIsNotThereIsRefusedWithBothFiguresBeforeItIsTaken) {
  // 174.6e9 parameters, two ranks, fp32: weights 4 bytes, moments 8, gradients 4 and a second table while the
  // tied head's gradient is kept apart.
  model_ = "gpt3-175b";
  const test::ProgramResult run = train(GetParam(), "dp=2,gb=2", {"--steps", "1", "--seq", "16"});
  EXPECT_EQ(run.exit_code, 3) << run.err;
  EXPECT_NE(run.err.find("TiB on this machine, "), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("are free (weights 1.270 TiB, gradients 1.275 TiB, optimizer 2.541 TiB"),
            std::string::npos)
      << run.err;
  EXPECT_NE(run.err.find("try zero=1"), std::string::npos) << run.err;
}

INSTANTIATE_TEST_SUITE_P(Communicators, Train, testing::Values("threads", "mpi"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace bmt
