// Vocabulary-parallel token embedding, learned positions, BLOOM's norm after it.
#include "core/block_builder.h"

namespace bmt {

Block buildEmbeddingBlock(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model;
  Block block;
  Params params(s, block);
  params.shardRows("embedding.weight", m.vocab, c, true);
  params.beginReplicated();
  const bool learned = m.position == PositionKind::Learned;
  if (learned) params.replicate("position.weight", m.max_positions, c, true);
  if (m.embedding_norm) params.norm("embedding_norm");

  const std::int64_t row_begin = s.vocab_rows() * s.tp_index;
  const std::int64_t first_row = s.sequence_parallel ? s.rows * s.tp_index : 0;
  SavedLayout saved;
  const Operand raw = m.embedding_norm ? saved.add(s.rows * c, s.dtype) : Operand{Region::Out, 0};
  NormStats stats;
  if (m.embedding_norm) stats = {saved.add(s.rows, DType::F32), saved.add(s.rows, DType::F32)};
  block.saved_bytes = saved.bytes();

  Builder f(s, block.forward);
  const Operand tokens{Region::Tokens, 0};
  const Operand full = s.sequence_parallel ? f.work(s.tokens * c) : raw;
  f.op(OpKind::EmbeddingForward, {s.tokens, c, row_begin, s.vocab_rows()},
       {full, tokens, params.weight("embedding.weight")});
  if (s.tp > 1) {
    const CommKind kind = s.sequence_parallel ? CommKind::ReduceScatter : CommKind::AllReduce;
    f.comm(kind, s.tokens * c, s.dtype, full, raw);
  }
  if (learned)
    f.op(OpKind::PositionForward, {s.rows, c, m.seq_len, first_row}, {raw, params.weight("position.weight")});
  if (m.embedding_norm) normForward(f, s, params, "embedding_norm", {Region::Out, 0}, {}, stats, raw, {}, {});
  block.forward_work = f.highWater();

  // Nobody waits for these gradients: where backward is split, all of them belong to the second pass.
  for (const bool first : {true, false}) {
    BackwardBuilder back(s, block, first);
    Builder& b = back.weight();
    const std::int64_t acc = back.acc;
    Operand dx{Region::Stream, 0};
    if (m.embedding_norm) {
      dx = b.work(s.rows * c);
      normBackward(b, s, params, "embedding_norm", dx, {Region::Stream, 0}, raw, stats, {}, acc);
    }
    if (learned)
      b.op(OpKind::PositionBackward, {s.rows, c, m.seq_len, first_row, acc},
           {params.grad("position.weight"), dx});
    b.op(OpKind::EmbeddingBackward, {s.tokens, c, row_begin, s.vocab_rows(), acc},
         {params.grad("embedding.weight"), tokens, b.gatherRows(dx)});
    back.finish();
  }
  return block;
}

}  // namespace bmt
