// Clusters of several groups, and parts that are slow.
#include "core/cluster_spec.h"

#include <gtest/gtest.h>

#include "core/plan.h"

namespace bmt {
namespace {

TEST(ClusterText, GroupsAreJoinedByPlus) {
  const ClusterSpec c = loadCluster("dgx-a100-80g:4+dgx-v100-32g:2");
  ASSERT_EQ(c.groups.size(), 2U);
  EXPECT_EQ(c.numDevices(), 48);
  EXPECT_EQ(c.numNodes(), 6);
  EXPECT_EQ(c.groupOf(31).device.name, "A100-SXM4-80GB");
  EXPECT_EQ(c.groupOf(32).device.name, "V100-SXM2-32GB");
  EXPECT_EQ(c.nodeOf(32), 4);
  EXPECT_FALSE(c.homogeneous());
  EXPECT_THROW(loadCluster("dgx-a100-80g:4+"), Error);
  EXPECT_THROW(loadCluster("dgx-a100-80g:4+dgx-nothing:1"), Error);
}

TEST(ClusterFile, KeepsSlowDevicesAndLinks) {
  ClusterSpec c = loadCluster("dgx-a100-80g:2");
  EXPECT_TRUE(c.uniform());
  c.slow_devices = {{3, 1.5}};
  c.slow_links = {{1, -1, 2}, {-1, 9, 4}};
  EXPECT_FALSE(c.uniform());
  EXPECT_EQ(clusterFromJson(clusterToJson(c), "c.json"), c);
}

TEST(ClusterIssues, NameTheSlowPartThatDoesNotExist) {
  ClusterSpec c = loadCluster("dgx-a100-80g:1");
  c.slow_devices = {{8, 1.5}, {0, 0.5}};
  c.slow_links = {{0, 0, 2}, {1, -1, 2}};
  const std::vector<Issue> issues = validateCluster(c);
  ASSERT_EQ(issues.size(), 4U);
  EXPECT_EQ(issues[0].what, "device 8 of 8, numbered 0 to 7");
  EXPECT_EQ(issues[1].what, "factor 0.5 is not between 1 (healthy) and 1000000");
  EXPECT_EQ(issues[2].what, "names neither or both of node and device; one is needed");
  EXPECT_EQ(issues[3].what, "node 1 of 1, numbered 0 to 0");
}

TEST(ClusterText, SlowPartsAreParsed) {
  EXPECT_EQ(parseSlowDevice("rank=3:1.5"), (SlowDevice{3, 1.5}));
  EXPECT_EQ(parseSlowLink("node=1:2"), (SlowLink{1, -1, 2}));
  EXPECT_EQ(parseSlowLink("rank=1:2"), (SlowLink{-1, 1, 2}));
  for (const char* bad : {"", "rank", "rank=3", "rank=:2", "rank=3:", "rank=3:x", "node=3:2", "rank=3:2:1"})
    EXPECT_THROW(parseSlowDevice(bad), Error) << bad;
}

TEST(PlanShares, TextJsonAndIssues) {
  const Plan plan = planFromText("dp=2,mb=2,gb=16,shares=5/3");
  EXPECT_EQ(plan.batch_shares, (std::vector<std::int64_t>{5, 3}));
  EXPECT_EQ(planFromText(planToText(plan)), plan);
  EXPECT_EQ(planFromJson(planToJson(plan), "p"), plan);
  EXPECT_EQ(plan.numMicrobatches(), 5);
  EXPECT_EQ(plan.microbatchesOf(1), 3);
  EXPECT_EQ(plan.firstSequenceOf(1), 10);
  const ModelSpec model = loadModel("gpt2-124m");
  EXPECT_EQ(formatIssues(validatePlan(model, localCluster(2), plan)), "");
  const auto what = [&](const char* text, std::int32_t ranks) {
    return formatIssues(validatePlan(model, localCluster(ranks), planFromText(text)));
  };
  EXPECT_NE(what("dp=2,mb=2,gb=18,shares=5/3", 2).find("nearest legal gb: 16"), std::string::npos);
  EXPECT_NE(what("dp=2,mb=2,gb=16,shares=8", 2).find("lists 1 replicas, but dp is 2"), std::string::npos);
  EXPECT_EQ(what("dp=2,pp=2,mb=1,gb=6,schedule=interleaved,chunks=2,shares=4/2", 4), "");
  EXPECT_NE(what("dp=2,pp=2,mb=1,gb=7,schedule=interleaved,chunks=2,shares=4/3", 4)
                .find("multiples of pp 2, but there are 3"),
            std::string::npos);
}

}  // namespace
}  // namespace bmt
