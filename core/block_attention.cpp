// The attention half of a layer: q, k, v projections, attention (block_context.cpp), output projection.
// Latent attention has other projections (block_latent.cpp).
#include "core/block_builder.h"

namespace bmt {

AttentionSizes attentionSizes(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  AttentionSizes n;
  n.c = m.d_model;
  n.heads = m.heads / s.tp;
  n.kv_heads = m.kv_heads / s.tp;
  n.q_cols = n.heads * m.d_head;
  n.kv_cols = n.kv_heads * (keyDim(m) + valueDim(m));
  n.out_cols = n.heads * valueDim(m);
  return n;
}

void declareAttention(Params& params, const BlockShape& s, const std::string& name, ParamGroup group) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model, q = m.heads * m.d_head, kv = m.kv_heads * m.d_head;
  if (m.kv_rank > 0) declareLatent(params, s, group);
  switch (group) {
    case ParamGroup::Matrices:
      if (m.kv_rank == 0) {
        params.shardRows(name + ".q.weight", q, c, true);
        params.shardRows(name + ".k.weight", kv, c, true);
        params.shardRows(name + ".v.weight", kv, c, true);
      }
      params.shardCols(name + ".out.weight", c, m.heads * valueDim(m));
      break;
    case ParamGroup::ShardedBiases:
      if (!m.qkv_bias) break;
      params.shardRows(name + ".q.bias", q, 1, false);
      params.shardRows(name + ".k.bias", kv, 1, false);
      params.shardRows(name + ".v.bias", kv, 1, false);
      break;
    case ParamGroup::ReplicatedMatrices:
      break;
    case ParamGroup::Replicated:
      if (m.qk_norm) {
        params.replicate(name + ".q_norm.weight", 1, m.d_head, false);
        params.replicate(name + ".k_norm.weight", 1, m.d_head, false);
      }
      if (m.attn_out_bias) params.replicate(name + ".out.bias", 1, c, false);
      break;
  }
}

void layoutAttention(Half& half, SavedLayout& saved, const BlockShape& s) {
  const AttentionSizes n = attentionSizes(s);
  const ModelSpec& m = *s.model;
  if (m.kv_rank > 0) layoutLatent(half, saved, s);
  if (m.qk_norm) {
    const std::int64_t heads = s.tokens * (n.heads + n.kv_heads);
    half.q_raw = saved.add(heads * m.d_head, s.dtype);
    half.q_stats.rstd = saved.add(heads, DType::F32);
  }
  // Cross attention: the keys and values of the encoder's rows follow the decoder's queries.
  const std::int64_t kv_tokens = half.memory_seq > 0 ? s.batch * half.memory_seq : s.tokens;
  half.projected = saved.add(s.tokens * n.q_cols + kv_tokens * n.kv_cols, s.dtype);
  half.result = saved.add(s.tokens * n.out_cols, s.dtype);
  layoutAttentionCore(half, saved, s);
}

Operand attentionForward(Builder& f, const BlockShape& s, const Params& params, const Half& kept) {
  const ModelSpec& m = *s.model;
  const AttentionSizes n = attentionSizes(s);
  const Bytes mark = f.mark();
  Half half = kept;
  if (exchangesHeads(s)) half.projected = f.work(s.tokens * n.qkv_cols());
  const auto bias = [&](const char* which) {
    return m.qkv_bias ? params.weight(half.name + which) : Operand{};
  };
  const Operand w = m.kv_rank > 0 ? Operand{} : params.weight(half.name + ".q.weight");
  if (m.kv_rank > 0) {
    latentForward(f, s, params, half);
  } else if (half.memory_seq > 0) {
    columnForward(f, s, half.projected, half.norm, w, bias(".q.bias"), n.q_cols, n.c);
    BlockShape encoder = s;
    encoder.tokens = s.batch * half.memory_seq;
    encoder.rows = encoder.tokens / (s.sequence_parallel ? s.tp : 1);
    columnForward(f, encoder, behind(half.projected, s.tokens * n.q_cols, s.dtype), half.memory,
                  params.weight(half.name + ".k.weight"), bias(".k.bias"), n.kv_cols, n.c);
  } else {
    columnForward(f, s, half.projected, half.norm, w, bias(".q.bias"), n.qkv_cols(), n.c);
  }
  if (m.qk_norm)
    f.op(OpKind::RmsNormForward, {s.tokens * (n.heads + n.kv_heads), m.d_head},
         {half.projected,
          {},
          half.q_stats.rstd,
          half.q_raw,
          {},
          {},
          params.weight(half.name + ".q_norm.weight")},
         m.norm_eps);
  attentionCoreForward(f, s, kept, half.projected);
  f.release(mark);
  return rowForward(f, s, half.result, params.weight(half.name + ".out.weight"), n.c, n.out_cols);
}

Operand attentionBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                          Operand dout) {
  Builder& b = back.input;
  const ModelSpec& m = *s.model;
  const AttentionSizes n = attentionSizes(s);
  const std::int64_t kv_tokens = half.memory_seq > 0 ? s.batch * half.memory_seq : s.tokens;
  const auto bias = [&](const char* which) {
    return m.qkv_bias ? params.grad(half.name + which) : Operand{};
  };
  const Operand datt = b.work(s.tokens * n.out_cols);
  rowBackward(back, s, datt, dout, half.result, params.weight(half.name + ".out.weight"),
              params.grad(half.name + ".out.weight"), n.c, n.out_cols);
  const Operand dqkv = back.kept(s.tokens * n.q_cols + kv_tokens * n.kv_cols);
  attentionCoreBackward(b, s, half, dqkv, datt);
  if (m.qk_norm)
    b.op(OpKind::RmsNormBackward, {s.tokens * (n.heads + n.kv_heads), m.d_head, back.acc},
         {dqkv, params.grad(half.name + ".q_norm.weight"), dqkv, half.q_raw,
          params.weight(half.name + ".q_norm.weight"), half.q_stats.rstd});
  if (m.kv_rank > 0) return latentBackward(back, s, params, half, dqkv);
  const std::string q = half.name + ".q.weight", k = half.name + ".k.weight";
  if (half.memory_seq == 0)
    return columnBackward(back, s, dqkv, half.norm, params.weight(q), params.grad(q), bias(".q.bias"),
                          n.qkv_cols(), n.c);
  BlockShape encoder = s;
  encoder.tokens = kv_tokens;
  encoder.rows = kv_tokens / (s.sequence_parallel ? s.tp : 1);
  const Operand dkv = behind(dqkv, s.tokens * n.q_cols, s.dtype);
  const Operand dmemory = columnBackward(back, encoder, dkv, half.memory, params.weight(k), params.grad(k),
                                         bias(".k.bias"), n.kv_cols, n.c);
  addRows(b, encoder.rows * n.c, half.memory_stream, dmemory);
  return columnBackward(back, s, dqkv, half.norm, params.weight(q), params.grad(q), bias(".q.bias"), n.q_cols,
                        n.c);
}

}  // namespace bmt
