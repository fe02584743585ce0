// Projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1):
//   queries   x [C] -> q_rank -> norm -> heads * d_head            (q_rank 0: x -> heads * d_head)
//   keys and values   x -> kv_rank + rope_dim; the kv_rank part -> norm -> heads * (d_head - rope_dim +
//   v_dim); the rope_dim part is one rotated key for all heads, appended to each head's.
// The matrices into the latents are the same on every tensor rank and act on its rows of the residual stream;
// those out of them are column-parallel.
#include "core/block_builder.h"

namespace bmt {
namespace {

std::int64_t expandedCols(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  return m.heads / s.tp * (m.d_head - m.rope_dim + m.v_dim);
}

void latentNorm(Builder& f, const BlockShape& s, const Params& params, const char* name, std::int64_t cols,
                Operand out, Operand raw, const NormStats& stats) {
  f.op(OpKind::RmsNormForward, {s.rows, cols}, {out, {}, stats.rstd, raw, {}, {}, params.weight(name)},
       s.model->norm_eps);
}

// Gradient of a latent before its norm -> of the residual rows, through the matrix into it.
void intoLatent(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                const std::string& name, std::int64_t cols, Operand draw, Operand dnorm, bool first) {
  const std::int64_t c = s.model->d_model;
  back.weight().op(OpKind::LinearBackwardWeight, {s.rows, cols, c, back.acc},
                   {params.grad(name + ".weight"), {}, draw, half.norm});
  Builder& b = back.input;
  const Operand part = first ? dnorm : b.work(s.rows * c);
  b.op(OpKind::LinearBackwardInput, {s.rows, cols, c}, {part, draw, params.weight(name + ".weight")});
  if (!first) addRows(b, s.rows * c, dnorm, part);
}

}  // namespace

void declareLatent(Params& params, const BlockShape& s, ParamGroup group) {
  const ModelSpec& m = *s.model;
  const std::int64_t q = m.heads * m.d_head;
  switch (group) {
    case ParamGroup::Matrices:
      params.shardRows("attn.q.weight", q, m.q_rank > 0 ? m.q_rank : m.d_model, true);
      params.shardRows("attn.kv.weight", m.heads * (m.d_head - m.rope_dim + m.v_dim), m.kv_rank, true);
      break;
    case ParamGroup::ShardedBiases:
      break;
    case ParamGroup::ReplicatedMatrices:
      if (m.q_rank > 0) params.replicate("attn.q_latent.weight", m.q_rank, m.d_model, true);
      params.replicate("attn.kv_latent.weight", m.kv_rank + m.rope_dim, m.d_model, true);
      break;
    case ParamGroup::Replicated:
      if (m.q_rank > 0) params.replicate("attn.q_norm.weight", 1, m.q_rank, false);
      params.replicate("attn.kv_norm.weight", 1, m.kv_rank, false);
      break;
  }
}

void layoutLatent(Half& half, SavedLayout& saved, const BlockShape& s) {
  const ModelSpec& m = *s.model;
  if (m.q_rank > 0) {
    half.q_raw = saved.add(s.rows * m.q_rank, s.dtype);
    half.q_latent = saved.add(s.rows * m.q_rank, s.dtype);
    half.q_stats.rstd = saved.add(s.rows, DType::F32);
  }
  half.kv_raw = saved.add(s.rows * (m.kv_rank + m.rope_dim), s.dtype);
  half.kv_latent = saved.add(s.rows * m.kv_rank, s.dtype);
  half.kv_stats.rstd = saved.add(s.rows, DType::F32);
}

void latentForward(Builder& f, const BlockShape& s, const Params& params, const Half& half) {
  const ModelSpec& m = *s.model;
  const AttentionSizes n = attentionSizes(s);
  const Bytes mark = f.mark();
  const std::int64_t kv_cols = m.kv_rank + m.rope_dim;
  if (m.q_rank > 0) {
    f.op(OpKind::LinearForward, {s.rows, m.q_rank, n.c},
         {half.q_raw, half.norm, params.weight("attn.q_latent.weight"), {}});
    latentNorm(f, s, params, "attn.q_norm.weight", m.q_rank, half.q_latent, half.q_raw, half.q_stats);
  }
  f.op(OpKind::LinearForward, {s.rows, kv_cols, n.c},
       {half.kv_raw, half.norm, params.weight("attn.kv_latent.weight"), {}});
  latentNorm(f, s, params, "attn.kv_norm.weight", m.kv_rank, half.kv_latent, half.kv_raw, half.kv_stats);
  columnForward(f, s, half.projected, m.q_rank > 0 ? half.q_latent : half.norm,
                params.weight("attn.q.weight"), {}, n.q_cols, m.q_rank > 0 ? m.q_rank : n.c);
  const Operand kv = f.work(s.tokens * expandedCols(s));
  columnForward(f, s, kv, half.kv_latent, params.weight("attn.kv.weight"), {}, expandedCols(s), m.kv_rank);
  if (m.rope_dim > 0 && s.sequence_parallel)
    f.gatherRows(behind(half.kv_raw, s.rows * m.kv_rank, s.dtype), s.tokens, m.rope_dim);
  // Keys are put together from both parts.
  f.op(OpKind::Copy, {s.tokens * n.kv_cols}, {behind(half.projected, s.tokens * n.q_cols, s.dtype), kv});
  f.release(mark);
}

Operand latentBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                       Operand dqkv) {
  const ModelSpec& m = *s.model;
  const AttentionSizes n = attentionSizes(s);
  Builder& b = back.input;
  const std::int64_t kv_cols = m.kv_rank + m.rope_dim;
  const Operand dkv = back.kept(s.tokens * expandedCols(s)), drope = b.work(s.tokens * m.rope_dim);
  b.op(OpKind::Copy, {s.tokens * n.kv_cols}, {dkv, behind(dqkv, s.tokens * n.q_cols, s.dtype)});
  const Operand dlatent = columnBackward(back, s, dkv, half.kv_latent, params.weight("attn.kv.weight"),
                                         params.grad("attn.kv.weight"), {}, expandedCols(s), m.kv_rank);
  if (m.rope_dim > 0) b.reduceRows(drope, s.tokens, m.rope_dim);
  const Operand draw = back.kept(s.rows * kv_cols);
  const auto norm_backward = [&](const char* name, std::int64_t cols, Operand dx, Operand dout, Operand raw,
                                 const NormStats& stats) {
    b.op(OpKind::RmsNormBackward, {s.rows, cols, back.acc},
         {dx, params.grad(name), dout, raw, params.weight(name), stats.rstd});
  };
  norm_backward("attn.kv_norm.weight", m.kv_rank, draw, dlatent, half.kv_raw, half.kv_stats);
  const std::string q = "attn.q.weight";
  if (m.q_rank == 0) {
    const Operand dnorm =
        columnBackward(back, s, dqkv, half.norm, params.weight(q), params.grad(q), {}, n.q_cols, n.c);
    intoLatent(back, s, params, half, "attn.kv_latent", kv_cols, draw, dnorm, false);
    return dnorm;
  }
  const Operand dnorm = b.work(s.rows * n.c);
  intoLatent(back, s, params, half, "attn.kv_latent", kv_cols, draw, dnorm, true);
  const Operand dq_latent =
      columnBackward(back, s, dqkv, half.q_latent, params.weight(q), params.grad(q), {}, n.q_cols, m.q_rank);
  const Operand dq_raw = back.kept(s.rows * m.q_rank);
  norm_backward("attn.q_norm.weight", m.q_rank, dq_raw, dq_latent, half.q_raw, half.q_stats);
  intoLatent(back, s, params, half, "attn.q_latent", m.q_rank, dq_raw, dnorm, false);
  return dnorm;
}

}  // namespace bmt
