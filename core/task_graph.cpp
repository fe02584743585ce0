#include "core/task_graph.h"

#include <fmt/format.h>

namespace bmt {

std::string_view toString(Lane lane) {
  switch (lane) {
    case Lane::Compute:
      return "compute";
    case Lane::Tensor:
      return "tensor";
    case Lane::Data:
      return "data";
    case Lane::SendF:
      return "send_f";
    case Lane::RecvF:
      return "recv_f";
    case Lane::SendB:
      return "send_b";
    case Lane::RecvB:
      return "recv_b";
    case Lane::Copy:
      return "copy";
  }
  return "unknown";
}

std::string_view toString(CommKind kind) {
  switch (kind) {
    case CommKind::AllReduce:
      return "all_reduce";
    case CommKind::AllGather:
      return "all_gather";
    case CommKind::ReduceScatter:
      return "reduce_scatter";
    case CommKind::Send:
      return "send";
    case CommKind::Recv:
      return "recv";
    case CommKind::AllToAll:
      return "all_to_all";
    case CommKind::Shift:
      return "shift";
  }
  return "unknown";
}

std::string_view toString(TaskKind kind) {
  switch (kind) {
    case TaskKind::Forward:
      return "forward";
    case TaskKind::Backward:
      return "backward";
    case TaskKind::WeightGrad:
      return "weight_grad";
    case TaskKind::Recompute:
      return "recompute";
    case TaskKind::Head:
      return "head";
    case TaskKind::Optimizer:
      return "optimizer";
    case TaskKind::TensorComm:
      return "tensor_comm";
    case TaskKind::DataComm:
      return "data_comm";
    case TaskKind::PipeComm:
      return "pipe_comm";
    case TaskKind::ContextComm:
      return "context_comm";
    case TaskKind::ExpertComm:
      return "expert_comm";
  }
  return "unknown";
}

std::string_view toString(BufferKind kind) {
  switch (kind) {
    case BufferKind::Weights:
      return "weights";
    case BufferKind::Gradients:
      return "gradients";
    case BufferKind::Optimizer:
      return "optimizer";
    case BufferKind::Activations:
      return "activations";
    case BufferKind::Workspace:
      return "workspace";
    case BufferKind::Communication:
      return "communication";
    case BufferKind::Input:
      return "input";
  }
  return "unknown";
}

std::string taskName(const TaskGraph& graph, const RankProgram& program, TaskId id) {
  const Task& task = program.tasks[static_cast<std::size_t>(id)];
  const std::string slot = task.slot.phase == Phase::Step ? std::string("step") : toString(task.slot);
  const std::string layer = task.layer >= 0 ? fmt::format(" L{}", task.layer) : std::string();
  if (task.comm < 0) return fmt::format("{} {}{}", toString(task.kind), slot, layer);
  const Comm& comm = program.comms[static_cast<std::size_t>(task.comm)];
  if (comm.kind == CommKind::Send || comm.kind == CommKind::Recv) {
    return fmt::format("{} {} {} stage {}", toString(comm.kind), slot,
                       comm.kind == CommKind::Send ? "to" : "from", graph.mesh.coordOf(comm.peer).pp);
  }
  return fmt::format("{} {} {}{}", toString(comm.kind), toString(groupKind(comm.group)), slot, layer);
}

namespace {

class Fnv1a {
 public:
  void add(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < size; ++i) hash_ = (hash_ ^ bytes[i]) * 1099511628211ULL;
  }
  void text(const std::string& value) {
    number(static_cast<std::int64_t>(value.size()));
    add(value.data(), value.size());
  }
  void number(std::int64_t value) { add(&value, sizeof(value)); }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 14695981039346656037ULL;
};

}  // namespace

std::uint64_t graphHash(const TaskGraph& graph) {
  Fnv1a hash;
  ModelSpec m = graph.model;
  m.name.clear();  // may be a path
  hash.text(modelToJson(m));
  hash.text(planToText(graph.plan));
  hash.text(scheduleToText(makeSchedule(graph.plan)));
  hash.number(static_cast<std::int64_t>(graph.granularity));
  return hash.value();
}

}  // namespace bmt
