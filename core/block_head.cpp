// Final norm, vocabulary-parallel logits and loss, and their gradients, all in the forward slot.
#include "core/block_builder.h"

namespace bmt {

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
    if (lossBytes(s) > 0) b.work(lossBytes(s), DType::I8);
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
