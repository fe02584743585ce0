// Parallel equivalence (DESIGN.md section 10, items 6, 7 and 8): the loss of every step of any legal plan
// equals that of one rank; pipeline-only plans are equal bit by bit; the arena's high-water mark is the
// predicted one. All scratch memory is filled with NaN before every step, so that a wrong lifetime shows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "core/lower.h"
#include "executor/trainer.h"
#include "tests/support/random_plan.h"

namespace bmt::exec {
namespace {

constexpr std::int64_t kSteps = 20;

// A learnable stream: token i + 1 depends on token i, with some noise.
BatchSource learnableTokens(std::int64_t vocab, std::int64_t seq_len, std::int64_t global_batch) {
  return [=](std::int64_t step, std::int64_t begin, std::int64_t end, std::int32_t* tokens,
             std::int32_t* targets) {
    for (std::int64_t s = begin; s < end; ++s) {
      std::uint64_t state = static_cast<std::uint64_t>(step * global_batch + s) * 0x9E3779B97F4A7C15ULL + 1;
      std::int64_t token = static_cast<std::int64_t>(state >> 40) % vocab;
      for (std::int64_t t = 0; t < seq_len; ++t) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        const std::int64_t next = (token * 5 + 3 + static_cast<std::int64_t>(state >> 62)) % vocab;
        const auto at = (s - begin) * seq_len + t;
        if (tokens != nullptr) tokens[at] = static_cast<std::int32_t>(token);
        if (targets != nullptr) targets[at] = static_cast<std::int32_t>(next);
        token = next;
      }
    }
  };
}

TrainOptions testOptions() {
  TrainOptions options;
  options.steps = kSteps;
  options.lr = 3e-3;
  options.warmup = 3;
  options.poison = true;
  options.deadline_s = 60;
  options.init.bias_std = 0.02;  // so that a bias that is added twice or not at all shows
  options.init.norm_std = 0.1;
  return options;
}

TrainResult train(const ModelSpec& model, const Plan& plan, FinalState* state = nullptr) {
  const TaskGraph graph =
      lower(model, localCluster(plan.numRanks()), plan, RankSelection::All, Granularity::Layer);
  return trainThreads(graph, learnableTokens(model.vocab, model.seq_len, plan.global_batch), testOptions(),
                      state);
}

Plan onOneRank(const Plan& plan) {
  Plan one;
  one.micro_batch = plan.micro_batch;
  one.global_batch = plan.global_batch;
  one.loss_chunk = plan.loss_chunk;  // part of the summation order
  return one;
}

void expectEqualRuns(const test::Case& c) {
  const TrainResult reference = train(c.model, onOneRank(c.plan));
  const TaskGraph graph = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Layer);
  const TrainResult result = trainThreads(
      graph, learnableTokens(c.model.vocab, c.model.seq_len, c.plan.global_batch), testOptions());
  ASSERT_EQ(reference.steps.size(), static_cast<std::size_t>(kSteps));
  ASSERT_EQ(result.steps.size(), static_cast<std::size_t>(kSteps));
  const bool pipeline_only = c.plan.dp == 1 && c.plan.tp == 1;
  for (std::size_t i = 0; i < result.steps.size(); ++i) {
    const double expected = reference.steps[i].loss;
    if (pipeline_only) {
      EXPECT_EQ(result.steps[i].loss, expected) << "step " << i;
    } else {
      EXPECT_NEAR(result.steps[i].loss, expected, 1e-5 * expected) << "step " << i;
    }
    EXPECT_NEAR(result.steps[i].grad_norm, reference.steps[i].grad_norm, 1e-3 * reference.steps[i].grad_norm)
        << "step " << i;
  }
  // Every step sees other sequences: the loss of one or two of them says little about learning.
  if (c.plan.global_batch >= 4) {
    EXPECT_LT(result.steps.back().loss, result.steps.front().loss);
  }
  for (std::size_t rank = 0; rank < graph.ranks.size(); ++rank)
    EXPECT_EQ(result.peak_memory[rank], graph.ranks[rank].arena) << "rank " << rank;
}

class Equivalence : public testing::TestWithParam<std::uint32_t> {};

TEST_P(Equivalence, EveryLossEqualsThatOfOneRank) {
  const test::Case c = test::randomCase(GetParam() + 1000, 8);
  SCOPED_TRACE(c.model.name + (c.model.tied_embedding ? " tied " : " untied ") + planToText(c.plan));
  expectEqualRuns(c);
}

INSTANTIATE_TEST_SUITE_P(Random, Equivalence, testing::Range(0U, 40U));

class FixedPlan : public testing::TestWithParam<const char*> {};

TEST_P(FixedPlan, EveryLossEqualsThatOfOneRank) {
  for (const Family family : {Family::Gpt2, Family::Llama}) {
    test::Case c;
    c.model = test::tinyModel(family);
    c.plan = planFromText(GetParam());
    c.cluster = localCluster(c.plan.numRanks());
    ASSERT_EQ(formatIssues(validatePlan(c.model, c.cluster, c.plan)), "");
    SCOPED_TRACE(c.model.name);
    expectEqualRuns(c);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Plans, FixedPlan,
    testing::Values("pp=2,mb=1,gb=4,schedule=gpipe", "pp=4,mb=1,gb=8,schedule=1f1b",
                    "pp=2,mb=1,gb=4,schedule=interleaved,chunks=2", "mb=1,gb=2,recompute=selective",
                    "pp=2,mb=1,gb=4,recompute=every:2", "mb=1,gb=2,recompute=sqrt",
                    "mb=1,gb=2,recompute=full/selective*2/none", "dp=2,mb=1,gb=4,zero=1",
                    "dp=4,mb=1,gb=8,zero=1,shard=2", "tp=2,mb=2,gb=4", "dp=2,mb=1,gb=8,shares=5/3",
                    "dp=2,pp=2,mb=2,gb=8,zero=1,shares=1/3", "tp=2,mb=1,gb=4,sp",
                    "dp=2,tp=2,pp=2,mb=1,gb=8,zero=1,sp,recompute=full",
                    "pp=2,mb=1,gb=4,schedule=bfs,chunks=2", "pp=4,mb=1,gb=8,schedule=zb-h1",
                    "pp=2,mb=1,gb=6,schedule=zb-h2,recompute=full", "pp=2,mb=1,gb=6,schedule=zb-v,chunks=2",
                    "pp=3,mb=1,gb=4,schedule=zb-auto", "pp=2,mb=1,gb=6,schedule=dualpipev,chunks=2",
                    "dp=2,tp=2,pp=2,mb=1,gb=8,zero=1,sp,schedule=zb-v,chunks=2"));

}  // namespace
}  // namespace bmt::exec
