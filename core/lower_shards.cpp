// ZeRO 2 and 3, and parameters that are gathered beside the next step's forward.
//   ZeRO 2: each micro-batch's gradients of a bucket are reduce-scattered as soon as they are complete and
//   freed; the shards are added up. ZeRO 3 (FSDP, Zhao et al. 2023): a block's parameters are gathered right
//   before its forward and again before its backward, `prefetch` blocks ahead beside the compute of the one
//   before, and dropped after use; the head is used once and its table, when tied, is gathered with it.
// With shard=N both work inside groups of N ranks; the sums of N ranks are added across the copies once,
// after the last micro-batch.
#include "core/lower_rank.h"

namespace bmt {

std::uint64_t RankLowerer::shardSeq(const Slot& slot, std::int32_t bucket, std::uint64_t what) const {
  std::uint64_t seq = 1;
  const auto push = [&seq](std::uint64_t radix, std::uint64_t digit) { seq = seq * radix + digit; };
  push(4, static_cast<std::uint64_t>(slot.phase));
  push(static_cast<std::uint64_t>(plan_.chunks), static_cast<std::uint64_t>(slot.chunk));
  push(static_cast<std::uint64_t>(num_microbatches_), static_cast<std::uint64_t>(slot.microbatch));
  push(4, what);
  push(std::uint64_t{1} << 24, static_cast<std::uint64_t>(bucket));  // above every once-a-step seq
  return seq;
}

Arg RankLowerer::gradArg(std::int32_t bucket, std::int64_t element) {
  if (zero_ < 2) return {program_.gradients, gradBytes(element)};
  const auto [entry, inserted] = gradients_of_.try_emplace(bucket, -1);
  if (inserted) entry->second = addBuffer(BufferKind::Gradients, gradBytes(bucketAt(bucket).count));
  return {entry->second, gradBytes(element - bucketAt(bucket).begin)};
}

void RankLowerer::bindGradients(Bindings& bindings, const Placed& placed) {
  bind(bindings, Region::Grad) = gradArg(placed.bucket, placed.offset);
  if (placed.expert_bucket >= 0)
    bind(bindings, Region::ExpertGrad) = gradArg(placed.expert_bucket, placed.expert_offset);
}

Arg RankLowerer::weightArg(std::int32_t bucket, std::int64_t element) {
  if (zero_ < 3) return {program_.weights, weightBytes(element)};
  const GradBucket& b = bucketAt(bucket);
  if (shardsOf(b) == 1) return {program_.weights, weightBytes(b.state_begin + element - b.begin)};
  const auto at = gathered_.find(bucket);
  if (at == gathered_.end()) return {};  // a block that reads no parameters here
  return {at->second.first, weightBytes(element - b.begin)};
}

// Whose parameters a block reads. An embedding without a norm reads none in backward.
std::vector<std::int32_t> RankLowerer::bucketsOf(const Placed& placed, bool forward) const {
  std::vector<std::int32_t> list;
  if (zero_ < 3 || (placed.kind == BlockKind::Embedding && !forward && !model_.embedding_norm)) return list;
  list.push_back(placed.bucket);
  if (placed.expert_bucket >= 0) list.push_back(placed.expert_bucket);
  if (placed.kind == BlockKind::Head && tiedOnRank()) list.push_back(blocks_.front().front().bucket);
  std::erase_if(list,
                [&](std::int32_t b) { return shardsOf(program_.buckets[static_cast<std::size_t>(b)]) == 1; });
  return list;
}

void RankLowerer::gatherBucket(const Slot& slot, const Placed& reader, std::int32_t index) {
  if (gathered_.contains(index)) return;
  const GradBucket& bucket = bucketAt(index);
  const BufferId full = addBuffer(BufferKind::Communication, weightBytes(bucket.count));
  // The head reads the embedding's table once more in the same slot.
  const bool tied = reader.kind == BlockKind::Head && index != reader.bucket;
  Comm comm = dataComm(CommKind::AllGather, shardGroup(bucket), shardSeq(slot, index, tied ? 2 : 0),
                       bucket.count, {program_.weights, weightBytes(bucket.state_begin)}, {full, 0});
  comm.dtype = storageType(plan_);
  gathered_[index] = {full, addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, {last_compute_})};
}

std::vector<TaskId> RankLowerer::gatherBlock(const Slot& slot, const std::vector<Placed>& blocks,
                                             std::size_t i, bool forward) {
  if (zero_ < 3) return forward ? aheadOf(slot, blocks[i]) : std::vector<TaskId>{};
  std::vector<TaskId> tasks;
  for (const std::int32_t bucket : bucketsOf(blocks[i], forward)) {
    gatherBucket(slot, blocks[i], bucket);
    tasks.push_back(gathered_.at(bucket).second);
  }
  for (std::size_t ahead = 1; ahead <= static_cast<std::size_t>(plan_.prefetch); ++ahead) {
    if (forward ? i + ahead >= blocks.size() : ahead > i) break;
    const Placed& next = blocks[forward ? i + ahead : i - ahead];
    for (const std::int32_t bucket : bucketsOf(next, forward)) gatherBucket(slot, next, bucket);
  }
  return tasks;
}

void RankLowerer::dropBlock(const Placed& placed, bool forward) {
  for (const std::int32_t bucket : bucketsOf(placed, forward)) gathered_.erase(bucket);
}

void RankLowerer::scatterBucket(std::int32_t index, const Slot& slot, const std::vector<TaskId>& deps) {
  const GradBucket& bucket = bucketAt(index);
  const std::int64_t count = bucket.count / shardsOf(bucket);
  const BufferId gradients = gradArg(index, bucket.begin).buffer;
  gradients_of_.erase(index);
  if (shardsOf(bucket) == 1) {  // experts that no other rank holds
    scattered_.push_back({index, gradients, -1});
  } else {
    const bool first = slot.microbatch == 0;
    const Arg shard = first ? Arg{program_.gradients, gradBytes(bucket.state_begin)}
                            : Arg{addBuffer(BufferKind::Communication, gradBytes(count)), 0};
    const Comm comm = dataComm(CommKind::ReduceScatter, shardGroup(bucket), shardSeq(slot, index, 1),
                               bucket.count, {gradients, 0}, shard);
    const TaskId task = addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, deps);
    data_tasks_.push_back(task);
    if (!first) scattered_.push_back({index, shard.buffer, task});
  }
  // One shard late, so that compute does not wait for the bucket that was just issued.
  addScattered(1);
}

void RankLowerer::addScattered(std::size_t keep) {
  while (scattered_.size() > keep) {
    const Scattered item = scattered_.front();
    scattered_.erase(scattered_.begin());
    const GradBucket& bucket = bucketAt(item.bucket);
    const std::int64_t count = bucket.count / shardsOf(bucket);
    const auto [segment, inserted] = add_segment_.try_emplace(count, -1);
    if (inserted) {
      OpCall call;
      call.op = {OpKind::Add, plan_.grads, {count}, 0};
      call.operands[0] = call.operands[1] = {Region::Grad, 0};
      call.operands[2] = {Region::TiedGrad, 0};
      Segment add;
      add.ops.push_back(call);
      segment->second = library_.add(std::move(add));
    }
    Bindings bindings;
    bind(bindings, Region::Grad) = {program_.gradients, gradBytes(bucket.state_begin)};
    bind(bindings, Region::TiedGrad) = {item.shard, 0};
    Slot slot;
    slot.phase = Phase::Step;
    addCompute(TaskKind::Optimizer, slot, -1, segment->second, bindings, {item.task});
  }
}

void RankLowerer::gatherAhead() {
  Slot slot;
  slot.phase = Phase::Step;
  ahead_.assign(program_.buckets.size(), -1);
  for (std::size_t b = 0; b < program_.buckets.size(); ++b) {
    const GradBucket& bucket = program_.buckets[b];
    if (shardsOf(bucket) == 1) continue;
    Comm comm = dataComm(CommKind::AllGather, shardGroup(bucket), program_.buckets.size() + b, bucket.count,
                         {program_.weights, weightBytes(bucket.begin + shardOffset(bucket))},
                         {program_.weights, weightBytes(bucket.begin)});
    comm.dtype = storageType(plan_);
    ahead_[b] = addComm(TaskKind::DataComm, Lane::Data, slot, -1, comm, {});
  }
}

std::vector<TaskId> RankLowerer::aheadOf(const Slot& slot, const Placed& placed) const {
  std::vector<TaskId> tasks;
  if (ahead_.empty() || slot.microbatch != 0) return tasks;
  tasks.push_back(ahead_[static_cast<std::size_t>(placed.bucket)]);
  if (placed.expert_bucket >= 0) tasks.push_back(ahead_[static_cast<std::size_t>(placed.expert_bucket)]);
  return tasks;
}

}  // namespace bmt
