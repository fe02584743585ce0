#include "simulator/cost_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace bmt::sim {
namespace {

bool samePeer(CommKind kind) {
  return kind == CommKind::Send || kind == CommKind::Recv;
}

}  // namespace

CommShape commShape(CommKind kind, double full_bytes, std::int64_t n, bool threads) {
  const double size = static_cast<double>(n), share = (size - 1) / size;
  switch (kind) {
    case CommKind::AllReduce:
      return {2 * share * full_bytes, threads ? 3 : 2 * (size - 1)};
    case CommKind::AllGather:
    case CommKind::ReduceScatter:
      return {share * full_bytes, threads ? 2 : size - 1};
    case CommKind::AllToAll:  // every rank keeps its own part
      return {share * full_bytes, threads ? 2.0 : 1.0};
    case CommKind::Send:
    case CommKind::Recv:
    case CommKind::Shift:
      return {full_bytes, threads ? 2.0 : 1.0};
  }
  return {};
}

CostModel::CostModel(const TaskGraph& graph, const ClusterSpec& cluster, const trace::CostProfile& profile,
                     std::size_t group)
    : graph_(graph), cluster_(cluster), profile_(profile), node_(cluster.groups.at(group)) {
  const NodeGroup& node = node_;
  for (std::size_t g = 0; g < group; ++g)
    first_rank_ += cluster.groups[g].num_nodes * cluster.groups[g].devices_per_node;
  cpu_ = node.device.kind == DeviceKind::Cpu;
  checkPeaks(node.device);
  for (int kind = 0; kind < kNumOpKinds; ++kind)
    fits_[static_cast<std::size_t>(kind)] = trace::findOp(profile, static_cast<OpKind>(kind));
  if (cpu_) {
    const double cores = profile.cores > 0 ? profile.cores : node.cores_per_node;
    if (!(cores > 0))
      throw Error(ErrorKind::BadInput, "neither the profile nor the cluster says how many cores a node has");
    for (std::int32_t n = 0; n < cluster.numNodes(); ++n)
      resources_.push_back({ResourceKind::Cores, n, cores / (1 + profile.contention)});
  } else {
    for (RankId rank = 0; rank < graph.mesh.numRanks(); ++rank)
      resources_.push_back({ResourceKind::Device, rank, 1.0});
  }
  if (!cpu_) {
    context_ = {graph.plan.attention, graph.plan.pointwise, graph.model.dropout};
    // A profile of measured op kinds alone says nothing of links: those come from the datasheet.
    const trace::GpuConstants gpu = profile.gpu ? *profile.gpu : *trace::datasheetProfile(node.device).gpu;
    if (!profile.gpu) warnings_.push_back("link and NIC efficiencies are assumed: the profile has none");
    if (graph.plan.dp > 1 && graph.plan.overlap_grad) compute_share_ = gpu.comm_share;
    fabric_ = makeFabric(node, cluster.oversubscription, gpu);
  }
  if (!profile.measured) warnings_.push_back("costs are assumed, not measured: " + profile.source);
  if (!node.device.executed)
    warnings_.push_back(node.device.name + " is simulated only; plans are not executed on it");
  segment_seconds_.reserve(graph.segments.size());
  for (const Segment& segment : graph.segments) segment_seconds_.push_back(segmentSeconds(segment));
}

void CostModel::checkPeaks(const DeviceSpec& device) const {
  const double peak = cpu_ ? profile_.core_peak_flops : peakFlops(device, graph_.plan.precision);
  if (!cpu_ && !(peak > 0))
    throw Error(ErrorKind::BadInput,
                fmt::format("{} has no {} units; choose a precision it supports", device.name,
                            toString(graph_.plan.precision)),
                "plan.precision");
  if (profile_.gpu && profile_.gpu->matmul_16 > peakFlops(device, DType::BF16) &&
      profile_.gpu->matmul_16 > peakFlops(device, DType::F16))
    throw Error(
        ErrorKind::BadInput,
        fmt::format("16-bit products at {} are above the peak of {}: a prediction above 100 % of peak is "
                    "refused; mend the profile",
                    formatRate(profile_.gpu->matmul_16, "FLOP"), device.name),
        "profile " + profile_.name);
  for (const trace::OpFit& fit : profile_.ops) {
    if (isMatrixProduct(fit.kind) && peak > 0 && fit.flops_per_s > peak)
      throw Error(
          ErrorKind::BadInput,
          fmt::format("{} at {} is above the peak of {} ({}): a prediction above 100 % of peak is refused; "
                      "calibrate again or mend the profile",
                      toString(fit.kind), formatRate(fit.flops_per_s, "FLOP"), device.name,
                      formatRate(peak, "FLOP")),
          "profile " + profile_.name);
  }
}

double CostModel::opSeconds(const OpCall& call) const {
  if (profile_.gpu) return gpuOpTime(*profile_.gpu, context_, call).device_s;
  const Op& op = call.op;
  const trace::OpFit* const fit = fits_[static_cast<std::size_t>(op.kind)];
  if (fit == nullptr)
    throw Error(ErrorKind::BadInput, fmt::format("has no cost for {}; calibrate again", toString(op.kind)),
                "profile " + profile_.name);
  double seconds = fit->overhead_s;
  if (fit->flops_per_s > 0) seconds += flops(op) / fit->flops_per_s;
  if (fit->bytes_per_s > 0) seconds += bytesMoved(op) / fit->bytes_per_s;
  return seconds;
}

double CostModel::segmentSeconds(const Segment& segment) const {
  double seconds = profile_.task_overhead_s, calls = 0;
  std::vector<double> until(segment.ops.size() + 1, 0);  // one repetition of the ops before each
  for (std::size_t i = 0; i < segment.ops.size(); ++i) {
    const double times = segment.repeat.empty() ? 1 : static_cast<double>(segment.repeat[i]);
    double each = 0;
    if (profile_.gpu) {
      const OpTime time = gpuOpTime(*profile_.gpu, context_, segment.ops[i]);
      each = time.device_s;
      calls += times * time.calls;
    } else {
      each = opSeconds(segment.ops[i]);
    }
    seconds += times * each;
    until[i + 1] = until[i] + each;
  }
  for (const MergedComm& comm : segment.comms) {
    const std::vector<RankId> members = graph_.mesh.members(graph_.mesh.groupOf(comm.group, first_rank_));
    double each = profile_.task_overhead_s +
                  collectiveSeconds(comm.kind, static_cast<double>(comm.count * sizeOf(comm.dtype)), members);
    if (comm.beside >= 0)
      each = std::max(0.0, each - (until[static_cast<std::size_t>(comm.beside_end)] -
                                   until[static_cast<std::size_t>(comm.beside)]));
    seconds += static_cast<double>(comm.times) * each;
  }
  // Ops and communication shorter than the host needs to issue them run at the host's pace.
  return profile_.gpu ? std::max(seconds, calls * profile_.gpu->host_s) : seconds;
}

std::vector<CostPart> CostModel::segmentParts(SegmentId id) const {
  const Segment& segment = graph_.segments[static_cast<std::size_t>(id)];
  std::vector<CostPart> parts;
  double known = 0;
  std::vector<double> until(segment.ops.size() + 1, 0);  // as in segmentSeconds
  trace::GpuConstants gapless = profile_.gpu.value_or(trace::GpuConstants{});
  gapless.launch_s = 0;
  for (std::size_t i = 0; i < segment.ops.size(); ++i) {
    const double times = segment.repeat.empty() ? 1 : static_cast<double>(segment.repeat[i]);
    const OpCall& call = segment.ops[i];
    until[i + 1] = until[i] + opSeconds(call);
    double seconds = profile_.gpu ? gpuOpTime(gapless, context_, call).device_s : opSeconds(call);
    if (!profile_.gpu) seconds -= fits_[static_cast<std::size_t>(call.op.kind)]->overhead_s;
    parts.push_back({CostPart::Work, call.op.kind, GroupKind::Tensor, times * seconds});
    known += times * seconds;
  }
  for (const MergedComm& comm : segment.comms) {
    const std::vector<RankId> members = graph_.mesh.members(graph_.mesh.groupOf(comm.group, first_rank_));
    double each = collectiveSeconds(comm.kind, static_cast<double>(comm.count * sizeOf(comm.dtype)), members);
    if (comm.beside >= 0)
      each = std::max(0.0, each + profile_.task_overhead_s -
                               (until[static_cast<std::size_t>(comm.beside_end)] -
                                until[static_cast<std::size_t>(comm.beside)]));
    const double seconds = static_cast<double>(comm.times) * each;
    parts.push_back({CostPart::Communication, OpKind::Zero, comm.group, seconds});
    known += seconds;
  }
  const double rest = segment_seconds_[static_cast<std::size_t>(id)] - known;
  parts.push_back({CostPart::Launch, OpKind::Zero, GroupKind::Tensor, std::max(0.0, rest)});
  return parts;
}

double CostModel::cpuCollectiveSeconds(CommKind kind, double bytes, std::int64_t n) const {
  // Fitted kinds cover what the communicator does; a receive is measured as a send.
  const CommKind fitted = kind == CommKind::Recv ? CommKind::Send : kind;
  const trace::CommFit* const fit = trace::findComm(profile_, fitted, "threads");
  if (fit == nullptr || !(fit->bytes_per_s > 0))
    throw Error(ErrorKind::BadInput,
                fmt::format("has no cost for {} between threads; calibrate again", toString(fitted)),
                "profile " + profile_.name);
  const CommShape shape = commShape(kind, bytes, n, true);
  return shape.steps * fit->alpha_s + shape.bytes / fit->bytes_per_s;
}

double CostModel::collectiveSeconds(CommKind kind, double bytes, const std::vector<RankId>& members) const {
  const auto n = static_cast<std::int64_t>(members.size());
  if (n <= 1) return 0;
  if (cpu_) return cpuCollectiveSeconds(kind, bytes, n);
  GroupPlacement at;
  at.ranks = static_cast<double>(n);
  const std::int32_t first = cluster_.nodeOf(members.front());
  std::int32_t last = first, in_first = 0, nodes = 1;
  for (const RankId rank : members) {
    const std::int32_t node = cluster_.nodeOf(rank);
    nodes += node != last ? 1 : 0;
    last = node;
    in_first += node == first ? 1 : 0;
  }
  at.nodes = nodes;
  at.per_node = in_first;
  // Every rank of a node belongs to one such group, all running at the same time: each gets its ranks' share
  // of the node's NICs.
  const double per_node = samePeer(kind) ? 1 : in_first;
  at.node_sharers = std::max(1.0, node_.devices_per_node / per_node);
  return sim::collectiveSeconds(fabric_, kind, bytes, at);
}

TaskCost CostModel::compute(const RankProgram& program, const Task& task) const {
  TaskCost cost;
  cost.duration = fromSeconds(segment_seconds_[static_cast<std::size_t>(task.segment)]);
  if (cpu_) cost.use = {cluster_.nodeOf(program.rank), 1.0};
  // A collective beside compute takes some of the device's SMs and memory bandwidth: both then run at 1 / (1
  // + share) of their speed (measured so by Hetu-Galvatron). Only plans that overlap need the resource.
  if (!cpu_ && compute_share_ > 0) cost.use = {program.rank, compute_share_};
  return cost;
}

TaskCost CostModel::communication(const RankProgram& program, const Comm& comm) const {
  const std::vector<RankId> members = graph_.mesh.members(comm.group);
  TaskCost cost;
  const double bytes = static_cast<double>(comm.bytes());
  double seconds = collectiveSeconds(comm.kind, bytes, members);
  const Plan& plan = graph_.plan;
  if (!cpu_ && samePeer(comm.kind) && plan.tp > 1 && !plan.sequence_parallel) {
    // Tensor ranks hold the same activations: each sends its part and the receivers gather over their links
    // (Narayanan et al. 2021, scatter/gather; DeepSpeed partitions likewise).
    const std::vector<RankId> tensor =
        graph_.mesh.members(graph_.mesh.groupOf(GroupKind::Tensor, members.back()));
    seconds = std::min(seconds, collectiveSeconds(comm.kind, bytes / plan.tp, members) +
                                    collectiveSeconds(CommKind::AllGather, bytes, tensor));
  }
  cost.duration = fromSeconds(seconds + profile_.task_overhead_s);
  if (cpu_) {
    // Each member copies on its own thread; a sender only waits.
    if (comm.kind != CommKind::Send) cost.use = {cluster_.nodeOf(program.rank), 1.0};
  } else {
    // One collective at a time fills a rank's links; a send and a receive go opposite ways.
    cost.use = {program.rank, samePeer(comm.kind) ? 0.5 : 1.0};
  }
  return cost;
}

}  // namespace bmt::sim
