// Loss, gradients and AdamW updates of a small model of each family against an independent implementation:
// PyTorch's autograd in float64 (tests/reference/make_golden.py, which also states every constant used here).
// One rank and hybrid plans.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "core/json.h"
#include "core/lower.h"
#include "executor/trainer.h"

namespace bmt::exec {
namespace {

constexpr std::int64_t kBatch = 4, kSeq = 16, kVocab = 101;

std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// The same batch in every step.
void fillBatch(std::int64_t, std::int64_t begin, std::int64_t end, std::int32_t* tokens,
               std::int32_t* targets) {
  for (std::int64_t b = begin; b < end; ++b) {
    for (std::int64_t t = 0; t < kSeq; ++t) {
      const auto token = [&](std::int64_t at) {
        return static_cast<std::int32_t>(splitmix64(static_cast<std::uint64_t>(1000 * b + at)) % kVocab);
      };
      if (tokens != nullptr) tokens[(b - begin) * kSeq + t] = token(t);
      if (targets != nullptr) targets[(b - begin) * kSeq + t] = token(t + 1);
    }
  }
}

ModelSpec modelOf(const Json& config) {
  Json json = config;
  json["schema"] = "bmtrain.model/1";
  json["vocab"] = kVocab;
  json["seq_len"] = kSeq;
  return modelFromJson(json.dump(), "golden config");
}

TrainOptions options(std::int64_t steps) {
  TrainOptions o;
  o.steps = steps;
  o.lr = o.min_lr = 1e-2;
  o.seed = 7;
  o.init = {0.2, 0.05, 0.05};
  o.poison = true;
  return o;
}

struct Case {
  const char* family;
  const char* plan;
};

class Reference : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const std::string path =
        std::string(BMT_SOURCE_DIR) + "/tests/golden/" + GetParam().family + "_reference.json";
    golden_ = parseJson(readFile(path), path);
    model_ = modelOf(golden_["config"]);
    plan_ = planFromText(GetParam().plan);
  }

  TrainResult run(std::int64_t steps, FinalState& state) const {
    const TaskGraph graph =
        lower(model_, localCluster(plan_.numRanks()), plan_, RankSelection::All, Granularity::Layer);
    return trainThreads(graph, fillBatch, options(steps), &state);
  }

  // Each tensor's norm to `relative`, its first and last eight elements to `element` (absolute; 0 =
  // `relative` times the norm, since rounding is relative to the tensor, not to its small elements).
  static void expectTensors(const std::vector<FullTensor>& tensors, const Json& golden, double relative,
                            double element, const std::vector<std::string>& skipped) {
    EXPECT_EQ(tensors.size(), golden.size());
    for (const FullTensor& tensor : tensors) {
      SCOPED_TRACE(tensor.name);
      ASSERT_TRUE(golden.contains(tensor.name));
      bool skip = false;
      for (const std::string& suffix : skipped) skip = skip || tensor.name.ends_with(suffix);
      if (skip) continue;
      const Json& expected = golden[tensor.name];
      double squares = 0;
      for (const float value : tensor.values)
        squares += static_cast<double>(value) * static_cast<double>(value);
      const double norm = expected["norm"];
      EXPECT_NEAR(std::sqrt(squares), norm, relative * norm);
      const double bound = element > 0 ? element : relative * norm;
      const std::size_t n = tensor.values.size();
      for (std::size_t i = 0; i < 8; ++i) {
        EXPECT_NEAR(tensor.values[i], expected["first"][i].get<double>(), bound) << "element " << i;
        EXPECT_NEAR(tensor.values[n - 8 + i], expected["last"][i].get<double>(), bound)
            << "element " << n - 8 + i;
      }
    }
  }

  Json golden_;
  ModelSpec model_;
  Plan plan_;
};

TEST_P(Reference, GradientsEqualThoseOfPyTorch) {
  FinalState state;
  const TrainResult result = run(1, state);
  EXPECT_NEAR(result.steps[0].loss, golden_["losses"][0].get<double>(), 1e-6 * result.steps[0].loss);
  EXPECT_NEAR(result.steps[0].grad_norm, golden_["grad_norms"][0].get<double>(),
              1e-5 * result.steps[0].grad_norm);
  // A bias of the keys shifts all scores of a query alike: without rotary positions its gradient is rounding
  // noise.
  if (plan_.dp == 1) expectTensors(state.gradients, golden_["gradients"], 1e-5, 0, {"attn.k.bias"});
}

TEST_P(Reference, FiveStepsOfAdamWEqualThoseOfPyTorch) {
  FinalState state;
  const TrainResult result = run(5, state);
  ASSERT_EQ(result.steps.size(), 5U);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(result.steps[i].loss, golden_["losses"][i].get<double>(), 1e-5 * result.steps[i].loss)
        << "step " << i;
    EXPECT_NEAR(result.steps[i].grad_norm, golden_["grad_norms"][i].get<double>(),
                1e-4 * result.steps[i].grad_norm)
        << "step " << i;
  }
  // AdamW divides by the gradient's own size, so an element whose gradient is small moves as far as any
  // other, with the relative error of an fp32 cancellation: 0.2 % of five steps of lr. The key bias has
  // nothing but noise to follow.
  expectTensors(state.weights, golden_["weights"], 1e-4, 5 * 1e-2 * 2e-3, {"attn.k.bias"});
}

INSTANTIATE_TEST_SUITE_P(Plans, Reference,
                         testing::Values(Case{"gpt2", "mb=4,gb=4"}, Case{"gpt2", "mb=1,gb=4,loss-chunk=5"},
                                         Case{"gpt2", "tp=2,pp=2,mb=1,gb=4,sp"},
                                         Case{"gpt2", "dp=2,tp=2,pp=2,mb=1,gb=4,zero=1,recompute=full"},
                                         Case{"llama", "mb=4,gb=4"}, Case{"llama", "tp=2,pp=2,mb=2,gb=4"},
                                         Case{"llama", "dp=2,tp=2,mb=1,gb=4,zero=1,sp"}));

}  // namespace
}  // namespace bmt::exec
