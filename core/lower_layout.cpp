// Layout of the flat weight and gradient buffers: blocks in model order, chunk by chunk, cut into gradient
// buckets from each chunk's end (backward finishes there first).
#include "core/lower_rank.h"

namespace bmt {

void RankLowerer::placeBlocks() {
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
      placed.block = kind == BlockKind::Layer ? &library_.layer(layerKind(model_, layer))
                                              : &library_.block(kind, program_.coord.tp);
      blocks.push_back(placed);
    };
    if (firstStage(chunk)) place(BlockKind::Embedding, -1, 0);
    const auto first =
        static_cast<std::int32_t>(std::accumulate(layers.begin(), layers.begin() + stage, std::int64_t{0}));
    for (std::int32_t l = first;
         l < first + static_cast<std::int32_t>(layers[static_cast<std::size_t>(stage)]); ++l)
      place(BlockKind::Layer, l, 1 + l);
    const std::int64_t before = firstStage(chunk) ? 1 : 0;
    for (const RecomputeSegment& segment :
         recomputeSegments(plan_, first, layers[static_cast<std::size_t>(stage)])) {
      for (std::int64_t l = segment.begin; l < segment.end; ++l) {
        Placed& placed = blocks[static_cast<std::size_t>(before + l)];
        placed.recompute = segment.policy;
        placed.segment_begin = static_cast<std::int32_t>(before + segment.begin);
        placed.segment_end = static_cast<std::int32_t>(before + segment.end);
      }
    }
    if (lastStage(chunk)) place(BlockKind::Head, -1, 1 + static_cast<std::int32_t>(model_.layers));
    cutBuckets(blocks);
  }
}

void RankLowerer::cutBuckets(std::vector<Placed>& blocks) {
  std::vector<std::size_t> starts;  // first block of every bucket, descending
  std::int64_t elements = 0;
  const bool whole = reducesAfterSend(blocks.front().chunk);
  for (std::size_t i = blocks.size(); i-- > 0;) {
    elements += blocks[i].block->elements;
    const bool waits = tiedAcrossStages() && blocks[i].kind != BlockKind::Layer;
    const bool before_waiting = tiedAcrossStages() && i > 0 && blocks[i - 1].kind == BlockKind::Embedding;
    // ZeRO 2: the head's gradients are done in the forward slot. ZeRO 3: blocks are gathered one by one.
    const bool alone = zero_ == 3 || (zero_ == 2 && blocks[i].kind == BlockKind::Head);
    if (i == 0 || waits || before_waiting || alone || (!whole && stateBytes(elements) >= plan_.bucket)) {
      starts.push_back(i);
      elements = 0;
    }
  }
  std::reverse(starts.begin(), starts.end());
  for (std::size_t b = 0; b < starts.size(); ++b) {
    const std::size_t end = b + 1 < starts.size() ? starts[b + 1] : blocks.size();
    std::int64_t offset = program_.flat_elements;
    const std::int64_t begin = offset;
    for (std::size_t i = starts[b]; i < end; ++i) {
      blocks[i].offset = offset;
      blocks[i].bucket = static_cast<std::int32_t>(program_.buckets.size());
      offset += blocks[i].block->elements;
    }
    addBucket(offset - begin, false);
  }
  // The experts of a block are a bucket of their own: they are large, and other ranks hold the same ones.
  for (Placed& placed : blocks) {
    if (placed.block->expert_elements == 0) continue;
    placed.expert_offset = program_.flat_elements;
    placed.expert_bucket = addBucket(placed.block->expert_elements, true);
  }
  for (const Placed& placed : blocks) addParams(placed);
}

std::int32_t RankLowerer::addBucket(std::int64_t elements, bool expert) {
  GradBucket bucket;
  bucket.expert = expert;
  bucket.begin = program_.flat_elements;
  bucket.count = roundUp(elements, bucketRanks(bucket) * (kArenaAlignment / sizeOf(DType::F32)));
  bucket.state_begin = program_.state_elements;
  program_.flat_elements += bucket.count;
  program_.state_elements += bucket.count / shardsOf(bucket);
  program_.buckets.push_back(bucket);
  return static_cast<std::int32_t>(program_.buckets.size()) - 1;
}

void RankLowerer::addParams(const Placed& placed) {
  const std::vector<BlockParam>& params =
      placed.kind == BlockKind::Layer
          ? library_.layerParams(layerKind(model_, placed.layer), program_.coord.tp,
                                 graph_.mesh.expertIndex(program_.coord))
          : placed.block->params;
  for (const BlockParam& p : params) {
    ParamShard shard;
    shard.name =
        placed.kind == BlockKind::Layer ? "layers." + std::to_string(placed.layer) + "." + p.name : p.name;
    shard.global_rows = p.global_rows;
    shard.global_cols = p.global_cols;
    shard.row_begin = p.row_begin;
    shard.rows = p.rows;
    shard.col_begin = p.col_begin;
    shard.cols = p.cols;
    shard.offset = (p.expert ? placed.expert_offset : placed.offset) + p.offset;
    shard.expert = p.expert;
    shard.block = placed.index;
    shard.decay = p.decay;
    shard.replicated = p.replicated;
    shard.tied_copy = placed.kind == BlockKind::Head && p.name == "embedding.weight";
    program_.params.push_back(std::move(shard));
  }
}

BufferId RankLowerer::addBuffer(BufferKind kind, Bytes bytes, bool persistent) {
  Buffer buffer;
  buffer.kind = kind;
  buffer.bytes = bytes;
  buffer.persistent = persistent;
  program_.buffers.push_back(buffer);
  return static_cast<BufferId>(program_.buffers.size()) - 1;
}

void RankLowerer::touch(BufferId id, TaskId task) {
  if (id < 0) return;
  Buffer& buffer = program_.buffers[static_cast<std::size_t>(id)];
  if (buffer.first_task < 0) buffer.first_task = task;
  buffer.last_task = std::max(buffer.last_task, task);
}

void RankLowerer::makePersistentBuffers() {
  RankProgram& p = program_;
  p.weights =
      addBuffer(BufferKind::Weights, weightBytes(zero_ == 3 ? p.state_elements : p.flat_elements), true);
  p.gradients =
      addBuffer(BufferKind::Gradients, gradBytes(zero_ >= 2 ? p.state_elements : p.flat_elements), true);
  // Adam moments, and an fp32 master copy when the weights are 16-bit; sharded over dp by ZeRO-1.
  const std::int64_t states = sizeOf(storageType(plan_)) == 4 ? 2 : 3;
  p.optimizer = addBuffer(BufferKind::Optimizer, states * stateBytes(p.state_elements), true);
  if (tiedOnRank())
    tied_grad_ =
        addBuffer(BufferKind::Gradients, gradBytes(ceilDiv(model_.vocab, plan_.tp) * model_.d_model), true);
  const BlockShape shape = makeBlockShape(model_, plan_, 0);
  const auto input = [&](Bytes each) { return addBuffer(BufferKind::Input, num_microbatches_ * each, true); };
  if (program_.coord.pp == 0) p.tokens = input(inputBytes(shape));
  if (program_.coord.pp == holderOf(plan_.numVirtualStages() - 1))
    p.targets = input(targetElements(shape) * sizeOf(DType::I32));
  p.scalars = addBuffer(BufferKind::Input, graph_.scalars.size() * sizeOf(DType::F64), true);
}

}  // namespace bmt
