// Collectives against ../shared/FACTS.md 1.3 (sources there) and the lower bounds of its section 2.
#include "simulator/network.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace bmt::sim {
namespace {

constexpr double kS = 1073741824, kB = 25e9, kAlpha = 5e-6;

TEST(Collectives, MatchTheClosedForms) {
  const auto ms = [](double seconds) { return 1e3 * seconds; };
  EXPECT_NEAR(ms(ringAllReduce(kS, 8, kB, kAlpha)), 75.23, 0.005);
  EXPECT_NEAR(ms(ringAllReduce(kS, 64, kB, kAlpha)), 85.19, 0.005);
  EXPECT_NEAR(ms(ringAllReduce(kS, 1024, kB, kAlpha)), 96.05, 0.005);
  EXPECT_NEAR(ms(ringGather(kS, 8, kB, kAlpha)), 37.62, 0.005);
  EXPECT_NEAR(ms(ringGather(kS, 64, kB, kAlpha)), 42.59, 0.005);
  EXPECT_NEAR(ms(ringGather(kS, 1024, kB, kAlpha)), 48.02, 0.005);
  EXPECT_NEAR(ms(halvingDoublingAllReduce(kS, 1024, kB, kAlpha)), 85.92, 0.005);
  EXPECT_NEAR(ms(doubleTreeAllReduce(kS, 1024, kB, kAlpha)), 86.00, 0.005);
  EXPECT_NEAR(ms(binomialAllReduce(kS, 1024, kB, kAlpha)), 859, 0.5);
  EXPECT_NEAR(ms(hierarchicalAllReduce(kS, 8, 128, 300e9, kB, kAlpha)), 18.26, 0.005);
  EXPECT_NEAR(ms(allToAll(kS, 1024, kB, 0)), 42.91, 0.005);
  EXPECT_NEAR(ms(pointToPoint(kS, kB, kAlpha)), 42.95, 0.01);
  // nccl-tests: busbw 400 GB/s on 8 ranks -> 4.698 ms, algbw 228.6.
  EXPECT_NEAR(ms(ringAllReduce(kS, 8, 400e9, 0)), 4.698, 0.001);
  EXPECT_NEAR(kS / ringAllReduce(kS, 8, 400e9, 0) * 1e-9, 228.6, 0.1);
  // Ring beats the tree only above S = n B (n - 1 - log2 n) alpha: n 64, 456 MB.
  const double crossing = 64 * kB * (63 - 6) * kAlpha;
  EXPECT_NEAR(crossing, 456e6, 1e6);
  EXPECT_NEAR(ringAllReduce(crossing, 64, kB, kAlpha) / doubleTreeAllReduce(crossing, 64, kB, kAlpha), 1,
              1e-9);
}

Fabric testFabric() {
  Fabric f;
  f.link_bandwidth = 235e9;
  f.link_latency = 3.4e-6;
  f.node_bandwidth = 180e9;
  f.nics = 8;
  f.nic_latency = 14e-6;
  f.start = 10e-6;
  f.fill = 50e-6;
  return f;
}

TEST(Collectives, NeverBeatTheLowerBounds) {
  std::mt19937 random(7);
  const Fabric f = testFabric();
  for (int i = 0; i < 500; ++i) {
    GroupPlacement at;
    at.per_node = 1 << random() % 4;
    at.nodes = 1 << random() % 8;
    at.ranks = at.per_node * at.nodes;
    at.node_sharers = 8 / at.per_node;
    if (at.ranks < 2) continue;
    const double bytes = std::exp2(10 + static_cast<double>(random() % 24));
    // No rank can send faster than its link, nor all ranks of a node faster than its NICs.
    double best = f.link_bandwidth;
    if (at.nodes > 1) best = std::min(f.node_bandwidth, at.per_node > 1 ? f.link_bandwidth : 1e300);
    const double n = at.ranks, seconds = collectiveSeconds(f, CommKind::AllReduce, bytes, at);
    EXPECT_GE(seconds, 2 * (n - 1) / n * bytes / best);
    EXPECT_GE(seconds, std::ceil(std::log2(n)) * f.link_latency);
    EXPECT_GE(collectiveSeconds(f, CommKind::AllGather, bytes, at), (n - 1) / n * bytes / best);
    // More bytes never take less time.
    EXPECT_GE(collectiveSeconds(f, CommKind::AllReduce, 2 * bytes, at), seconds);
  }
  EXPECT_EQ(collectiveSeconds(f, CommKind::AllReduce, kS, {}), 0);
}

TEST(Collectives, GroupsOfANodeShareItsNics) {
  const Fabric f = testFabric();
  GroupPlacement alone{16, 16, 1, 1}, shared{16, 16, 1, 8};
  // Eight data-parallel groups of a node, one rank each: every one gets an eighth of the NICs, which is one
  // NIC.
  EXPECT_NEAR(collectiveSeconds(f, CommKind::AllReduce, kS, shared),
              2 * 15.0 / 16 * kS / (f.node_bandwidth / 8), 1e-2);
  EXPECT_LE(collectiveSeconds(f, CommKind::AllReduce, kS, alone),
            collectiveSeconds(f, CommKind::AllReduce, kS, shared));
  // With half as many NICs, eight senders of a node take twice as long, one alone does not.
  Fabric half = f;
  half.nics = 4;
  half.node_bandwidth /= 2;
  const GroupPlacement pair{2, 2, 1, 8}, lone{2, 2, 1, 1};
  EXPECT_NEAR(
      collectiveSeconds(half, CommKind::Send, kS, pair) / collectiveSeconds(f, CommKind::Send, kS, pair), 2,
      1e-3);
  EXPECT_NEAR(
      collectiveSeconds(half, CommKind::Send, kS, lone) / collectiveSeconds(f, CommKind::Send, kS, lone), 1,
      1e-3);
}

TEST(Collectives, FollowTheMeasuredSweepOfA100) {
  // stas00/ml-engineering@744d01e18b network/README.md, nccl-tests all_reduce on 8 A100: bus bandwidth GB/s
  // by size.
  const GroupPlacement node{8, 1, 8, 1};
  for (const auto& [bytes, bus] : {std::pair(67108864.0, 171.54),
                                   {268435456.0, 194.07},
                                   {1073741824.0, 229.04},
                                   {17179869184.0, 234.89}}) {
    const double seconds = collectiveSeconds(testFabric(), CommKind::AllReduce, bytes, node);
    EXPECT_NEAR(1.75 * bytes / seconds * 1e-9 / bus, 1, 0.13) << bytes;
  }
}

}  // namespace
}  // namespace bmt::sim
