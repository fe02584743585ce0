#include "core/op_graph.h"

#include <algorithm>

#include "core/schedule.h"

namespace bmt {

BlockShape makeBlockShape(const ModelSpec& model, const Plan& plan, std::int32_t tp_index) {
  BlockShape shape;
  shape.model = &model;
  shape.batch = plan.micro_batch;
  shape.tokens = plan.micro_batch * model.seq_len;
  shape.tp = plan.tp;
  shape.tp_index = tp_index;
  shape.sequence_parallel = plan.sequence_parallel;
  shape.split_backward = splitsBackward(plan);
  shape.rows = plan.sequence_parallel ? shape.tokens / plan.tp : shape.tokens;
  shape.dtype = plan.precision;
  shape.attention = plan.attention;
  shape.pointwise = plan.pointwise;
  shape.loss_rows = plan.loss_chunk > 0 ? std::min(plan.loss_chunk, shape.tokens) : shape.tokens;
  shape.loss_scale = 1.0 / static_cast<double>(plan.global_batch * model.seq_len);
  return shape;
}

}  // namespace bmt
