// Inside of lower(): the blocks that ranks share, and the class that emits one rank's program. Nothing else
// includes this.
//   lower.cpp           which ranks, and the shared blocks        lower_layout.cpp     flat buffers, buckets,
//   parameters lower_slots.cpp     tasks of forward and backward slots       lower_optimizer.cpp  gradient
//   reduction, norm, AdamW
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/lower.h"
#include "core/op_graph.h"

namespace bmt {

enum class BlockKind : std::uint8_t { Embedding, Layer, Head };
enum class Part : std::uint8_t { Forward, BackwardFirst, Backward, WeightFirst, Weight, Core };

// A block on this rank: where it is in the model and in the flat buffers.
struct Placed {
  BlockKind kind = BlockKind::Layer;
  std::int32_t chunk = 0;
  std::int32_t layer = -1;  // global layer index
  std::int32_t index = 0;   // 0 = embedding, 1 + layer, 1 + layers = head
  std::int64_t offset = 0;  // elements
  std::int32_t bucket = 0;
  std::int64_t expert_offset = 0;  // of its experts, which lie in buckets of their own
  std::int32_t expert_bucket = -1;
  Recompute recompute = Recompute::None;  // None, Selective or Full
  // Full: blocks [segment_begin, segment_end) of the chunk are computed again together, from the first's
  // input.
  std::int32_t segment_begin = 0, segment_end = 0;
  const Block* block = nullptr;
};

// The first and the last virtual stage are on the same pipeline rank.
inline bool endsShareRank(const Plan& plan) {
  return plan.pp == 1 || placementOf(plan) == Placement::V;
}

// Blocks and segments shared by all ranks of a graph. Embedding and head differ between tensor ranks; a
// layer's ops are the same on all ranks, only the rows or columns of its parameters and its experts differ.
class Library {
 public:
  Library(TaskGraph& graph) : graph_(graph) {
    const ModelSpec& model = graph.model;
    for (std::int64_t l = 0; l < model.layers; ++l) {
      const LayerKind kind = layerKind(model, l);
      if (!layers_.contains(kind))
        layers_.emplace(kind, buildLayerBlock(makeBlockShape(model, graph.plan, 0), kind));
    }
    for (std::int32_t t = 0; t < graph.plan.tp; ++t) {
      const BlockShape shape = makeBlockShape(model, graph.plan, t);
      embedding_.push_back(buildEmbeddingBlock(shape));
      const bool shares_rank = model.tied_embedding && endsShareRank(graph.plan);
      head_.push_back(buildHeadBlock(shape, shares_rank ? HeadTable::Tied : HeadTable::Own));
    }
  }

  const Block& layer(LayerKind kind) const { return layers_.at(kind); }
  const Block& block(BlockKind kind, std::int32_t tp_index) const {
    return (kind == BlockKind::Embedding ? embedding_ : head_)[static_cast<std::size_t>(tp_index)];
  }
  // Parameters of a layer on the rank with these indexes.
  const std::vector<BlockParam>& layerParams(LayerKind kind, std::int32_t tp_index, std::int32_t ep_index) {
    if (kind != LayerKind::Experts) ep_index = 0;
    const auto [entry, inserted] = layer_params_.try_emplace({kind, tp_index, ep_index});
    if (inserted)
      entry->second =
          buildLayerBlock(makeBlockShape(graph_.model, graph_.plan, tp_index, ep_index), kind).params;
    return entry->second;
  }
  static const std::vector<Piece>& pieces(const Block& block, Part part) {
    switch (part) {
      case Part::Forward:
        return block.forward;
      case Part::BackwardFirst:
        return block.backward_first;
      case Part::Backward:
        return block.backward;
      case Part::WeightFirst:
        return block.weight_first;
      case Part::Core:
        return block.core;
      case Part::Weight:
        break;
    }
    return block.weight;
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
      const std::vector<Piece>& list = pieces(*block, part);
      std::vector<std::int32_t> first_op;
      for (const Piece& piece : list) {
        first_op.push_back(static_cast<std::int32_t>(segment.ops.size()));
        for (const OpCall& call : piece.ops) {
          segment.ops.push_back(call);
          segment.repeat.push_back(times);
        }
      }
      first_op.push_back(static_cast<std::int32_t>(segment.ops.size()));
      for (std::size_t i = 0; i < list.size(); ++i) {
        if (!list[i].is_comm) continue;
        const BlockComm& comm = list[i].comm;
        MergedComm merged{comm.kind, comm.group, comm.count, comm.dtype, times};
        if (comm.overlapped) {
          // Beside the ops from here to whoever waits for it.
          std::size_t until = i + 1;
          const auto waits = [&](const Piece& p) {
            return std::find(p.after.begin(), p.after.end(), static_cast<std::int32_t>(i)) != p.after.end();
          };
          while (until < list.size() && !waits(list[until])) ++until;
          merged.beside = first_op[i];
          merged.beside_end = first_op[until];
        }
        segment.comms.push_back(merged);
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
  std::map<LayerKind, Block> layers_;
  std::map<std::tuple<LayerKind, std::int32_t, std::int32_t>, std::vector<BlockParam>> layer_params_;
  std::vector<Block> embedding_, head_;
  std::map<std::tuple<const Block*, Part, std::size_t>, SegmentId> segment_of_;
  std::map<ChunkKey, SegmentId> chunk_segment_;
};

using Bindings = std::array<Arg, kNumRegions>;
inline Arg& bind(Bindings& bindings, Region region) {
  return bindings[static_cast<std::size_t>(region)];
}

// Emits the program of one rank.
class RankLowerer {
 public:
  RankLowerer(TaskGraph& graph, Library& library, const Schedule& schedule,
              const std::vector<std::vector<ReceiveAt>>& receives, RankId rank)
      : graph_(graph),
        model_(graph.model),
        plan_(graph.plan),
        library_(library),
        slots_(schedule.stages[static_cast<std::size_t>(graph.mesh.coordOf(rank).pp)]),
        receives_(receives[static_cast<std::size_t>(graph.mesh.coordOf(rank).pp)]),
        num_microbatches_(schedule.num_microbatches),
        placement_(schedule.placement),
        split_(schedule.split_backward),
        zero_(graph.plan.dataRanks() > 1 ? graph.plan.zero : std::min(graph.plan.zero, 1)),
        staged_(graph.granularity == Granularity::Stage && zero_ < 2) {
    program_.rank = rank;
    program_.coord = graph.mesh.coordOf(rank);
  }

  RankProgram run() {
    placeBlocks();
    makePersistentBuffers();
    emitScalarReset();
    if (plan_.overlap_param) gatherAhead();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      // Receives are posted before a slot computes, so that they overlap.
      for (; received_ < receives_.size() && receives_[received_].before <= static_cast<std::int32_t>(i);
           ++received_)
        receiveFor(slots_[static_cast<std::size_t>(receives_[received_].slot)]);
      switch (slots_[i].phase) {
        case Phase::F:
          forwardSlot(slots_[i]);
          break;
        case Phase::B:
          backwardSlot(slots_[i]);
          break;
        default:
          weightSlot(slots_[i]);
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
    // Gradients of the residual stream: [i] of the input of block i, back() of the chunk's output. All the
    // same buffer, in place, unless backward is split.
    std::vector<BufferId> grads;
    std::vector<BufferId> deferred;        // per block, from B to W
    BufferId all = -1, deferred_all = -1;  // Stage granularity: everything that is kept for B and W, for W
    TaskId recv_f = -1, recv_b = -1;
  };

  std::int32_t virtualStage(std::int32_t chunk) const {
    return bmt::virtualStage(placement_, plan_.pp, program_.coord.pp, chunk);
  }
  // Pipeline rank of a virtual stage. In V placement two consecutive ones share the last rank.
  std::int32_t holderOf(std::int32_t virtual_stage) const {
    return stageOf(placement_, plan_.pp, virtual_stage);
  }
  bool firstStage(std::int32_t chunk) const { return virtualStage(chunk) == 0; }
  bool lastStage(std::int32_t chunk) const { return virtualStage(chunk) == plan_.numVirtualStages() - 1; }
  std::int64_t streamElements() const {
    return makeBlockShape(model_, plan_, 0).stream_rows() * model_.d_model;
  }
  InFlight& inFlight(const Slot& slot) { return in_flight_[{slot.chunk, slot.microbatch}]; }
  std::vector<Placed>& blocksOf(std::int32_t chunk) { return blocks_[static_cast<std::size_t>(chunk)]; }
  bool tiedAcrossStages() const { return model_.tied_embedding && !endsShareRank(plan_); }
  bool tiedOnRank() const { return model_.tied_embedding && endsShareRank(plan_); }
  TaskId nextTask() const { return static_cast<TaskId>(program_.tasks.size()); }
  Bytes weightBytes(std::int64_t elements) const { return elements * sizeOf(storageType(plan_)); }
  Bytes gradBytes(std::int64_t elements) const { return elements * sizeOf(plan_.grads); }
  static Bytes stateBytes(std::int64_t elements) { return elements * sizeOf(DType::F32); }

  // Layout (lower_layout.cpp).
  void placeBlocks();
  // Groups a chunk's blocks into buckets from its end and lays them out. A tied table that exists twice waits
  // for its other copy, so it gets a bucket of its own.
  void cutBuckets(std::vector<Placed>& blocks);
  // Appends a bucket of `elements`, rounded up so that every shard of it stays aligned; returns its index.
  std::int32_t addBucket(std::int64_t elements, bool expert);
  void addParams(const Placed& placed);
  BufferId addBuffer(BufferKind kind, Bytes bytes, bool persistent = false);
  void touch(BufferId id, TaskId task);
  void span(BufferId id, TaskId first);
  void makePersistentBuffers();

  // Emission (lower_slots.cpp).
  TaskId addTask(Task task, const std::vector<TaskId>& deps);
  TaskId addCompute(TaskKind kind, const Slot& slot, std::int32_t layer, SegmentId segment,
                    const Bindings& bindings, const std::vector<TaskId>& deps);
  TaskId addComm(TaskKind kind, Lane lane, const Slot& slot, std::int32_t layer, const Comm& comm,
                 const std::vector<TaskId>& deps);
  Bindings baseBindings(const Placed& placed, std::int32_t microbatch);
  // seq of a tensor-axis collective: mixed radix over (phase, recompute, chunk, micro-batch, block, piece).
  std::uint64_t tensorSeq(const Slot& slot, bool recompute, std::int32_t block_index,
                          std::size_t piece) const;
  void emitPieces(const Placed& placed, Part part, TaskKind kind, const Slot& slot, const Bindings& bindings,
                  const std::vector<TaskId>& before);
  Comm pipeComm(CommKind kind, bool forward, std::int32_t boundary, const Slot& slot, BufferId buffer) const;
  // The buffer of a gradient of the residual stream: a new one, or where backward is in place the chunk's
  // only one.
  void receiveGradient(InFlight& flight, std::int32_t chunk, BufferId buffer);
  void handOver(const Slot& slot, bool forward, std::int32_t to, BufferId buffer);
  BufferId activations();
  void receiveFor(const Slot& slot);
  void emitScalarReset();

  // Slots at Layer granularity (lower_slots.cpp).
  void forwardSlot(const Slot& slot);
  void forwardBlock(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks, std::size_t i,
                    TaskId recv);
  void backwardSlot(const Slot& slot);
  // Runs the forward of a recompute segment again, which keeps what its backward needs.
  void recomputeSegment(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks,
                        const Placed& last, TaskId recv);
  // What a block keeps from forward to backward.
  static Bytes keptBytes(const Placed& placed);
  void backwardBlock(const Slot& slot, InFlight& flight, const std::vector<Placed>& blocks, std::size_t i,
                     TaskId recv);
  void weightSlot(const Slot& slot);

  // Stage granularity (lower_slots.cpp): one task per chunk and direction; buffers are summed, so memory over
  // time stays right at slot resolution.
  void forwardChunk(const Slot& slot, InFlight& flight, TaskId recv);
  void backwardChunk(const Slot& slot, InFlight& flight, TaskId recv);
  void weightChunk(const Slot& slot, InFlight& flight);

  // Gradients and optimizer (lower_optimizer.cpp).
  // Called after a block's last task of a backward slot; starts what its gradients were waiting for.
  void blockDone(const Slot& slot, const std::vector<Placed>& blocks, std::size_t i);
  Comm dataComm(CommKind kind, GroupKind group, std::uint64_t seq, std::int64_t count, Arg src,
                Arg dst) const;
  // With sequence parallelism every tensor rank saw only its rows: replicated parameters need the sum.
  void reduceReplicated(const Slot& slot, const Placed& placed);
  void addTiedGradient(const Slot& slot, const Placed& placed);
  void reduceBucket(std::int32_t index, const Slot& slot);
  // Overlapped reductions start bucket by bucket only in virtual stage 0. Behind it the next stage waits for
  // the gradient of the chunk's input, and communication posts in the order of issue (R4): buckets that queue
  // on the data lane would hold that message back, stage after stage. So such a chunk is one bucket, reduced
  // once its message is on its way, in time that the pipeline drains anyway (Megatron-LM, too, switches
  // bucketing off there).
  bool reducesAfterSend(std::int32_t chunk) const {
    return plan_.overlap_grad && zero_ < 2 && !firstStage(chunk);
  }
  void reduceAfterSend();
  // Ranks that sum a bucket's gradients, and this rank's place among them.
  std::int32_t bucketRanks(const GradBucket& bucket) const {
    return bucket.expert ? plan_.expertDataRanks() : plan_.dataRanks();
  }
  std::int32_t bucketIndex(const GradBucket& bucket) const {
    return bucket.expert ? graph_.mesh.expertDataIndex(program_.coord)
                         : graph_.mesh.dataIndex(program_.coord);
  }
  // Ranks over which a bucket's states (gradients, parameters) are cut, and this rank's place among them.
  std::int32_t shardsOf(const GradBucket& bucket) const {
    if (plan_.zero == 0) return 1;
    return plan_.shard > 0 ? plan_.shard : bucketRanks(bucket);
  }
  std::int32_t shardIndex(const GradBucket& bucket) const { return bucketIndex(bucket) % shardsOf(bucket); }
  GroupKind shardGroup(const GradBucket& bucket) const {
    return plan_.shard > 0 ? GroupKind::Shard : bucket.expert ? GroupKind::ExpertData : GroupKind::Data;
  }
  GradBucket& bucketAt(std::int32_t index) { return program_.buckets[static_cast<std::size_t>(index)]; }
  std::int64_t shardOffset(const GradBucket& bucket) const;

  // ZeRO 2 and 3 (lower_shards.cpp): this micro-batch's gradients of a bucket, until they are scattered; the
  // parameters of a bucket, while they are gathered.
  bool overwritesGradients(const Slot& slot) const { return zero_ >= 2 || slot.microbatch == 0; }
  Arg gradArg(std::int32_t bucket, std::int64_t element);
  void bindGradients(Bindings& bindings, const Placed& placed);
  Arg weightArg(std::int32_t bucket, std::int64_t element);
  std::vector<std::int32_t> bucketsOf(const Placed& placed, bool forward) const;
  // Gathers a block's parameters and starts gathering those of the next ones in the given direction; returns
  // what the block has to wait for.
  std::vector<TaskId> gatherBlock(const Slot& slot, const std::vector<Placed>& blocks, std::size_t i,
                                  bool forward);
  void gatherBucket(const Slot& slot, const Placed& reader, std::int32_t bucket);
  void dropBlock(const Placed& placed, bool forward);
  void scatterBucket(std::int32_t index, const Slot& slot, const std::vector<TaskId>& deps);
  void addScattered(std::size_t keep);
  std::uint64_t shardSeq(const Slot& slot, std::int32_t bucket, std::uint64_t what) const;
  // overlap-param: last step's update is gathered beside this step's forward.
  void gatherAhead();
  std::vector<TaskId> aheadOf(const Slot& slot, const Placed& placed) const;
  // The two copies of a tied table add their gradients; then the buckets that waited are reduced.
  void finishGradients();
  // Elements of bucket that this rank's optimizer owns.
  std::pair<std::int64_t, std::int64_t> ownedRange(const GradBucket& bucket) const;
  void optimizerStep();
  // Which squares this rank contributes, so that the sum over all ranks counts every parameter once.
  Segment normSegment();
  Segment adamSegment(std::size_t bucket_index);

  TaskGraph& graph_;
  const ModelSpec& model_;
  const Plan& plan_;
  Library& library_;
  const std::vector<Slot>& slots_;
  const std::vector<ReceiveAt>& receives_;
  std::int32_t num_microbatches_;
  Placement placement_;
  bool split_;
  std::int32_t zero_;  // effective level: there is nothing to shard over one data rank
  bool staged_;        // one task per chunk; ZeRO 2 and 3 talk between layers, so they keep a task per layer
  RankProgram program_;
  std::vector<std::vector<Placed>> blocks_;                              // [chunk]
  std::map<std::pair<std::int32_t, std::int32_t>, InFlight> in_flight_;  // (chunk, micro-batch)
  std::map<std::int32_t, TaskId> replicated_;  // bucket -> last sum of replicated gradients
  std::vector<std::pair<std::int32_t, Slot>> late_buckets_, after_send_;
  std::vector<TaskId> data_tasks_;
  std::map<std::int32_t, BufferId> gradients_of_;                 // bucket -> this micro-batch's
  std::map<std::int32_t, std::pair<BufferId, TaskId>> gathered_;  // bucket -> its parameters
  struct Scattered {
    std::int32_t bucket = 0;
    BufferId shard = -1;
    TaskId task = -1;
  };
  std::vector<Scattered> scattered_;               // shards not yet added to the sum of micro-batches
  std::map<std::int64_t, SegmentId> add_segment_;  // by elements
  std::vector<TaskId> ahead_;                      // overlap-param: by bucket
  Placed tied_block_;
  BufferId tied_grad_ = -1;
  TaskId last_compute_ = -1, tied_task_ = -1, scalars_task_ = -1;
  std::size_t received_ = 0;
};

}  // namespace bmt
