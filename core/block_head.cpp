// What follows the last layer: final norm (BERT: dense, activation, norm; ViT: of the class token only),
// vocabulary-parallel logits and loss, and their gradients, all in the forward slot.
#include "core/block_builder.h"

namespace bmt {
namespace {

// The rows that have a loss: T5's lie behind the encoder's.
BlockShape headShape(const BlockShape& s) {
  BlockShape head = s;
  if (s.model->family == Family::T5) {
    head.tokens = s.decoder_tokens;
    head.rows = s.decoder_rows;
  }
  return head;
}

// fp32 logits and probabilities beside the logits, where the loss is made of plain ops (simulated only).
Bytes lossBytes(const BlockShape& s) {
  const bool fused = s.pointwise == Pointwise::Fused && !keepsScores(s.attention);
  // Logits and their softmax; on gathered logits, whose backward is autograd's, also the gradients of both.
  const std::int64_t columns = s.vocab_rows() * (s.gather_logits ? s.tp : 1);
  return fused ? 0 : (s.gather_logits ? 4 : 2) * s.loss_rows * columns * sizeOf(DType::F32);
}

class HeadBuilder {
 public:
  HeadBuilder(const BlockShape& shape, HeadTable table)
      : whole_(shape), s_(headShape(shape)), m_(*shape.model), table_(table), params_(s_, block_) {}

  Block build() {
    declare();
    for (const std::int64_t acc : {0, 1}) emit(acc);
    return std::move(block_);
  }

 private:
  bool dense() const { return m_.family == Family::Bert; }
  bool classes() const { return m_.family == Family::Vit; }
  bool biased() const { return dense() || classes(); }
  std::string tableName() const { return m_.tied_embedding ? "embedding.weight" : "head.weight"; }

  void declare() {
    if (table_ == HeadTable::Own) params_.shardRows(tableName(), m_.vocab, m_.d_model, true);
    if (biased()) params_.shardRows("head.bias", m_.vocab, 1, false);
    params_.beginReplicated();
    if (dense()) params_.replicate("head.dense.weight", m_.d_model, m_.d_model, true);
    if (dense()) params_.replicate("head.dense.bias", 1, m_.d_model, false);
    params_.norm("final_norm");
  }

  void emit(std::int64_t acc) {
    const std::int64_t c = m_.d_model, elements = s_.rows * c;
    Builder b(s_, acc == 0 ? block_.backward_first : block_.forward);
    NormStats stats;
    if (m_.norm == NormKind::LayerNorm) stats.mean = b.work(s_.rows, DType::F32);
    stats.rstd = b.work(s_.rows, DType::F32);
    const std::int64_t before = m_.family == Family::T5 ? whole_.rows * c : 0;
    const Operand x = behind({Region::In, 0}, before, s_.dtype);
    const Operand stream = behind({Region::Stream, 0}, before, s_.dtype);
    if (before > 0) b.op(OpKind::Zero, {before}, {Operand{Region::Stream, 0}});
    const Operand norm = b.work(elements);
    Operand normed = x, pre;
    if (dense()) {
      pre = b.work(elements);
      normed = b.work(elements);
      b.op(OpKind::LinearForward, {s_.rows, c, c},
           {pre, x, params_.weight("head.dense.weight"), params_.weight("head.dense.bias")});
      b.op(OpKind::ActivationForward, {elements, static_cast<std::int64_t>(m_.activation)}, {normed, pre});
    }
    normForward(b, s_, params_, "final_norm", norm, {}, stats, normed, {}, {});
    const Operand dnorm = b.work(s_.tokens * c);
    if (classes()) {
      const Operand tokens = b.work(s_.batch * c);
      b.op(OpKind::Copy, {s_.batch * c}, {tokens, norm});
      b.op(OpKind::Zero, {s_.tokens * c}, {dnorm});
      losses(b, acc, s_.batch, tokens, dnorm);
    } else {
      losses(b, acc, s_.tokens, b.gatherRows(norm), dnorm);
    }
    const Operand reduced = b.reduceRows(dnorm);
    if (!dense()) {
      normBackward(b, s_, params_, "final_norm", stream, reduced, x, stats, {}, acc);
    } else {
      normBackward(b, s_, params_, "final_norm", norm, reduced, normed, stats, {}, acc);
      b.op(OpKind::ActivationBackward, {elements, static_cast<std::int64_t>(m_.activation)},
           {norm, norm, pre});
      b.op(OpKind::LinearBackwardWeight, {s_.rows, c, c, acc},
           {params_.grad("head.dense.weight"), params_.grad("head.dense.bias"), norm, x});
      b.op(OpKind::LinearBackwardInput, {s_.rows, c, c}, {stream, norm, params_.weight("head.dense.weight")});
    }
    block_.forward_work = std::max(block_.forward_work, b.highWater());
  }

  // Logits, losses and their gradients, loss_rows at a time.
  void losses(Builder& b, std::int64_t acc, std::int64_t rows, Operand x, Operand dx) {
    const std::int64_t c = m_.d_model, v = s_.vocab_rows();
    const std::int64_t v_begin = std::min(m_.vocab, v * s_.tp_index), valid = std::min(v, m_.vocab - v_begin);
    const bool own = table_ == HeadTable::Own;
    const Operand w = own ? params_.weight(tableName()) : Operand{Region::Tied, 0};
    const Operand dw = own ? params_.grad(tableName()) : Operand{Region::TiedGrad, 0};
    const Operand bias = biased() ? params_.weight("head.bias") : Operand{};
    const Operand dbias = biased() ? params_.grad("head.bias") : Operand{};
    // Replicated ranks all hold the loss; one of them reports it.
    const Operand loss = s_.tp_index == 0 ? Operand{Region::Scalars, 0} : Operand{};
    const Operand logits = b.work(s_.loss_rows * v);
    if (lossBytes(s_) > 0) b.work(lossBytes(s_), DType::I8);
    const Operand whole = s_.gather_logits ? b.work(s_.loss_rows * v * s_.tp) : Operand{};
    const Operand all_stats = b.work(s_.tp * s_.loss_rows * 3, DType::F32);
    for (std::int64_t row = 0; row < rows; row += s_.loss_rows) {
      const std::int64_t n = std::min(s_.loss_rows, rows - row);
      const Operand x_rows = behind(x, row * c, s_.dtype), dx_rows = behind(dx, row * c, s_.dtype);
      const Operand targets = behind({Region::Targets, 0}, row, DType::I32);
      const Operand own_stats = behind(all_stats, n * s_.tp_index * 3, DType::F32);
      b.op(OpKind::LinearForward, {n, v, c}, {logits, x_rows, w, bias});
      if (s_.gather_logits) {  // simulated only: the whole vocabulary on every tensor rank
        b.comm(CommKind::AllGather, n * v * s_.tp, s_.dtype, logits, whole);
        b.op(OpKind::CrossEntropyStats, {n, v * s_.tp, 0, m_.vocab}, {own_stats, whole, targets});
        b.op(OpKind::CrossEntropyBackward, {n, v * s_.tp, 0, m_.vocab, 1}, {whole, own_stats, targets, loss},
             s_.loss_scale);
      } else {
        b.op(OpKind::CrossEntropyStats, {n, v, v_begin, valid}, {own_stats, logits, targets});
        if (s_.tp > 1) b.comm(CommKind::AllGather, s_.tp * n * 3, DType::F32, own_stats, all_stats);
        b.op(OpKind::CrossEntropyBackward, {n, v, v_begin, valid, s_.tp}, {logits, all_stats, targets, loss},
             s_.loss_scale);
      }
      b.op(OpKind::LinearBackwardInput, {n, v, c}, {dx_rows, logits, w});
      b.op(OpKind::LinearBackwardWeight, {n, v, c, (acc != 0 || row > 0) ? 1 : 0},
           {dw, dbias, logits, x_rows});
    }
  }

  const BlockShape whole_, s_;
  const ModelSpec& m_;
  const HeadTable table_;
  Block block_;
  Params params_;
};

}  // namespace

Block buildHeadBlock(const BlockShape& s, HeadTable table) {
  BlockShape plain = s;
  plain.fp8 = false;  // the head stays in 16 bits
  return HeadBuilder(plain, table).build();
}

}  // namespace bmt
