// The engine against closed forms (../shared/FACTS.md section 1, sources there) and its own invariants.
#include "simulator/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/lower.h"
#include "simulator/report.h"
#include "tests/support/random_plan.h"
#include "traces/shares.h"

namespace bmt::sim {
namespace {

using test::Case;
using test::randomCase;

constexpr Ns kUnit = 1000;

// A pipeline-only plan with equal stages; forward takes F, backward B (all of a slot on its first task),
// communication `c`.
SimResult playPipeline(ScheduleKind kind, int pp, int chunks, int m, Ns f, Ns b, Ns c) {
  ModelSpec model = test::tinyModel(Family::Llama);
  model.layers = pp * chunks;
  Plan plan;
  plan.pp = pp;
  plan.chunks = chunks;
  plan.global_batch = m;
  plan.schedule = kind;
  const TaskGraph graph = lower(model, localCluster(pp), plan, RankSelection::All, Granularity::Stage);
  CostTable costs(graph.ranks.size());
  for (std::size_t r = 0; r < graph.ranks.size(); ++r) {
    for (const Task& task : graph.ranks[r].tasks) {
      TaskCost cost;
      if (task.kind == TaskKind::Forward) cost.duration = f;
      if (task.kind == TaskKind::Backward) cost.duration = b;
      if (task.kind == TaskKind::PipeComm) cost.duration = c;
      costs[r].push_back(cost);
    }
  }
  return simulate(graph, costs, {});
}

struct Shape {
  int p, m, v;
};
class PipelineTime : public testing::TestWithParam<Shape> {};

TEST_P(PipelineTime, EqualsTheClosedForm) {
  const auto [p, m, v] = GetParam();
  const Ns f = kUnit * v, b = 2 * kUnit * v;  // of a whole stage; a chunk takes 1/v of it
  const Ns ideal = m * (f + b);
  if (v == 1) {
    for (const ScheduleKind kind : {ScheduleKind::GPipe, ScheduleKind::OneFOneB}) {
      const SimResult result = playPipeline(kind, p, 1, m, f, b, 0);
      EXPECT_EQ(result.trace.step_time, (m + p - 1) * (f + b));
      const trace::Shares shares = trace::stepShares(result.trace);
      EXPECT_NEAR(shares.bubble, static_cast<double>(p - 1) / (m + p - 1), 1e-9);
    }
  } else {
    const SimResult result = playPipeline(ScheduleKind::Interleaved, p, v, m, f / v, b / v, 0);
    EXPECT_EQ(result.trace.step_time, ideal + (p - 1) * (f + b) / v);
  }
}
INSTANTIATE_TEST_SUITE_P(Facts, PipelineTime,
                         testing::Values(Shape{8, 32, 1}, Shape{8, 2, 1}, Shape{8, 4, 1}, Shape{4, 64, 1},
                                         Shape{2, 1, 1}, Shape{1, 5, 1}, Shape{8, 32, 2}, Shape{8, 32, 4},
                                         Shape{4, 8, 2}, Shape{4, 4, 3}));

class EngineProperty : public testing::TestWithParam<std::uint32_t> {};

// Random durations per task, equal on the members of a communication.
CostTable randomCosts(const TaskGraph& graph, std::uint64_t seed) {
  CostTable costs(graph.ranks.size());
  for (std::size_t r = 0; r < graph.ranks.size(); ++r) {
    const RankProgram& program = graph.ranks[r];
    for (std::size_t t = 0; t < program.tasks.size(); ++t) {
      const Task& task = program.tasks[t];
      std::uint64_t key = seed * 7919 + r * 1000003 + t;
      if (task.comm >= 0) {
        const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
        key = seed * 7919 + static_cast<std::uint64_t>(comm.group) * 31 + comm.seq;
      }
      key = (key ^ (key >> 29)) * 0xBF58476D1CE4E5B9ULL;
      costs[r].push_back({static_cast<Ns>(1 + (key >> 40) % 5000), {}});
    }
  }
  return costs;
}

TEST_P(EngineProperty, ObeysTheContractAndEqualsTheLongestPath) {
  const Case c = randomCase(GetParam(), 8);
  SCOPED_TRACE(planToText(c.plan));
  const TaskGraph graph = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Layer);
  const CostTable costs = randomCosts(graph, GetParam());
  const trace::Trace t = simulate(graph, costs, {}).trace;
  std::map<std::pair<RankId, TaskId>, const trace::Span*> at;
  for (const trace::Span& span : t.spans) at[{span.rank, span.task}] = &span;
  std::map<std::pair<GroupId, std::uint64_t>, Ns> start_of;
  for (std::size_t r = 0; r < graph.ranks.size(); ++r) {
    const RankProgram& program = graph.ranks[r];
    std::array<Ns, kNumLanes> lane_end{};
    Ns last_post = 0;
    for (std::size_t i = 0; i < program.tasks.size(); ++i) {
      const Task& task = program.tasks[i];
      const trace::Span& span = *at[{program.rank, static_cast<TaskId>(i)}];
      EXPECT_EQ(span.end - span.start, costs[r][i].duration);
      Ns ready = lane_end[static_cast<std::size_t>(task.lane)];  // R1
      for (const TaskId dep : program.depsOf(task))
        ready = std::max(ready, at[{program.rank, dep}]->end);  // R2
      if (task.comm >= 0) {
        EXPECT_EQ(span.posted, std::max(ready, last_post));  // R4
        last_post = span.posted;
        const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
        const auto [entry, inserted] = start_of.try_emplace({comm.group, comm.seq}, span.start);
        EXPECT_EQ(entry->second, span.start);  // R3: together
        EXPECT_GE(span.start, span.posted);
      } else {
        EXPECT_EQ(span.start, ready);
      }
      lane_end[static_cast<std::size_t>(task.lane)] = span.end;
    }
  }
  // R3: a communication starts when its last member posts, so every start is some member's post: the longest
  // path.
  for (const trace::Span& span : t.spans) {
    if (span.cause.task < 0) {
      EXPECT_EQ(span.start, 0);
    } else {
      EXPECT_LE((at[{span.cause.rank, span.cause.task}]->end), span.start);
    }
  }
}

TEST_P(EngineProperty, LongerTasksNeverShortenTheStepWithoutContention) {
  const Case c = randomCase(GetParam(), 8);
  const TaskGraph graph = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Layer);
  CostTable costs = randomCosts(graph, GetParam());
  const Ns before = simulate(graph, costs, {}).trace.step_time;
  EXPECT_EQ(simulate(graph, costs, {}).trace.step_time, before);  // deterministic
  std::size_t longer = 0;
  for (std::size_t i = 0; i < costs[0].size(); i += 7) {
    if (graph.ranks[0].tasks[i].comm >= 0) continue;
    costs[0][i].duration += 700;
    ++longer;
  }
  EXPECT_GE(simulate(graph, costs, {}).trace.step_time, before);
  EXPECT_LE(simulate(graph, costs, {}).trace.step_time, before + static_cast<Ns>(longer) * 700);
}

TEST_P(EngineProperty, SharedCoresSlowButNeverSpeedUp) {
  const Case c = randomCase(GetParam(), 8);
  const TaskGraph graph = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Layer);
  CostTable costs = randomCosts(graph, GetParam());
  const Ns free = simulate(graph, costs, {}).trace.step_time;
  Ns work = 0;
  for (std::size_t r = 0; r < costs.size(); ++r) {
    for (std::size_t i = 0; i < costs[r].size(); ++i) {
      if (graph.ranks[r].tasks[i].comm >= 0) continue;
      costs[r][i].use = {0, 1.0};
      work += costs[r][i].duration;
    }
  }
  const std::vector<Resource> two_cores{{ResourceKind::Cores, 0, 2.0}};
  const trace::Trace t = simulate(graph, costs, two_cores).trace;
  EXPECT_GE(t.step_time, free);
  EXPECT_GE(t.step_time, work / 2);  // two cores cannot do more
  // Never more work done than two cores offer at any time: checked over the whole step through compute
  // shares.
  Ns busy = 0;
  for (const trace::Span& span : t.spans)
    busy += span.lane == Lane::Compute && span.kind != TaskKind::TensorComm ? span.end - span.start : 0;
  EXPECT_GE(busy, work);
}

TEST_P(EngineProperty, FoldedEqualsAllOnASymmetricCluster) {
  Case c = GetParam() % 2 == 0 ? randomCase(GetParam(), 8) : test::randomSimulatedCase(GetParam(), 8);
  c.cluster = loadCluster("dgx-a100-80g:1");
  c.cluster.groups[0].devices_per_node = c.plan.numRanks();
  c.plan.precision = DType::BF16;
  // ZeRO-1 shards cut parameters at different places, so ranks launch different numbers of kernels.
  c.plan.zero = c.plan.shard = 0;
  c.plan.overlap_param = false;
  c.plan.grads = DType::F32;
  const trace::CostProfile profile = trace::datasheetProfile(c.cluster.groups[0].device);
  const auto step = [&](RankSelection selection) {
    return simulatePlan(c.model, c.cluster, c.plan, profile, selection, Granularity::Layer).report;
  };
  const Report all = step(RankSelection::All), folded = step(RankSelection::Folded);
  SCOPED_TRACE(planToText(c.plan));
  // Ranks differ by the rounding of their shares (padded vocabulary shards, optimizer ranges).
  EXPECT_NEAR(folded.step_time_s, all.step_time_s, 0.01 * all.step_time_s);
  EXPECT_EQ(folded.peak_memory, all.peak_memory);
}

TEST_P(EngineProperty, TheCriticalPathAndTheSharesAddUpToTheStep) {
  Case c = randomCase(GetParam(), 8);
  c.cluster = loadCluster("dgx-a100-80g:1");
  c.cluster.groups[0].devices_per_node = c.plan.numRanks();
  c.plan.precision = DType::BF16;
  const trace::CostProfile profile = trace::datasheetProfile(c.cluster.groups[0].device);
  const Report r =
      simulatePlan(c.model, c.cluster, c.plan, profile, RankSelection::All, Granularity::Layer).report;
  double seconds = 0;
  for (const auto& [cause, part] : r.critical_path) seconds += part;
  EXPECT_NEAR(seconds, r.step_time_s, 1e-9);
  EXPECT_NEAR(r.shares.compute + r.shares.bubble + r.shares.exposed, 1.0, 1e-9);
  EXPECT_GE(r.shares.bubble, -1e-12);
}

INSTANTIATE_TEST_SUITE_P(Random, EngineProperty, testing::Range(100U, 140U));

TEST(Engine, StageIsCloseToLayerGranularity) {
  ModelSpec model = loadModel("gpt3-1.3b");
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1");
  trace::CostProfile profile = trace::datasheetProfile(cluster.groups[0].device);
  // The host's pace binds per task: over a whole chunk it may run ahead of the device, which pieces of a
  // layer do not show.
  profile.gpu->host_s = 0;
  // At Stage granularity the last backward is one task, so gradient buckets cannot start inside it: where dp
  // > 1 its step is longer by what Layer granularity overlaps there, never shorter.
  for (const auto& [text, tolerance] : {std::pair("tp=2,pp=4,mb=1,gb=16,precision=bf16,sp", 0.03),
                                        {"dp=2,pp=4,mb=1,gb=32,precision=bf16,recompute=full", 0.03},
                                        {"dp=8,mb=2,gb=32,precision=bf16,zero=1", 0.07}}) {
    const Plan plan = planFromText(text);
    const Report layer =
        simulatePlan(model, cluster, plan, profile, RankSelection::Folded, Granularity::Layer).report;
    const Report stage =
        simulatePlan(model, cluster, plan, profile, RankSelection::Folded, Granularity::Stage).report;
    EXPECT_NEAR(stage.step_time_s, layer.step_time_s, tolerance * layer.step_time_s) << text;
    if (plan.dp > 1) {
      EXPECT_GE(stage.step_time_s, layer.step_time_s * 0.999) << text;
    }
    EXPECT_NEAR(static_cast<double>(stage.peak_memory), static_cast<double>(layer.peak_memory),
                0.05 * static_cast<double>(layer.peak_memory))
        << text;
  }
}

// Context and expert parallelism, overlap, and the families whose layers differ in kind.
TEST(Engine, StageIsCloseToLayerGranularityOnEveryAxis) {
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1");
  trace::CostProfile profile = trace::datasheetProfile(cluster.groups[0].device);
  profile.gpu->host_s = 0;
  struct Row {
    const char *model, *plan;
  };
  for (const Row& row : {Row{"llama2-7b", "cp=4,tp=2,mb=1,gb=4,precision=bf16,sp,no-overlap-grad"},
                         Row{"llama2-7b", "cp=4,cp-kind=a2a,tp=2,mb=1,gb=4,precision=bf16,no-overlap-grad"},
                         Row{"llama2-7b", "tp=8,mb=1,gb=4,precision=bf16,tp-overlap"},
                         Row{"llama2-7b", "tp=8,mb=1,gb=4,precision=bf16,sp,tp-overlap"},
                         Row{"deepseek-moe-16b", "pp=2,tp=4,mb=1,gb=8,precision=bf16,sp"},
                         Row{"deepseek-v2-lite", "pp=8,mb=1,gb=16,precision=bf16"},
                         Row{"bert-large", "pp=8,mb=4,gb=64,precision=bf16"},
                         Row{"vit-h-14", "pp=8,mb=4,gb=64,precision=bf16"},
                         Row{"t5-large", "pp=8,mb=4,gb=64,precision=bf16"}}) {
    const ModelSpec model = loadModel(row.model);
    const Plan plan = planFromText(row.plan);
    ASSERT_EQ(formatIssues(validatePlan(model, cluster, plan)), "") << row.plan;
    const Report layer =
        simulatePlan(model, cluster, plan, profile, RankSelection::Folded, Granularity::Layer).report;
    const Report stage =
        simulatePlan(model, cluster, plan, profile, RankSelection::Folded, Granularity::Stage).report;
    EXPECT_NEAR(stage.step_time_s, layer.step_time_s, 0.05 * layer.step_time_s) << row.model << row.plan;
    EXPECT_NEAR(static_cast<double>(stage.peak_memory), static_cast<double>(layer.peak_memory),
                0.06 * static_cast<double>(layer.peak_memory))
        << row.model << row.plan;
  }
}

double stepSeconds(const char* model, const char* plan) {
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1");
  const trace::CostProfile profile = trace::datasheetProfile(cluster.groups[0].device);
  return simulatePlan(loadModel(model), cluster, planFromText(plan), profile, RankSelection::Folded,
                      Granularity::Layer)
      .report.step_time_s;
}

TEST(Engine, OverlapHidesTensorParallelCommunicationAndNeverCosts) {
  EXPECT_LT(stepSeconds("llama2-7b", "tp=8,mb=1,gb=4,precision=bf16,tp-overlap"),
            stepSeconds("llama2-7b", "tp=8,mb=1,gb=4,precision=bf16"));
  EXPECT_LT(stepSeconds("llama2-13b", "tp=8,mb=4,gb=4,precision=bf16,sp,tp-overlap"),
            stepSeconds("llama2-13b", "tp=8,mb=4,gb=4,precision=bf16,sp"));
}

// With one bucket each behind the message to the stage before, reductions of p stages run side by side while
// the pipeline drains. (Queues of buckets once held the messages back, stage after stage: + 20 % here.)
TEST(Engine, OverlappedReductionsDoNotHoldThePipelineBack) {
  const ModelSpec model = loadModel("gpt3-175b");
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:128");
  const trace::CostProfile profile = chooseProfile(cluster, "");
  for (const char* schedule : {"1f1b", "interleaved,chunks=2", "zb-h1", "zb-v,chunks=2"}) {
    for (const Granularity granularity : {Granularity::Layer, Granularity::Stage}) {
      const auto seconds = [&](const std::string& more) {
        const Plan plan = planFromText(
            "dp=32,tp=4,pp=8,mb=1,gb=1536,zero=1,sp,precision=bf16,schedule=" + std::string(schedule) + more);
        return simulatePlan(model, cluster, plan, profile, RankSelection::Folded, granularity, {false})
            .report.step_time_s;
      };
      EXPECT_LE(seconds(""), 1.001 * seconds(",no-overlap-grad")) << schedule;
    }
  }
}

TEST(Report, ModelFlopsCountTheExpertsOfAToken) {
  // 6 N per token for the active matrices, plus attention: DeepSeek-V3's 37 B of 671 B, Mixtral's 12.9 B
  // of 46.7 B.
  Plan plan;
  for (const char* name : {"deepseek-v3", "mixtral-8x7b"}) {
    ModelSpec m = loadModel(name);
    m.seq_len = 128;  // attention is small
    const double tokens = static_cast<double>(m.seq_len);
    const double table = static_cast<double>(m.vocab * m.d_model);
    const double active =
        static_cast<double>(numActiveParams(m)) - table;  // the embedding multiplies nothing
    EXPECT_NEAR(modelFlopsPerStep(m, plan, false) / (6 * active * tokens), 1.0, 0.02) << name;
  }
}

TEST(Report, ModelFlopsOf175B) {
  // Narayanan et al. 2021: 72 B s L h^2 (1 + s/6h + V/12Lh) = 3.386e18 for B 1536, s 2048, L 96, h 12288, V
  // 51200.
  Plan plan;
  plan.global_batch = 1536;
  EXPECT_NEAR(modelFlopsPerStep(loadModel("megatron-175b"), plan, false) / 3.386e18, 1.0, 2e-3);
  EXPECT_NEAR(modelFlopsPerStep(loadModel("megatron-175b"), plan, true) / 3.341e18, 1.0, 2e-3);
  // The same source with full recompute: 96 B s L h^2 (1 + s/6h + V/16Lh) = 4.511e18; the head runs once.
  plan.recompute = Recompute::Full;
  const ModelSpec model = loadModel("megatron-175b");
  EXPECT_NEAR(hardwareFlopsPerStep(model, plan) / 4.511e18, 1.0, 2e-3);
  const double head = 6.0 * 1536 * static_cast<double>(model.seq_len * model.vocab * model.d_model);
  EXPECT_NEAR(hardwareFlopsPerStep(model, plan), modelFlopsPerStep(model, plan, false) * 4 / 3 - head / 3,
              1e6);
}

TEST(CostModel, CollectiveShapesMatchTheClosedForms) {
  // FACTS section 1.3: S 1 GiB, B 25 GB/s, alpha 5 us.
  const double s = 1073741824, b = 25e9, alpha = 5e-6;
  const auto ms = [&](CommKind kind, std::int64_t n) {
    const CommShape shape = commShape(kind, s, n, false);
    return 1e3 * (shape.bytes / b + shape.steps * alpha);
  };
  EXPECT_NEAR(ms(CommKind::AllReduce, 8), 75.23, 0.01);
  EXPECT_NEAR(ms(CommKind::AllReduce, 64), 85.19, 0.01);
  EXPECT_NEAR(ms(CommKind::AllReduce, 1024), 96.05, 0.01);
  EXPECT_NEAR(ms(CommKind::AllGather, 8), 37.62, 0.01);
  EXPECT_NEAR(ms(CommKind::ReduceScatter, 1024), 48.02, 0.01);
  EXPECT_NEAR(ms(CommKind::Send, 2), 42.95, 0.01);
  EXPECT_NEAR(ms(CommKind::AllToAll, 1024), 42.91, 0.01);
  // FACTS section 1.6: dispatch of s 4096, h 7168, k 8 over ep 64 at 45 GB/s: 10.3 ms.
  EXPECT_NEAR(commShape(CommKind::AllToAll, 2.0 * 4096 * 7168 * 8, 64, false).bytes / 45e9, 10.3e-3, 5e-5);
}

TEST(CostModel, RefusesAProfileAbovePeak) {
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:1");
  trace::CostProfile profile = trace::datasheetProfile(cluster.groups[0].device);
  for (trace::OpFit& fit : profile.ops) fit.flops_per_s *= 2;
  const Plan plan = planFromText("dp=8,gb=8,precision=bf16");
  try {
    simulatePlan(loadModel("gpt2-124m"), cluster, plan, profile, RankSelection::Folded, Granularity::Stage);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.exitCode(), 2);
    EXPECT_NE(std::string(error.what()).find("above the peak"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace bmt::sim
