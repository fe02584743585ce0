// Properties of lowered programs over random legal plans (DESIGN.md section 10, items 1, 2 and 8).
#include "core/lower.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "core/memory_plan.h"
#include "core/verify.h"
#include "tests/support/random_plan.h"

namespace bmt {
namespace {

using test::Case;
using test::randomCase;

// From here on, seeds draw models and axes that are simulated only.
constexpr std::uint32_t kSimulated = 1000;
Case caseOf(std::uint32_t seed) {
  return seed < kSimulated ? randomCase(seed, 8) : test::randomSimulatedCase(seed, 16);
}

class LowerProperty : public testing::TestWithParam<std::uint32_t> {};

TEST_P(LowerProperty, VerifiesAndEveryMicrobatchRunsForwardThenBackward) {
  const Case c = caseOf(GetParam());
  SCOPED_TRACE(planToText(c.plan) + (c.model.tied_embedding ? " tied" : " untied"));
  const TaskGraph graph = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Layer);
  EXPECT_EQ(formatIssues(verify(graph)), "");
  ASSERT_EQ(graph.ranks.size(), static_cast<std::size_t>(c.plan.numRanks()));
  for (const RankProgram& program : graph.ranks) {
    std::map<std::tuple<int, int>, std::pair<TaskId, TaskId>> last_f_first_b;
    for (TaskId t = 0; t < static_cast<TaskId>(program.tasks.size()); ++t) {
      const Task& task = program.tasks[static_cast<std::size_t>(t)];
      if (task.lane != Lane::Compute || task.slot.phase == Phase::Step) continue;
      auto& [last_f, first_b] =
          last_f_first_b.try_emplace({task.slot.chunk, task.slot.microbatch}, -1, -1).first->second;
      if (task.slot.phase == Phase::F) last_f = t;
      if (task.slot.phase == Phase::B && first_b < 0) first_b = t;
    }
    const std::int64_t microbatches = c.plan.microbatchesOf(program.coord.dp);
    EXPECT_EQ(last_f_first_b.size(), static_cast<std::size_t>(c.plan.chunks * microbatches));
    for (const auto& [key, tasks] : last_f_first_b) EXPECT_LT(tasks.first, tasks.second);
    EXPECT_GE(program.arena, memoryUse(program).peak_live);
  }
}

TEST_P(LowerProperty, StageGranularityVerifiesAndFoldedProgramsEqualTheFullOnes) {
  const Case c = caseOf(GetParam());
  SCOPED_TRACE(planToText(c.plan));
  const TaskGraph all = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Stage);
  EXPECT_EQ(formatIssues(verify(all)), "");
  const TaskGraph folded = lower(c.model, c.cluster, c.plan, RankSelection::Folded, Granularity::Stage);
  EXPECT_EQ(formatIssues(verify(folded)), "");
  ASSERT_EQ(folded.ranks.size(), static_cast<std::size_t>(c.plan.pp));
  for (const RankProgram& program : folded.ranks) {
    const RankProgram& twin = all.ranks[static_cast<std::size_t>(program.rank)];
    ASSERT_EQ(program.tasks.size(), twin.tasks.size());
    EXPECT_EQ(program.arena, twin.arena);
    for (std::size_t t = 0; t < program.tasks.size(); ++t)
      EXPECT_EQ(program.tasks[t].slot, twin.tasks[t].slot);
    for (std::size_t i = 0; i < program.comms.size(); ++i) {
      EXPECT_EQ(program.comms[i].group, twin.comms[i].group);
      EXPECT_EQ(program.comms[i].seq, twin.comms[i].seq);
    }
  }
}

TEST_P(LowerProperty, EveryParameterElementIsOwnedExactlyOnce) {
  const Case c = caseOf(GetParam());
  SCOPED_TRACE(planToText(c.plan));
  const TaskGraph graph = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Layer);
  std::int64_t elements = 0;
  for (const RankProgram& program : graph.ranks) {
    for (const ParamShard& p : program.params) {
      const Mesh& mesh = graph.mesh;
      if ((p.expert ? mesh.expertDataIndex(program.coord) : mesh.dataIndex(program.coord)) != 0) continue;
      if (p.tied_copy || (p.replicated && program.coord.tp != 0)) continue;
      elements += p.rows * p.cols;
    }
  }
  EXPECT_EQ(elements, numParams(c.model));
}

INSTANTIATE_TEST_SUITE_P(Random, LowerProperty, testing::Range(0U, 60U));
INSTANTIATE_TEST_SUITE_P(Simulated, LowerProperty, testing::Range(kSimulated, kSimulated + 60));

TaskGraph twoStageGraph() {
  Case c = randomCase(1, 1);
  c.model.layers = 2;
  c.plan = planFromText("pp=2,mb=1,gb=2");
  return lower(c.model, localCluster(2), c.plan, RankSelection::All, Granularity::Layer);
}

TEST(Verify, NamesCommunicationThatNobodyAnswers) {
  TaskGraph graph = twoStageGraph();
  for (Comm& comm : graph.ranks[1].comms) {
    if (comm.kind == CommKind::Recv) comm.seq += 100;
  }
  const std::string text = formatIssues(verify(graph));
  EXPECT_NE(text.find("its group has [0 1]"), std::string::npos) << text;
}

TEST(Verify, NamesTheTasksThatDeadlock) {
  // Stage 1 asks for micro-batch 1 first, stage 0 sends micro-batch 0 first: each lane waits for the other.
  TaskGraph graph = twoStageGraph();
  std::vector<Comm*> receives;
  for (Comm& comm : graph.ranks[1].comms) {
    if (comm.kind == CommKind::Recv) receives.push_back(&comm);
  }
  ASSERT_EQ(receives.size(), 2U);
  std::swap(receives[0]->seq, receives[1]->seq);
  const std::string text = formatIssues(verify(graph));
  EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
  EXPECT_NE(text.find("deadlock"), std::string::npos) << text;
}

TEST(Verify, FindsMemoryReusedTooEarly) {
  Case c = randomCase(1, 1);
  c.model.layers = 2;
  c.plan = planFromText("mb=1,gb=2");
  c.cluster = localCluster(1);
  TaskGraph graph = lower(c.model, c.cluster, c.plan, RankSelection::All, Granularity::Layer);
  RankProgram& program = graph.ranks[0];
  for (Buffer& buffer : program.buffers) {
    if (!buffer.persistent) buffer.offset = program.buffers[static_cast<std::size_t>(program.scalars)].offset;
  }
  EXPECT_NE(formatIssues(verify(graph)).find("in memory"), std::string::npos);
}

}  // namespace
}  // namespace bmt
