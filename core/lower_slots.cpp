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
  bind(bindings, Region::Weight) = weightArg(placed.bucket, placed.offset);
  if (placed.expert_bucket >= 0)
    bind(bindings, Region::Expert) = weightArg(placed.expert_bucket, placed.expert_offset);
  if (zero_ < 2) bindGradients(bindings, placed);
  const BlockShape shape = makeBlockShape(model_, plan_, 0);
  if (placed.kind == BlockKind::Embedding)
    bind(bindings, Region::Tokens) = {p.tokens, inputBytes(shape) * microbatch};
  if (placed.kind == BlockKind::Head) {
    bind(bindings, Region::Targets) = {p.targets, targetElements(shape) * sizeOf(DType::I32) * microbatch};
    bind(bindings, Region::Scalars) = {p.scalars, 0};
    if (tiedOnRank()) {
      const Placed& embedding = blocksOf(0).front();
      bind(bindings, Region::Tied) = weightArg(embedding.bucket, embedding.offset);
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
  comm.dtype = storageType(plan_);
  (send ? comm.src : comm.dst) = {buffer, 0};
  return comm;
}

BufferId RankLowerer::activations() {
  return addBuffer(BufferKind::Activations, streamElements() * sizeOf(storageType(plan_)));
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
    // Its gradients are complete: it has no backward of its own.
    if (zero_ >= 2 && blocks.back().kind == BlockKind::Head) blockDone(slot, blocks, blocks.size() - 1);
  }
  if (!lastStage(slot.chunk)) handOver(slot, true, virtualStage(slot.chunk) + 1, flight.inputs.back());
}

void RankLowerer::forwardBlock(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks,
                               std::size_t i, TaskId recv) {
  const Placed& placed = blocks[i];
  const Block& block = *placed.block;
  std::vector<TaskId> deps = gatherBlock(slot, blocks, i, true);
  deps.push_back(recv);
  Bindings bindings = baseBindings(placed, slot.microbatch);
  if (zero_ >= 2 && placed.kind == BlockKind::Head) bindGradients(bindings, placed);
  if (flight.inputs[i] >= 0) bind(bindings, Region::In) = {flight.inputs[i], 0};
  const bool recomputed = placed.recompute == Recompute::Full;
  if (block.saved_bytes > 0) {
    const BufferId saved = addBuffer(recomputed ? BufferKind::Workspace : BufferKind::Activations,
                                     recomputed ? block.saved_bytes : keptBytes(placed));
    bind(bindings, Region::Saved) = {saved, 0};
    if (!recomputed) flight.saved[i] = saved;
  }
  const TaskId first_task = nextTask();
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
      placed.kind == BlockKind::Head && overwritesGradients(slot) ? Part::BackwardFirst : Part::Forward;
  emitPieces(placed, part, placed.kind == BlockKind::Head ? TaskKind::Head : TaskKind::Forward, slot,
             bindings, deps);
  dropBlock(placed, true);
  if (placed.recompute == Recompute::Selective && block.score_bytes > 0)
    span(addBuffer(BufferKind::Workspace, block.score_bytes), first_task);
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
      if (!split_ && !(zero_ >= 2 && blocks[i].kind == BlockKind::Head)) blockDone(slot, blocks, i);
    }
  }
  if (!firstStage(slot.chunk)) handOver(slot, false, virtualStage(slot.chunk) - 1, flight.grads.front());
  reduceAfterSend();
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
      emitPieces(placed, overwritesGradients(slot) ? Part::WeightFirst : Part::Weight, TaskKind::WeightGrad,
                 slot, bindings, {});
    }
    blockDone(slot, blocks, i);
  }
  reduceAfterSend();
  in_flight_.erase({slot.chunk, slot.microbatch});
}

void RankLowerer::backwardBlock(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks,
                                std::size_t i, TaskId recv) {
  const Placed& placed = blocks[i];
  const Block& block = *placed.block;
  std::vector<TaskId> deps = gatherBlock(slot, blocks, i, false);
  deps.push_back(recv);
  Bindings bindings = baseBindings(placed, slot.microbatch);
  if (flight.inputs[i] >= 0) bind(bindings, Region::In) = {flight.inputs[i], 0};
  if (placed.recompute == Recompute::Full) {
    // As frameworks do, the gradient is received first, then the layers are computed again.
    if (static_cast<std::int32_t>(i) + 1 == placed.segment_end)
      recomputeSegment(slot, flight, blocks, placed, recv);
    if (flight.inputs[i] >= 0) bind(bindings, Region::In) = {flight.inputs[i], 0};
  }
  const TaskId first_task = nextTask();
  if (placed.recompute == Recompute::Selective) {
    Bindings again = bindings;
    bind(again, Region::Saved) = {flight.saved[i], 0};
    if (block.core_work > 0)
      bind(again, Region::Work) = {addBuffer(BufferKind::Workspace, block.core_work), 0};
    // A ring's first shift runs beside compute: its memory, too, is free only after what ran before.
    if (block.core.front().is_comm) {
      touch(bind(again, Region::Work).buffer, last_compute_);
      deps.push_back(last_compute_);
    }
    emitPieces(placed, Part::Core, TaskKind::Recompute, slot, again, deps);
    deps.clear();
  }
  if (zero_ >= 2) bindGradients(bindings, placed);
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
  emitPieces(placed, overwritesGradients(slot) ? Part::BackwardFirst : Part::Backward, TaskKind::Backward,
             slot, bindings, deps);
  dropBlock(placed, false);
  if (placed.recompute == Recompute::Selective && block.score_bytes > 0)
    span(addBuffer(BufferKind::Workspace, block.score_bytes), first_task);
}

Bytes RankLowerer::keptBytes(const Placed& placed) {
  if (placed.recompute == Recompute::Full) return 0;
  const Bytes scores = placed.recompute == Recompute::Selective ? placed.block->score_bytes : 0;
  return placed.block->saved_bytes - scores;
}

// A buffer that no operand names, live from `first` to the last task so far.
void RankLowerer::span(BufferId id, TaskId first) {
  touch(id, first);
  touch(id, nextTask() - 1);
}

void RankLowerer::recomputeSegment(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks,
                                   const Placed& last, TaskId recv) {
  const auto end = static_cast<std::size_t>(last.segment_end);
  const auto begin = static_cast<std::size_t>(last.segment_begin);
  // What one layer needs is scratch; what a whole segment keeps for its layers' backwards are activations.
  const BufferKind kind = end - begin > 1 ? BufferKind::Activations : BufferKind::Workspace;
  for (std::size_t i = begin; i < end; ++i) {
    const Block& block = *blocks[i].block;
    std::vector<TaskId> deps;  // parameters stay gathered until the layer's backward
    for (const std::int32_t bucket : bucketsOf(blocks[i], false)) {
      gatherBucket(slot, blocks[i], bucket);
      deps.push_back(gathered_.at(bucket).second);
    }
    deps.push_back(std::exchange(recv, -1));
    Bindings bindings = baseBindings(blocks[i], slot.microbatch);
    if (flight.inputs[i] >= 0) bind(bindings, Region::In) = {flight.inputs[i], 0};
    flight.saved[i] = addBuffer(kind, block.saved_bytes);
    bind(bindings, Region::Saved) = {flight.saved[i], 0};
    const BufferId out =
        addBuffer(i + 1 < end ? kind : BufferKind::Workspace, streamElements() * sizeOf(storageType(plan_)));
    if (i + 1 < end) flight.inputs[i + 1] = out;
    bind(bindings, Region::Out) = {out, 0};
    if (block.forward_work > 0)
      bind(bindings, Region::Work) = {addBuffer(BufferKind::Workspace, block.forward_work), 0};
    emitPieces(blocks[i], Part::Forward, TaskKind::Recompute, slot, bindings, deps);
  }
}

namespace {

// A part of a block once more in a chunk's segment.
void addPart(Library::ChunkKey& key, const Block* block, Part part) {
  for (auto& [of, which, times] : key) {
    if (of != block || which != part) continue;
    ++times;
    return;
  }
  key.emplace_back(block, part, 1);
}

}  // namespace

void RankLowerer::forwardChunk(const Slot& slot, InFlight& flight, TaskId recv) {
  const std::vector<Placed>& blocks = blocksOf(slot.chunk);
  Bytes kept = 0, scratch = 0;
  Library::ChunkKey key;
  const Bytes stream_bytes = streamElements() * sizeOf(storageType(plan_));
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Placed& placed = blocks[i];
    const Block& block = *placed.block;
    const bool head = placed.kind == BlockKind::Head;
    addPart(key, &block, head && overwritesGradients(slot) ? Part::BackwardFirst : Part::Forward);
    // The first input is the receive buffer; the last output is sent; inside a recompute segment nothing
    // stays.
    const bool inside =
        placed.recompute == Recompute::Full && static_cast<std::int32_t>(i) + 1 < placed.segment_end;
    if (!head && i + 1 < blocks.size() && !inside) kept += stream_bytes;
    kept += keptBytes(placed);
    scratch = std::max(scratch, block.forward_work + block.saved_bytes - keptBytes(placed));
  }
  std::vector<TaskId> deps{recv};
  for (const Placed& placed : blocks) {
    for (const TaskId task : aheadOf(slot, placed)) deps.push_back(task);
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
  addCompute(TaskKind::Forward, slot, -1, library_.chunkSegment(key), bindings, deps);
}

void RankLowerer::backwardChunk(const Slot& slot, InFlight& flight, TaskId recv) {
  const std::vector<Placed>& blocks = blocksOf(slot.chunk);
  Bytes scratch = 0, deferred = 0, segment = 0;
  Library::ChunkKey key;
  const Part part = overwritesGradients(slot) ? Part::BackwardFirst : Part::Backward;
  const Bytes stream_bytes = streamElements() * sizeOf(storageType(plan_));
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Placed& placed = blocks[i];
    const Block& block = *placed.block;
    if (placed.kind == BlockKind::Head) continue;
    const bool layer = placed.kind == BlockKind::Layer, full = placed.recompute == Recompute::Full;
    // Kept for W: what the layer defers and the gradient of its input (that of the chunk's is a buffer of its
    // own).
    if (layer && split_) deferred += block.deferred_bytes + (i == 0 ? 0 : stream_bytes);
    Bytes need = block.backward_work;
    if (full) need = std::max(need, block.forward_work + stream_bytes);
    // What is computed again lives until its last reader: here, or in W. A segment's layers are all computed
    // before the first backward.
    if (full && static_cast<std::int32_t>(i) == placed.segment_begin) segment = 0;
    if (full)
      segment +=
          block.saved_bytes + (static_cast<std::int32_t>(i) == placed.segment_begin ? 0 : stream_bytes);
    if (full && split_) deferred += block.saved_bytes;
    if (full && !split_) need += segment;
    if (placed.recompute == Recompute::Selective) need = std::max(need, block.core_work) + block.score_bytes;
    scratch = std::max(scratch, need);
    if (full) addPart(key, &block, Part::Forward);
    if (placed.recompute == Recompute::Selective) addPart(key, &block, Part::Core);
    addPart(key, &block, part);
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
  const Part part = overwritesGradients(slot) ? Part::WeightFirst : Part::Weight;
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
