#include "core/op_graph.h"

#include <algorithm>
#include <initializer_list>

namespace bmt {
namespace {

constexpr Bytes kAlign = 64;  // operands start on cache lines

Bytes aligned(Bytes bytes) {
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

void normForward(Builder& b, const BlockShape& s, const Params& params, const std::string& name, Operand out,
                 Operand y, const NormStats& stats, Operand x, Operand delta, Operand bias) {
  const std::int64_t c = s.model->d_model;
  if (s.model->norm == NormKind::LayerNorm) {
    b.op(OpKind::LayerNormForward, {s.rows, c},
         {out, y, stats.mean, stats.rstd, x, delta, bias, params.weight(name + ".weight"),
          params.weight(name + ".bias")},
         s.model->norm_eps);
  } else {
    b.op(OpKind::RmsNormForward, {s.rows, c},
         {out, y, stats.rstd, x, delta, bias, params.weight(name + ".weight")}, s.model->norm_eps);
  }
}

void normBackward(Builder& b, const BlockShape& s, const Params& params, const std::string& name, Operand dx,
                  Operand dout, Operand y, const NormStats& stats, Operand dres, std::int64_t acc) {
  const std::int64_t c = s.model->d_model;
  if (s.model->norm == NormKind::LayerNorm) {
    b.op(OpKind::LayerNormBackward, {s.rows, c, acc},
         {dx, params.grad(name + ".weight"), params.grad(name + ".bias"), dout, y,
          params.weight(name + ".weight"), stats.mean, stats.rstd, dres});
  } else {
    b.op(OpKind::RmsNormBackward, {s.rows, c, acc},
         {dx, params.grad(name + ".weight"), dout, y, params.weight(name + ".weight"), stats.rstd, dres});
  }
}

}  // namespace

std::int64_t savedScoreBytes(const BlockShape& s) {
  const bool softmax = s.attention == AttentionKernel::Softmax,
             unfused = s.attention == AttentionKernel::Unfused;
  if (!softmax && !unfused) return 0;
  const ModelSpec& m = *s.model;
  const std::int64_t scores = s.batch * (m.heads / s.tp) * m.seq_len * m.seq_len;
  // Softmax output, kept in the activations' type (plain ops: also in fp32 before the cast); with dropout
  // also its mask and output: 5 bytes a score in 16 bit, the "5 a s / h" of Korthikanti et al. 2022.
  const Bytes element = sizeOf(s.dtype);
  return scores * (element + (unfused ? sizeOf(DType::F32) : 0) + (m.dropout ? 1 + element : 0));
}

BlockShape makeBlockShape(const ModelSpec& model, const Plan& plan, std::int32_t tp_index) {
  BlockShape shape;
  shape.model = &model;
  shape.batch = plan.micro_batch;
  shape.tokens = plan.micro_batch * model.seq_len;
  shape.tp = plan.tp;
  shape.tp_index = tp_index;
  shape.sequence_parallel = plan.sequence_parallel;
  shape.rows = plan.sequence_parallel ? shape.tokens / plan.tp : shape.tokens;
  shape.dtype = plan.precision;
  shape.attention = plan.attention;
  shape.loss_rows = plan.loss_chunk > 0 ? std::min(plan.loss_chunk, shape.tokens) : shape.tokens;
  shape.loss_scale = 1.0 / static_cast<double>(plan.global_batch * model.seq_len);
  return shape;
}

Block buildEmbeddingBlock(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model;
  Block block;
  Params params(s, block);
  params.shardRows("embedding.weight", m.vocab, c, true);
  params.beginReplicated();
  const bool learned = m.position == PositionKind::Learned;
  if (learned) params.replicate("position.weight", m.max_positions, c, true);
  if (m.embedding_norm) params.norm("embedding_norm");

  const std::int64_t row_begin = s.vocab_rows() * s.tp_index;
  const std::int64_t first = s.sequence_parallel ? s.rows * s.tp_index : 0;
  SavedLayout saved;
  const Operand raw = m.embedding_norm ? saved.add(s.rows * c, s.dtype) : Operand{Region::Out, 0};
  NormStats stats;
  if (m.embedding_norm) stats = {saved.add(s.rows, DType::F32), saved.add(s.rows, DType::F32)};
  block.saved_bytes = saved.bytes();

  Builder f(s, block.forward);
  const Operand tokens{Region::Tokens, 0};
  const Operand full = s.sequence_parallel ? f.work(s.tokens * c) : raw;
  f.op(OpKind::EmbeddingForward, {s.tokens, c, row_begin, s.vocab_rows()},
       {full, tokens, params.weight("embedding.weight")});
  if (s.tp > 1) {
    const CommKind kind = s.sequence_parallel ? CommKind::ReduceScatter : CommKind::AllReduce;
    f.comm(kind, s.tokens * c, s.dtype, full, raw);
  }
  if (learned)
    f.op(OpKind::PositionForward, {s.rows, c, m.seq_len, first}, {raw, params.weight("position.weight")});
  if (m.embedding_norm) normForward(f, s, params, "embedding_norm", {Region::Out, 0}, {}, stats, raw, {}, {});
  block.forward_work = f.highWater();

  for (const std::int64_t acc : {0, 1}) {
    Builder b(s, acc == 0 ? block.backward_first : block.backward);
    Operand dx{Region::Stream, 0};
    if (m.embedding_norm) {
      dx = b.work(s.rows * c);
      normBackward(b, s, params, "embedding_norm", dx, {Region::Stream, 0}, raw, stats, {}, acc);
    }
    if (learned)
      b.op(OpKind::PositionBackward, {s.rows, c, m.seq_len, first, acc},
           {params.grad("position.weight"), dx});
    b.op(OpKind::EmbeddingBackward, {s.tokens, c, row_begin, s.vocab_rows(), acc},
         {params.grad("embedding.weight"), tokens, b.gatherRows(dx)});
    block.backward_work = b.highWater();
  }
  return block;
}

Block buildLayerBlock(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model;
  const std::int64_t heads = m.heads / s.tp, kv_heads = m.kv_heads / s.tp, ff = m.d_ff / s.tp;
  const std::int64_t att_cols = heads * m.d_head, qkv_cols = (heads + 2 * kv_heads) * m.d_head;
  const std::int64_t pre_cols = m.gated_mlp ? 2 * ff : ff;

  Block block;
  Params params(s, block);
  params.shardRows("attn.q.weight", m.heads * m.d_head, c, true);
  params.shardRows("attn.k.weight", m.kv_heads * m.d_head, c, true);
  params.shardRows("attn.v.weight", m.kv_heads * m.d_head, c, true);
  params.shardCols("attn.out.weight", c, m.heads * m.d_head);
  if (m.gated_mlp) params.shardRows("mlp.gate.weight", m.d_ff, c, true);
  params.shardRows("mlp.up.weight", m.d_ff, c, true);
  params.shardCols("mlp.down.weight", c, m.d_ff);
  if (m.qkv_bias) {
    params.shardRows("attn.q.bias", m.heads * m.d_head, 1, false);
    params.shardRows("attn.k.bias", m.kv_heads * m.d_head, 1, false);
    params.shardRows("attn.v.bias", m.kv_heads * m.d_head, 1, false);
  }
  if (m.mlp_bias) {
    if (m.gated_mlp) params.shardRows("mlp.gate.bias", m.d_ff, 1, false);
    params.shardRows("mlp.up.bias", m.d_ff, 1, false);
  }
  params.beginReplicated();
  params.norm("norm1");
  params.norm("norm2");
  if (m.attn_out_bias) params.replicate("attn.out.bias", 1, c, false);
  if (m.mlp_bias) params.replicate("mlp.down.bias", 1, c, false);
  const auto optionalWeight = [&](bool present, const char* name) {
    return present ? params.weight(name) : Operand{};
  };
  const auto optionalGrad = [&](bool present, const char* name) {
    return present ? params.grad(name) : Operand{};
  };
  // Adjacent parameters act as one matrix: q, k, v and gate, up.
  const char* const up_name = m.gated_mlp ? "mlp.gate.weight" : "mlp.up.weight";
  const char* const up_bias = m.gated_mlp ? "mlp.gate.bias" : "mlp.up.bias";

  SavedLayout saved;
  const bool has_mean = m.norm == NormKind::LayerNorm;
  const auto stats = [&]() {
    NormStats result;
    if (has_mean) result.mean = saved.add(s.rows, DType::F32);
    result.rstd = saved.add(s.rows, DType::F32);
    return result;
  };
  const NormStats stats1 = stats(), stats2 = stats();
  const Operand norm1 = saved.add(s.rows * c, s.dtype), norm2 = saved.add(s.rows * c, s.dtype);
  const Operand qkv = saved.add(s.tokens * qkv_cols, s.dtype), att = saved.add(s.tokens * att_cols, s.dtype);
  const Operand lse = saved.add(s.batch * heads * m.seq_len, DType::F32);
  const Operand mid = saved.add(s.rows * c, s.dtype);
  const Operand pre = saved.add(s.tokens * pre_cols, s.dtype), act = saved.add(s.tokens * ff, s.dtype);
  // Simulated only (no op reads them): what attention with scores in memory and dropout keep for backward.
  saved.add(savedScoreBytes(s), DType::I8);
  if (m.dropout) saved.add(2 * s.rows * c, DType::I8);  // masks of the two residual branches
  block.saved_bytes = saved.bytes();

  const bool rope = m.position == PositionKind::Rope;
  const std::int64_t alibi = m.position == PositionKind::Alibi ? 1 : 0;
  const auto activation = static_cast<std::int64_t>(m.activation);
  const Operand x{Region::In, 0}, out{Region::Out, 0}, stream{Region::Stream, 0};

  Builder f(s, block.forward);
  normForward(f, s, params, "norm1", norm1, {}, stats1, x, {}, {});
  f.op(OpKind::LinearForward, {s.tokens, qkv_cols, c},
       {qkv, f.gatherRows(norm1), params.weight("attn.q.weight"), optionalWeight(m.qkv_bias, "attn.q.bias")});
  f.release(0);
  if (rope) f.op(OpKind::RopeForward, {s.tokens, m.seq_len, heads, kv_heads, m.d_head}, {qkv}, m.rope_theta);
  f.op(OpKind::AttentionForward, {s.batch, m.seq_len, heads, kv_heads, m.d_head, alibi}, {att, lse, qkv});
  Operand partial = f.work(s.tokens * c);
  f.op(OpKind::LinearForward, {s.tokens, c, att_cols}, {partial, att, params.weight("attn.out.weight"), {}});
  normForward(f, s, params, "norm2", norm2, mid, stats2, x, f.reduceRows(partial),
              optionalWeight(m.attn_out_bias, "attn.out.bias"));
  f.release(0);
  f.op(OpKind::LinearForward, {s.tokens, pre_cols, c},
       {pre, f.gatherRows(norm2), params.weight(up_name), optionalWeight(m.mlp_bias, up_bias)});
  f.release(0);
  if (m.gated_mlp) {
    f.op(OpKind::SwigluForward, {s.tokens, ff}, {act, pre});
  } else {
    f.op(OpKind::ActivationForward, {s.tokens * ff, activation}, {act, pre});
  }
  partial = f.work(s.tokens * c);
  f.op(OpKind::LinearForward, {s.tokens, c, ff}, {partial, act, params.weight("mlp.down.weight"), {}});
  f.op(OpKind::ResidualAdd, {s.rows, c},
       {out, mid, f.reduceRows(partial), optionalWeight(m.mlp_bias, "mlp.down.bias")});
  block.forward_work = f.highWater();

  for (const std::int64_t acc : {0, 1}) {
    Builder b(s, acc == 0 ? block.backward_first : block.backward);
    // MLP
    if (m.mlp_bias) b.op(OpKind::BiasBackward, {s.rows, c, acc}, {params.grad("mlp.down.bias"), stream});
    Operand dout = b.gatherRows(stream);
    Operand dact = b.work(s.tokens * ff);
    b.op(OpKind::LinearBackwardInput, {s.tokens, c, ff}, {dact, dout, params.weight("mlp.down.weight")});
    b.op(OpKind::LinearBackwardWeight, {s.tokens, c, ff, acc},
         {params.grad("mlp.down.weight"), {}, dout, act});
    Operand dpre = dact;  // in place
    if (m.gated_mlp) {
      dpre = b.work(s.tokens * pre_cols);
      b.op(OpKind::SwigluBackward, {s.tokens, ff}, {dpre, dact, pre});
    } else {
      b.op(OpKind::ActivationBackward, {s.tokens * ff, activation}, {dpre, dact, pre});
    }
    b.op(OpKind::LinearBackwardWeight, {s.tokens, pre_cols, c, acc},
         {params.grad(up_name), optionalGrad(m.mlp_bias, up_bias), dpre, b.gatherRows(norm2)});
    Operand dnorm = b.work(s.tokens * c);
    b.op(OpKind::LinearBackwardInput, {s.tokens, pre_cols, c}, {dnorm, dpre, params.weight(up_name)});
    normBackward(b, s, params, "norm2", stream, b.reduceRows(dnorm), mid, stats2, stream, acc);
    b.release(0);
    // Attention
    if (m.attn_out_bias) b.op(OpKind::BiasBackward, {s.rows, c, acc}, {params.grad("attn.out.bias"), stream});
    dout = b.gatherRows(stream);
    const Operand datt = b.work(s.tokens * att_cols);
    b.op(OpKind::LinearBackwardInput, {s.tokens, c, att_cols},
         {datt, dout, params.weight("attn.out.weight")});
    b.op(OpKind::LinearBackwardWeight, {s.tokens, c, att_cols, acc},
         {params.grad("attn.out.weight"), {}, dout, att});
    const Operand dqkv = b.work(s.tokens * qkv_cols);
    b.op(OpKind::AttentionBackward, {s.batch, m.seq_len, heads, kv_heads, m.d_head, alibi},
         {dqkv, datt, qkv, att, lse});
    if (rope)
      b.op(OpKind::RopeBackward, {s.tokens, m.seq_len, heads, kv_heads, m.d_head}, {dqkv}, m.rope_theta);
    b.op(OpKind::LinearBackwardWeight, {s.tokens, qkv_cols, c, acc},
         {params.grad("attn.q.weight"), optionalGrad(m.qkv_bias, "attn.q.bias"), dqkv, b.gatherRows(norm1)});
    dnorm = b.work(s.tokens * c);
    b.op(OpKind::LinearBackwardInput, {s.tokens, qkv_cols, c}, {dnorm, dqkv, params.weight("attn.q.weight")});
    normBackward(b, s, params, "norm1", stream, b.reduceRows(dnorm), x, stats1, stream, acc);
    block.backward_work = b.highWater();
  }
  return block;
}

Block buildHeadBlock(const BlockShape& s, HeadTable table) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model, v = s.vocab_rows();
  const std::int64_t v_begin = std::min(m.vocab, v * s.tp_index), valid = std::min(v, m.vocab - v_begin);
  Block block;
  Params params(s, block);
  if (table == HeadTable::Own)
    params.shardRows(m.tied_embedding ? "embedding.weight" : "head.weight", m.vocab, c, true);
  params.beginReplicated();
  params.norm("final_norm");
  const std::string own = m.tied_embedding ? "embedding.weight" : "head.weight";
  const Operand w = table == HeadTable::Own ? params.weight(own) : Operand{Region::Tied, 0};
  const Operand dw = table == HeadTable::Own ? params.grad(own) : Operand{Region::TiedGrad, 0};
  // Replicated ranks all hold the loss; one of them reports it.
  const Operand loss = s.tp_index == 0 ? Operand{Region::Scalars, 0} : Operand{};

  for (const std::int64_t acc : {0, 1}) {
    Builder b(s, acc == 0 ? block.backward_first : block.forward);
    NormStats stats;
    if (m.norm == NormKind::LayerNorm) stats.mean = b.work(s.rows, DType::F32);
    stats.rstd = b.work(s.rows, DType::F32);
    const Operand x{Region::In, 0}, norm = b.work(s.rows * c);
    normForward(b, s, params, "final_norm", norm, {}, stats, x, {}, {});
    const Operand full = b.gatherRows(norm);
    const Operand dnorm = b.work(s.tokens * c);
    const Operand logits = b.work(s.loss_rows * v);
    const Operand all_stats = b.work(s.tp * s.loss_rows * 3, DType::F32);
    const auto rowOffset = [&](Operand operand, std::int64_t row, std::int64_t cols, Bytes element) {
      operand.offset += row * cols * element;
      return operand;
    };
    for (std::int64_t row = 0; row < s.tokens; row += s.loss_rows) {
      const std::int64_t n = std::min(s.loss_rows, s.tokens - row);
      const Operand x_rows = rowOffset(full, row, c, sizeOf(s.dtype));
      const Operand dx_rows = rowOffset(dnorm, row, c, sizeOf(s.dtype));
      const Operand targets = rowOffset({Region::Targets, 0}, row, 1, sizeOf(DType::I32));
      const Operand own_stats = rowOffset(all_stats, n * s.tp_index, 3, sizeOf(DType::F32));
      b.op(OpKind::LinearForward, {n, v, c}, {logits, x_rows, w, {}});
      b.op(OpKind::CrossEntropyStats, {n, v, v_begin, valid}, {own_stats, logits, targets});
      if (s.tp > 1) b.comm(CommKind::AllGather, s.tp * n * 3, DType::F32, own_stats, all_stats);
      b.op(OpKind::CrossEntropyBackward, {n, v, v_begin, valid, s.tp}, {logits, all_stats, targets, loss},
           s.loss_scale);
      b.op(OpKind::LinearBackwardInput, {n, v, c}, {dx_rows, logits, w});
      b.op(OpKind::LinearBackwardWeight, {n, v, c, (acc != 0 || row > 0) ? 1 : 0}, {dw, {}, logits, x_rows});
    }
    normBackward(b, s, params, "final_norm", {Region::Stream, 0}, b.reduceRows(dnorm), x, stats, {}, acc);
    block.forward_work = std::max(block.forward_work, b.highWater());
  }
  return block;
}

}  // namespace bmt
