#include "simulator/cluster_costs.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <tuple>

namespace bmt::sim {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): a hash of its counter, so draws need no order.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

double uniform(std::uint64_t bits) {  // (0, 1)
  return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
}

double standardNormal(std::uint64_t key) {  // Box and Muller 1958
  const double u = uniform(mix(key)), v = uniform(mix(key ^ 0xD1B54A32D192ED03ULL));
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

Ns scaled(Ns duration, double factor) {
  return factor == 1 ? duration : static_cast<Ns>(std::llround(static_cast<double>(duration) * factor));
}

}  // namespace

ClusterCosts::ClusterCosts(const TaskGraph& graph, const ClusterSpec& cluster,
                           const std::vector<trace::CostProfile>& profiles)
    : graph_(graph), cluster_(cluster) {
  BMT_CHECK(profiles.size() == cluster.groups.size(), "one profile per node group");
  for (std::size_t g = 0; g < profiles.size(); ++g) {
    models_.push_back(std::make_unique<CostModel>(graph, cluster, profiles[g], g));
    first_resource_.push_back(static_cast<ResourceId>(resources_.size()));
    resources_.insert(resources_.end(), models_[g]->resources().begin(), models_[g]->resources().end());
    for (const std::string& warning : models_[g]->warnings()) {
      if (std::find(warnings_.begin(), warnings_.end(), warning) == warnings_.end())
        warnings_.push_back(warning);
    }
    const NodeGroup& node = cluster.groups[g];
    group_of_rank_.insert(group_of_rank_.end(),
                          static_cast<std::size_t>(node.num_nodes * node.devices_per_node), g);
  }
}

std::vector<CostPart> ClusterCosts::partsOf(RankId rank, SegmentId segment) const {
  return models_[groupOf(rank)]->segmentParts(segment);
}

double ClusterCosts::linkFactor(const Comm& comm) const {
  if (cluster_.slow_links.empty()) return 1;
  const std::vector<RankId> members = graph_.mesh.members(comm.group);
  const std::int32_t first = cluster_.nodeOf(members.front());
  const bool across =
      std::any_of(members.begin(), members.end(), [&](RankId r) { return cluster_.nodeOf(r) != first; });
  double factor = 1;
  for (const SlowLink& link : cluster_.slow_links) {
    for (const RankId rank : members) {
      const bool hit = link.device >= 0 ? link.device == rank : across && link.node == cluster_.nodeOf(rank);
      if (hit) factor = std::max(factor, link.factor);
    }
  }
  return factor;
}

// The slowest of the device types that take part decides.
TaskCost ClusterCosts::communication(const RankProgram& program, const Comm& comm) const {
  const std::size_t own = groupOf(program.rank);
  TaskCost cost = models_[own]->communication(program, comm);
  if (models_.size() == 1) return cost;
  for (const RankId member : graph_.mesh.members(comm.group)) {
    const std::size_t other = groupOf(member);
    if (other != own)
      cost.duration = std::max(cost.duration, models_[other]->communication(program, comm).duration);
  }
  return cost;
}

CostTable ClusterCosts::healthy() const {
  CostTable costs(graph_.ranks.size());
  for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
    const RankProgram& program = graph_.ranks[r];
    const std::size_t own = groupOf(program.rank);
    costs[r].reserve(program.tasks.size());
    // A rank repeats few different communications, one per micro-batch and layer: each is priced once.
    // Neither sequence number nor buffers change the cost.
    std::map<std::tuple<CommKind, GroupId, std::int64_t, DType>, TaskCost> known;
    for (const Task& task : program.tasks) {
      TaskCost cost;
      if (task.comm < 0) {
        cost = models_[own]->compute(program, task);
      } else {
        const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
        const auto [entry, inserted] = known.try_emplace({comm.kind, comm.group, comm.count, comm.dtype});
        if (inserted) entry->second = communication(program, comm);
        cost = entry->second;
      }
      if (cost.use.resource >= 0) cost.use.resource += first_resource_[own];
      costs[r].push_back(cost);
    }
  }
  return costs;
}

CostTable ClusterCosts::table() const {
  CostTable costs = healthy();
  if (cluster_.slow_devices.empty() && cluster_.slow_links.empty()) return costs;
  for (std::size_t r = 0; r < graph_.ranks.size(); ++r) {
    const RankProgram& program = graph_.ranks[r];
    double device = 1;
    for (const SlowDevice& slow : cluster_.slow_devices) {
      if (slow.device == program.rank) device *= slow.factor;
    }
    for (std::size_t t = 0; t < program.tasks.size(); ++t) {
      const std::int32_t comm = program.tasks[t].comm;
      costs[r][t].duration =
          scaled(costs[r][t].duration,
                 comm < 0 ? device : linkFactor(program.comms[static_cast<std::size_t>(comm)]));
    }
  }
  return costs;
}

CostTable withJitter(const TaskGraph& graph, const CostTable& costs, double sigma, std::uint64_t seed,
                     std::int64_t draw) {
  CostTable drawn = costs;
  const std::uint64_t base = mix(mix(seed) ^ static_cast<std::uint64_t>(draw));
  for (std::size_t r = 0; r < graph.ranks.size(); ++r) {
    const RankProgram& program = graph.ranks[r];
    for (std::size_t t = 0; t < program.tasks.size(); ++t) {
      // All members of a communication draw alike.
      std::uint64_t key = (static_cast<std::uint64_t>(program.rank) << 32) | t;
      if (program.tasks[t].comm >= 0) {
        const Comm& comm = program.comms[static_cast<std::size_t>(program.tasks[t].comm)];
        key = mix(comm.seq) ^ (static_cast<std::uint64_t>(comm.group) << 1) ^ (1ULL << 63);
      }
      const double z = standardNormal(base ^ mix(key));
      drawn[r][t].duration = scaled(drawn[r][t].duration, std::exp(sigma * z - sigma * sigma / 2));
    }
  }
  return drawn;
}

}  // namespace bmt::sim
