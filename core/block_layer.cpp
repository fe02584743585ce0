// A decoder layer: the attention half, then the MLP half, with the residual additions between them fused into
// the next norm.
#include "core/block_builder.h"

namespace bmt {

Block buildLayerBlock(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  Block block;
  Params params(s, block);
  for (const ParamGroup group : {ParamGroup::Matrices, ParamGroup::ShardedBiases, ParamGroup::Replicated}) {
    if (group == ParamGroup::Replicated) {
      params.beginReplicated();
      params.norm("norm1");
      params.norm("norm2");
    }
    declareAttention(params, s, group);
    declareMlp(params, s, group);
  }

  const Operand x{Region::In, 0}, out{Region::Out, 0};
  SavedLayout saved;
  Half attention, mlp;
  attention.norm_name = "norm1";
  attention.input = x;
  layoutAttention(attention, saved, s);
  mlp.norm_name = "norm2";
  mlp.input = saved.add(s.rows * m.d_model, s.dtype);
  layoutMlp(mlp, saved, s);
  // Simulated only: masks of the two residual branches.
  if (m.dropout) saved.add(2 * s.rows * m.d_model, DType::I8);
  block.saved_bytes = saved.bytes();

  Builder f(s, block.forward);
  const auto bias = [&](bool present, const char* name) { return present ? params.weight(name) : Operand{}; };
  Operand partial = attentionForward(f, s, params, attention, {x, {}, {}, {}});
  partial = mlpForward(f, s, params, mlp,
                       {x, f.reduceRows(partial), bias(m.attn_out_bias, "attn.out.bias"), mlp.input});
  f.op(OpKind::ResidualAdd, {s.rows, m.d_model},
       {out, mlp.input, f.reduceRows(partial), bias(m.mlp_bias, "mlp.down.bias")});
  block.forward_work = f.highWater();

  for (const bool first : {true, false}) {
    BackwardBuilder b(s, block, first);
    const Operand stream{Region::Stream, 0};
    const Operand between = s.split_backward ? b.kept(s.rows * m.d_model) : stream;
    mlpBackward(b, s, params, mlp, stream, between);
    attentionBackward(b, s, params, attention, between,
                      s.split_backward ? Operand{Region::InGrad, 0} : stream);
    b.finish();
  }
  return block;
}

}  // namespace bmt
