// Walks every stage's slots and emits tasks, buffers and communication. Layout of the flat weight and
// gradient buffers: blocks in model order, chunk by chunk, cut into gradient buckets from each chunk's end
// (backward finishes there first).
#include "core/lower.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/memory_plan.h"
#include "core/op_graph.h"

namespace bmt {
namespace {

enum class BlockKind : std::uint8_t { Embedding, Layer, Head };
enum class Part : std::uint8_t { Forward, BackwardFirst, Backward };

// A block on this rank: where it is in the model and in the flat buffers.
struct Placed {
  BlockKind kind = BlockKind::Layer;
  std::int32_t chunk = 0;
  std::int32_t layer = -1;  // global layer index
  std::int32_t index = 0;   // 0 = embedding, 1 + layer, 1 + layers = head
  std::int64_t offset = 0;  // elements
  std::int32_t bucket = 0;
  const Block* block = nullptr;
};

// Blocks and segments shared by all ranks of a graph. Embedding and head differ between tensor ranks; a
// layer's ops are the same on all of them, only the rows or columns of its parameters differ.
class Library {
 public:
  Library(TaskGraph& graph) : graph_(graph) {
    BlockShape shape = makeBlockShape(graph.model, graph.plan, 0);
    layer_ = buildLayerBlock(shape);
    for (std::int32_t t = 0; t < graph.plan.tp; ++t) {
      shape = makeBlockShape(graph.model, graph.plan, t);
      layer_params_.push_back(buildLayerBlock(shape).params);
      embedding_.push_back(buildEmbeddingBlock(shape));
      const bool shares_rank = graph.model.tied_embedding && graph.plan.pp == 1;
      head_.push_back(buildHeadBlock(shape, shares_rank ? HeadTable::Tied : HeadTable::Own));
    }
  }

  const Block& block(BlockKind kind, std::int32_t tp_index) const {
    const auto t = static_cast<std::size_t>(tp_index);
    if (kind == BlockKind::Layer) return layer_;
    return kind == BlockKind::Embedding ? embedding_[t] : head_[t];
  }
  const std::vector<BlockParam>& params(BlockKind kind, std::int32_t tp_index) const {
    if (kind == BlockKind::Layer) return layer_params_[static_cast<std::size_t>(tp_index)];
    return block(kind, tp_index).params;
  }
  static const std::vector<Piece>& pieces(const Block& block, Part part) {
    if (part == Part::Forward) return block.forward;
    return part == Part::BackwardFirst ? block.backward_first : block.backward;
  }

  // Segment of one piece; equal pieces share it.
  SegmentId segmentOf(const Block* block, Part part, std::size_t piece) {
    const auto [entry, inserted] = segment_of_.try_emplace({block, part, piece}, -1);
    if (inserted) entry->second = add({pieces(*block, part)[piece].ops, {}, {}});
    return entry->second;
  }

  // Segment of a whole chunk at Stage granularity: `parts` with repeat counts.
  using ChunkKey = std::vector<std::tuple<const Block*, Part, std::int64_t>>;
  SegmentId chunkSegment(const ChunkKey& parts) {
    const auto [entry, inserted] = chunk_segment_.try_emplace(parts, -1);
    if (!inserted) return entry->second;
    Segment segment;
    for (const auto& [block, part, times] : parts) {
      for (const Piece& piece : pieces(*block, part)) {
        if (piece.is_comm) {
          segment.comms.push_back(
              {piece.comm.kind, GroupKind::Tensor, piece.comm.count, piece.comm.dtype, times});
        }
        for (const OpCall& call : piece.ops) {
          segment.ops.push_back(call);
          segment.repeat.push_back(times);
        }
      }
    }
    entry->second = add(std::move(segment));
    return entry->second;
  }

  SegmentId add(Segment segment) {
    graph_.segments.push_back(std::move(segment));
    return static_cast<SegmentId>(graph_.segments.size()) - 1;
  }

 private:
  TaskGraph& graph_;
  Block layer_;
  std::vector<std::vector<BlockParam>> layer_params_;  // by tensor index
  std::vector<Block> embedding_, head_;
  std::map<std::tuple<const Block*, Part, std::size_t>, SegmentId> segment_of_;
  std::map<ChunkKey, SegmentId> chunk_segment_;
};

using Bindings = std::array<Arg, kNumRegions>;
Arg& bind(Bindings& bindings, Region region) {
  return bindings[static_cast<std::size_t>(region)];
}

// Emits the program of one rank.
class RankLowerer {
 public:
  RankLowerer(TaskGraph& graph, Library& library, const Schedule& schedule, RankId rank)
      : graph_(graph),
        model_(graph.model),
        plan_(graph.plan),
        library_(library),
        slots_(schedule.stages[static_cast<std::size_t>(graph.mesh.coordOf(rank).pp)]),
        num_microbatches_(schedule.num_microbatches),
        staged_(graph.granularity == Granularity::Stage) {
    program_.rank = rank;
    program_.coord = graph.mesh.coordOf(rank);
  }

  RankProgram run() {
    placeBlocks();
    makePersistentBuffers();
    emitScalarReset();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      // The next slot's receive is posted before this slot computes, so that it overlaps.
      receiveFor(i);
      if (i + 1 < slots_.size()) receiveFor(i + 1);
      if (slots_[i].phase == Phase::F) {
        forwardSlot(slots_[i]);
      } else {
        backwardSlot(slots_[i]);
      }
    }
    finishGradients();
    optimizerStep();
    return std::move(program_);
  }

 private:
  // Activations of one micro-batch in one chunk.
  struct InFlight {
    std::vector<BufferId> inputs;  // per block: its input; empty entries are -1
    std::vector<BufferId> saved;   // per block; -1 when recomputed or nothing is saved
    BufferId stream = -1;          // gradient of the residual stream
    BufferId all = -1;             // Stage granularity: everything that is kept
    TaskId recv_f = -1, recv_b = -1;
  };

  std::int32_t virtualStage(std::int32_t chunk) const { return chunk * plan_.pp + program_.coord.pp; }
  bool firstStage(std::int32_t chunk) const { return virtualStage(chunk) == 0; }
  bool lastStage(std::int32_t chunk) const { return virtualStage(chunk) == plan_.numVirtualStages() - 1; }
  std::int64_t streamElements() const { return makeBlockShape(model_, plan_, 0).rows * model_.d_model; }
  InFlight& inFlight(const Slot& slot) { return in_flight_[{slot.chunk, slot.microbatch}]; }
  std::vector<Placed>& blocksOf(std::int32_t chunk) { return blocks_[static_cast<std::size_t>(chunk)]; }
  bool tiedAcrossStages() const { return model_.tied_embedding && plan_.pp > 1; }
  bool tiedOnRank() const { return model_.tied_embedding && plan_.pp == 1; }
  TaskId nextTask() const { return static_cast<TaskId>(program_.tasks.size()); }
  Bytes weightBytes(std::int64_t elements) const { return elements * sizeOf(plan_.precision); }
  static Bytes gradBytes(std::int64_t elements) { return elements * sizeOf(DType::F32); }

  // ---- layout
  // -------------------------------------------------------------------------------------------------------
  void placeBlocks() {
    const std::vector<std::int64_t> layers = layersOfStages(model_, plan_);
    blocks_.resize(static_cast<std::size_t>(plan_.chunks));
    for (std::int32_t chunk = 0; chunk < plan_.chunks; ++chunk) {
      const std::int32_t stage = virtualStage(chunk);
      std::vector<Placed>& blocks = blocksOf(chunk);
      const auto place = [&](BlockKind kind, std::int32_t layer, std::int32_t index) {
        Placed placed;
        placed.kind = kind;
        placed.chunk = chunk;
        placed.layer = layer;
        placed.index = index;
        placed.block = &library_.block(kind, program_.coord.tp);
        blocks.push_back(placed);
      };
      if (firstStage(chunk)) place(BlockKind::Embedding, -1, 0);
      const auto first =
          static_cast<std::int32_t>(std::accumulate(layers.begin(), layers.begin() + stage, std::int64_t{0}));
      for (std::int32_t l = first;
           l < first + static_cast<std::int32_t>(layers[static_cast<std::size_t>(stage)]); ++l)
        place(BlockKind::Layer, l, 1 + l);
      if (lastStage(chunk)) place(BlockKind::Head, -1, 1 + static_cast<std::int32_t>(model_.layers));
      cutBuckets(blocks);
    }
  }

  // Groups a chunk's blocks into buckets from its end and lays them out. A tied table that exists twice waits
  // for its other copy, so it gets a bucket of its own.
  void cutBuckets(std::vector<Placed>& blocks) {
    const std::int64_t align =
        plan_.dp * (kArenaAlignment / sizeOf(DType::F32));  // every shard stays aligned
    std::vector<std::size_t> starts;                        // first block of every bucket, descending
    std::int64_t elements = 0;
    for (std::size_t i = blocks.size(); i-- > 0;) {
      elements += blocks[i].block->elements;
      const bool waits = tiedAcrossStages() && blocks[i].kind != BlockKind::Layer;
      const bool before_waiting = tiedAcrossStages() && i > 0 && blocks[i - 1].kind == BlockKind::Embedding;
      if (i == 0 || waits || before_waiting || gradBytes(elements) >= plan_.bucket) {
        starts.push_back(i);
        elements = 0;
      }
    }
    std::reverse(starts.begin(), starts.end());
    for (std::size_t b = 0; b < starts.size(); ++b) {
      const std::size_t end = b + 1 < starts.size() ? starts[b + 1] : blocks.size();
      GradBucket bucket;
      bucket.begin = program_.flat_elements;
      std::int64_t offset = bucket.begin;
      for (std::size_t i = starts[b]; i < end; ++i) {
        blocks[i].offset = offset;
        blocks[i].bucket = static_cast<std::int32_t>(program_.buckets.size());
        offset += blocks[i].block->elements;
      }
      bucket.count = roundUp(offset - bucket.begin, align);
      program_.flat_elements += bucket.count;
      program_.buckets.push_back(bucket);
    }
    for (const Placed& placed : blocks) addParams(placed);
  }

  void addParams(const Placed& placed) {
    for (const BlockParam& p : library_.params(placed.kind, program_.coord.tp)) {
      ParamShard shard;
      shard.name =
          placed.kind == BlockKind::Layer ? "layers." + std::to_string(placed.layer) + "." + p.name : p.name;
      shard.global_rows = p.global_rows;
      shard.global_cols = p.global_cols;
      shard.row_begin = p.row_begin;
      shard.rows = p.rows;
      shard.col_begin = p.col_begin;
      shard.cols = p.cols;
      shard.offset = placed.offset + p.offset;
      shard.block = placed.index;
      shard.decay = p.decay;
      shard.replicated = p.replicated;
      shard.tied_copy = placed.kind == BlockKind::Head && p.name == "embedding.weight";
      program_.params.push_back(std::move(shard));
    }
  }

  BufferId addBuffer(BufferKind kind, Bytes bytes, bool persistent = false) {
    Buffer buffer;
    buffer.kind = kind;
    buffer.bytes = bytes;
    buffer.persistent = persistent;
    program_.buffers.push_back(buffer);
    return static_cast<BufferId>(program_.buffers.size()) - 1;
  }

  void touch(BufferId id, TaskId task) {
    if (id < 0) return;
    Buffer& buffer = program_.buffers[static_cast<std::size_t>(id)];
    if (buffer.first_task < 0) buffer.first_task = task;
    buffer.last_task = std::max(buffer.last_task, task);
  }

  void makePersistentBuffers() {
    RankProgram& p = program_;
    p.weights = addBuffer(BufferKind::Weights, weightBytes(p.flat_elements), true);
    p.gradients = addBuffer(BufferKind::Gradients, gradBytes(p.flat_elements), true);
    // Adam moments, and an fp32 master copy when the weights are 16-bit; sharded over dp by ZeRO-1.
    const std::int64_t states = plan_.precision == DType::F32 ? 2 : 3;
    const std::int64_t shards = plan_.zero >= 1 ? plan_.dp : 1;
    p.optimizer = addBuffer(BufferKind::Optimizer, states * gradBytes(p.flat_elements / shards), true);
    if (tiedOnRank())
      tied_grad_ =
          addBuffer(BufferKind::Gradients, gradBytes(ceilDiv(model_.vocab, plan_.tp) * model_.d_model), true);
    const Bytes token_bytes = num_microbatches_ * plan_.micro_batch * model_.seq_len * sizeOf(DType::I32);
    if (program_.coord.pp == 0) p.tokens = addBuffer(BufferKind::Input, token_bytes, true);
    if (program_.coord.pp == plan_.pp - 1) p.targets = addBuffer(BufferKind::Input, token_bytes, true);
    p.scalars = addBuffer(BufferKind::Input, graph_.scalars.size() * sizeOf(DType::F64), true);
  }

  // ---- emission
  // -----------------------------------------------------------------------------------------------------
  TaskId addTask(Task task, const std::vector<TaskId>& deps) {
    task.first_dep = static_cast<std::int32_t>(program_.deps.size());
    for (const TaskId dep : deps) {
      if (dep < 0 || program_.tasks[static_cast<std::size_t>(dep)].lane == task.lane) continue;
      program_.deps.push_back(dep);
    }
    task.num_deps = static_cast<std::int32_t>(program_.deps.size()) - task.first_dep;
    program_.tasks.push_back(task);
    return nextTask() - 1;
  }

  TaskId addCompute(TaskKind kind, const Slot& slot, std::int32_t layer, SegmentId segment,
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

  TaskId addComm(TaskKind kind, Lane lane, const Slot& slot, std::int32_t layer, const Comm& comm,
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

  Bindings baseBindings(const Placed& placed, std::int32_t microbatch) {
    Bindings bindings;
    const RankProgram& p = program_;
    bind(bindings, Region::Weight) = {p.weights, weightBytes(placed.offset)};
    bind(bindings, Region::Grad) = {p.gradients, gradBytes(placed.offset)};
    const Bytes tokens = plan_.micro_batch * model_.seq_len * sizeOf(DType::I32) * microbatch;
    if (placed.kind == BlockKind::Embedding) bind(bindings, Region::Tokens) = {p.tokens, tokens};
    if (placed.kind == BlockKind::Head) {
      bind(bindings, Region::Targets) = {p.targets, tokens};
      bind(bindings, Region::Scalars) = {p.scalars, 0};
      if (tiedOnRank()) {
        bind(bindings, Region::Tied) = {p.weights, weightBytes(blocksOf(0).front().offset)};
        bind(bindings, Region::TiedGrad) = {tied_grad_, 0};
      }
    }
    return bindings;
  }

  // seq of a tensor-axis collective: mixed radix over (phase, recompute, chunk, micro-batch, block, piece).
  std::uint64_t tensorSeq(const Slot& slot, bool recompute, std::int32_t block_index,
                          std::size_t piece) const {
    std::uint64_t seq = static_cast<std::uint64_t>(slot.phase) * 2 + (recompute ? 1 : 0);
    const auto push = [&seq](std::uint64_t radix, std::uint64_t digit) { seq = seq * radix + digit; };
    push(static_cast<std::uint64_t>(plan_.chunks), static_cast<std::uint64_t>(slot.chunk));
    push(static_cast<std::uint64_t>(num_microbatches_), static_cast<std::uint64_t>(slot.microbatch));
    push(static_cast<std::uint64_t>(model_.layers) + 2, static_cast<std::uint64_t>(block_index));
    push(std::uint64_t{1} << 24, piece);
    return seq;
  }

  void emitPieces(const Placed& placed, Part part, TaskKind kind, const Slot& slot, const Bindings& bindings,
                  std::vector<TaskId> deps) {
    const std::vector<Piece>& pieces = Library::pieces(*placed.block, part);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      if (!piece.is_comm) {
        addCompute(kind, slot, placed.layer, library_.segmentOf(placed.block, part, i), bindings, deps);
      } else {
        const auto resolve = [&bindings](Operand operand) {
          Arg arg = bindings[static_cast<std::size_t>(operand.region)];
          arg.offset += operand.offset;
          return arg;
        };
        Comm comm;
        comm.kind = piece.comm.kind;
        comm.group = graph_.mesh.groupOf(GroupKind::Tensor, program_.rank);
        comm.seq = tensorSeq(slot, kind == TaskKind::Recompute, placed.index, i);
        comm.count = piece.comm.count;
        comm.dtype = piece.comm.dtype;
        comm.src = resolve(piece.comm.src);
        comm.dst = resolve(piece.comm.dst);
        addComm(TaskKind::TensorComm, Lane::Compute, slot, placed.layer, comm, deps);
      }
      deps.clear();
    }
  }

  Comm pipeComm(CommKind kind, bool forward, std::int32_t boundary, const Slot& slot, BufferId buffer) const {
    // boundary = virtual stage that receives.
    const bool send = kind == CommKind::Send;
    const std::int32_t step = (forward == send) ? 1 : -1;
    Coord peer = program_.coord;
    peer.pp = (peer.pp + step + plan_.pp) % plan_.pp;
    Comm comm;
    comm.kind = kind;
    comm.peer = graph_.mesh.rankOf(peer);
    comm.group = packGroup(forward ? GroupKind::ForwardPair : GroupKind::BackwardPair,
                           send ? program_.rank : comm.peer);
    comm.seq = static_cast<std::uint64_t>(boundary) * static_cast<std::uint64_t>(num_microbatches_) +
               static_cast<std::uint64_t>(slot.microbatch);
    comm.count = streamElements();
    comm.dtype = plan_.precision;
    (send ? comm.src : comm.dst) = {buffer, 0};
    return comm;
  }

  BufferId activations() {
    return addBuffer(BufferKind::Activations, streamElements() * sizeOf(plan_.precision));
  }

  void receiveFor(std::size_t index) {
    const Slot& slot = slots_[index];
    if (index < received_) return;
    received_ = index + 1;
    InFlight& flight = inFlight(slot);
    if (slot.phase == Phase::F && !firstStage(slot.chunk)) {
      flight.inputs.assign(blocksOf(slot.chunk).size() + 1, -1);
      flight.inputs[0] = activations();
      const Comm comm = pipeComm(CommKind::Recv, true, virtualStage(slot.chunk), slot, flight.inputs[0]);
      flight.recv_f = addComm(TaskKind::PipeComm, Lane::RecvF, slot, -1, comm, {});
    } else if (slot.phase == Phase::B && !lastStage(slot.chunk)) {
      flight.stream = activations();
      const Comm comm = pipeComm(CommKind::Recv, false, virtualStage(slot.chunk), slot, flight.stream);
      flight.recv_b = addComm(TaskKind::PipeComm, Lane::RecvB, slot, -1, comm, {});
    }
  }

  void emitScalarReset() {
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

  // ---- slots
  // --------------------------------------------------------------------------------------------------------
  void forwardSlot(const Slot& slot) {
    InFlight& flight = inFlight(slot);
    const std::vector<Placed>& blocks = blocksOf(slot.chunk);
    flight.inputs.resize(blocks.size() + 1, -1);
    flight.saved.assign(blocks.size(), -1);
    const TaskId recv = std::exchange(flight.recv_f, -1);
    if (staged_) {
      forwardChunk(slot, flight, recv);
    } else {
      for (std::size_t i = 0; i < blocks.size(); ++i)
        forwardBlock(slot, flight, blocks, i, i == 0 ? recv : -1);
    }
    if (lastStage(slot.chunk)) return;
    const Comm comm =
        pipeComm(CommKind::Send, true, virtualStage(slot.chunk) + 1, slot, flight.inputs.back());
    addComm(TaskKind::PipeComm, Lane::SendF, slot, -1, comm, {last_compute_});
  }

  void forwardBlock(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks, std::size_t i,
                    TaskId recv) {
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
      flight.stream = activations();
      bind(bindings, Region::Stream) = {flight.stream, 0};
    } else {
      flight.inputs[i + 1] = activations();
      bind(bindings, Region::Out) = {flight.inputs[i + 1], 0};
    }
    const Part part =
        placed.kind == BlockKind::Head && slot.microbatch == 0 ? Part::BackwardFirst : Part::Forward;
    emitPieces(placed, part, placed.kind == BlockKind::Head ? TaskKind::Head : TaskKind::Forward, slot,
               bindings, {recv});
  }

  void backwardSlot(const Slot& slot) {
    InFlight& flight = inFlight(slot);
    const std::vector<Placed>& blocks = blocksOf(slot.chunk);
    const TaskId recv = std::exchange(flight.recv_b, -1);
    if (staged_) {
      backwardChunk(slot, flight, recv);
    } else {
      TaskId pending = recv;
      for (std::size_t i = blocks.size(); i-- > 0;) {
        if (blocks[i].kind != BlockKind::Head)
          backwardBlock(slot, flight, blocks, i, std::exchange(pending, -1));
        blockDone(slot, blocks, i);
      }
    }
    if (!firstStage(slot.chunk)) {
      const Comm comm = pipeComm(CommKind::Send, false, virtualStage(slot.chunk) - 1, slot, flight.stream);
      addComm(TaskKind::PipeComm, Lane::SendB, slot, -1, comm, {last_compute_});
    }
    in_flight_.erase({slot.chunk, slot.microbatch});
  }

  void backwardBlock(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks, std::size_t i,
                     TaskId recv) {
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
      // The gradient may arrive while recomputing, but lanes are in order: the wait stays with the first
      // task.
      deps.clear();
    }
    if (flight.saved[i] >= 0) bind(bindings, Region::Saved) = {flight.saved[i], 0};
    bind(bindings, Region::Stream) = {flight.stream, 0};
    if (block.backward_work > 0)
      bind(bindings, Region::Work) = {addBuffer(BufferKind::Workspace, block.backward_work), 0};
    emitPieces(placed, slot.microbatch == 0 ? Part::BackwardFirst : Part::Backward, TaskKind::Backward, slot,
               bindings, deps);
  }

  // ---- Stage granularity
  // -------------------------------------------------------------------------------------------- One task per
  // chunk and direction; buffers are summed, so memory over time stays right at slot resolution.
  void forwardChunk(const Slot& slot, InFlight& flight, TaskId recv) {
    const std::vector<Placed>& blocks = blocksOf(slot.chunk);
    Bytes kept = 0, scratch = 0;
    std::int64_t layers = 0;
    Library::ChunkKey key;
    const bool recompute = plan_.recompute == Recompute::Full;
    const Bytes stream_bytes = streamElements() * sizeOf(plan_.precision);
    for (const Placed& placed : blocks) {
      const Block& block = *placed.block;
      const bool layer = placed.kind == BlockKind::Layer;
      const bool head = placed.kind == BlockKind::Head;
      layers += layer ? 1 : 0;
      if (!layer || layers == 1) {
        const Part part = head && slot.microbatch == 0 ? Part::BackwardFirst : Part::Forward;
        key.emplace_back(&block, part, layer ? numLayers(blocks) : 1);
      }
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
      use(Region::Stream, flight.stream = activations());
    } else {
      use(Region::Out, flight.inputs.back() = activations());
    }
    addCompute(TaskKind::Forward, slot, -1, library_.chunkSegment(key), bindings, {recv});
  }

  void backwardChunk(const Slot& slot, InFlight& flight, TaskId recv) {
    const std::vector<Placed>& blocks = blocksOf(slot.chunk);
    Bytes scratch = 0;
    Library::ChunkKey key;
    const bool recompute = plan_.recompute == Recompute::Full;
    const Part part = slot.microbatch == 0 ? Part::BackwardFirst : Part::Backward;
    for (const Placed& placed : blocks) {
      const Block& block = *placed.block;
      if (placed.kind == BlockKind::Head) continue;
      const bool layer = placed.kind == BlockKind::Layer;
      const std::int64_t times = layer ? numLayers(blocks) : 1;
      Bytes need = block.backward_work;
      if (layer && recompute) {
        need = block.saved_bytes +
               std::max(block.backward_work, block.forward_work + streamElements() * sizeOf(plan_.precision));
      }
      scratch = std::max(scratch, need);
      if (layer && !key.empty() && std::get<0>(key.back()) == &block) continue;
      if (layer && recompute) key.emplace_back(&block, Part::Forward, times);
      key.emplace_back(&block, part, times);
    }
    Bindings bindings;
    const auto use = [&](Region region, BufferId id) {
      if (id >= 0) bind(bindings, region) = {id, 0};
    };
    use(Region::In, flight.inputs[0]);
    use(Region::Saved, flight.all);
    use(Region::Stream, flight.stream);
    if (scratch > 0) use(Region::Work, addBuffer(BufferKind::Workspace, scratch));
    addCompute(TaskKind::Backward, slot, -1, library_.chunkSegment(key), bindings, {recv});
    for (std::size_t i = blocks.size(); i-- > 0;) blockDone(slot, blocks, i);
  }

  static std::int64_t numLayers(const std::vector<Placed>& blocks) {
    return std::count_if(blocks.begin(), blocks.end(),
                         [](const Placed& p) { return p.kind == BlockKind::Layer; });
  }

  // ---- gradients and optimizer
  // --------------------------------------------------------------------------------------- Called after a
  // block's last task of a backward slot; starts what its gradients were waiting for.
  void blockDone(const Slot& slot, const std::vector<Placed>& blocks, std::size_t i) {
    if (slot.microbatch != num_microbatches_ - 1) return;
    const Placed& placed = blocks[i];
    reduceReplicated(slot, placed);
    if (placed.kind == BlockKind::Embedding && tiedOnRank()) addTiedGradient(slot, placed);
    const bool closes = i == 0 || blocks[i - 1].bucket != placed.bucket;
    if (!closes) return;
    const bool waits = tiedAcrossStages() && placed.kind != BlockKind::Layer;
    if (plan_.overlap_grad && !waits) {
      reduceBucket(placed.bucket, slot);
    } else {
      late_buckets_.emplace_back(placed.bucket, slot);
    }
    if (waits) tied_block_ = placed;
  }

  Comm dataComm(CommKind kind, GroupKind group, std::uint64_t seq, std::int64_t count, Arg src,
                Arg dst) const {
    Comm comm;
    comm.kind = kind;
    comm.group = graph_.mesh.groupOf(group, program_.rank);
    comm.seq = seq;
    comm.count = count;
    comm.dtype = DType::F32;
    comm.src = src;
    comm.dst = dst;
    return comm;
  }

  // With sequence parallelism every tensor rank saw only its rows: replicated parameters need the sum.
  void reduceReplicated(const Slot& slot, const Placed& placed) {
    const std::int64_t count = placed.block->elements - placed.block->replicated_begin;
    if (!plan_.sequence_parallel || count == 0) return;
    const Arg arg{program_.gradients, gradBytes(placed.offset + placed.block->replicated_begin)};
    Slot step = slot;
    step.phase = Phase::Step;
    const Comm comm = dataComm(CommKind::AllReduce, GroupKind::Tensor,
                               tensorSeq(step, false, placed.index, 0), count, arg, arg);
    const TaskId id = addComm(TaskKind::TensorComm, Lane::Tensor, slot, placed.layer, comm, {last_compute_});
    replicated_[placed.bucket] = id;
  }

  void addTiedGradient(const Slot& slot, const Placed& placed) {
    const std::int64_t count = ceilDiv(model_.vocab, plan_.tp) * model_.d_model;
    Segment segment;
    OpCall call;
    call.op = {OpKind::Add, DType::F32, {count}, 0};
    call.operands[0] = call.operands[1] = {Region::Grad, 0};
    call.operands[2] = {Region::TiedGrad, 0};
    segment.ops.push_back(call);
    Bindings bindings;
    bind(bindings, Region::Grad) = {program_.gradients, gradBytes(placed.offset)};
    bind(bindings, Region::TiedGrad) = {tied_grad_, 0};
    addCompute(TaskKind::Backward, slot, -1, library_.add(std::move(segment)), bindings, {});
  }

  void reduceBucket(std::int32_t index, const Slot& slot) {
    if (plan_.dp == 1) return;
    const GradBucket& bucket = program_.buckets[static_cast<std::size_t>(index)];
    const Arg full{program_.gradients, gradBytes(bucket.begin)};
    const Arg shard{program_.gradients, gradBytes(bucket.begin + shardOffset(bucket))};
    const bool scatter = plan_.zero >= 1;
    const Comm comm = dataComm(scatter ? CommKind::ReduceScatter : CommKind::AllReduce, GroupKind::Data,
                               static_cast<std::uint64_t>(index), bucket.count, full, scatter ? shard : full);
    const auto replicated = replicated_.find(index);
    const TaskId sum = replicated == replicated_.end() ? -1 : replicated->second;
    data_tasks_.push_back(
        addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, {last_compute_, tied_task_, sum}));
  }

  std::int64_t shardOffset(const GradBucket& bucket) const {
    return bucket.count / plan_.dp * program_.coord.dp;
  }

  // The two copies of a tied table add their gradients; then the buckets that waited are reduced.
  void finishGradients() {
    Slot slot;
    slot.phase = Phase::Step;
    if (tied_block_.block != nullptr) {
      const std::int64_t count = ceilDiv(model_.vocab, plan_.tp) * model_.d_model;
      const Arg arg{program_.gradients, gradBytes(tied_block_.offset)};
      const Comm comm = dataComm(CommKind::AllReduce, GroupKind::Embedding, 0, count, arg, arg);
      tied_task_ = addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, {last_compute_});
      data_tasks_.push_back(tied_task_);
    }
    for (const auto& [bucket, at] : late_buckets_) reduceBucket(bucket, slot);
  }

  // Elements of bucket that this rank's optimizer owns.
  std::pair<std::int64_t, std::int64_t> ownedRange(const GradBucket& bucket) const {
    if (plan_.zero == 0) return {bucket.begin, bucket.begin + bucket.count};
    const std::int64_t begin = bucket.begin + shardOffset(bucket);
    return {begin, begin + bucket.count / plan_.dp};
  }

  void optimizerStep() {
    Slot slot;
    slot.phase = Phase::Step;
    Bindings bindings;
    bind(bindings, Region::Weight) = {program_.weights, 0};
    bind(bindings, Region::Grad) = {program_.gradients, 0};
    bind(bindings, Region::Optimizer) = {program_.optimizer, 0};
    bind(bindings, Region::Scalars) = {program_.scalars, 0};
    std::vector<TaskId> ready = data_tasks_;
    for (const auto& [bucket, task] : replicated_) ready.push_back(task);
    addCompute(TaskKind::Optimizer, slot, -1, library_.add(normSegment()), bindings, ready);
    if (plan_.numRanks() > 1) {
      Comm comm = dataComm(CommKind::AllReduce, GroupKind::World, 0, graph_.scalars.num_slots,
                           {program_.scalars, 0}, {program_.scalars, 0});
      comm.dtype = DType::F64;
      scalars_task_ = addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, {last_compute_});
    }
    for (std::size_t b = 0; b < program_.buckets.size(); ++b) {
      addCompute(TaskKind::Optimizer, slot, -1, library_.add(adamSegment(b)), bindings, {scalars_task_});
      if (plan_.zero == 0 || plan_.dp == 1) continue;
      const GradBucket& bucket = program_.buckets[b];
      Comm comm = dataComm(CommKind::AllGather, GroupKind::Data, program_.buckets.size() + b, bucket.count,
                           {program_.weights, weightBytes(bucket.begin + shardOffset(bucket))},
                           {program_.weights, weightBytes(bucket.begin)});
      comm.dtype = plan_.precision;
      addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, {last_compute_});
    }
  }

  // Which squares this rank contributes, so that the sum over all ranks counts every parameter once.
  Segment normSegment() {
    Segment segment;
    for (const std::vector<Placed>& blocks : blocks_) {
      for (const Placed& placed : blocks) {
        const auto [owned_begin, owned_end] =
            ownedRange(program_.buckets[static_cast<std::size_t>(placed.bucket)]);
        if (plan_.zero == 0 && program_.coord.dp != 0) continue;  // replicas hold equal gradients
        const Block& block = *placed.block;
        std::int64_t begin = 0, end = program_.coord.tp == 0 ? block.elements : block.replicated_begin;
        // The last stage's copy of a tied table comes first in the head block and counts on the first stage.
        if (placed.kind == BlockKind::Head && tiedAcrossStages()) begin = block.replicated_begin;
        begin = std::max(begin + placed.offset, owned_begin);
        end = std::min(end + placed.offset, owned_end);
        if (begin >= end) continue;
        OpCall call;
        call.op = {OpKind::SumOfSquares, DType::F32, {end - begin}, 0};
        call.operands[0] = {Region::Scalars, (1 + placed.index) * sizeOf(DType::F64)};
        call.operands[1] = {Region::Grad, gradBytes(begin)};
        segment.ops.push_back(call);
      }
    }
    return segment;
  }

  Segment adamSegment(std::size_t bucket_index) {
    const GradBucket& bucket = program_.buckets[bucket_index];
    const auto [owned_begin, owned_end] = ownedRange(bucket);
    const std::int64_t shards = plan_.zero >= 1 ? plan_.dp : 1;
    const std::int64_t num_states = program_.flat_elements / shards;
    Segment segment;
    if (bucket_index == 0) {
      OpCall call;
      call.op = {OpKind::StepScalars, DType::F64, {graph_.scalars.num_slots}, 0};
      call.operands[0] = {Region::Scalars, 0};
      segment.ops.push_back(call);
    }
    const auto range = [&](std::int64_t begin, std::int64_t end, std::int64_t decay) {
      begin = std::max(begin, owned_begin);
      end = std::min(end, owned_end);
      if (begin >= end) return;
      const std::int64_t state = bucket.begin / shards + (begin - owned_begin);
      OpCall call;
      call.op = {OpKind::AdamW, plan_.precision, {end - begin, decay, graph_.scalars.num_slots}, 0};
      call.operands[0] = {Region::Weight, weightBytes(begin)};
      call.operands[1] = {Region::Optimizer, gradBytes(state)};
      call.operands[2] = {Region::Optimizer, gradBytes(num_states + state)};
      call.operands[3] = {Region::Grad, gradBytes(begin)};
      call.operands[4] = {Region::Scalars, 0};
      segment.ops.push_back(call);
    };
    for (const std::vector<Placed>& blocks : blocks_) {
      for (const Placed& placed : blocks) {
        if (placed.bucket != static_cast<std::int32_t>(bucket_index)) continue;
        range(placed.offset, placed.offset + placed.block->decay_elements, 1);
        range(placed.offset + placed.block->decay_elements, placed.offset + placed.block->elements, 0);
      }
    }
    return segment;
  }

  TaskGraph& graph_;
  const ModelSpec& model_;
  const Plan& plan_;
  Library& library_;
  const std::vector<Slot>& slots_;
  std::int32_t num_microbatches_;
  bool staged_;
  RankProgram program_;
  std::vector<std::vector<Placed>> blocks_;                              // [chunk]
  std::map<std::pair<std::int32_t, std::int32_t>, InFlight> in_flight_;  // (chunk, micro-batch)
  std::map<std::int32_t, TaskId> replicated_;  // bucket -> last sum of replicated gradients
  std::vector<std::pair<std::int32_t, Slot>> late_buckets_;
  std::vector<TaskId> data_tasks_;
  Placed tied_block_;
  BufferId tied_grad_ = -1;
  TaskId last_compute_ = -1, tied_task_ = -1, scalars_task_ = -1;
  std::size_t received_ = 0;
};

}  // namespace

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
  const Schedule schedule = makeSchedule(plan);
  for (const RankId rank : ranks) {
    graph.ranks.push_back(RankLowerer(graph, library, schedule, rank).run());
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
