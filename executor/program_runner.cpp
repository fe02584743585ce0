#include "executor/program_runner.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace bmt::exec {
namespace {

constexpr int kPoison = 0xFF;  // four of them are a NaN, and no computed float

}  // namespace

ProgramRunner::ProgramRunner(const TaskGraph& graph, const RankProgram& program, Backend& backend,
                             Communicator& communicator, MidStep mid_step)
    : graph_(graph), program_(program), backend_(backend), communicator_(communicator) {
  arena_ = static_cast<char*>(backend_.allocate(program_.arena));
  capture(mid_step);
}

ProgramRunner::~ProgramRunner() {
  backend_.beginCapture(0);  // drops the commands that point into the arena
  backend_.release(arena_);
}

void* ProgramRunner::data(BufferId buffer) const {
  BMT_CHECK(buffer >= 0, "this rank has no such buffer");
  return arena_ + program_.buffers[static_cast<std::size_t>(buffer)].offset;
}

void* ProgramRunner::resolve(const Arg& arg) {
  if (arg.buffer < 0) return nullptr;
  const Buffer& buffer = program_.buffers[static_cast<std::size_t>(arg.buffer)];
  return arena_ + buffer.offset + arg.offset;
}

void ProgramRunner::captureOps(const Task& task) {
  const auto bindings = program_.bindingsOf(task);
  for (const OpCall& call : graph_.segments[static_cast<std::size_t>(task.segment)].ops) {
    OperandPointers pointers{};
    for (std::size_t i = 0; i < call.operands.size(); ++i) {
      const Operand& operand = call.operands[i];
      if (operand.region == Region::None) continue;
      Arg arg = bindings[static_cast<std::size_t>(operand.region)];
      arg.offset += operand.offset;
      pointers[i] = resolve(arg);
    }
    backend_.launch(task.lane, call.op, pointers);
  }
}

void ProgramRunner::capture(const MidStep& mid_step) {
  backend_.beginCapture(static_cast<std::int32_t>(program_.tasks.size()) * 2);
  std::int32_t order = 0;
  auto middle = static_cast<TaskId>(program_.tasks.size() / 2);
  for (TaskId t = 0; t < static_cast<TaskId>(program_.tasks.size()); ++t) {
    const Task& task = program_.tasks[static_cast<std::size_t>(t)];
    for (const TaskId dep : program_.depsOf(task)) backend_.wait(task.lane, endEvent(dep));
    if (mid_step && task.lane == Lane::Compute && t >= middle) {
      backend_.enqueue(Lane::Compute, [mid_step, name = taskName(graph_, program_, t)] { mid_step(name); });
      middle = static_cast<TaskId>(program_.tasks.size());
    }
    backend_.record(task.lane, startEvent(t));
    if (task.comm < 0) {
      captureOps(task);
    } else {
      const Comm& comm = program_.comms[static_cast<std::size_t>(task.comm)];
      CommCall call;
      call.kind = comm.kind;
      call.group = comm.group;
      call.seq = comm.seq;
      call.members = graph_.mesh.members(comm.group);
      const auto self = std::find(call.members.begin(), call.members.end(), program_.rank);
      BMT_CHECK(self != call.members.end(), "rank is not a member of its group");
      call.index = static_cast<std::int32_t>(self - call.members.begin());
      call.count = comm.count;
      call.dtype = comm.dtype;
      call.src = resolve(comm.src);
      call.dst = resolve(comm.dst);
      call.order = order++;
      call.name = taskName(graph_, program_, t);
      communicator_.run(task.lane, call);
    }
    backend_.record(task.lane, endEvent(t));
  }
  backend_.endCapture();
}

std::vector<trace::Span> ProgramRunner::spans() const {
  std::vector<trace::Span> spans;
  spans.reserve(program_.tasks.size());
  std::int32_t order = 0;
  for (TaskId t = 0; t < static_cast<TaskId>(program_.tasks.size()); ++t) {
    const Task& task = program_.tasks[static_cast<std::size_t>(t)];
    trace::Span span;
    span.rank = program_.rank;
    span.task = t;
    span.lane = task.lane;
    span.kind = task.kind;
    span.slot = task.slot;
    span.layer = task.layer;
    span.start = span.posted = backend_.timeOf(startEvent(t));
    span.end = backend_.timeOf(endEvent(t));
    if (task.comm >= 0) {
      span.posted = communicator_.postedAt(order);
      span.start = communicator_.startedAt(order);
      span.bytes = program_.comms[static_cast<std::size_t>(task.comm)].bytes();
      ++order;
    }
    spans.push_back(span);
  }
  return spans;
}

std::vector<Bytes> ProgramRunner::commBytes() const {
  std::vector<Bytes> bytes(kNumTaskKinds, 0);
  for (const Task& task : program_.tasks) {
    if (task.comm < 0) continue;
    const Comm& comm = program_.comms[static_cast<std::size_t>(task.comm)];
    const auto n = static_cast<Bytes>(graph_.mesh.members(comm.group).size());
    Bytes& sum = bytes[static_cast<std::size_t>(task.kind)];
    switch (comm.kind) {
      case CommKind::AllReduce:
        sum += 2 * comm.bytes() * (n - 1) / n;
        break;
      case CommKind::AllGather:
      case CommKind::ReduceScatter:
        sum += comm.bytes() * (n - 1) / n;
        break;
      case CommKind::AllToAll:
        sum += comm.bytes() * (n - 1) / n;
        break;
      case CommKind::Send:
      case CommKind::Shift:
        sum += comm.bytes();
        break;
      case CommKind::Recv:
        break;
    }
  }
  return bytes;
}

Bytes ProgramRunner::persistentEnd() const {
  Bytes end = 0;
  for (const Buffer& buffer : program_.buffers) {
    if (buffer.persistent) end = std::max(end, roundUp(buffer.offset + buffer.bytes, kArenaAlignment));
  }
  return end;
}

void ProgramRunner::poison() {
  const Bytes first = persistentEnd();
  std::memset(arena_ + first, kPoison, static_cast<std::size_t>(program_.arena - first));
}

Bytes ProgramRunner::touchedHighWater() const {
  const Bytes first = persistentEnd();
  Bytes end = program_.arena;
  while (end > first && static_cast<unsigned char>(arena_[end - 1]) == kPoison) --end;
  return roundUp(end, kArenaAlignment);
}

}  // namespace bmt::exec
