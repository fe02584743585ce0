// ClusterCosts: what every task costs on its own rank's device. One CostModel per node group, so a cluster of
// two device types is two groups and not another code path.
//   compute        by the rank's own group, times its slow-device factor
//   communication  the slowest view among the groups that its members sit in, times the largest factor of the
//                  members' links and, across nodes, of their nodes' NICs
//   jitter         every duration times exp(sigma z - sigma^2 / 2), z standard normal from a counter-based
//                  hash of (seed, draw, task): mean 1, the same for any number of threads
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "simulator/engine.h"

namespace bmt::sim {

class ClusterCosts {
 public:
  // One profile per node group. Throws Error{BadInput} as CostModel does.
  ClusterCosts(const TaskGraph& graph, const ClusterSpec& cluster,
               const std::vector<trace::CostProfile>& profiles);

  const std::vector<Resource>& resources() const { return resources_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  // Without slow devices and links, and with them.
  CostTable healthy() const;
  CostTable table() const;
  std::vector<CostPart> partsOf(RankId rank, SegmentId segment) const;

 private:
  std::size_t groupOf(RankId rank) const { return group_of_rank_[static_cast<std::size_t>(rank)]; }
  TaskCost communication(const RankProgram& program, const Comm& comm) const;
  double linkFactor(const Comm& comm) const;

  const TaskGraph& graph_;
  const ClusterSpec& cluster_;
  std::vector<std::unique_ptr<CostModel>> models_;
  std::vector<ResourceId> first_resource_;
  std::vector<std::size_t> group_of_rank_;
  std::vector<Resource> resources_;
  std::vector<std::string> warnings_;
};

// `costs` with one draw of jitter.
CostTable withJitter(const TaskGraph& graph, const CostTable& costs, double sigma, std::uint64_t seed,
                     std::int64_t draw);

}  // namespace bmt::sim
