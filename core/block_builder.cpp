// Norms of every block.
#include "core/block_builder.h"

namespace bmt {

NormStats saveNormStats(SavedLayout& saved, const BlockShape& s, std::int64_t rows) {
  NormStats stats;
  if (s.model->norm == NormKind::LayerNorm) stats.mean = saved.add(rows, DType::F32);
  stats.rstd = saved.add(rows, DType::F32);
  return stats;
}

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

}  // namespace bmt
