// The attention half of a layer: norm, q, k, v, rotary positions, attention, output projection.
#include "core/block_builder.h"

namespace bmt {
namespace {

struct Sizes {
  std::int64_t c, heads, kv_heads, att_cols, qkv_cols;
};
Sizes sizesOf(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  const std::int64_t heads = m.heads / s.tp, kv_heads = m.kv_heads / s.tp;
  return {m.d_model, heads, kv_heads, heads * m.d_head, (heads + 2 * kv_heads) * m.d_head};
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

std::int64_t savedNormBytes(const BlockShape& s) {
  if (s.pointwise != Pointwise::Eager || s.model->norm != NormKind::RmsNorm) return 0;
  return s.rows * s.model->d_model * (sizeOf(DType::F32) + sizeOf(s.dtype));
}

std::int64_t lossBytes(const BlockShape& s) {
  const bool fused = s.pointwise == Pointwise::Fused &&
                     (s.attention == AttentionKernel::Flash || s.attention == AttentionKernel::Flash1);
  return fused ? 0 : 2 * s.loss_rows * s.vocab_rows() * sizeOf(DType::F32);
}

void declareAttention(Params& params, const BlockShape& s, ParamGroup group) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model, q = m.heads * m.d_head, kv = m.kv_heads * m.d_head;
  switch (group) {
    case ParamGroup::Matrices:
      params.shardRows("attn.q.weight", q, c, true);
      params.shardRows("attn.k.weight", kv, c, true);
      params.shardRows("attn.v.weight", kv, c, true);
      params.shardCols("attn.out.weight", c, q);
      break;
    case ParamGroup::ShardedBiases:
      if (!m.qkv_bias) break;
      params.shardRows("attn.q.bias", q, 1, false);
      params.shardRows("attn.k.bias", kv, 1, false);
      params.shardRows("attn.v.bias", kv, 1, false);
      break;
    case ParamGroup::Replicated:
      if (m.attn_out_bias) params.replicate("attn.out.bias", 1, c, false);
      break;
  }
}

void layoutAttention(Half& half, SavedLayout& saved, const BlockShape& s) {
  const Sizes n = sizesOf(s);
  half.stats = saveNormStats(saved, s);
  half.norm = saved.add(s.rows * n.c, s.dtype);
  saved.add(savedNormBytes(s), DType::I8);
  half.projected = saved.add(s.tokens * n.qkv_cols, s.dtype);
  half.result = saved.add(s.tokens * n.att_cols, s.dtype);
  half.lse = saved.add(s.batch * n.heads * s.model->seq_len, DType::F32);
  // Simulated only (no op reads it): what attention with scores in memory keeps for backward.
  saved.add(savedScoreBytes(s), DType::I8);
}

Operand attentionForward(Builder& f, const BlockShape& s, const Params& params, const Half& half,
                         const Residual& in) {
  const ModelSpec& m = *s.model;
  const Sizes n = sizesOf(s);
  const std::int64_t alibi = m.position == PositionKind::Alibi ? 1 : 0;
  normForward(f, s, params, half.norm_name, half.norm, in.y, half.stats, in.x, in.delta, in.bias);
  f.release(0);
  f.op(OpKind::LinearForward, {s.tokens, n.qkv_cols, n.c},
       {half.projected, f.gatherRows(half.norm), params.weight("attn.q.weight"),
        m.qkv_bias ? params.weight("attn.q.bias") : Operand{}});
  f.release(0);
  if (m.position == PositionKind::Rope)
    f.op(OpKind::RopeForward, {s.tokens, m.seq_len, n.heads, n.kv_heads, m.d_head}, {half.projected},
         m.rope_theta);
  f.op(OpKind::AttentionForward, {s.batch, m.seq_len, n.heads, n.kv_heads, m.d_head, alibi},
       {half.result, half.lse, half.projected});
  const Operand partial = f.work(s.tokens * n.c);
  f.op(OpKind::LinearForward, {s.tokens, n.c, n.att_cols},
       {partial, half.result, params.weight("attn.out.weight"), {}});
  return partial;
}

void attentionBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                       Operand dout, Operand din) {
  const ModelSpec& m = *s.model;
  const Sizes n = sizesOf(s);
  const std::int64_t alibi = m.position == PositionKind::Alibi ? 1 : 0, acc = back.acc;
  Builder &b = back.input, &w = back.weight();
  if (m.attn_out_bias) w.op(OpKind::BiasBackward, {s.rows, n.c, acc}, {params.grad("attn.out.bias"), dout});
  const Operand dout_rows = back.gatherKept(dout);
  const Operand datt = b.work(s.tokens * n.att_cols);
  b.op(OpKind::LinearBackwardInput, {s.tokens, n.c, n.att_cols},
       {datt, dout_rows, params.weight("attn.out.weight")});
  w.op(OpKind::LinearBackwardWeight, {s.tokens, n.c, n.att_cols, acc},
       {params.grad("attn.out.weight"), {}, dout_rows, half.result});
  const Operand dqkv = back.kept(s.tokens * n.qkv_cols);
  b.op(OpKind::AttentionBackward, {s.batch, m.seq_len, n.heads, n.kv_heads, m.d_head, alibi},
       {dqkv, datt, half.projected, half.result, half.lse});
  if (m.position == PositionKind::Rope)
    b.op(OpKind::RopeBackward, {s.tokens, m.seq_len, n.heads, n.kv_heads, m.d_head}, {dqkv}, m.rope_theta);
  w.op(OpKind::LinearBackwardWeight, {s.tokens, n.qkv_cols, n.c, acc},
       {params.grad("attn.q.weight"), m.qkv_bias ? params.grad("attn.q.bias") : Operand{}, dqkv,
        w.gatherRows(half.norm)});
  const Operand dnorm = b.work(s.tokens * n.c);
  b.op(OpKind::LinearBackwardInput, {s.tokens, n.qkv_cols, n.c},
       {dnorm, dqkv, params.weight("attn.q.weight")});
  normBackward(b, s, params, half.norm_name, din, b.reduceRows(dnorm), half.input, half.stats, dout, acc);
  back.endHalf();
}

}  // namespace bmt
