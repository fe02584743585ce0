// Plans: text and JSON forms, and what makes one illegal.
#include "core/plan.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/mesh.h"

namespace bmt {
namespace {

std::string messageOf(const std::string& text) {
  try {
    planFromText(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.exitCode(), 2);
    return error.location() + ": " + error.what();
  }
  return "accepted";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(PlanText, RoundTripsInCanonicalForm) {
  for (const char* text :
       {"dp=1,tp=1,pp=1,mb=1,gb=1,schedule=1f1b", "dp=8,tp=4,pp=2,mb=1,gb=512,schedule=1f1b,zero=1,sp",
        "dp=2,tp=2,pp=2,mb=4,gb=64,schedule=interleaved,chunks=2,recompute=full,precision=bf16",
        "dp=1,tp=1,pp=4,mb=2,gb=8,schedule=gpipe,layers=3/4/4/1,no-overlap-grad,loss-chunk=128",
        "dp=2,tp=1,pp=1,mb=1,gb=2,schedule=1f1b,bucket=1048576,attention=softmax,pointwise=eager,gather-"
        "logits,grads=fp16,"
        "order=dp-tp-cp-pp",
        "dp=8,tp=1,pp=1,mb=1,gb=8,schedule=1f1b,zero=3,shard=4,prefetch=2,recompute=every:4,precision=fp8,"
        "grads=bf16",
        "dp=8,tp=1,pp=1,mb=1,gb=8,schedule=1f1b,zero=2,recompute=full*2/selective*7/none*3,precision=tf32",
        "dp=8,tp=1,pp=1,mb=1,gb=8,schedule=1f1b,zero=1,recompute=sqrt,overlap-param,offload=optimizer,"
        "compress=topk:0.05",
        "dp=8,tp=1,pp=1,mb=1,gb=8,schedule=1f1b,recompute=selective,compress=threshold:0.0001",
        "dp=8,tp=1,pp=1,mb=1,gb=8,schedule=1f1b,compress=int8"}) {
    const Plan plan = planFromText(text);
    EXPECT_EQ(planToText(plan), text);
    EXPECT_EQ(planFromJson(planToJson(plan), "plan.json"), plan);
  }
  EXPECT_EQ(planToText(planFromText(" gb=64, tp=2 ,dp=4 ,bucket=1MiB")),
            "dp=4,tp=2,pp=1,mb=1,gb=64,schedule=1f1b,bucket=1048576");
}

TEST(PlanText, ErrorsNameTheKey) {
  EXPECT_TRUE(contains(messageOf("dp=2,shedule=gpipe"), "'schedule'"));
  EXPECT_TRUE(contains(messageOf("dp=two"), "'two'"));
  EXPECT_TRUE(contains(messageOf("dp=2,dp=4"), "twice"));
  EXPECT_TRUE(contains(messageOf("schedule=1fb"), "1f1b"));
  EXPECT_TRUE(contains(messageOf("zero=4"), "0, 1, 2, 3"));
  EXPECT_TRUE(contains(messageOf("recompute=fulll"), "full"));
  EXPECT_TRUE(contains(messageOf("recompute=full*2/some*3"), "'some'"));
  EXPECT_TRUE(contains(messageOf("recompute=full*0/none"), "'full*0'"));
  EXPECT_TRUE(contains(messageOf("recompute=every:0"), "0 is not between"));
  EXPECT_TRUE(contains(messageOf("compress=topk:1.5"), "topk:1.5"));
  EXPECT_TRUE(contains(messageOf("compress=topk:x"), "'x'"));
  EXPECT_TRUE(contains(messageOf("offload=all"), "optimizer"));
  EXPECT_TRUE(contains(messageOf("tp="), "value"));
  EXPECT_TRUE(contains(messageOf("dp=99999999999999999999"), "99999999999999999999"));
  EXPECT_TRUE(contains(messageOf("overlap-grad,no-overlap-grad"), "twice"));
}

TEST(PlanJson, RefusesWhatIsNoPlan) {
  for (const char* text :
       {"[]", "{\"dp\": ", R"({"schema": "bmtrain.model/1"})", R"({"dp": 1.5})", R"({"layers": 3})",
        R"({"layers": [1, "x"]})", R"({"dp": null})", R"({"dpp": 1})"}) {
    EXPECT_THROW(planFromJson(text, "plan.json"), Error) << text;
  }
}

std::vector<Issue> check(const std::string& plan, int devices) {
  return validatePlan(loadModel("gpt2-124m"), localCluster(devices), planFromText(plan));
}

TEST(ValidatePlan, AcceptsLegalPlans) {
  EXPECT_TRUE(check("dp=2,tp=2,pp=2,gb=8", 8).empty());
  EXPECT_TRUE(check("tp=4,sp,gb=8", 4).empty());
  EXPECT_TRUE(check("pp=3,schedule=interleaved,chunks=2,gb=6", 3).empty());
  EXPECT_TRUE(check("pp=2,layers=5/7,gb=4", 2).empty());
}

TEST(ValidatePlan, ReportsEveryProblemAtOnceWithBothFigures) {
  const std::vector<Issue> issues = check("dp=3,tp=5,pp=1,mb=2,gb=7", 16);
  const std::string text = formatIssues(issues);
  EXPECT_TRUE(contains(text, "15 ranks")) << text;
  EXPECT_TRUE(contains(text, "16 devices")) << text;
  EXPECT_TRUE(contains(text, "plan.tp: 5 does not divide heads 12; nearest legal value: 4")) << text;
  EXPECT_TRUE(contains(text, "plan.gb: 7 is not a multiple of mb 2 x dp 3 = 6; nearest legal value: 6 or 12"))
      << text;
}

TEST(ValidatePlan, PipelineRules) {
  EXPECT_TRUE(contains(formatIssues(check("pp=16,gb=16", 16)), "12 layers"));
  EXPECT_TRUE(contains(formatIssues(check("pp=2,layers=6/5,gb=2", 2)), "adds up to 11"));
  EXPECT_TRUE(contains(formatIssues(check("pp=2,layers=4/4/4,gb=2", 2)), "lists 3 stages"));
  EXPECT_TRUE(contains(formatIssues(check("pp=2,chunks=2,gb=2", 2)), "interleaved"));
  EXPECT_TRUE(
      contains(formatIssues(check("pp=2,chunks=2,schedule=interleaved,gb=3", 2)), "multiples of pp 2"));
  EXPECT_TRUE(contains(formatIssues(check("sp,gb=1", 1)), "tp > 1"));
  EXPECT_TRUE(contains(formatIssues(check("order=tp-tp-pp-dp,gb=1", 1)), "permutation"));
}

// A suggested value is itself legal: replace and check again.
TEST(ValidatePlan, SuggestedTensorDegreeIsLegal) {
  for (int tp = 2; tp <= 40; ++tp) {
    const std::string plan = "gb=4,tp=" + std::to_string(tp);
    const std::string text = formatIssues(check(plan, tp));
    const std::string marker = "heads 12; nearest legal value: ";
    if (!contains(text, marker)) continue;
    const int nearest = std::stoi(text.substr(text.find(marker) + marker.size()));
    EXPECT_TRUE(check("gb=4,tp=" + std::to_string(nearest), nearest).empty()) << tp << " -> " << nearest;
  }
}

TEST(Plan, LayersCoverTheModelAndDifferByOne) {
  const ModelSpec model = loadModel("gpt2-124m");
  for (int pp = 1; pp <= 12; ++pp) {
    const std::vector<std::int64_t> layers = layersOfStages(model, planFromText("pp=" + std::to_string(pp)));
    EXPECT_EQ(std::accumulate(layers.begin(), layers.end(), std::int64_t{0}), 12);
    EXPECT_LE(
        *std::max_element(layers.begin(), layers.end()) - *std::min_element(layers.begin(), layers.end()), 1);
  }
}

// Every rank is in exactly one group of each axis, at the place its coordinate says, for any order of the
// axes.
TEST(Mesh, CoordinatesAndGroupsAgree) {
  for (const char* order : {"tp-cp-pp-dp", "dp-pp-cp-tp", "pp-tp-dp-cp"}) {
    Plan plan = planFromText("dp=3,tp=2,pp=4");
    plan.order = order;
    const Mesh mesh(plan);
    ASSERT_EQ(mesh.numRanks(), 24);
    for (RankId rank = 0; rank < mesh.numRanks(); ++rank) {
      const Coord coord = mesh.coordOf(rank);
      EXPECT_EQ(mesh.rankOf(coord), rank);
      const auto tensor = mesh.members(mesh.groupOf(GroupKind::Tensor, rank));
      const auto data = mesh.members(mesh.groupOf(GroupKind::Data, rank));
      ASSERT_EQ(tensor.size(), 2U);
      ASSERT_EQ(data.size(), 3U);
      EXPECT_EQ(tensor[static_cast<std::size_t>(coord.tp)], rank);
      EXPECT_EQ(data[static_cast<std::size_t>(coord.dp)], rank);
      const auto pair = mesh.members(mesh.groupOf(GroupKind::ForwardPair, rank));
      ASSERT_EQ(pair.size(), 2U);
      EXPECT_EQ(pair[0], rank);
      EXPECT_EQ(mesh.coordOf(pair[1]).pp, (coord.pp + 1) % 4);
    }
    EXPECT_EQ(mesh.members(mesh.groupOf(GroupKind::World, 0)).size(), 24U);
  }
}

}  // namespace
}  // namespace bmt
