// Attention between its projections, on one rank or over the context axis (cp ranks of T / cp tokens each).
//   ring (Liu, Zaharia, Abbeel 2023): cp steps; keys and values of step i + 1 travel beside the attention of
//     step i. Zigzag order: rank r holds parts r and 2 cp - 1 - r of 2 cp, so every step of every rank is
//     half of a (T/cp)^2 square: the own block by its diagonal, the others because one half sees the other
//     fully. Forward: cp - 1 shifts of (T/cp) (k and v); backward: the same with their gradients, twice the
//     bytes.
//   a2a (DeepSpeed-Ulysses, Jacobs et al. 2023): all-to-alls of q, k, v turn tokens into heads, attention
//   sees
//     all tokens of heads / cp, one more turns its output back.
#include "core/block_builder.h"

namespace bmt {
namespace {

// B, T, Hq, Hkv, D, bias, S, Dv, full of an attention op.
struct Core {
  std::int64_t batch, queries, heads, kv_heads, d, bias, keys, dv, full;
};

Core coreOf(const BlockShape& s, const Half& half) {
  const ModelSpec& m = *s.model;
  const AttentionSizes n = attentionSizes(s);
  const bool bias = m.position == PositionKind::Alibi || m.position == PositionKind::Relative;
  return {s.batch,          s.seq,        n.heads,         n.kv_heads,
          m.d_head,         bias ? 1 : 0, half.memory_seq, m.kv_rank > 0 ? m.v_dim : 0,
          half.full ? 1 : 0};
}

bool rotates(const BlockShape& s) {
  return s.model->position == PositionKind::Rope;
}

void rotate(Builder& b, const BlockShape& s, OpKind kind, Operand qkv) {
  const ModelSpec& m = *s.model;
  const AttentionSizes n = attentionSizes(s);
  // Latent attention: only rope_dim elements of each query head, and one key for all heads.
  if (m.kv_rank > 0) {
    if (m.rope_dim > 0) b.op(kind, {s.tokens, m.seq_len, n.heads, 1, m.rope_dim}, {qkv}, m.rope_theta);
  } else {
    b.op(kind, {s.tokens, m.seq_len, n.heads, n.kv_heads, m.d_head}, {qkv}, m.rope_theta);
  }
}

void forwardOp(Builder& f, const Core& a, Operand out, Operand lse, Operand qkv, Operand kv) {
  f.op(OpKind::AttentionForward, {a.batch, a.queries, a.heads, a.kv_heads, a.d, a.bias, a.keys, a.dv, a.full},
       {out, lse, qkv, kv});
}

void backwardOp(Builder& b, const Core& a, Operand dqkv, Operand dout, const Half& half, Operand result,
                Operand dkv, Operand kv) {
  b.op(OpKind::AttentionBackward,
       {a.batch, a.queries, a.heads, a.kv_heads, a.d, a.bias, a.keys, a.dv, a.full},
       {dqkv, dout, half.projected, result, half.lse, dkv, kv});
}

bool ring(const BlockShape& s) {
  return s.cp > 1 && s.context == ContextKind::Ring;
}
Core exchangedCore(const BlockShape& s, const Half& half) {
  Core a = coreOf(s, half);
  a.queries = s.model->seq_len;
  a.heads /= s.cp;
  a.kv_heads /= s.cp;
  return a;
}

void turn(Builder& b, const BlockShape& s, std::int64_t cols, Operand from, Operand to) {
  b.comm(CommKind::AllToAll, s.tokens * cols, s.dtype, from, to, GroupKind::Context);
}

// q, k and v each in one all-to-all.
void turnProjections(Builder& b, const BlockShape& s, Operand from, Operand to) {
  const AttentionSizes n = attentionSizes(s);
  const std::int64_t keys = n.kv_heads * keyDim(*s.model), values = n.kv_heads * valueDim(*s.model);
  turn(b, s, n.q_cols, from, to);
  const auto at = [&](Operand o, std::int64_t cols) { return behind(o, s.tokens * cols, s.dtype); };
  turn(b, s, keys, at(from, n.q_cols), at(to, n.q_cols));
  turn(b, s, values, at(from, n.q_cols + keys), at(to, n.q_cols + keys));
}

}  // namespace

bool exchangesHeads(const BlockShape& s) {
  return s.cp > 1 && s.context == ContextKind::AllToAll;
}

void layoutAttentionCore(Half& half, SavedLayout& saved, const BlockShape& s) {
  const ModelSpec& m = *s.model;
  const Core a = coreOf(s, half);
  half.lse = saved.add(a.batch * a.heads * a.queries, DType::F32);
  if (exchangesHeads(s)) half.exchanged = saved.add(s.tokens * attentionSizes(s).out_cols, s.dtype);
  const bool softmax = s.attention == AttentionKernel::Softmax,
             unfused = s.attention == AttentionKernel::Unfused;
  if (!softmax && !unfused) return;
  // Simulated only (no op reads them): scores in memory, placed by the layer behind everything else. Softmax
  // output, kept in the activations' type (plain ops: also in fp32 before the cast); with dropout also its
  // mask and output: 5 bytes a score in 16 bit, the "5 a s / h" of Korthikanti et al. 2022.
  const std::int64_t scores = a.batch * a.heads * a.queries * (a.keys > 0 ? a.keys : s.cp * a.queries);
  const Bytes element = sizeOf(s.dtype);
  half.score_bytes = scores * (element + (unfused ? sizeOf(DType::F32) : 0) + (m.dropout ? 1 + element : 0));
}

void attentionCoreForward(Builder& f, const BlockShape& s, const Half& half, Operand qkv) {
  if (rotates(s)) rotate(f, s, OpKind::RopeForward, qkv);
  if (exchangesHeads(s)) turnProjections(f, s, qkv, half.projected);  // backward needs the turned ones
  attentionCoreAgain(f, s, half);
  if (exchangesHeads(s)) turn(f, s, attentionSizes(s).out_cols, half.exchanged, half.result);
}

void attentionCoreAgain(Builder& f, const BlockShape& s, const Half& half) {
  const AttentionSizes n = attentionSizes(s);
  const Bytes mark = f.mark();
  if (exchangesHeads(s)) {
    forwardOp(f, exchangedCore(s, half), half.exchanged, half.lse, half.projected, {});
  } else if (!ring(s)) {
    const Operand kv = half.memory_seq > 0 ? behind(half.projected, s.tokens * n.q_cols, s.dtype) : Operand{};
    forwardOp(f, coreOf(s, half), half.result, half.lse, half.projected, kv);
  } else {
    const std::int64_t count = s.tokens * n.kv_cols;
    const Operand buffers[2] = {f.work(count), f.work(count)}, part = f.work(s.tokens * n.out_cols);
    Operand kv = behind(half.projected, s.tokens * n.q_cols, s.dtype);
    for (std::int64_t step = 0; step < s.cp; ++step) {
      const Operand next = buffers[step % 2];
      std::int32_t arrives = -1;
      if (step + 1 < s.cp)
        arrives = f.commBeside(CommKind::Shift, count, s.dtype, kv, next, GroupKind::Context);
      forwardOp(f, coreOf(s, half), step == 0 ? half.result : part, half.lse, half.projected, kv);
      if (step > 0) f.op(OpKind::AttentionMerge, {s.tokens, n.out_cols}, {half.result, part});
      if (arrives >= 0) f.waitFor(arrives);
      kv = next;
    }
  }
  f.release(mark);
}

void attentionCoreBackward(Builder& b, const BlockShape& s, const Half& half, Operand dqkv, Operand dresult) {
  const AttentionSizes n = attentionSizes(s);
  if (exchangesHeads(s)) {
    const Operand dall = b.work(s.tokens * n.out_cols), dturned = b.work(s.tokens * n.qkv_cols());
    turn(b, s, n.out_cols, dresult, dall);
    backwardOp(b, exchangedCore(s, half), dturned, dall, half, half.exchanged, {}, {});
    turnProjections(b, s, dturned, dqkv);
  } else if (!ring(s)) {
    const bool cross = half.memory_seq > 0;
    const std::int64_t q = s.tokens * n.q_cols;
    backwardOp(b, coreOf(s, half), dqkv, dresult, half, half.result,
               cross ? behind(dqkv, q, s.dtype) : Operand{},
               cross ? behind(half.projected, q, s.dtype) : Operand{});
  } else {
    // Keys, values and their gradients travel together.
    const std::int64_t count = s.tokens * n.kv_cols;
    const Operand buffers[2] = {b.work(2 * count), b.work(2 * count)};
    Operand kv = behind(half.projected, s.tokens * n.q_cols, s.dtype);
    Operand dkv = behind(dqkv, s.tokens * n.q_cols, s.dtype);
    for (std::int64_t step = 0; step < s.cp; ++step) {
      const Operand next = buffers[step % 2];
      std::int32_t arrives = -1;
      if (step + 1 < s.cp)
        arrives = b.commBeside(CommKind::Shift, 2 * count, s.dtype,
                               step == 0 ? buffers[1] : buffers[(step + 1) % 2], next, GroupKind::Context);
      backwardOp(b, coreOf(s, half), dqkv, dresult, half, half.result, dkv, kv);
      if (step > 0) addRows(b, s.tokens * n.q_cols, dqkv, dqkv);
      if (arrives >= 0) b.waitFor(arrives);
      kv = next;
      dkv = behind(next, count, s.dtype);
    }
  }
  if (rotates(s)) rotate(b, s, OpKind::RopeBackward, dqkv);
}

}  // namespace bmt
