#include "core/op.h"

#include "core/error.h"

namespace bmt {

std::string_view toString(OpKind kind) {
  switch (kind) {
    case OpKind::Zero:
      return "zero";
    case OpKind::Add:
      return "add";
    case OpKind::EmbeddingForward:
      return "embedding_forward";
    case OpKind::EmbeddingBackward:
      return "embedding_backward";
    case OpKind::PositionForward:
      return "position_forward";
    case OpKind::PositionBackward:
      return "position_backward";
    case OpKind::LinearForward:
      return "linear_forward";
    case OpKind::LinearBackwardInput:
      return "linear_backward_input";
    case OpKind::LinearBackwardWeight:
      return "linear_backward_weight";
    case OpKind::BiasBackward:
      return "bias_backward";
    case OpKind::LayerNormForward:
      return "layernorm_forward";
    case OpKind::LayerNormBackward:
      return "layernorm_backward";
    case OpKind::RmsNormForward:
      return "rmsnorm_forward";
    case OpKind::RmsNormBackward:
      return "rmsnorm_backward";
    case OpKind::ResidualAdd:
      return "residual_add";
    case OpKind::RopeForward:
      return "rope_forward";
    case OpKind::RopeBackward:
      return "rope_backward";
    case OpKind::AttentionForward:
      return "attention_forward";
    case OpKind::AttentionBackward:
      return "attention_backward";
    case OpKind::ActivationForward:
      return "activation_forward";
    case OpKind::ActivationBackward:
      return "activation_backward";
    case OpKind::SwigluForward:
      return "swiglu_forward";
    case OpKind::SwigluBackward:
      return "swiglu_backward";
    case OpKind::CrossEntropyStats:
      return "cross_entropy_stats";
    case OpKind::CrossEntropyBackward:
      return "cross_entropy_backward";
    case OpKind::SumOfSquares:
      return "sum_of_squares";
    case OpKind::StepScalars:
      return "step_scalars";
    case OpKind::AdamW:
      return "adamw";
    case OpKind::Copy:
      return "copy";
    case OpKind::AttentionMerge:
      return "attention_merge";
    case OpKind::RouterForward:
      return "router_forward";
    case OpKind::RouterBackward:
      return "router_backward";
    case OpKind::DispatchForward:
      return "dispatch_forward";
    case OpKind::DispatchBackward:
      return "dispatch_backward";
    case OpKind::CombineForward:
      return "combine_forward";
    case OpKind::CombineBackward:
      return "combine_backward";
    case OpKind::GroupedForward:
      return "grouped_forward";
    case OpKind::GroupedBackwardInput:
      return "grouped_backward_input";
    case OpKind::GroupedBackwardWeight:
      return "grouped_backward_weight";
  }
  return "unknown";
}

bool isMatrixProduct(OpKind kind) {
  return kind == OpKind::LinearForward || kind == OpKind::LinearBackwardInput ||
         kind == OpKind::LinearBackwardWeight || kind == OpKind::GroupedForward ||
         kind == OpKind::GroupedBackwardInput || kind == OpKind::GroupedBackwardWeight;
}

namespace {

double keys(const Op& op) {
  return static_cast<double>(op.dim[6] > 0 ? op.dim[6] : op.dim[1]);
}
double valueSize(const Op& op) {
  return static_cast<double>(op.dim[7] > 0 ? op.dim[7] : op.dim[4]);
}

}  // namespace

double attentionPairs(const Op& op) {
  const double all = static_cast<double>(op.dim[0] * op.dim[2]) * static_cast<double>(op.dim[1]) * keys(op);
  return op.dim[8] != 0 ? all : all / 2;
}

double flops(const Op& op) {
  const auto d = [&op](int i) { return static_cast<double>(op.dim[static_cast<std::size_t>(i)]); };
  switch (op.kind) {
    case OpKind::Zero:
    case OpKind::EmbeddingForward:
      return 0;
    case OpKind::Add:
      return d(0);
    case OpKind::EmbeddingBackward:
    case OpKind::PositionForward:
    case OpKind::PositionBackward:
    case OpKind::BiasBackward:
      return d(0) * d(1);
    case OpKind::LinearForward:
    case OpKind::LinearBackwardInput:
    case OpKind::LinearBackwardWeight:
      return 2 * d(0) * d(1) * d(2);
    case OpKind::LayerNormForward:
      return 8 * d(0) * d(1);
    case OpKind::LayerNormBackward:
      return 14 * d(0) * d(1);
    case OpKind::RmsNormForward:
      return 5 * d(0) * d(1);
    case OpKind::RmsNormBackward:
      return 10 * d(0) * d(1);
    case OpKind::ResidualAdd:
      return 2 * d(0) * d(1);
    case OpKind::RopeForward:
    case OpKind::RopeBackward:
      return 3 * d(0) * (d(2) + d(3)) * d(4);
    case OpKind::AttentionForward:
      return attentionPairs(op) * 2 * (d(4) + valueSize(op));
    case OpKind::AttentionBackward:
      return attentionPairs(op) * 2 * (3 * d(4) + 2 * valueSize(op));
    case OpKind::ActivationForward:
      return 10 * d(0);
    case OpKind::ActivationBackward:
      return 18 * d(0);
    case OpKind::SwigluForward:
      return 6 * d(0) * d(1);
    case OpKind::SwigluBackward:
      return 12 * d(0) * d(1);
    case OpKind::CrossEntropyStats:
      return 4 * d(0) * d(1);
    case OpKind::CrossEntropyBackward:
      return 4 * d(0) * d(1);
    case OpKind::SumOfSquares:
      return 2 * d(0);
    case OpKind::StepScalars:
      return d(0);
    case OpKind::AdamW:
      return 14 * d(0);
    case OpKind::Copy:
    case OpKind::DispatchForward:
      return 0;
    case OpKind::AttentionMerge:
      return 3 * d(0) * d(1);
    case OpKind::RouterForward:  // softmax, K rounds of maximum
      return d(0) * d(1) * (4 + d(2));
    case OpKind::RouterBackward:
      return 4 * d(0) * d(1);
    case OpKind::DispatchBackward:
      return d(3) * d(1);
    case OpKind::CombineForward:
      return 2 * d(3) * d(1);
    case OpKind::CombineBackward:
      return 3 * d(3) * d(1);
    case OpKind::GroupedForward:
    case OpKind::GroupedBackwardInput:
    case OpKind::GroupedBackwardWeight:
      return 2 * d(0) * d(1) * d(2);
  }
  return 0;
}

double bytesMoved(const Op& op) {
  const auto d = [&op](int i) { return static_cast<double>(op.dim[static_cast<std::size_t>(i)]); };
  const double e = static_cast<double>(sizeOf(op.dtype));  // activations and weights
  const double f = 4;                                      // gradients of parameters, statistics, moments
  switch (op.kind) {
    case OpKind::Zero:
      return d(0) * e;
    case OpKind::Add:
      return 3 * d(0) * e;
    case OpKind::EmbeddingForward:
      return d(0) * (2 * d(1) * e + 4);
    case OpKind::EmbeddingBackward:  // touched rows read and written; overwriting clears the table first
      return d(0) * (d(1) * (e + 2 * f) + 4) + (op.dim[4] != 0 ? 0 : d(3) * d(1) * f);
    case OpKind::PositionForward:
      return 3 * d(0) * d(1) * e;
    case OpKind::PositionBackward:
      return d(0) * d(1) * (e + 2 * f);
    case OpKind::LinearForward:
    case OpKind::LinearBackwardInput:
      return e * (d(0) * d(1) + d(0) * d(2) + d(1) * d(2));
    case OpKind::LinearBackwardWeight:
      return e * (d(0) * d(1) + d(0) * d(2)) + f * d(1) * d(2) * (op.dim[3] != 0 ? 2 : 1);
    case OpKind::BiasBackward:
      return e * d(0) * d(1) + 2 * f * d(1);
    case OpKind::LayerNormForward:
      return e * (4 * d(0) * d(1) + 2 * d(1)) + 2 * f * d(0);
    case OpKind::LayerNormBackward:
      return e * 4 * d(0) * d(1) + 4 * f * d(1) + 2 * f * d(0);
    case OpKind::RmsNormForward:
      return e * (4 * d(0) * d(1) + d(1)) + f * d(0);
    case OpKind::RmsNormBackward:
      return e * 4 * d(0) * d(1) + 2 * f * d(1) + f * d(0);
    case OpKind::ResidualAdd:
      return e * 3 * d(0) * d(1);
    case OpKind::RopeForward:
    case OpKind::RopeBackward:
      return e * 2 * d(0) * (d(2) + d(3)) * d(4);
    // Queries and output on T rows, keys and values on S.
    case OpKind::AttentionForward:
      return e * d(0) * (d(1) * d(2) + keys(op) * d(3)) * (d(4) + valueSize(op)) + f * d(0) * d(1) * d(2);
    case OpKind::AttentionBackward:
      return 2 * e * d(0) * (d(1) * d(2) + keys(op) * d(3)) * (d(4) + valueSize(op)) + f * d(0) * d(1) * d(2);
    case OpKind::ActivationForward:
      return e * 2 * d(0);
    case OpKind::ActivationBackward:
      return e * 3 * d(0);
    case OpKind::SwigluForward:
      return e * 3 * d(0) * d(1);
    case OpKind::SwigluBackward:
      return e * 5 * d(0) * d(1);
    case OpKind::CrossEntropyStats:
      return e * d(0) * d(1) + 3 * f * d(0);
    case OpKind::CrossEntropyBackward:
      return e * 2 * d(0) * d(1) + 3 * f * d(0) * d(4);
    case OpKind::SumOfSquares:
      return f * d(0);
    case OpKind::StepScalars:
      return 8 * d(0);
    case OpKind::AdamW:  // p, m, v read and written, g read; 16-bit training also writes the working copy
      // (fp8: 8-bit weights and their transposes)
      return d(0) * (7 * f + (op.dtype == DType::F32 || op.dtype == DType::TF32 ? 0
                              : op.dtype == DType::F8                           ? 2
                                                                                : e));
    case OpKind::Copy:
      return 2 * e * d(0);
    case OpKind::AttentionMerge:
      return 3 * e * d(0) * d(1);
    case OpKind::RouterForward:
      return e * d(0) * d(1) + 2 * f * d(0) * d(2);
    case OpKind::RouterBackward:
      return e * d(0) * d(1) + 3 * f * d(0) * d(2);
    case OpKind::DispatchForward:
      return 2 * e * d(3) * d(1) + f * d(0) * d(2);
    case OpKind::DispatchBackward:
      return e * (d(3) + (op.dim[4] != 0 ? 2 : 1) * d(0)) * d(1) + f * d(0) * d(2);
    case OpKind::CombineForward:
      return e * (d(3) + d(0)) * d(1) + 2 * f * d(0) * d(2);
    case OpKind::CombineBackward:
      return e * (2 * d(3) + d(0)) * d(1) + 3 * f * d(0) * d(2);
    case OpKind::GroupedForward:
    case OpKind::GroupedBackwardInput:
      return e * (d(0) * d(1) + d(0) * d(2) + d(3) * d(1) * d(2));
    case OpKind::GroupedBackwardWeight:
      return e * (d(0) * d(1) + d(0) * d(2)) + f * d(3) * d(1) * d(2) * (op.dim[4] != 0 ? 2 : 1);
  }
  return 0;
}

}  // namespace bmt
