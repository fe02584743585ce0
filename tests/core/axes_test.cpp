// Context and expert parallelism and the model families against published counts and closed forms
// (FACTS 1.6).
#include <gtest/gtest.h>

#include "core/executable.h"
#include "core/lower.h"
#include "core/model_spec.h"
#include "core/verify.h"

namespace bmt {
namespace {

TEST(Experts, ActiveParametersAreThePublishedOnes) {
  // DeepSeek-AI 2024: 236 B / 21 B and 671 B / 37 B; Jiang et al. 2024: 47 B / 13 B; Mistral AI 2024: 141 B /
  // 39 B; Qwen team 2025: 235 B / 22 B, 30.5 B / 3.3 B.
  struct Row {
    const char* name;
    double total, active, tolerance;  // 1e9
  };
  for (const Row& row : {Row{"deepseek-v2", 236, 21, 0.5}, Row{"deepseek-v3", 671, 37, 0.6},
                         Row{"mixtral-8x7b", 46.7, 12.9, 0.05}, Row{"mixtral-8x22b", 140.6, 39.1, 0.1},
                         Row{"qwen3-235b-a22b", 235, 22, 0.3}, Row{"qwen3-30b-a3b", 30.5, 3.3, 0.1},
                         Row{"deepseek-moe-16b", 16.4, 2.8, 0.1}}) {
    const ModelSpec model = loadModel(row.name);
    EXPECT_NEAR(static_cast<double>(numParams(model)) * 1e-9, row.total, row.tolerance) << row.name;
    EXPECT_NEAR(static_cast<double>(numActiveParams(model)) * 1e-9, row.active, row.tolerance) << row.name;
  }
}

TaskGraph lowered(const ModelSpec& model, const std::string& text) {
  const Plan plan = planFromText(text);
  ClusterSpec cluster = localCluster(plan.numRanks());
  EXPECT_EQ(formatIssues(validatePlan(model, cluster, plan)), "");
  TaskGraph graph = lower(model, cluster, plan, RankSelection::Folded, Granularity::Layer);
  EXPECT_EQ(formatIssues(verify(graph)), "");
  return graph;
}

// Communications of one kind in a layer's forward or backward of micro-batch 0, on the first rank.
std::vector<Bytes> commBytes(const TaskGraph& graph, std::int32_t layer, Phase phase, TaskKind kind) {
  std::vector<Bytes> bytes;
  const RankProgram& program = graph.ranks.front();
  for (const Task& task : program.tasks) {
    if (task.kind == kind && task.layer == layer && task.slot.phase == phase && task.slot.microbatch == 0)
      bytes.push_back(program.comms[static_cast<std::size_t>(task.comm)].bytes());
  }
  return bytes;
}

TEST(Experts, AllToAllsMoveTheBytesOfTheClosedForm) {
  // FACTS 1.6: dispatch 2 s b h k (ep-1)/ep, combine the same; s 4096, h 7168, k 8: 470 MB before (ep-1)/ep.
  ModelSpec model = loadModel("deepseek-v3");
  model.layers = 4;
  const TaskGraph graph = lowered(model, "dp=64,ep=64,mb=1,gb=64,precision=bf16");
  for (const Phase phase : {Phase::F, Phase::B}) {
    const std::vector<Bytes> bytes = commBytes(graph, 3, phase, TaskKind::ExpertComm);
    ASSERT_EQ(bytes.size(), 2U);
    for (const Bytes each : bytes) EXPECT_EQ(each, Bytes{2} * 4096 * 7168 * 8);
  }
  EXPECT_TRUE(commBytes(graph, 0, Phase::F, TaskKind::ExpertComm).empty());  // a dense layer
}

TEST(Experts, AreReducedOverTheRanksThatHoldThem) {
  ModelSpec model = loadModel("mixtral-8x7b");
  model.layers = 1;
  const TaskGraph graph = lowered(model, "dp=8,ep=4,mb=1,gb=8,precision=bf16,zero=1");
  const RankProgram& program = graph.ranks.front();
  std::int64_t experts = 0, states = 0;
  for (const GradBucket& bucket : program.buckets) {
    if (!bucket.expert) continue;
    experts += bucket.count;
    states += bucket.count / 2;  // dp / ep ranks share them
  }
  EXPECT_EQ(experts, 2 * std::int64_t{3} * 4096 * 14336);
  for (const Task& task : program.tasks) {
    if (task.kind != TaskKind::DataComm || task.comm < 0) continue;
    const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
    if (groupKind(comm.group) == GroupKind::ExpertData) {
      EXPECT_EQ(graph.mesh.members(comm.group), (std::vector<RankId>{0, 4}));
    }
  }
  std::int64_t dense = 0;
  for (const GradBucket& bucket : program.buckets) dense += bucket.expert ? 0 : bucket.count / 8;
  EXPECT_EQ(program.state_elements, dense + states);
}

TEST(Context, RingMovesKeysAndValuesAndTwiceThatBack) {
  // FACTS 1.6: 4 (s/cp) h_kv d_head bytes, cp - 1 times; 128 K tokens, cp 8, 8 heads of 128: 67.1 MB a step.
  ModelSpec model = loadModel("llama3-8b");
  model.layers = 1;
  model.seq_len = 131072;
  const TaskGraph graph = lowered(model, "cp=8,mb=1,gb=1,precision=bf16");
  const std::vector<Bytes> forward = commBytes(graph, 0, Phase::F, TaskKind::ContextComm);
  const std::vector<Bytes> backward = commBytes(graph, 0, Phase::B, TaskKind::ContextComm);
  ASSERT_EQ(forward.size(), 7U);
  ASSERT_EQ(backward.size(), 7U);
  EXPECT_EQ(forward.front(), 67108864);
  EXPECT_EQ(backward.front(), 2 * 67108864);
}

TEST(Context, AttentionWorkIsThatOfTheWholeSequenceInEqualParts) {
  ModelSpec model = loadModel("llama3-8b");
  model.layers = 1;
  const auto attention = [&](const char* plan) {
    const TaskGraph graph = lowered(model, plan);
    double sum = 0;
    for (const Task& task : graph.ranks.front().tasks) {
      if (task.segment < 0 || task.slot.phase == Phase::Step) continue;
      for (const OpCall& call : graph.segments[static_cast<std::size_t>(task.segment)].ops) {
        if (call.op.kind == OpKind::AttentionForward || call.op.kind == OpKind::AttentionBackward)
          sum += flops(call.op);
      }
    }
    return sum;
  };
  const double whole = attention("mb=1,gb=1");
  EXPECT_DOUBLE_EQ(attention("cp=4,mb=1,gb=1"), whole / 4);
  EXPECT_DOUBLE_EQ(attention("cp=4,cp-kind=a2a,mb=1,gb=1"), whole / 4);
}

TEST(Context, UlyssesExchangesFourTensorsEachWay) {
  ModelSpec model = loadModel("llama3-8b");
  model.layers = 1;
  const TaskGraph graph = lowered(model, "cp=8,cp-kind=a2a,mb=1,gb=1,precision=bf16");
  for (const Phase phase : {Phase::F, Phase::B}) {
    const std::vector<Bytes> bytes = commBytes(graph, 0, phase, TaskKind::ContextComm);
    ASSERT_EQ(bytes.size(), 4U);
    Bytes sum = 0;
    for (const Bytes each : bytes) sum += each;
    EXPECT_EQ(sum, Bytes{2} * 1024 * (4096 + 1024 + 1024 + 4096));  // q, k, v and the output
  }
}

TEST(Mesh, ExpertGroupsCutTheDataGroup) {
  const Mesh mesh(planFromText("dp=4,cp=2,tp=2,ep=4,gb=4"));
  for (RankId rank = 0; rank < mesh.numRanks(); ++rank) {
    const auto data = mesh.members(mesh.groupOf(GroupKind::Data, rank));
    const auto expert = mesh.members(mesh.groupOf(GroupKind::Expert, rank));
    const auto same = mesh.members(mesh.groupOf(GroupKind::ExpertData, rank));
    ASSERT_EQ(data.size(), 8U);
    ASSERT_EQ(expert.size(), 4U);
    ASSERT_EQ(same.size(), 2U);
    const Coord c = mesh.coordOf(rank);
    EXPECT_EQ(data[static_cast<std::size_t>(mesh.dataIndex(c))], rank);
    EXPECT_EQ(expert[static_cast<std::size_t>(mesh.expertIndex(c))], rank);
    EXPECT_EQ(same[static_cast<std::size_t>(mesh.expertDataIndex(c))], rank);
    EXPECT_EQ(mesh.members(mesh.groupOf(GroupKind::Context, rank)).size(), 2U);
  }
}

TEST(ValidatePlan, NamesTheNearestLegalDegree) {
  const auto issues = [](const char* model, const char* plan) {
    const Plan p = planFromText(plan);
    return formatIssues(validatePlan(loadModel(model), localCluster(p.numRanks()), p));
  };
  EXPECT_NE(issues("mixtral-8x7b", "dp=12,ep=6,gb=12").find("nearest legal value: 4"), std::string::npos);
  EXPECT_NE(issues("llama3-8b", "dp=4,ep=2,gb=4").find("no experts"), std::string::npos);
  EXPECT_NE(issues("llama3-8b", "cp=16,cp-kind=a2a,gb=1").find("8 kv_heads"), std::string::npos);
  EXPECT_NE(issues("llama3-8b", "cp=3,gb=1").find("nearest legal value: 2"), std::string::npos);
  EXPECT_NE(issues("t5-base", "cp=2,gb=1").find("encoder-decoder"), std::string::npos);
  EXPECT_NE(issues("llama3-8b", "cp=2,gb=1,attention=softmax").find("cp-kind=ring"), std::string::npos);
}

TEST(Executable, RefusesWhatHasNoKernelsAndSaysWhich) {
  const Plan plain = planFromText("gb=1");
  EXPECT_TRUE(notExecutable(loadModel("gpt2-124m"), plain).empty());
  EXPECT_TRUE(notExecutable(loadModel("gpt2-124m"), planFromText("tp=2,gb=1,tp-overlap")).empty());
  for (const char* name : {"mixtral-8x7b", "deepseek-v2-lite", "bert-base", "vit-b-16", "t5-small",
                           "gemma-2b", "nemotron4-15b", "qwen3-30b-a3b", "bloom-560m"})
    EXPECT_FALSE(notExecutable(loadModel(name), plain).empty()) << name;
  EXPECT_NE(formatIssues(notExecutable(loadModel("gpt2-124m"), planFromText("cp=2,gb=1"))).find("plan.cp"),
            std::string::npos);
}

TEST(Families, T5PlacesEncoderThenDecoderAndSendsBothStreams) {
  const ModelSpec model = loadModel("t5-base");
  const TaskGraph graph = lowered(model, "pp=4,mb=2,gb=8");
  for (const RankProgram& program : graph.ranks) {
    for (const Task& task : program.tasks) {
      if (task.kind != TaskKind::PipeComm) continue;
      EXPECT_EQ(program.comms[static_cast<std::size_t>(task.comm)].count, 2 * (512 + 114) * model.d_model);
    }
  }
}

TEST(HfConfig, ReadsMixturesAndOtherFamilies) {
  EXPECT_EQ(
      numParams(modelFromHfConfig(R"({"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
      "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
      "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": null})",
                                  "c")),
      46702792704);
  EXPECT_EQ(numParams(modelFromHfConfig(R"({"model_type": "deepseek_v2", "hidden_size": 2048,
      "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 10944, "vocab_size": 102400,
      "q_lora_rank": null, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
      "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
      "n_shared_experts": 2, "first_k_dense_replace": 1})",
                                        "c")),
            15706484224);
  EXPECT_EQ(numParams(modelFromHfConfig(R"({"model_type": "bert"})", "c")), 109514298);
  EXPECT_EQ(numParams(modelFromHfConfig(R"({"model_type": "vit"})", "c")), 86567656);
  EXPECT_EQ(numParams(modelFromHfConfig(R"({"model_type": "t5"})", "c")), 60506624);
}

}  // namespace
}  // namespace bmt
