// The MLP half of a layer: up (and gate) projection, activation, down projection. Also the shared experts.
#include "core/block_builder.h"

namespace bmt {
namespace {

// Adjacent parameters act as one matrix: gate, up.
std::string upName(const ModelSpec& m, const Half& half) {
  return half.name + (m.gated_mlp ? ".gate" : ".up");
}
bool biased(const ModelSpec& m, const Half& half) {
  return m.mlp_bias && half.name == "mlp";
}

}  // namespace

void declareMlp(Params& params, const BlockShape& s, const std::string& name, std::int64_t inner,
                ParamGroup group) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model;
  const bool bias = m.mlp_bias && name == "mlp";
  switch (group) {
    case ParamGroup::Matrices:
      if (m.gated_mlp) params.shardRows(name + ".gate.weight", inner, c, true);
      params.shardRows(name + ".up.weight", inner, c, true);
      params.shardCols(name + ".down.weight", c, inner);
      break;
    case ParamGroup::ShardedBiases:
      if (!bias) break;
      if (m.gated_mlp) params.shardRows(name + ".gate.bias", inner, 1, false);
      params.shardRows(name + ".up.bias", inner, 1, false);
      break;
    case ParamGroup::ReplicatedMatrices:
      break;
    case ParamGroup::Replicated:
      if (bias) params.replicate(name + ".down.bias", 1, c, false);
      break;
  }
}

void layoutMlp(Half& half, SavedLayout& saved, const BlockShape& s) {
  const std::int64_t ff = half.inner / s.tp;
  // Simulated only: op by op, silu's output is kept beside the product with it.
  if (s.model->gated_mlp && s.pointwise != Pointwise::Fused) saved.add(s.tokens * ff, s.dtype);
  half.projected = saved.add(s.tokens * (s.model->gated_mlp ? 2 : 1) * ff, s.dtype);
  half.result = saved.add(s.tokens * ff, s.dtype);
}

Operand mlpForward(Builder& f, const BlockShape& s, const Params& params, const Half& half) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model, ff = half.inner / s.tp, pre_cols = m.gated_mlp ? 2 * ff : ff;
  const std::string up = upName(m, half);
  columnForward(f, s, half.projected, half.norm, params.weight(up + ".weight"),
                biased(m, half) ? params.weight(up + ".bias") : Operand{}, pre_cols, c);
  if (m.gated_mlp) {
    f.op(OpKind::SwigluForward, {s.tokens, ff, m.activation == ActivationKind::Gelu ? 1 : 0},
         {half.result, half.projected});
  } else {
    f.op(OpKind::ActivationForward, {s.tokens * ff, static_cast<std::int64_t>(m.activation)},
         {half.result, half.projected});
  }
  return rowForward(f, s, half.result, params.weight(half.name + ".down.weight"), c, ff);
}

Operand mlpBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                    Operand dout) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model, ff = half.inner / s.tp, pre_cols = m.gated_mlp ? 2 * ff : ff;
  Builder& b = back.input;
  const Operand dact = m.gated_mlp ? b.work(s.tokens * ff) : back.kept(s.tokens * ff);
  rowBackward(back, s, dact, dout, half.result, params.weight(half.name + ".down.weight"),
              params.grad(half.name + ".down.weight"), c, ff);
  Operand dpre = dact;  // in place
  if (m.gated_mlp) {
    dpre = back.kept(s.tokens * pre_cols);
    b.op(OpKind::SwigluBackward, {s.tokens, ff, m.activation == ActivationKind::Gelu ? 1 : 0},
         {dpre, dact, half.projected});
  } else {
    b.op(OpKind::ActivationBackward, {s.tokens * ff, static_cast<std::int64_t>(m.activation)},
         {dpre, dact, half.projected});
  }
  const std::string up = upName(m, half);
  return columnBackward(back, s, dpre, half.norm, params.weight(up + ".weight"), params.grad(up + ".weight"),
                        biased(m, half) ? params.grad(up + ".bias") : Operand{}, pre_cols, c);
}

}  // namespace bmt
