// CostModel: what a task costs alone on its cluster, and which shared resources it uses meanwhile.
//   compute: sum over the segment's ops of (overhead + flops / rate + bytes / bandwidth), plus the profile's
//   task overhead collectives, n ranks, S bytes of full buffer, B bytes/s per rank, alpha per step (Thakur,
//   Rabenseifner, Gropp 2005):
//     ring all-reduce 2(n-1)/n S/B + 2(n-1) alpha;  all-gather, reduce-scatter (n-1)/n S/B + (n-1) alpha; p2p
//     S/B + alpha threads of one process: the same bytes, but 3 (all-reduce) or 2 barriers instead of the
//     ring's steps
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/cluster_spec.h"
#include "core/task_graph.h"
#include "simulator/gpu_cost.h"
#include "simulator/network.h"
#include "traces/cost_profile.h"

namespace bmt::sim {

enum class ResourceKind : std::uint8_t {
  Device,  // per rank: the lanes of one GPU share its links (capacity 1)
  Cores    // per CPU node: the cores that all its ranks share
};

using ResourceId = std::int32_t;
struct Resource {
  ResourceKind kind = ResourceKind::Device;
  std::int32_t owner = 0;  // rank or node
  double capacity = 1;
};

// `demand` of a resource while the task runs at full speed.
struct Use {
  ResourceId resource = -1;
  double demand = 0;
};
// A piece of what a compute task is charged.
struct CostPart {
  enum Kind : std::uint8_t { Work, Launch, Communication } kind = Work;
  OpKind op = OpKind::Zero;             // Work
  GroupKind group = GroupKind::Tensor;  // Communication merged into the task (Stage granularity)
  double seconds = 0;
};
struct TaskCost {
  Ns duration = 0;
  Use use;  // at most one shared resource per member of a task
};

// Bytes a rank sends and the steps of the algorithm for a collective of n ranks.
struct CommShape {
  double bytes = 0, steps = 0;
};
CommShape commShape(CommKind kind, double full_bytes, std::int64_t n, bool threads);

class CostModel {
 public:
  // Costs as the devices of node group `group` see them; `profile` describes them (cluster_costs.h joins the
  // groups of a heterogeneous cluster). Throws Error{BadInput} when the profile promises more than the
  // device's peak.
  CostModel(const TaskGraph& graph, const ClusterSpec& cluster, const trace::CostProfile& profile,
            std::size_t group = 0);

  const std::vector<Resource>& resources() const { return resources_; }
  TaskCost compute(const RankProgram& program, const Task& task) const;
  // One member's view of a communication; all members have the same duration.
  TaskCost communication(const RankProgram& program, const Comm& comm) const;
  // What was assumed or missing, for the report.
  const std::vector<std::string>& warnings() const { return warnings_; }
  bool cpu() const { return cpu_; }

  // One op alone; on a GPU without the host's pace, which binds per segment.
  double opSeconds(const OpCall& call) const;
  // What the segment's seconds are made of: ops without their launch gaps, merged collectives, and launch:
  // gaps between kernels, the host's pace and the task's overhead. Adds up to what compute() charges.
  std::vector<CostPart> segmentParts(SegmentId segment) const;

 private:
  double cpuCollectiveSeconds(CommKind kind, double bytes, std::int64_t n) const;
  double collectiveSeconds(CommKind kind, double bytes, const std::vector<RankId>& members) const;
  double segmentSeconds(const Segment& segment) const;
  void checkPeaks(const DeviceSpec& device) const;

  const TaskGraph& graph_;
  const ClusterSpec& cluster_;
  const trace::CostProfile& profile_;
  const NodeGroup& node_;
  RankId first_rank_ = 0;  // the group's first: its tensor group stands for those of merged collectives
  bool cpu_ = false;
  double compute_share_ = 0;  // of the device's resource that compute needs; 0 = nothing runs beside it
  KernelContext context_;
  Fabric fabric_;
  std::vector<Resource> resources_;
  std::vector<double> segment_seconds_;
  std::array<const trace::OpFit*, kNumOpKinds> fits_{};
  std::vector<std::string> warnings_;
};

}  // namespace bmt::sim
