// Closed forms of memory through lower(): bytes of state per parameter, activations per layer, recompute
// policies. Sources: Rajbhandari et al. 2020 (ZeRO), Korthikanti et al. 2022 (activations), Chen et al. 2016
// (sqrt); the figures are those of shared/FACTS.md sections 1.4 and 1.5.
#include <gtest/gtest.h>

#include <cmath>

#include "core/lower.h"
#include "core/memory_plan.h"
#include "core/verify.h"
#include "tests/support/random_plan.h"

namespace bmt {
namespace {

Bytes persistent(const RankProgram& program, BufferKind kind) {
  Bytes bytes = 0;
  for (const Buffer& buffer : program.buffers) {
    if (buffer.persistent && buffer.kind == kind) bytes += buffer.bytes;
  }
  return bytes;
}

Bytes stateBytes(const RankProgram& program) {
  return persistent(program, BufferKind::Weights) + persistent(program, BufferKind::Gradients) +
         persistent(program, BufferKind::Optimizer);
}

Bytes peakActivations(const RankProgram& program) {
  Bytes peak = 0;
  for (const auto& live : liveBytesByTask(program))
    peak = std::max(peak, live[static_cast<std::size_t>(BufferKind::Activations)]);
  return peak;
}

TaskGraph graphOf(const ModelSpec& model, const std::string& text, Granularity granularity) {
  const Plan plan = planFromText(text);
  const ClusterSpec cluster = localCluster(plan.numRanks());
  EXPECT_EQ(formatIssues(validatePlan(model, cluster, plan)), "") << text;
  TaskGraph graph = lower(model, cluster, plan, RankSelection::Folded, granularity);
  EXPECT_EQ(formatIssues(verify(graph)), "") << text;
  return graph;
}

struct StateCase {
  const char* plan;
  double whole, shared;  // bytes per parameter = whole + shared / dp
};

TEST(MemoryForms, StateBytesPerParameter) {
  ModelSpec model = test::tinyModel(Family::Llama);  // no tied table
  for (const StateCase& c : std::initializer_list<StateCase>{
           {"precision=fp32", 16, 0},
           {"precision=tf32", 16, 0},
           {"precision=fp16,grads=fp16", 16, 0},
           {"precision=bf16", 18, 0},
           {"precision=bf16,grads=bf16,zero=1", 4, 12},
           {"precision=bf16,zero=1", 6, 12},
           {"precision=bf16,grads=bf16,zero=2", 2, 14},
           {"precision=bf16,zero=2", 2, 16},
           {"precision=bf16,grads=bf16,zero=3", 0, 16},
       }) {
    for (const int dp : {2, 8}) {
      SCOPED_TRACE(std::string(c.plan) + " dp " + std::to_string(dp));
      const TaskGraph graph = graphOf(
          model, "dp=" + std::to_string(dp) + ",gb=" + std::to_string(dp) + "," + c.plan, Granularity::Stage);
      const RankProgram& program = graph.ranks.front();
      const double elements = static_cast<double>(program.flat_elements);
      EXPECT_DOUBLE_EQ(static_cast<double>(stateBytes(program)), elements * (c.whole + c.shared / dp));
    }
  }
}

// Elements that cross the data axis in one step (FACTS.md 1.6): ZeRO 1 and 2 reduce-scatter and gather each
// parameter once; ZeRO 3 gathers a layer's twice, what is used in one pass (table, head) once. Each further
// micro-batch scatters again, and with ZeRO 3 gathers again.
TEST(MemoryForms, DataVolumeOfEveryZeroLevel) {
  const ModelSpec model = test::tinyModel(Family::Llama);
  struct Volume {
    std::int64_t gathered = 0, scattered = 0, reduced = 0, flat = 0, layers = 0;
  };
  for (const Granularity granularity : {Granularity::Layer, Granularity::Stage}) {
    const auto volume = [&](const std::string& text) {
      const TaskGraph graph = graphOf(model, text, granularity);
      const RankProgram& program = graph.ranks.front();
      Volume v;
      v.flat = program.flat_elements;
      for (std::size_t b = 0; b < program.buckets.size(); ++b) {
        // ZeRO 3: one bucket for each block, head last, embedding first.
        if (b > 0 && b + 1 < program.buckets.size()) v.layers += program.buckets[b].count;
      }
      for (const Comm& comm : program.comms) {
        if (groupKind(comm.group) == GroupKind::World) continue;
        if (comm.kind == CommKind::AllGather) v.gathered += comm.count;
        if (comm.kind == CommKind::ReduceScatter) v.scattered += comm.count;
        if (comm.kind == CommKind::AllReduce) v.reduced += comm.count;
      }
      return v;
    };
    for (const int m : {1, 3}) {
      const std::string plan = "dp=4,gb=" + std::to_string(4 * m) + ",zero=";
      const Volume none = volume(plan + "0"), one = volume(plan + "1"), two = volume(plan + "2"),
                   three = volume(plan + "3"), hybrid = volume(plan + "3,shard=2"),
                   ahead = volume(plan + "1,overlap-param");
      EXPECT_EQ(none.reduced, none.flat);
      EXPECT_EQ(none.gathered + none.scattered, 0);
      EXPECT_EQ(one.scattered, one.flat);
      EXPECT_EQ(one.gathered, one.flat);
      EXPECT_EQ(ahead.gathered, ahead.flat);
      EXPECT_EQ(two.scattered, m * two.flat);
      EXPECT_EQ(two.gathered, two.flat);
      EXPECT_EQ(three.scattered, m * three.flat);
      EXPECT_EQ(three.gathered, m * (three.flat + three.layers));
      EXPECT_EQ(hybrid.gathered, three.gathered);
      EXPECT_EQ(hybrid.scattered, three.scattered);
      EXPECT_EQ(hybrid.reduced, hybrid.flat / 2);  // each copy's shard, once a step
    }
  }
}

// What ZeRO 3 holds besides its shard: the layer in use and those gathered ahead.
TEST(MemoryForms, GatheredParametersLiveForTheirLayer) {
  ModelSpec model = test::tinyModel(Family::Llama);
  model.layers = 6;
  model.vocab = 8;
  for (const int prefetch : {0, 1, 2}) {
    const TaskGraph graph =
        graphOf(model, "dp=2,gb=2,zero=3,prefetch=" + std::to_string(prefetch), Granularity::Layer);
    const RankProgram& program = graph.ranks.front();
    Bytes peak = 0;
    for (const auto& live : liveBytesByTask(program))
      peak = std::max(peak, live[static_cast<std::size_t>(BufferKind::Communication)]);
    EXPECT_EQ(peak, (1 + prefetch) * 4 * program.buckets[1].count);
  }
}

// The arena has room for what is live, not for each layer of a slot: memory of a reduce-scattered gradient
// serves the layers after the next. (It once waited for the end of the slot, so ZeRO 3 seemed to hold the
// whole model.)
TEST(MemoryForms, ArenaOfZero3DoesNotGrowWithTheLayers) {
  ModelSpec model = test::tinyModel(Family::Llama);
  model.vocab = 8;
  const auto beyond = [&model](std::int64_t layers) {
    model.layers = layers;
    const TaskGraph graph = graphOf(model, "dp=2,gb=2,zero=3,recompute=full", Granularity::Layer);
    const RankProgram& program = graph.ranks.front();
    Bytes persistent = 0, inputs = 0;
    for (const Buffer& buffer : program.buffers) {
      if (buffer.persistent) persistent += roundUp(buffer.bytes, kArenaAlignment);
      if (buffer.kind == BufferKind::Activations) inputs += roundUp(buffer.bytes, kArenaAlignment);
    }
    return program.arena - persistent - inputs;
  };
  EXPECT_LE(beyond(32), beyond(8));
}

// A loss on gathered logits holds the whole vocabulary on every tensor rank: bf16 logits, and four fp32
// tensors of that size where the loss is made of plain ops.
TEST(MemoryForms, GatheredLogits) {
  ModelSpec model = test::tinyModel(Family::Llama);
  model.layers = 1;
  model.vocab = 4096;
  const auto peak = [&model](const std::string& more) {
    const TaskGraph graph =
        graphOf(model, "tp=4,gb=1,precision=bf16,pointwise=eager" + more, Granularity::Layer);
    return memoryUse(graph.ranks.front()).at_peak[static_cast<std::size_t>(BufferKind::Workspace)];
  };
  const Bytes elements = model.seq_len * model.vocab;
  EXPECT_EQ(peak(",gather-logits") - peak(""), elements * (2 + 4 * 4) - elements / 4 * 2 * 4);
}

ModelSpec gpt3() {
  ModelSpec model = loadModel("gpt3-175b");
  model.vocab = 51200;
  model.dropout = true;
  return model;
}

struct ActivationCase {
  const char* plan;
  double plain, per_tp, scores;  // bytes = s b h (plain + per_tp / t + scores * A / t), A = 5 a s / h
  bool rows_sharded, full;
  double mib;  // the published example
};

TEST(MemoryForms, ActivationBytesPerLayerAreThePublishedOnes) {
  ModelSpec model = gpt3();
  const double sbh = 2048.0 * 12288, a = 5.0 * 96 * 2048 / 12288;
  ASSERT_EQ(a, 80);
  for (const ActivationCase& c :
       std::initializer_list<ActivationCase>{{"tp=1", 34, 0, 1, false, false, 2736},
                                             {"tp=8", 10, 24, 1, false, false, 552},
                                             {"tp=8,sp", 0, 34, 1, true, false, 342},
                                             {"tp=8,recompute=selective", 10, 24, 0, false, false, 312},
                                             {"tp=8,sp,recompute=selective", 0, 34, 0, true, false, 102},
                                             {"tp=8,recompute=full", 2, 0, 0, false, true, 48},
                                             {"tp=8,sp,recompute=full", 0, 2, 0, true, true, 6}}) {
    SCOPED_TRACE(c.plan);
    const Plan plan = planFromText(c.plan);
    const auto bytes = [&](int layers) {
      model.layers = layers;
      const std::string text = std::string(c.plan) + ",gb=1,schedule=gpipe,precision=fp16,attention=softmax";
      return peakActivations(graphOf(model, text, Granularity::Layer).ranks.front());
    };
    const double t = plan.tp, published = sbh * (c.plain + c.per_tp / t + c.scores * a / t);
    EXPECT_EQ(published, c.mib * 1024 * 1024);
    // What the paper leaves out: fp32 mean and 1/deviation of two norms, and the softmax's row sums.
    const double rows = 2048 / (c.rows_sharded ? t : 1);
    const double statistics = c.full ? 0 : 16 * rows + 4 * 96 / t * 2048;
    EXPECT_EQ(static_cast<double>(bytes(3) - bytes(2)), published + statistics);
  }
}

// Flash attention keeps no scores: selective recompute saves nothing more. Two-matrix MLP: 18 + 4 f / h.
TEST(MemoryForms, FlashAttentionAndOtherMlpSizes) {
  ModelSpec model = gpt3();
  for (const std::int64_t d_ff : {4 * 12288, 2 * 12288}) {
    model.d_ff = d_ff;
    const auto bytes = [&](int layers) {
      model.layers = layers;
      return peakActivations(
          graphOf(model, "gb=1,schedule=gpipe,precision=bf16", Granularity::Layer).ranks.front());
    };
    const double form = 2048.0 * 12288 * (18 + 4.0 * static_cast<double>(d_ff) / 12288);
    EXPECT_EQ(static_cast<double>(bytes(3) - bytes(2)), form + 16 * 2048 + 4 * 96 * 2048);
  }
}

// Korthikanti et al. 2022, 175B on 64 GPUs, t 8, p 8, 3 chunks: 12.3516 and 66.8438 GiB of activations, 45.74
// GiB of state (18 bytes a parameter).
TEST(MemoryForms, WholeModelOf175B) {
  const ModelSpec model = gpt3();
  const std::string common =
      "tp=8,pp=8,mb=1,gb=64,schedule=interleaved,chunks=3,precision=fp16,attention=softmax";
  const double gib = 1024.0 * 1024 * 1024;
  const TaskGraph lean = graphOf(model, common + ",sp,recompute=selective", Granularity::Stage);
  const TaskGraph plain = graphOf(model, common, Granularity::Stage);
  EXPECT_NEAR(static_cast<double>(peakActivations(lean.ranks[0])) / gib, 12.3516, 0.005 * 12.3516);
  EXPECT_NEAR(static_cast<double>(peakActivations(plain.ranks[0])) / gib, 66.8438, 0.005 * 66.8438);
  // An even share of all parameters, and the blocks that a middle stage holds.
  EXPECT_NEAR(18 * static_cast<double>(numParams(model)) / 64 / gib, 45.74, 0.01);
  EXPECT_NEAR(static_cast<double>(stateBytes(lean.ranks[3])) / gib, 45.56, 0.03);
}

// Memory O(n) becomes O(sqrt n): exponent 0.5 +- 0.05 over n = 16 .. 256 equal layers (REQUIREMENTS R4).
TEST(Recompute, SqrtPolicyGrowsWithTheRootOfTheLayers) {
  ModelSpec model = test::tinyModel(Family::Gpt2);
  const auto exponent = [&](const std::string& policy) {
    double sx = 0, sy = 0, sxx = 0, sxy = 0, n = 0;
    for (const int layers : {16, 25, 36, 64, 100, 144, 196, 256}) {
      model.layers = layers;
      const TaskGraph graph = graphOf(model, "gb=1,recompute=" + policy, Granularity::Layer);
      const double x = std::log(layers), y = std::log(peakActivations(graph.ranks.front()));
      sx += x, sy += y, sxx += x * x, sxy += x * y, n += 1;
    }
    return (n * sxy - sx * sy) / (n * sxx - sx * sx);
  };
  EXPECT_NEAR(exponent("sqrt"), 0.5, 0.05);
  EXPECT_NEAR(exponent("none"), 1.0, 0.05);
}

TEST(Recompute, SegmentsCoverTheChunk) {
  const auto segments = [](const char* text, std::int64_t first, std::int64_t layers) {
    std::string out;
    for (const RecomputeSegment& s : recomputeSegments(planFromText(text), first, layers))
      out += std::to_string(s.begin) + "-" + std::to_string(s.end) + std::string(toString(s.policy)) + " ";
    return out;
  };
  EXPECT_EQ(segments("recompute=every:2", 0, 5), "0-2full 2-4full 4-5full ");
  EXPECT_EQ(segments("recompute=sqrt", 7, 9), "0-3full 3-6full 6-9full ");
  EXPECT_EQ(segments("recompute=sqrt", 0, 5), "0-3full 3-5full ");
  EXPECT_EQ(segments("recompute=selective", 0, 2), "0-1selective 1-2selective ");
  EXPECT_EQ(segments("recompute=full*2/selective/none", 1, 3), "0-1full 1-2selective 2-3none ");
}

// Four all-reduces a layer and micro-batch; recomputing the layer adds the two of its forward
// (FACTS.md 1.6), the attention core none. One more pass of the same ops each.
TEST(Recompute, AddsTheForwardsOpsAndCollectives) {
  ModelSpec model = test::tinyModel(Family::Gpt2);
  struct Counts {
    std::int64_t comms = 0;
    double flops = 0;
  };
  const auto count = [&](const std::string& policy, int layers) {
    model.layers = layers;
    Counts counts;
    const TaskGraph graph = graphOf(model, "tp=2,gb=1,recompute=" + policy, Granularity::Layer);
    for (const Task& task : graph.ranks.front().tasks) {
      counts.comms += task.kind == TaskKind::TensorComm ? 1 : 0;
      if (task.kind != TaskKind::Recompute || task.segment < 0) continue;
      for (const OpCall& call : graph.segments[static_cast<std::size_t>(task.segment)].ops)
        counts.flops += flops(call.op);
    }
    return counts;
  };
  const auto perLayer = [&](const std::string& policy) {
    const Counts two = count(policy, 2), three = count(policy, 3);
    return Counts{three.comms - two.comms, three.flops - two.flops};
  };
  EXPECT_EQ(perLayer("none").comms, 4);
  EXPECT_EQ(perLayer("none").flops, 0);
  EXPECT_EQ(perLayer("selective").comms, 4);
  EXPECT_EQ(perLayer("full").comms, 6);
  EXPECT_EQ(perLayer("every:1").flops, perLayer("full").flops);
  // b 1, T 16, 8 heads / tp 2, D 4: causal scores and values.
  EXPECT_EQ(perLayer("selective").flops, 2.0 * 4 * 16 * 16 * 4);
  EXPECT_GT(perLayer("full").flops, 2.0 * 16 * (4 * 32 * 32 + 2 * 32 * 64) / 2);
}

}  // namespace
}  // namespace bmt
