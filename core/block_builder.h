// What the block files (block_*.cpp) share: Builder appends ops and collectives and hands out scratch,
// SavedLayout places what is kept for backward, Params lays out parameters; norms; and the two halves of a
// decoder layer, which block_layer.cpp puts together.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

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
    if (pieces_.empty() || pieces_.back().is_comm) pieces_.emplace_back();
    OpCall call;
    call.op.kind = kind;
    call.op.dtype = shape_.dtype;
    call.op.scalar = scalar;
    std::copy(dims.begin(), dims.end(), call.op.dim.begin());
    std::copy(operands.begin(), operands.end(), call.operands.begin());
    pieces_.back().ops.push_back(call);
  }

  void comm(CommKind kind, std::int64_t count, DType dtype, Operand src, Operand dst) {
    Piece piece;
    piece.is_comm = true;
    piece.comm = {kind, count, dtype, src, dst};
    pieces_.push_back(std::move(piece));
  }

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

  // Rows sharded over tp -> all rows (sequence parallel); otherwise the operand itself.
  Operand gatherRows(Operand shard) {
    if (!shape_.sequence_parallel) return shard;
    const std::int64_t count = shape_.tokens * shape_.model->d_model;
    const Operand full = work(count);
    comm(CommKind::AllGather, count, shape_.dtype, shard, full);
    return full;
  }

  // Partial sums [tokens, C] -> their sum over tp: all rows, or this rank's rows with sequence parallelism.
  Operand reduceRows(Operand partial) {
    if (shape_.tp == 1) return partial;
    const std::int64_t count = shape_.tokens * shape_.model->d_model;
    if (!shape_.sequence_parallel) {
      comm(CommKind::AllReduce, count, shape_.dtype, partial, partial);
      return partial;
    }
    const Operand shard = work(shape_.rows * shape_.model->d_model);
    comm(CommKind::ReduceScatter, count, shape_.dtype, partial, shard);
    return shard;
  }

 private:
  const BlockShape& shape_;
  std::vector<Piece>& pieces_;
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
  Operand gatherKept(Operand shard) {
    if (!shape_.sequence_parallel || !shape_.split_backward) return input.gatherRows(shard);
    const std::int64_t count = shape_.tokens * shape_.model->d_model;
    const Operand full = kept(count);
    input.comm(CommKind::AllGather, count, shape_.dtype, shard, full);
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
    add({name, rows, cols, begin, std::min(local, rows - begin), 0, cols, block_.elements, decay, false},
        local * cols);
  }
  void shardCols(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const std::int64_t local = cols / shape_.tp;
    add({name, rows, cols, 0, rows, local * shape_.tp_index, local, block_.elements, true, false},
        rows * local);
  }
  void replicate(const std::string& name, std::int64_t rows, std::int64_t cols, bool decay) {
    add({name, rows, cols, 0, rows, 0, cols, block_.elements, decay, true}, rows * cols);
  }
  void norm(const std::string& name) {
    replicate(name + ".weight", 1, shape_.model->d_model, false);
    if (shape_.model->norm == NormKind::LayerNorm) replicate(name + ".bias", 1, shape_.model->d_model, false);
  }
  void beginReplicated() { block_.replicated_begin = block_.elements; }

  Operand weight(const std::string& name) const { return at(name, Region::Weight, sizeOf(shape_.dtype)); }
  Operand grad(const std::string& name) const { return at(name, Region::Grad, sizeOf(DType::F32)); }

 private:
  void add(BlockParam param, std::int64_t local_elements) {
    // The kernels want rows to start on cache lines where sizes allow it; parameters are packed densely
    // otherwise.
    block_.elements += local_elements;
    if (param.decay) block_.decay_elements = block_.elements;
    block_.params.push_back(std::move(param));
  }
  Operand at(const std::string& name, Region region, Bytes element) const {
    for (const BlockParam& param : block_.params) {
      if (param.name == name) return {region, param.offset * element};
    }
    return {};
  }

  const BlockShape& shape_;
  Block& block_;
};

// Norm statistics kept for backward.
struct NormStats {
  Operand mean, rstd;
};
NormStats saveNormStats(SavedLayout& saved, const BlockShape& s);
void normForward(Builder& b, const BlockShape& s, const Params& params, const std::string& name, Operand out,
                 Operand y, const NormStats& stats, Operand x, Operand delta, Operand bias);
void normBackward(Builder& b, const BlockShape& s, const Params& params, const std::string& name, Operand dx,
                  Operand dout, Operand y, const NormStats& stats, Operand dres, std::int64_t acc);

// What a half's norm reads: x + delta + bias, written to y when there is a delta.
struct Residual {
  Operand x, delta, bias, y;
};

// Parameters are declared in this order, so that decayed ones come first and replicated ones last.
enum class ParamGroup : std::uint8_t { Matrices, ShardedBiases, Replicated };

// A half of a layer: norm, projections and what is between them. Forward returns the partial sums of its
// output [tokens, C] (to be reduced over tp); backward turns `dout`, the gradient of the residual stream
// after the half, into `din`, the one before it (the same operand where backward is not split).
struct Half {
  std::string norm_name;
  NormStats stats;
  Operand input;      // the residual stream before the half (Residual::y, or x without a delta)
  Operand norm;       // its norm [rows, C]
  Operand projected;  // attention: q, k, v;  MLP: pre-activation (gate, up)
  Operand result;     // attention: output before its projection;  MLP: activation
  Operand lse;        // attention only
};
void declareAttention(Params& params, const BlockShape& s, ParamGroup group);
void layoutAttention(Half& half, SavedLayout& saved, const BlockShape& s);
Operand attentionForward(Builder& f, const BlockShape& s, const Params& params, const Half& half,
                         const Residual& in);
void attentionBackward(BackwardBuilder& b, const BlockShape& s, const Params& params, const Half& half,
                       Operand dout, Operand din);
void declareMlp(Params& params, const BlockShape& s, ParamGroup group);
void layoutMlp(Half& half, SavedLayout& saved, const BlockShape& s);
Operand mlpForward(Builder& f, const BlockShape& s, const Params& params, const Half& half,
                   const Residual& in);
void mlpBackward(BackwardBuilder& b, const BlockShape& s, const Params& params, const Half& half,
                 Operand dout, Operand din);

}  // namespace bmt
