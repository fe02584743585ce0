// What the block files (block_*.cpp) share: Builder appends ops and collectives and hands out scratch,
// SavedLayout places what is kept for backward, Params lays out parameters; norms; and the two halves of a
// decoder layer, which block_layer.cpp puts together.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/op_graph.h"

namespace bmt {

inline constexpr Bytes kAlign = 64;  // operands start on cache lines

inline Bytes aligned(Bytes bytes) {
  return roundUp(bytes, kAlign);
}

// Appends ops and collectives to a list of pieces and hands out scratch memory.
class Builder {
 public:
  Builder(const BlockShape& shape, std::vector<Piece>& pieces) : shape_(shape), pieces_(pieces) {}

  void op(OpKind kind, std::initializer_list<std::int64_t> dims, std::initializer_list<Operand> operands,
          double scalar = 0) {
    if (pieces_.empty() || pieces_.back().is_comm || !after_.empty()) {
      pieces_.emplace_back();
      pieces_.back().after = std::exchange(after_, {});
    }
    OpCall call;
    call.op.kind = kind;
    call.op.dtype = shape_.dtype;
    call.op.scalar = scalar;
    std::copy(dims.begin(), dims.end(), call.op.dim.begin());
    std::copy(operands.begin(), operands.end(), call.operands.begin());
    if (shape_.fp8 && isMatrixProduct(kind)) quantise(call);
    pieces_.back().ops.push_back(call);
  }

  void comm(CommKind kind, std::int64_t count, DType dtype, Operand src, Operand dst,
            GroupKind group = GroupKind::Tensor) {
    Piece piece;
    piece.is_comm = true;
    piece.comm = {kind, group, count, dtype, src, dst, false};
    piece.after = std::exchange(after_, {});
    pieces_.push_back(std::move(piece));
  }
  // Starts beside the ops that follow, once those before it are done; whoever needs dst calls waitFor.
  std::int32_t commBeside(CommKind kind, std::int64_t count, DType dtype, Operand src, Operand dst,
                          GroupKind group = GroupKind::Tensor) {
    if (!pieces_.empty()) after_.push_back(lastPiece());
    comm(kind, count, dtype, src, dst, group);
    pieces_.back().comm.overlapped = true;
    return lastPiece();
  }
  // fp8: whether the inputs of the products that follow are 8-bit already.
  void quantised(bool already) { quantised_ = already; }
  // fp8: an 8-bit copy of `rows`, made before they are sent.
  void quantiseRows(std::int64_t elements, Operand rows) {
    if (shape_.fp8) op(OpKind::Copy, {elements}, {rows, rows});
  }
  // The next piece starts when `piece` is finished.
  void waitFor(std::int32_t piece) { after_.push_back(piece); }

  Operand work(std::int64_t elements, DType dtype) {
    const Operand operand{Region::Work, used_};
    used_ += aligned(elements * sizeOf(dtype));
    high_ = std::max(high_, used_);
    return operand;
  }
  Operand work(std::int64_t elements) { return work(elements, shape_.dtype); }
  Bytes mark() const { return used_; }
  void release(Bytes mark) { used_ = mark; }
  Bytes highWater() const { return high_; }

  // Rows sharded over tp -> all rows (sequence parallel); otherwise the operand itself. `tokens` and `cols`:
  // of the full tensor.
  Operand gatherRows(Operand shard, std::int64_t tokens, std::int64_t cols) {
    return gatherRows(shard, tokens, cols, shape_.dtype);
  }
  Operand gatherRows(Operand shard, std::int64_t tokens, std::int64_t cols, DType wire) {
    if (!shape_.sequence_parallel) return shard;
    const Operand full = work(tokens * cols);
    comm(CommKind::AllGather, tokens * cols, wire, shard, full);
    return full;
  }
  Operand gatherRows(Operand shard) { return gatherRows(shard, shape_.tokens, shape_.model->d_model); }

  // Partial sums [tokens, cols] -> their sum over tp: all rows, or this rank's rows with sequence
  // parallelism.
  Operand reduceRows(Operand partial, std::int64_t tokens, std::int64_t cols) {
    if (shape_.tp == 1) return partial;
    const std::int64_t count = tokens * cols;
    if (!shape_.sequence_parallel) {
      comm(CommKind::AllReduce, count, shape_.dtype, partial, partial);
      return partial;
    }
    const Operand shard = work(count / shape_.tp);
    comm(CommKind::ReduceScatter, count, shape_.dtype, partial, shard);
    return shard;
  }
  Operand reduceRows(Operand partial) { return reduceRows(partial, shape_.tokens, shape_.model->d_model); }

 private:
  // 8-bit products, as Transformer Engine does them: the activation (backward: the gradient) is read in 16
  // bits and written as an 8-bit copy and its transpose, which the weight gradient uses: the traffic of a
  // 16-bit copy. What is quantised already is not copied again: a norm writes 8-bit rows itself, and gathers
  // move 8-bit rows. Weights are 8-bit, written by the optimizer.
  void quantise(OpCall& product) {
    product.op.dtype = DType::F8;
    if (quantised_) return;
    const auto& d = product.op.dim;
    const bool forward =
        product.op.kind == OpKind::LinearForward || product.op.kind == OpKind::GroupedForward;
    const bool input =
        product.op.kind == OpKind::LinearBackwardInput || product.op.kind == OpKind::GroupedBackwardInput;
    if (!forward && !input) return;
    OpCall cast;
    cast.op.kind = OpKind::Copy;
    cast.op.dtype = shape_.dtype;
    cast.op.dim[0] = d[0] * (forward ? d[2] : d[1]);
    cast.operands[0] = cast.operands[1] = product.operands[1];
    pieces_.back().ops.push_back(cast);
  }

  const BlockShape& shape_;
  std::int32_t lastPiece() const { return static_cast<std::int32_t>(pieces_.size()) - 1; }

  std::vector<Piece>& pieces_;
  std::vector<std::int32_t> after_;
  bool quantised_ = false;
  Bytes used_ = 0, high_ = 0;
};

// Hands out offsets in Region::Saved.
class SavedLayout {
 public:
  Operand add(std::int64_t elements, DType dtype) {
    const Operand operand{Region::Saved, used_};
    used_ += aligned(elements * sizeOf(dtype));
    return operand;
  }
  Bytes bytes() const { return used_; }

 private:
  Bytes used_ = 0;
};

// Builds the backward pass of a block: input gradients, and weight gradients right after them or, where
// backward is split, in a pass of their own, for which `kept` tensors then outlive the first.
class BackwardBuilder {
 public:
  BackwardBuilder(const BlockShape& shape, Block& block, bool first_microbatch)
      : acc(first_microbatch ? 0 : 1),
        input(shape, first_microbatch ? block.backward_first : block.backward),
        weight_(shape, first_microbatch ? block.weight_first : block.weight),
        shape_(shape),
        block_(block) {}

  const std::int64_t acc;  // 1: parameter gradients are added to
  Builder input;
  Builder& weight() { return shape_.split_backward ? weight_ : input; }

  // Scratch that the weight gradients read.
  Operand kept(std::int64_t elements) {
    if (!shape_.split_backward) return input.work(elements);
    const Operand operand{Region::Deferred, deferred_};
    deferred_ += aligned(elements * sizeOf(shape_.dtype));
    return operand;
  }
  // All rows of a gradient that the weight gradients read again.
  Operand gatherKept(Operand shard, std::int64_t tokens, std::int64_t cols) {
    if (!shape_.sequence_parallel) return shard;
    const Operand full = kept(tokens * cols);
    input.comm(CommKind::AllGather, tokens * cols, shape_.productType(), shard, full);
    return full;
  }
  // Scratch of a half is free again.
  void endHalf() {
    input.release(0);
    weight_.release(0);
  }
  void finish() {
    block_.backward_work = input.highWater();
    block_.weight_work = weight_.highWater();
    block_.deferred_bytes = deferred_;
  }

 private:
  Builder weight_;
  const BlockShape& shape_;
  Block& block_;
  Bytes deferred_ = 0;
};

// Collects the block's parameters in flat order and finds them again by name.
class Params {
 public:
  Params(const BlockShape& shape, Block& block) : shape_(shape), block_(block) {}

  void shardRows(const std::string& name, std::int64_t rows, std::int64_t cols, bool decay) {
    const std::int64_t local = ceilDiv(rows, shape_.tp);
    const std::int64_t begin = std::min(rows, local * shape_.tp_index);
    add({name, rows, cols, begin, std::min(local, rows - begin), 0, cols, block_.elements, decay, false,
         false},
        local * cols);
  }
  void shardCols(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const std::int64_t local = cols / shape_.tp;
    add({name, rows, cols, 0, rows, local * shape_.tp_index, local, block_.elements, true, false, false},
        rows * local);
  }
  void replicate(const std::string& name, std::int64_t rows, std::int64_t cols, bool decay) {
    add({name, rows, cols, 0, rows, 0, cols, block_.elements, decay, true, false}, rows * cols);
  }
  void norm(const std::string& name) {
    replicate(name + ".weight", 1, shape_.model->d_model, false);
    if (shape_.model->norm == NormKind::LayerNorm) replicate(name + ".bias", 1, shape_.model->d_model, false);
  }
  // A matrix of one expert, its rows or columns sharded over tp.
  void expertRows(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const std::int64_t local = rows / shape_.tp;
    addExpert({name, rows, cols, local * shape_.tp_index, local, 0, cols, 0, true, false, true});
  }
  void expertCols(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const std::int64_t local = cols / shape_.tp;
    addExpert({name, rows, cols, 0, rows, local * shape_.tp_index, local, 0, true, false, true});
  }
  void beginReplicated() { block_.replicated_begin = block_.replicated_decay_end = block_.elements; }

  Operand weight(const std::string& name) const { return at(name, Region::Weight, sizeOf(shape_.dtype)); }
  Operand grad(const std::string& name) const { return at(name, Region::Grad, sizeOf(shape_.grads)); }

 private:
  void add(BlockParam param, std::int64_t local_elements) {
    // The kernels want rows to start on cache lines where sizes allow it; parameters are packed densely
    // otherwise.
    block_.elements += local_elements;
    if (param.decay)
      (param.replicated ? block_.replicated_decay_end : block_.decay_elements) = block_.elements;
    block_.params.push_back(std::move(param));
  }
  void addExpert(BlockParam param) {
    param.offset = block_.expert_elements;
    block_.expert_elements += param.rows * param.cols;
    block_.params.push_back(std::move(param));
  }
  Operand at(const std::string& name, Region region, Bytes element) const {
    for (const BlockParam& param : block_.params) {
      if (param.name != name) continue;
      if (param.expert) region = region == Region::Weight ? Region::Expert : Region::ExpertGrad;
      return {region, param.offset * element};
    }
    BMT_CHECK(false, "no parameter " + name);
    return {};
  }

  const BlockShape& shape_;
  Block& block_;
};

// Norm statistics kept for backward.
struct NormStats {
  Operand mean, rstd;
};
NormStats saveNormStats(SavedLayout& saved, const BlockShape& s, std::int64_t rows);
void normForward(Builder& b, const BlockShape& s, const Params& params, const std::string& name, Operand out,
                 Operand y, const NormStats& stats, Operand x, Operand delta, Operand bias);
void normBackward(Builder& b, const BlockShape& s, const Params& params, const std::string& name, Operand dx,
                  Operand dout, Operand y, const NormStats& stats, Operand dres, std::int64_t acc);

// Parameters are declared in this order, so that decayed ones come first and replicated ones last; of the
// replicated ones, matrices come first.
enum class ParamGroup : std::uint8_t { Matrices, ShardedBiases, ReplicatedMatrices, Replicated };

// A half of a layer: attention or MLP. Forward reads `norm` and returns the half's contribution to the
// residual stream [rows, C], summed over tp, without its bias. Backward reads the gradient of that
// contribution from `stream` and returns the gradient of `norm` [rows, C], summed over tp. Norms, biases and
// residual additions are block_layer.cpp's.
struct Half {
  std::string norm_name, name;  // prefixes of the parameters: "norm1", "attn"
  NormStats stats;
  Operand input;      // what its norm reads: the residual stream before the half; with post_norm: after it
  Operand norm;       // what the half reads [rows, C]
  Operand projected;  // attention: q, k, v;  MLP: pre-activation (gate, up)
  Operand result;     // attention: output before its projection;  MLP: activation
  Operand lse;        // attention only
  Bytes score_bytes = 0;  // of scores kept in memory
  Operand exchanged;      // attention with cp-kind=a2a: result in the layout of all tokens and some heads
  bool full = false;      // attention: every query sees every key
  Operand memory, memory_stream;  // cross attention: the encoder's rows and their gradient,
  std::int64_t memory_seq = 0;    // and how many a sequence has
  // Latent attention: compressed queries, keys and values before and after their norms. qk_norm: q_raw and
  // q_stats, of queries and keys together.
  Operand q_raw, q_latent, kv_raw, kv_latent;
  NormStats q_stats, kv_stats;
  // Experts: router, rows at the experts, and what comes back from them.
  Operand probs, choice, slots, outputs;
  std::int64_t inner = 0;  // MLP: columns between up and down, before tp
};

// Columns of the attention's parts on this rank.
struct AttentionSizes {
  std::int64_t c, heads, kv_heads, q_cols, kv_cols, out_cols;  // kv_cols: keys and values together
  std::int64_t qkv_cols() const { return q_cols + kv_cols; }
};
AttentionSizes attentionSizes(const BlockShape& s);

// Attention itself, between the projections (block_context.cpp): qkv (half.projected, except where heads are
// exchanged) -> half.result; the gradient of half.result -> that of qkv.
bool exchangesHeads(const BlockShape& s);
void layoutAttentionCore(Half& half, SavedLayout& saved, const BlockShape& s);
void attentionCoreForward(Builder& f, const BlockShape& s, const Half& half, Operand qkv);
// The part of it that selective recompute runs again: from half.projected, in place.
void attentionCoreAgain(Builder& f, const BlockShape& s, const Half& half);
void attentionCoreBackward(Builder& b, const BlockShape& s, const Half& half, Operand dqkv, Operand dresult);

// Projections of latent attention (block_latent.cpp): half.norm -> half.projected; gradient of
// half.projected -> of half.norm [rows, C].
void declareLatent(Params& params, const BlockShape& s, ParamGroup group);
void layoutLatent(Half& half, SavedLayout& saved, const BlockShape& s);
void latentForward(Builder& f, const BlockShape& s, const Params& params, const Half& half);
Operand latentBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                       Operand dqkv);

void declareAttention(Params& params, const BlockShape& s, const std::string& name, ParamGroup group);
void layoutAttention(Half& half, SavedLayout& saved, const BlockShape& s);
Operand attentionForward(Builder& f, const BlockShape& s, const Params& params, const Half& half);
Operand attentionBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                          Operand dout);
void declareMlp(Params& params, const BlockShape& s, const std::string& name, std::int64_t inner,
                ParamGroup group);
void layoutMlp(Half& half, SavedLayout& saved, const BlockShape& s);
Operand mlpForward(Builder& f, const BlockShape& s, const Params& params, const Half& half);
Operand mlpBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                    Operand dout);
// Router, experts and shared experts instead of the MLP (block_experts.cpp); `shared` is an MLP half that
// reads the same rows.
void declareExperts(Params& params, const BlockShape& s, ParamGroup group);
void layoutExperts(Half& half, Half& shared, SavedLayout& saved, const BlockShape& s);
Operand expertsForward(Builder& f, const BlockShape& s, const Params& params, const Half& half,
                       const Half& shared);
Operand expertsBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                        const Half& shared, Operand dout);

// Tensor-parallel products with their communication (block_linear.cpp); x and the results of forward row and
// backward column products are [rows, .] of the residual stream, the others [tokens, .].
void columnForward(Builder& f, const BlockShape& s, Operand out, Operand x, Operand w, Operand bias,
                   std::int64_t o, std::int64_t i);
Operand columnBackward(BackwardBuilder& back, const BlockShape& s, Operand dout, Operand x, Operand w,
                       Operand dw, Operand dbias, std::int64_t o, std::int64_t i);
Operand rowForward(Builder& f, const BlockShape& s, Operand x, Operand w, std::int64_t o, std::int64_t i);
void rowBackward(BackwardBuilder& back, const BlockShape& s, Operand dx, Operand dout, Operand x, Operand w,
                 Operand dw, std::int64_t o, std::int64_t i);

// x = x + delta, in place.
inline void addRows(Builder& b, std::int64_t elements, Operand x, Operand delta) {
  b.op(OpKind::Add, {elements}, {x, x, delta});
}
inline Operand behind(Operand operand, std::int64_t elements, DType dtype) {
  operand.offset += elements * sizeOf(dtype);
  return operand;
}

}  // namespace bmt
