// The MLP half of a layer: norm, up (and gate) projection, activation, down projection.
#include "core/block_builder.h"

namespace bmt {
namespace {

// Adjacent parameters act as one matrix: gate, up.
const char* upWeight(const ModelSpec& m) {
  return m.gated_mlp ? "mlp.gate.weight" : "mlp.up.weight";
}
const char* upBias(const ModelSpec& m) {
  return m.gated_mlp ? "mlp.gate.bias" : "mlp.up.bias";
}

}  // namespace

void declareMlp(Params& params, const BlockShape& s, ParamGroup group) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model;
  switch (group) {
    case ParamGroup::Matrices:
      if (m.gated_mlp) params.shardRows("mlp.gate.weight", m.d_ff, c, true);
      params.shardRows("mlp.up.weight", m.d_ff, c, true);
      params.shardCols("mlp.down.weight", c, m.d_ff);
      break;
    case ParamGroup::ShardedBiases:
      if (!m.mlp_bias) break;
      if (m.gated_mlp) params.shardRows("mlp.gate.bias", m.d_ff, 1, false);
      params.shardRows("mlp.up.bias", m.d_ff, 1, false);
      break;
    case ParamGroup::Replicated:
      if (m.mlp_bias) params.replicate("mlp.down.bias", 1, c, false);
      break;
  }
}

void layoutMlp(Half& half, SavedLayout& saved, const BlockShape& s) {
  const ModelSpec& m = *s.model;
  const std::int64_t ff = m.d_ff / s.tp;
  half.stats = saveNormStats(saved, s);
  half.norm = saved.add(s.rows * m.d_model, s.dtype);
  saved.add(savedNormBytes(s), DType::I8);
  // Simulated only: op by op, silu's output is kept beside the product with it.
  if (m.gated_mlp && s.pointwise != Pointwise::Fused) saved.add(s.tokens * ff, s.dtype);
  half.projected = saved.add(s.tokens * (m.gated_mlp ? 2 : 1) * ff, s.dtype);
  half.result = saved.add(s.tokens * ff, s.dtype);
}

Operand mlpForward(Builder& f, const BlockShape& s, const Params& params, const Half& half,
                   const Residual& in) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model, ff = m.d_ff / s.tp, pre_cols = m.gated_mlp ? 2 * ff : ff;
  normForward(f, s, params, half.norm_name, half.norm, in.y, half.stats, in.x, in.delta, in.bias);
  f.release(0);
  f.op(OpKind::LinearForward, {s.tokens, pre_cols, c},
       {half.projected, f.gatherRows(half.norm), params.weight(upWeight(m)),
        m.mlp_bias ? params.weight(upBias(m)) : Operand{}});
  f.release(0);
  if (m.gated_mlp) {
    f.op(OpKind::SwigluForward, {s.tokens, ff}, {half.result, half.projected});
  } else {
    f.op(OpKind::ActivationForward, {s.tokens * ff, static_cast<std::int64_t>(m.activation)},
         {half.result, half.projected});
  }
  const Operand partial = f.work(s.tokens * c);
  f.op(OpKind::LinearForward, {s.tokens, c, ff},
       {partial, half.result, params.weight("mlp.down.weight"), {}});
  return partial;
}

void mlpBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                 Operand dout, Operand din) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model, ff = m.d_ff / s.tp, pre_cols = m.gated_mlp ? 2 * ff : ff, acc = back.acc;
  Builder &b = back.input, &w = back.weight();
  if (m.mlp_bias) w.op(OpKind::BiasBackward, {s.rows, c, acc}, {params.grad("mlp.down.bias"), dout});
  const Operand dout_rows = back.gatherKept(dout);
  const Operand dact = m.gated_mlp ? b.work(s.tokens * ff) : back.kept(s.tokens * ff);
  b.op(OpKind::LinearBackwardInput, {s.tokens, c, ff}, {dact, dout_rows, params.weight("mlp.down.weight")});
  w.op(OpKind::LinearBackwardWeight, {s.tokens, c, ff, acc},
       {params.grad("mlp.down.weight"), {}, dout_rows, half.result});
  Operand dpre = dact;  // in place
  if (m.gated_mlp) {
    dpre = back.kept(s.tokens * pre_cols);
    b.op(OpKind::SwigluBackward, {s.tokens, ff}, {dpre, dact, half.projected});
  } else {
    b.op(OpKind::ActivationBackward, {s.tokens * ff, static_cast<std::int64_t>(m.activation)},
         {dpre, dact, half.projected});
  }
  w.op(OpKind::LinearBackwardWeight, {s.tokens, pre_cols, c, acc},
       {params.grad(upWeight(m)), m.mlp_bias ? params.grad(upBias(m)) : Operand{}, dpre,
        w.gatherRows(half.norm)});
  const Operand dnorm = b.work(s.tokens * c);
  b.op(OpKind::LinearBackwardInput, {s.tokens, pre_cols, c}, {dnorm, dpre, params.weight(upWeight(m))});
  normBackward(b, s, params, half.norm_name, din, b.reduceRows(dnorm), half.input, half.stats, dout, acc);
  back.endHalf();
}

}  // namespace bmt
