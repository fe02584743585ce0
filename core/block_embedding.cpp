// What feeds the first layer: vocabulary-parallel token embedding (T5: of both stacks), learned positions,
// BERT's segments, the norm of BLOOM and BERT; or ViT's patch projection.
#include "core/block_builder.h"

namespace bmt {
namespace {

bool patches(const BlockShape& s) {
  return s.model->family == Family::Vit;
}

void declare(Params& params, const BlockShape& s) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model;
  if (!patches(s)) params.shardRows("embedding.weight", m.vocab, c, true);
  params.beginReplicated();
  if (patches(s)) params.replicate("patch.weight", c, m.patch_dim, true);
  if (m.position == PositionKind::Learned) params.replicate("position.weight", m.max_positions, c, true);
  if (m.token_types > 0) params.replicate("token_type.weight", m.token_types, c, true);
  if (m.relative_buckets > 0) {
    params.replicate("encoder.relative.weight", m.relative_buckets, m.heads, true);
    params.replicate("decoder.relative.weight", m.relative_buckets, m.heads, true);
  }
  if (patches(s)) {
    params.replicate("patch.bias", 1, c, false);
    params.replicate("class_token", 1, c, false);
  }
  if (m.embedding_norm) params.norm("embedding_norm");
}

}  // namespace

Block buildEmbeddingBlock(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  const std::int64_t c = m.d_model;
  Block block;
  Params params(s, block);
  declare(params, s);

  const std::int64_t tokens = s.tokens + s.decoder_tokens, rows = s.stream_rows();
  const std::int64_t row_begin = s.vocab_rows() * s.tp_index;
  const std::int64_t first = s.sequence_parallel ? s.rows * s.tp_index : 0;
  SavedLayout saved;
  const Operand raw = m.embedding_norm ? saved.add(rows * c, s.dtype) : Operand{Region::Out, 0};
  NormStats stats;
  if (m.embedding_norm) stats = {saved.add(rows, DType::F32), saved.add(rows, DType::F32)};
  block.saved_bytes = saved.bytes();

  Builder f(s, block.forward);
  const Operand input{Region::Tokens, 0};
  if (patches(s)) {
    f.op(OpKind::LinearForward, {rows, c, m.patch_dim},
         {raw, input, params.weight("patch.weight"), params.weight("patch.bias")});
    f.op(OpKind::Copy, {s.batch * c}, {raw, params.weight("class_token")});
  } else {
    const Operand full = s.sequence_parallel ? f.work(tokens * c) : raw;
    f.op(OpKind::EmbeddingForward, {tokens, c, row_begin, s.vocab_rows()},
         {full, input, params.weight("embedding.weight")});
    if (s.tp > 1) {
      const CommKind kind = s.sequence_parallel ? CommKind::ReduceScatter : CommKind::AllReduce;
      f.comm(kind, tokens * c, s.dtype, full, raw);
    }
  }
  const bool learned = m.position == PositionKind::Learned;
  if (learned)
    f.op(OpKind::PositionForward, {rows, c, m.seq_len, first}, {raw, params.weight("position.weight")});
  if (m.token_types > 0)
    f.op(OpKind::PositionForward, {rows, c, m.token_types, first}, {raw, params.weight("token_type.weight")});
  if (m.embedding_norm) normForward(f, s, params, "embedding_norm", {Region::Out, 0}, {}, stats, raw, {}, {});
  block.forward_work = f.highWater();

  // Nobody waits for these gradients: where backward is split, all of them belong to the second pass.
  for (const bool first_microbatch : {true, false}) {
    BackwardBuilder back(s, block, first_microbatch);
    Builder& b = back.weight();
    const std::int64_t acc = back.acc;
    Operand dx{Region::Stream, 0};
    if (m.embedding_norm) {
      dx = b.work(rows * c);
      normBackward(b, s, params, "embedding_norm", dx, {Region::Stream, 0}, raw, stats, {}, acc);
    }
    if (learned)
      b.op(OpKind::PositionBackward, {rows, c, m.seq_len, first, acc}, {params.grad("position.weight"), dx});
    if (m.token_types > 0)
      b.op(OpKind::PositionBackward, {rows, c, m.token_types, first, acc},
           {params.grad("token_type.weight"), dx});
    if (patches(s)) {
      b.op(OpKind::LinearBackwardWeight, {rows, c, m.patch_dim, acc},
           {params.grad("patch.weight"), params.grad("patch.bias"), dx, input});
      b.op(OpKind::BiasBackward, {s.batch, c, acc}, {params.grad("class_token"), dx});
    } else {
      b.op(OpKind::EmbeddingBackward, {tokens, c, row_begin, s.vocab_rows(), acc},
           {params.grad("embedding.weight"), input, b.gatherRows(dx, tokens, c)});
    }
    back.finish();
  }
  return block;
}

}  // namespace bmt
