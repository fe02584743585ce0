// What follows backward: sums over tensor ranks, gradient buckets, tied tables, the norm, AdamW, parameter
// gathers.
#include "core/lower_rank.h"

namespace bmt {

void RankLowerer::blockDone(const Slot& slot, const std::vector<Placed>& blocks, std::size_t i) {
  const bool last = slot.microbatch == num_microbatches_ - 1;
  if (zero_ < 2 && !last) return;
  const Placed& placed = blocks[i];
  reduceReplicated(slot, placed);
  if (placed.kind == BlockKind::Embedding && tiedOnRank() && last) addTiedGradient(slot, placed);
  const bool after_send = reducesAfterSend(placed.chunk);
  const auto reduce = [&](std::int32_t bucket, bool now) {
    if (now && !after_send) {
      reduceBucket(bucket, slot);
    } else {
      (now ? after_send_ : late_buckets_).emplace_back(bucket, slot);
    }
  };
  if (placed.expert_bucket >= 0) reduce(placed.expert_bucket, plan_.overlap_grad);
  const bool closes = i == 0 || blocks[i - 1].bucket != placed.bucket;
  if (!closes) return;
  const bool waits = tiedAcrossStages() && placed.kind != BlockKind::Layer;
  reduce(placed.bucket, plan_.overlap_grad && !waits);
  if (waits) tied_block_ = placed;
}

void RankLowerer::reduceAfterSend() {
  for (const auto& [bucket, at] : std::exchange(after_send_, {})) reduceBucket(bucket, at);
}

Comm RankLowerer::dataComm(CommKind kind, GroupKind group, std::uint64_t seq, std::int64_t count, Arg src,
                           Arg dst) const {
  Comm comm;
  comm.kind = kind;
  comm.group = graph_.mesh.groupOf(group, program_.rank);
  comm.seq = seq;
  comm.count = count;
  comm.dtype = plan_.grads;
  comm.src = src;
  comm.dst = dst;
  return comm;
}

void RankLowerer::reduceReplicated(const Slot& slot, const Placed& placed) {
  const std::int64_t count = placed.block->elements - placed.block->replicated_begin;
  if (!plan_.sequence_parallel || count == 0) return;
  const Arg arg = gradArg(placed.bucket, placed.offset + placed.block->replicated_begin);
  Slot step = slot;
  step.phase = Phase::Step;
  const Comm comm = dataComm(CommKind::AllReduce, GroupKind::Tensor, tensorSeq(step, false, placed.index, 0),
                             count, arg, arg);
  const TaskId id = addComm(TaskKind::TensorComm, Lane::Tensor, slot, placed.layer, comm, {last_compute_});
  replicated_[placed.bucket] = id;
}

void RankLowerer::addTiedGradient(const Slot& slot, const Placed& placed) {
  const std::int64_t count = ceilDiv(model_.vocab, plan_.tp) * model_.d_model;
  Segment segment;
  OpCall call;
  call.op = {OpKind::Add, DType::F32, {count}, 0};
  call.operands[0] = call.operands[1] = {Region::Grad, 0};
  call.operands[2] = {Region::TiedGrad, 0};
  segment.ops.push_back(call);
  Bindings bindings;
  bind(bindings, Region::Grad) = gradArg(placed.bucket, placed.offset);
  bind(bindings, Region::TiedGrad) = {tied_grad_, 0};
  addCompute(TaskKind::Backward, slot, -1, library_.add(std::move(segment)), bindings, {});
}

void RankLowerer::reduceBucket(std::int32_t index, const Slot& slot) {
  const GradBucket& bucket = bucketAt(index);
  const auto replicated = replicated_.find(index);
  const TaskId sum = replicated == replicated_.end() ? -1 : replicated->second;
  if (zero_ >= 2) return scatterBucket(index, slot, {last_compute_, sum});
  const std::int32_t ranks = bucketRanks(bucket), shards = shardsOf(bucket);
  if (ranks == 1) return;
  const Arg full{program_.gradients, gradBytes(bucket.begin)};
  const Arg shard{program_.gradients, gradBytes(bucket.begin + shardOffset(bucket))};
  const auto seq = static_cast<std::uint64_t>(index);
  if (plan_.zero == 0) {
    const Comm comm = dataComm(CommKind::AllReduce, bucket.expert ? GroupKind::ExpertData : GroupKind::Data,
                               seq, bucket.count, full, full);
    data_tasks_.push_back(
        addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, {last_compute_, tied_task_, sum}));
    return;
  }
  const Comm scatter = dataComm(CommKind::ReduceScatter, shardGroup(bucket), seq, bucket.count, full, shard);
  data_tasks_.push_back(
      addComm(TaskKind::DataComm, Lane::Data, slot, -1, scatter, {last_compute_, tied_task_, sum}));
  if (shards == ranks) return;
  const Comm across =
      dataComm(CommKind::AllReduce, GroupKind::Replica, seq, bucket.count / shards, shard, shard);
  data_tasks_.push_back(addComm(TaskKind::DataComm, Lane::Data, slot, -1, across, {}));
}

std::int64_t RankLowerer::shardOffset(const GradBucket& bucket) const {
  return bucket.count / shardsOf(bucket) * shardIndex(bucket);
}

void RankLowerer::finishGradients() {
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
  if (zero_ < 2) return;
  addScattered(0);
  for (std::size_t b = 0; b < program_.buckets.size(); ++b) {
    const GradBucket& bucket = program_.buckets[b];
    if (shardsOf(bucket) == bucketRanks(bucket)) continue;
    const Arg shard{program_.gradients, gradBytes(bucket.state_begin)};
    const Comm across =
        dataComm(CommKind::AllReduce, GroupKind::Replica, b, bucket.count / shardsOf(bucket), shard, shard);
    data_tasks_.push_back(addComm(TaskKind::DataComm, Lane::Data, slot, -1, across, {last_compute_}));
  }
}

std::pair<std::int64_t, std::int64_t> RankLowerer::ownedRange(const GradBucket& bucket) const {
  if (plan_.zero == 0) return {bucket.begin, bucket.begin + bucket.count};
  const std::int64_t begin = bucket.begin + shardOffset(bucket);
  return {begin, begin + bucket.count / shardsOf(bucket)};
}

void RankLowerer::optimizerStep() {
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
    const GradBucket& bucket = program_.buckets[b];
    if (plan_.zero == 0 || zero_ == 3 || plan_.overlap_param || shardsOf(bucket) == 1) continue;
    Comm comm = dataComm(CommKind::AllGather, shardGroup(bucket), program_.buckets.size() + b, bucket.count,
                         {program_.weights, weightBytes(bucket.begin + shardOffset(bucket))},
                         {program_.weights, weightBytes(bucket.begin)});
    comm.dtype = storageType(plan_);
    addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, {last_compute_});
  }
}

Segment RankLowerer::normSegment() {
  Segment segment;
  for (const std::vector<Placed>& blocks : blocks_) {
    for (const Placed& placed : blocks) {
      const auto add = [&](std::int32_t bucket_index, std::int64_t begin, std::int64_t end) {
        const GradBucket& bucket = program_.buckets[static_cast<std::size_t>(bucket_index)];
        if (bucketIndex(bucket) >= shardsOf(bucket)) return;  // replicas hold equal gradients
        const auto [owned_begin, owned_end] = ownedRange(bucket);
        begin = std::max(begin, owned_begin);
        end = std::min(end, owned_end);
        if (begin >= end) return;
        OpCall call;
        call.op = {OpKind::SumOfSquares, DType::F32, {end - begin}, 0};
        call.operands[0] = {Region::Scalars, (1 + placed.index) * sizeOf(DType::F64)};
        call.operands[1] = {Region::Grad,
                            gradBytes(zero_ >= 2 ? bucket.state_begin + begin - owned_begin : begin)};
        segment.ops.push_back(call);
      };
      const Block& block = *placed.block;
      std::int64_t begin = 0;
      const std::int64_t end = program_.coord.tp == 0 ? block.elements : block.replicated_begin;
      // The last stage's copy of a tied table comes first in the head block and counts on the first stage.
      if (placed.kind == BlockKind::Head && tiedAcrossStages())
        begin = ceilDiv(model_.vocab, plan_.tp) * model_.d_model;
      add(placed.bucket, placed.offset + begin, placed.offset + end);
      if (placed.expert_bucket >= 0)
        add(placed.expert_bucket, placed.expert_offset, placed.expert_offset + block.expert_elements);
    }
  }
  return segment;
}

Segment RankLowerer::adamSegment(std::size_t bucket_index) {
  const GradBucket& bucket = program_.buckets[bucket_index];
  const auto [owned_begin, owned_end] = ownedRange(bucket);
  const std::int64_t num_states = program_.state_elements;
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
    const std::int64_t state = bucket.state_begin + (begin - owned_begin);
    OpCall call;
    call.op = {OpKind::AdamW, plan_.precision, {end - begin, decay, graph_.scalars.num_slots}, 0};
    call.operands[0] = {Region::Weight, weightBytes(zero_ == 3 ? state : begin)};
    call.operands[1] = {Region::Optimizer, stateBytes(state)};
    call.operands[2] = {Region::Optimizer, stateBytes(num_states + state)};
    call.operands[3] = {Region::Grad, gradBytes(zero_ >= 2 ? state : begin)};
    call.operands[4] = {Region::Scalars, 0};
    segment.ops.push_back(call);
  };
  for (const std::vector<Placed>& blocks : blocks_) {
    for (const Placed& placed : blocks) {
      if (placed.expert_bucket == static_cast<std::int32_t>(bucket_index))
        range(placed.expert_offset, placed.expert_offset + placed.block->expert_elements, 1);
      if (placed.bucket != static_cast<std::int32_t>(bucket_index)) continue;
      const Block& block = *placed.block;
      range(placed.offset, placed.offset + block.decay_elements, 1);
      range(placed.offset + block.decay_elements, placed.offset + block.replicated_begin, 0);
      range(placed.offset + block.replicated_begin, placed.offset + block.replicated_decay_end, 1);
      range(placed.offset + block.replicated_decay_end, placed.offset + block.elements, 0);
    }
  }
  return segment;
}

}  // namespace bmt
