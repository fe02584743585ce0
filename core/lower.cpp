// Entry points: checks the inputs, builds the shared blocks once, emits every rank's program and places its
// buffers.
#include "core/lower.h"

#include <map>

#include "core/lower_rank.h"
#include "core/memory_plan.h"

namespace bmt {

TaskGraph lower(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
                const std::vector<RankId>& ranks, Granularity granularity) {
  BMT_CHECK(validatePlan(model, cluster, plan).empty(), formatIssues(validatePlan(model, cluster, plan)));
  TaskGraph graph;
  graph.model = model;
  graph.plan = plan;
  graph.mesh = Mesh(plan);
  graph.granularity = granularity;
  graph.scalars.num_slots = 1 + model.layers + 2;
  Library library(graph);
  // Replicas with unequal shares of the batch follow the same schedule with their own number of
  // micro-batches.
  struct Order {
    Schedule schedule;
    std::vector<std::vector<ReceiveAt>> receives;
  };
  std::map<std::int64_t, Order> orders;
  for (const RankId rank : ranks) {
    const std::int64_t microbatches = plan.microbatchesOf(graph.mesh.coordOf(rank).dp);
    const auto [order, missing] = orders.try_emplace(microbatches);
    if (missing) {
      Plan replica = plan;
      replica.batch_shares.clear();
      replica.global_batch = microbatches * plan.micro_batch * plan.dp;
      order->second.schedule = makeSchedule(replica);
      order->second.receives =
          receiveOrder(order->second.schedule, receivesAsPlayed(plan.schedule, plan.chunks));
    }
    graph.ranks.push_back(
        RankLowerer(graph, library, order->second.schedule, order->second.receives, rank).run());
    planMemory(graph.ranks.back());
  }
  return graph;
}

TaskGraph lower(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan, RankSelection selection,
                Granularity granularity) {
  const Mesh mesh(plan);
  std::vector<RankId> ranks;
  for (RankId rank = 0; rank < mesh.numRanks(); ++rank) {
    const Coord c = mesh.coordOf(rank);
    if (selection == RankSelection::All || (c.dp == 0 && c.tp == 0 && c.cp == 0)) ranks.push_back(rank);
  }
  TaskGraph graph = lower(model, cluster, plan, ranks, granularity);
  graph.selection = selection;
  return graph;
}

}  // namespace bmt
