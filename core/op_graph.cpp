#include "core/op_graph.h"

#include <algorithm>

#include "core/schedule.h"

namespace bmt {

BlockShape makeBlockShape(const ModelSpec& model, const Plan& plan, std::int32_t tp_index,
                          std::int32_t ep_index) {
  BlockShape shape;
  shape.model = &model;
  shape.batch = plan.micro_batch;
  shape.cp = plan.cp;
  shape.context = plan.context;
  shape.ep = plan.ep;
  shape.ep_index = ep_index;
  shape.tp = plan.tp;
  shape.tp_index = tp_index;
  shape.sequence_parallel = plan.sequence_parallel;
  shape.split_backward = splitsBackward(plan);
  shape.tp_overlap = plan.tp_overlap;
  const std::int64_t cut = plan.sequence_parallel ? plan.tp : 1;
  shape.seq = model.seq_len / plan.cp;
  shape.tokens = plan.micro_batch * shape.seq;
  shape.rows = shape.tokens / cut;
  shape.decoder_seq = model.decoder_seq_len;
  shape.decoder_tokens = plan.micro_batch * shape.decoder_seq;
  shape.decoder_rows = shape.decoder_tokens / cut;
  shape.dtype = storageType(plan);
  shape.grads = plan.grads;
  shape.fp8 = plan.precision == DType::F8;
  shape.attention = plan.attention;
  shape.pointwise = plan.pointwise;
  shape.gather_logits = plan.gather_logits && plan.tp > 1;
  const std::int64_t loss_rows = targetElements(shape);
  shape.loss_rows = plan.loss_chunk > 0 ? std::min(plan.loss_chunk, loss_rows) : loss_rows;
  shape.loss_scale = 1.0 / static_cast<double>(plan.global_batch * lossRowsPerSequence(model));
  return shape;
}

Bytes inputBytes(const BlockShape& s) {
  if (s.model->family == Family::Vit)
    return s.batch * (s.model->seq_len - 1) * s.model->patch_dim * sizeOf(s.dtype);
  return (s.tokens + s.decoder_tokens) * sizeOf(DType::I32);
}

std::int64_t targetElements(const BlockShape& s) {
  if (s.model->family == Family::Vit) return s.batch;
  return s.model->family == Family::T5 ? s.decoder_tokens : s.tokens;
}

}  // namespace bmt
