// Walks a stage's slots: tasks, activations and pipeline communication, at Layer and at Stage granularity.
#include "core/lower_rank.h"

namespace bmt {

TaskId RankLowerer::addTask(Task task, const std::vector<TaskId>& deps) {
  task.first_dep = static_cast<std::int32_t>(program_.deps.size());
  for (const TaskId dep : deps) {
    if (dep < 0 || program_.tasks[static_cast<std::size_t>(dep)].lane == task.lane) continue;
    program_.deps.push_back(dep);
  }
  task.num_deps = static_cast<std::int32_t>(program_.deps.size()) - task.first_dep;
  program_.tasks.push_back(task);
  return nextTask() - 1;
}

TaskId RankLowerer::addCompute(TaskKind kind, const Slot& slot, std::int32_t layer, SegmentId segment,
                               const Bindings& bindings, const std::vector<TaskId>& deps) {
  Task task;
  task.kind = kind;
  task.slot = slot;
  task.layer = layer;
  task.segment = segment;
  if (!staged_) {
    task.first_binding = static_cast<std::int32_t>(program_.bindings.size());
    program_.bindings.insert(program_.bindings.end(), bindings.begin(), bindings.end());
  }
  for (const Arg& arg : bindings) touch(arg.buffer, nextTask());
  last_compute_ = addTask(task, deps);
  return last_compute_;
}

TaskId RankLowerer::addComm(TaskKind kind, Lane lane, const Slot& slot, std::int32_t layer, const Comm& comm,
                            const std::vector<TaskId>& deps) {
  Task task;
  task.kind = kind;
  task.lane = lane;
  task.slot = slot;
  task.layer = layer;
  task.comm = static_cast<std::int32_t>(program_.comms.size());
  program_.comms.push_back(comm);
  touch(comm.src.buffer, nextTask());
  touch(comm.dst.buffer, nextTask());
  const TaskId id = addTask(task, deps);
  if (lane == Lane::Compute) last_compute_ = id;
  return id;
}

Bindings RankLowerer::baseBindings(const Placed& placed, std::int32_t microbatch) {
  Bindings bindings;
  const RankProgram& p = program_;
  bind(bindings, Region::Weight) = {p.weights, weightBytes(placed.offset)};
  bind(bindings, Region::Grad) = {p.gradients, gradBytes(placed.offset)};
  if (placed.block->expert_elements > 0) {
    bind(bindings, Region::Expert) = {p.weights, weightBytes(placed.expert_offset)};
    bind(bindings, Region::ExpertGrad) = {p.gradients, gradBytes(placed.expert_offset)};
  }
  const BlockShape shape = makeBlockShape(model_, plan_, 0);
  if (placed.kind == BlockKind::Embedding)
    bind(bindings, Region::Tokens) = {p.tokens, inputBytes(shape) * microbatch};
  if (placed.kind == BlockKind::Head) {
    bind(bindings, Region::Targets) = {p.targets, targetElements(shape) * sizeOf(DType::I32) * microbatch};
    bind(bindings, Region::Scalars) = {p.scalars, 0};
    if (tiedOnRank()) {
      bind(bindings, Region::Tied) = {p.weights, weightBytes(blocksOf(0).front().offset)};
      bind(bindings, Region::TiedGrad) = {tied_grad_, 0};
    }
  }
  return bindings;
}

std::uint64_t RankLowerer::tensorSeq(const Slot& slot, bool recompute, std::int32_t block_index,
                                     std::size_t piece) const {
  std::uint64_t seq = static_cast<std::uint64_t>(slot.phase) * 2 + (recompute ? 1 : 0);
  const auto push = [&seq](std::uint64_t radix, std::uint64_t digit) { seq = seq * radix + digit; };
  push(static_cast<std::uint64_t>(plan_.chunks), static_cast<std::uint64_t>(slot.chunk));
  push(static_cast<std::uint64_t>(num_microbatches_), static_cast<std::uint64_t>(slot.microbatch));
  push(static_cast<std::uint64_t>(model_.layers) + 2, static_cast<std::uint64_t>(block_index));
  push(std::uint64_t{1} << 24, piece);
  return seq;
}

void RankLowerer::emitPieces(const Placed& placed, Part part, TaskKind kind, const Slot& slot,
                             const Bindings& bindings, const std::vector<TaskId>& before) {
  const std::vector<Piece>& pieces = Library::pieces(*placed.block, part);
  std::vector<TaskId> emitted(pieces.size(), -1);
  bool computed = false;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    // Until something runs on the compute lane, nothing carries on what the block waits for.
    std::vector<TaskId> deps;
    if (!computed) deps = before;
    const bool beside = piece.is_comm && piece.comm.overlapped;
    if (!computed && beside) deps.push_back(last_compute_);
    computed = computed || !beside;
    for (const std::int32_t earlier : piece.after) deps.push_back(emitted[static_cast<std::size_t>(earlier)]);
    if (!piece.is_comm) {
      emitted[i] =
          addCompute(kind, slot, placed.layer, library_.segmentOf(placed.block, part, i), bindings, deps);
    } else {
      const auto resolve = [&bindings](Operand operand) {
        Arg arg = bindings[static_cast<std::size_t>(operand.region)];
        arg.offset += operand.offset;
        return arg;
      };
      Comm comm;
      comm.kind = piece.comm.kind;
      comm.group = graph_.mesh.groupOf(piece.comm.group, program_.rank);
      comm.seq = tensorSeq(slot, kind == TaskKind::Recompute, placed.index, i);
      comm.count = piece.comm.count;
      comm.dtype = piece.comm.dtype;
      comm.src = resolve(piece.comm.src);
      comm.dst = resolve(piece.comm.dst);
      const TaskKind axis = piece.comm.group == GroupKind::Context  ? TaskKind::ContextComm
                            : piece.comm.group == GroupKind::Expert ? TaskKind::ExpertComm
                                                                    : TaskKind::TensorComm;
      emitted[i] =
          addComm(axis, piece.comm.overlapped ? Lane::Tensor : Lane::Compute, slot, placed.layer, comm, deps);
    }
  }
}

Comm RankLowerer::pipeComm(CommKind kind, bool forward, std::int32_t boundary, const Slot& slot,
                           BufferId buffer) const {
  // boundary = virtual stage that receives.
  const bool send = kind == CommKind::Send;
  const std::int32_t sender = forward ? boundary - 1 : boundary + 1;
  Coord peer = program_.coord;
  peer.pp = holderOf(send ? boundary : sender);
  // On the way back of a V, forwards go to the previous rank and backwards to the next.
  const bool next = (placement_ == Placement::V && slot.chunk == 1) != forward;
  Comm comm;
  comm.kind = kind;
  comm.peer = graph_.mesh.rankOf(peer);
  comm.group =
      packGroup(next ? GroupKind::ForwardPair : GroupKind::BackwardPair, send ? program_.rank : comm.peer);
  comm.seq = static_cast<std::uint64_t>(boundary) * static_cast<std::uint64_t>(num_microbatches_) +
             static_cast<std::uint64_t>(slot.microbatch);
  comm.count = streamElements();
  comm.dtype = plan_.precision;
  (send ? comm.src : comm.dst) = {buffer, 0};
  return comm;
}

BufferId RankLowerer::activations() {
  return addBuffer(BufferKind::Activations, streamElements() * sizeOf(plan_.precision));
}

void RankLowerer::receiveFor(const Slot& slot) {
  InFlight& flight = inFlight(slot);
  const std::int32_t v = virtualStage(slot.chunk), rank = program_.coord.pp;
  if (slot.phase == Phase::F && !firstStage(slot.chunk) && holderOf(v - 1) != rank) {
    flight.inputs.assign(blocksOf(slot.chunk).size() + 1, -1);
    flight.inputs[0] = activations();
    const Comm comm = pipeComm(CommKind::Recv, true, v, slot, flight.inputs[0]);
    flight.recv_f = addComm(TaskKind::PipeComm, Lane::RecvF, slot, -1, comm, {});
  } else if (slot.phase == Phase::B && !lastStage(slot.chunk) && holderOf(v + 1) != rank) {
    receiveGradient(flight, slot.chunk, activations());
    const Comm comm = pipeComm(CommKind::Recv, false, v, slot, flight.grads.back());
    flight.recv_b = addComm(TaskKind::PipeComm, Lane::RecvB, slot, -1, comm, {});
  }
}

void RankLowerer::receiveGradient(InFlight& flight, std::int32_t chunk, BufferId buffer) {
  flight.grads.assign(blocksOf(chunk).size() + 1, split_ ? -1 : buffer);
  flight.grads.back() = buffer;
}

// A chunk's result goes to virtual stage `to`: by message, or where a V turns to the other chunk of this
// rank.
void RankLowerer::handOver(const Slot& slot, bool forward, std::int32_t to, BufferId buffer) {
  if (holderOf(to) != program_.coord.pp) {
    const Comm comm = pipeComm(CommKind::Send, forward, to, slot, buffer);
    addComm(TaskKind::PipeComm, forward ? Lane::SendF : Lane::SendB, slot, -1, comm, {last_compute_});
    return;
  }
  Slot other = slot;
  other.chunk = static_cast<std::int16_t>(1 - slot.chunk);
  InFlight& flight = inFlight(other);
  if (forward) {
    flight.inputs.assign(blocksOf(other.chunk).size() + 1, -1);
    flight.inputs[0] = buffer;
  } else {
    receiveGradient(flight, other.chunk, buffer);
  }
}

void RankLowerer::emitScalarReset() {
  Segment segment;
  OpCall call;
  call.op = {OpKind::Zero, DType::F64, {graph_.scalars.num_slots}, 0};
  call.operands[0] = {Region::Scalars, 0};
  segment.ops.push_back(call);
  Bindings bindings;
  bind(bindings, Region::Scalars) = {program_.scalars, 0};
  Slot slot;
  slot.phase = Phase::Step;
  addCompute(TaskKind::Optimizer, slot, -1, library_.add(std::move(segment)), bindings, {});
}

void RankLowerer::forwardSlot(const Slot& slot) {
  InFlight& flight = inFlight(slot);
  const std::vector<Placed>& blocks = blocksOf(slot.chunk);
  flight.inputs.resize(blocks.size() + 1, -1);
  flight.saved.assign(blocks.size(), -1);
  const TaskId recv = std::exchange(flight.recv_f, -1);
  if (staged_) {
    forwardChunk(slot, flight, recv);
  } else {
    for (std::size_t i = 0; i < blocks.size(); ++i) forwardBlock(slot, flight, blocks, i, i == 0 ? recv : -1);
  }
  if (!lastStage(slot.chunk)) handOver(slot, true, virtualStage(slot.chunk) + 1, flight.inputs.back());
}

void RankLowerer::forwardBlock(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks,
                               std::size_t i, TaskId recv) {
  const Placed& placed = blocks[i];
  const Block& block = *placed.block;
  Bindings bindings = baseBindings(placed, slot.microbatch);
  if (flight.inputs[i] >= 0) bind(bindings, Region::In) = {flight.inputs[i], 0};
  const bool recomputed = placed.kind == BlockKind::Layer && plan_.recompute == Recompute::Full;
  if (block.saved_bytes > 0) {
    const BufferId saved =
        addBuffer(recomputed ? BufferKind::Workspace : BufferKind::Activations, block.saved_bytes);
    bind(bindings, Region::Saved) = {saved, 0};
    if (!recomputed) flight.saved[i] = saved;
  }
  if (block.forward_work > 0)
    bind(bindings, Region::Work) = {addBuffer(BufferKind::Workspace, block.forward_work), 0};
  if (placed.kind == BlockKind::Head) {
    // The head's gradient is that of the last layer's output.
    receiveGradient(flight, slot.chunk, activations());
    flight.grads[i] = flight.grads.back();
    bind(bindings, Region::Stream) = {flight.grads[i], 0};
  } else {
    flight.inputs[i + 1] = activations();
    bind(bindings, Region::Out) = {flight.inputs[i + 1], 0};
  }
  const Part part =
      placed.kind == BlockKind::Head && slot.microbatch == 0 ? Part::BackwardFirst : Part::Forward;
  emitPieces(placed, part, placed.kind == BlockKind::Head ? TaskKind::Head : TaskKind::Forward, slot,
             bindings, {recv});
}

void RankLowerer::backwardSlot(const Slot& slot) {
  InFlight& flight = inFlight(slot);
  const std::vector<Placed>& blocks = blocksOf(slot.chunk);
  const TaskId recv = std::exchange(flight.recv_b, -1);
  flight.deferred.assign(blocks.size(), -1);
  if (staged_) {
    backwardChunk(slot, flight, recv);
  } else {
    TaskId pending = recv;
    for (std::size_t i = blocks.size(); i-- > 0;) {
      if (blocks[i].kind != BlockKind::Head)
        backwardBlock(slot, flight, blocks, i, std::exchange(pending, -1));
      if (!split_) blockDone(slot, blocks, i);
    }
  }
  if (!firstStage(slot.chunk)) handOver(slot, false, virtualStage(slot.chunk) - 1, flight.grads.front());
  if (!split_) in_flight_.erase({slot.chunk, slot.microbatch});
}

void RankLowerer::weightSlot(const Slot& slot) {
  InFlight& flight = inFlight(slot);
  const std::vector<Placed>& blocks = blocksOf(slot.chunk);
  if (staged_) weightChunk(slot, flight);
  for (std::size_t i = blocks.size(); i-- > 0;) {
    const Placed& placed = blocks[i];
    if (!staged_ && placed.kind != BlockKind::Head) {
      Bindings bindings = baseBindings(placed, slot.microbatch);
      if (flight.saved[i] >= 0) bind(bindings, Region::Saved) = {flight.saved[i], 0};
      bind(bindings, Region::Stream) = {flight.grads[i + 1], 0};
      if (flight.deferred[i] >= 0) bind(bindings, Region::Deferred) = {flight.deferred[i], 0};
      if (placed.block->weight_work > 0)
        bind(bindings, Region::Work) = {addBuffer(BufferKind::Workspace, placed.block->weight_work), 0};
      emitPieces(placed, slot.microbatch == 0 ? Part::WeightFirst : Part::Weight, TaskKind::WeightGrad, slot,
                 bindings, {});
    }
    blockDone(slot, blocks, i);
  }
  in_flight_.erase({slot.chunk, slot.microbatch});
}

void RankLowerer::backwardBlock(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks,
                                std::size_t i, TaskId recv) {
  const Placed& placed = blocks[i];
  const Block& block = *placed.block;
  Bindings bindings = baseBindings(placed, slot.microbatch);
  if (flight.inputs[i] >= 0) bind(bindings, Region::In) = {flight.inputs[i], 0};
  std::vector<TaskId> deps{recv};
  if (placed.kind == BlockKind::Layer && plan_.recompute == Recompute::Full) {
    flight.saved[i] = addBuffer(BufferKind::Workspace, block.saved_bytes);
    Bindings again = bindings;
    bind(again, Region::Saved) = {flight.saved[i], 0};
    const Bytes out_bytes = streamElements() * sizeOf(plan_.precision);
    bind(again, Region::Out) = {addBuffer(BufferKind::Workspace, out_bytes), 0};
    if (block.forward_work > 0)
      bind(again, Region::Work) = {addBuffer(BufferKind::Workspace, block.forward_work), 0};
    emitPieces(placed, Part::Forward, TaskKind::Recompute, slot, again, deps);
    // As frameworks do, the gradient is received first, then the layer is computed again.
    deps.clear();
  }
  if (flight.saved[i] >= 0) bind(bindings, Region::Saved) = {flight.saved[i], 0};
  bind(bindings, Region::Stream) = {flight.grads[i + 1], 0};
  if (split_ && placed.kind == BlockKind::Layer) {
    flight.grads[i] = activations();
    bind(bindings, Region::InGrad) = {flight.grads[i], 0};
    flight.deferred[i] = addBuffer(BufferKind::Activations, block.deferred_bytes);
    bind(bindings, Region::Deferred) = {flight.deferred[i], 0};
  }
  if (block.backward_work > 0)
    bind(bindings, Region::Work) = {addBuffer(BufferKind::Workspace, block.backward_work), 0};
  emitPieces(placed, slot.microbatch == 0 ? Part::BackwardFirst : Part::Backward, TaskKind::Backward, slot,
             bindings, deps);
}

void RankLowerer::forwardChunk(const Slot& slot, InFlight& flight, TaskId recv) {
  const std::vector<Placed>& blocks = blocksOf(slot.chunk);
  Bytes kept = 0, scratch = 0;
  Library::ChunkKey key;
  const bool recompute = plan_.recompute == Recompute::Full;
  const Bytes stream_bytes = streamElements() * sizeOf(plan_.precision);
  for (const Placed& placed : blocks) {
    const Block& block = *placed.block;
    const bool layer = placed.kind == BlockKind::Layer;
    const bool head = placed.kind == BlockKind::Head;
    const Part part = head && slot.microbatch == 0 ? Part::BackwardFirst : Part::Forward;
    if (key.empty() || std::get<0>(key.back()) != &block) key.emplace_back(&block, part, 0);
    ++std::get<2>(key.back());
    // The first input is the receive buffer; the last output is sent.
    if (!head && &placed != &blocks.back()) kept += stream_bytes;
    if (!(layer && recompute)) kept += block.saved_bytes;
    scratch = std::max(scratch, block.forward_work + (layer && recompute ? block.saved_bytes : 0));
  }
  Bindings bindings;
  const auto use = [&](Region region, BufferId id) { bind(bindings, region) = {id, 0}; };
  if (flight.inputs[0] >= 0) use(Region::In, flight.inputs[0]);
  if (kept > 0) use(Region::Saved, flight.all = addBuffer(BufferKind::Activations, kept));
  if (scratch > 0) use(Region::Work, addBuffer(BufferKind::Workspace, scratch));
  if (lastStage(slot.chunk)) {
    receiveGradient(flight, slot.chunk, activations());
    use(Region::Stream, flight.grads.back());
  } else {
    use(Region::Out, flight.inputs.back() = activations());
  }
  addCompute(TaskKind::Forward, slot, -1, library_.chunkSegment(key), bindings, {recv});
}

void RankLowerer::backwardChunk(const Slot& slot, InFlight& flight, TaskId recv) {
  const std::vector<Placed>& blocks = blocksOf(slot.chunk);
  Bytes scratch = 0, deferred = 0;
  Library::ChunkKey key;
  const bool recompute = plan_.recompute == Recompute::Full;
  const Part part = slot.microbatch == 0 ? Part::BackwardFirst : Part::Backward;
  const Bytes stream_bytes = streamElements() * sizeOf(plan_.precision);
  for (const Placed& placed : blocks) {
    const Block& block = *placed.block;
    if (placed.kind == BlockKind::Head) continue;
    const bool layer = placed.kind == BlockKind::Layer;
    // Kept for W: what the layer defers and the gradient of its input (that of the chunk's is a buffer of its
    // own).
    if (layer && split_) deferred += block.deferred_bytes + (&placed == &blocks.front() ? 0 : stream_bytes);
    Bytes need = block.backward_work;
    if (layer && recompute) need = std::max(block.backward_work, block.forward_work + stream_bytes);
    // What is computed again lives until its last reader: here, or in W.
    if (layer && recompute && split_) deferred += block.saved_bytes;
    if (layer && recompute && !split_) need += block.saved_bytes;
    scratch = std::max(scratch, need);
    if (key.empty() || std::get<0>(key.back()) != &block) {
      if (layer && recompute) key.emplace_back(&block, Part::Forward, 0);
      key.emplace_back(&block, part, 0);
    }
    ++std::get<2>(key.back());
    if (layer && recompute) ++std::get<2>(key[key.size() - 2]);
  }
  Bindings bindings;
  const auto use = [&](Region region, BufferId id) {
    if (id >= 0) bind(bindings, region) = {id, 0};
  };
  use(Region::In, flight.inputs[0]);
  use(Region::Saved, flight.all);
  use(Region::Stream, flight.grads.back());
  if (split_ && !firstStage(slot.chunk)) use(Region::InGrad, flight.grads.front() = activations());
  if (deferred > 0) use(Region::Deferred, flight.deferred_all = addBuffer(BufferKind::Activations, deferred));
  if (scratch > 0) use(Region::Work, addBuffer(BufferKind::Workspace, scratch));
  addCompute(TaskKind::Backward, slot, -1, library_.chunkSegment(key), bindings, {recv});
  for (std::size_t i = blocks.size(); !split_ && i-- > 0;) blockDone(slot, blocks, i);
}

void RankLowerer::weightChunk(const Slot& slot, InFlight& flight) {
  const std::vector<Placed>& blocks = blocksOf(slot.chunk);
  Bytes scratch = 0;
  Library::ChunkKey key;
  const Part part = slot.microbatch == 0 ? Part::WeightFirst : Part::Weight;
  for (const Placed& placed : blocks) {
    if (placed.kind == BlockKind::Head) continue;
    scratch = std::max(scratch, placed.block->weight_work);
    if (key.empty() || std::get<0>(key.back()) != placed.block) key.emplace_back(placed.block, part, 0);
    ++std::get<2>(key.back());
  }
  Bindings bindings;
  const auto use = [&](Region region, BufferId id) {
    if (id >= 0) bind(bindings, region) = {id, 0};
  };
  use(Region::Saved, flight.all);
  use(Region::Stream, flight.grads.back());
  use(Region::Deferred, flight.deferred_all);
  if (scratch > 0) use(Region::Work, addBuffer(BufferKind::Workspace, scratch));
  addCompute(TaskKind::WeightGrad, slot, -1, library_.chunkSegment(key), bindings, {});
}

}  // namespace bmt
