// Maps every OpKind to its CPU kernel. The order of operands is that of core/op.h.
#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/model_spec.h"
#include "core/task_graph.h"
#include "executor/cpu/cpu_backend.h"
#include "kernels/cpu/kernels.h"

namespace bmt::exec {
namespace {

using kernels::cpu::kernels;

float* f(void* pointer) {
  return static_cast<float*>(pointer);
}
const std::int32_t* ints(void* pointer) {
  return static_cast<const std::int32_t*>(pointer);
}

// Loss, gradient norm and clip factor from the summed slots; layout in ScalarLayout.
void stepScalars(double* scalars, std::int64_t num_slots) {
  ScalarLayout layout;
  layout.num_slots = num_slots;
  double squares = 0;
  for (std::int64_t slot = 1; slot < num_slots; ++slot) squares += scalars[slot];
  const double norm = std::sqrt(squares);
  const double clip = scalars[layout.hyper(ScalarLayout::kClip)];
  scalars[layout.result(ScalarLayout::kLoss)] = scalars[0] * scalars[layout.hyper(ScalarLayout::kLossScale)];
  scalars[layout.result(ScalarLayout::kGradNorm)] = norm;
  scalars[layout.result(ScalarLayout::kGradScale)] = clip > 0 && norm > clip ? clip / norm : 1.0;
}

void adamW(const Op& op, const OperandPointers& p) {
  const auto* const scalars = static_cast<const double*>(p[4]);
  ScalarLayout layout;
  layout.num_slots = op.dim[2];
  const auto h = [&](ScalarLayout::Hyper which) { return static_cast<float>(scalars[layout.hyper(which)]); };
  kernels().adamW(f(p[0]), f(p[1]), f(p[2]), f(p[3]), op.dim[0], h(ScalarLayout::kLr),
                  h(ScalarLayout::kBeta1), h(ScalarLayout::kBeta2), h(ScalarLayout::kEps),
                  op.dim[1] != 0 ? h(ScalarLayout::kWeightDecay) : 0.0f, h(ScalarLayout::kCorrection1),
                  h(ScalarLayout::kCorrection2),
                  static_cast<float>(scalars[layout.result(ScalarLayout::kGradScale)]));
}

void refuseAlibi(const Op& op) {
  if (op.dim[5] != 0)
    throw Error(ErrorKind::BadInput, "ALiBi attention is simulated but not executed in this version");
}

}  // namespace

void runOp(const Op& op, const OperandPointers& p) {
  const auto& k = kernels();
  const auto& d = op.dim;
  const auto scalar = static_cast<float>(op.scalar);
  switch (op.kind) {
    case OpKind::Zero:
      std::memset(p[0], 0, static_cast<std::size_t>(d[0] * sizeOf(op.dtype)));
      return;
    case OpKind::Add:
      k.add(f(p[0]), f(p[1]), f(p[2]), d[0]);
      return;
    case OpKind::EmbeddingForward:
      k.embeddingForward(f(p[0]), ints(p[1]), f(p[2]), d[0], d[1], d[2], d[3]);
      return;
    case OpKind::EmbeddingBackward:
      k.embeddingBackward(f(p[0]), ints(p[1]), f(p[2]), d[0], d[1], d[2], d[3], d[4] != 0);
      return;
    case OpKind::PositionForward:
      k.positionForward(f(p[0]), f(p[1]), d[0], d[1], d[2], d[3]);
      return;
    case OpKind::PositionBackward:
      k.positionBackward(f(p[0]), f(p[1]), d[0], d[1], d[2], d[3], d[4] != 0);
      return;
    case OpKind::LinearForward:
      k.linearForward(f(p[0]), f(p[1]), f(p[2]), f(p[3]), d[0], d[1], d[2]);
      return;
    case OpKind::LinearBackwardInput:
      k.linearBackwardInput(f(p[0]), f(p[1]), f(p[2]), d[0], d[1], d[2]);
      return;
    case OpKind::LinearBackwardWeight:
      k.linearBackwardWeight(f(p[0]), f(p[1]), f(p[2]), f(p[3]), d[0], d[1], d[2], d[3] != 0);
      return;
    case OpKind::BiasBackward:
      k.biasBackward(f(p[0]), f(p[1]), d[0], d[1], d[2] != 0);
      return;
    case OpKind::LayerNormForward:
      k.layerNormForward(f(p[0]), f(p[1]), f(p[2]), f(p[3]), f(p[4]), f(p[5]), f(p[6]), f(p[7]), f(p[8]),
                         d[0], d[1], scalar);
      return;
    case OpKind::LayerNormBackward:
      k.layerNormBackward(f(p[0]), f(p[1]), f(p[2]), f(p[3]), f(p[4]), f(p[5]), f(p[6]), f(p[7]), f(p[8]),
                          d[0], d[1], d[2] != 0);
      return;
    case OpKind::RmsNormForward:
      k.rmsNormForward(f(p[0]), f(p[1]), f(p[2]), f(p[3]), f(p[4]), f(p[5]), f(p[6]), d[0], d[1], scalar);
      return;
    case OpKind::RmsNormBackward:
      k.rmsNormBackward(f(p[0]), f(p[1]), f(p[2]), f(p[3]), f(p[4]), f(p[5]), f(p[6]), d[0], d[1], d[2] != 0);
      return;
    case OpKind::ResidualAdd:
      k.residualAdd(f(p[0]), f(p[1]), f(p[2]), f(p[3]), d[0], d[1]);
      return;
    case OpKind::RopeForward:
      k.ropeForward(f(p[0]), d[0], d[1], d[2], d[3], d[4], scalar);
      return;
    case OpKind::RopeBackward:
      k.ropeBackward(f(p[0]), d[0], d[1], d[2], d[3], d[4], scalar);
      return;
    case OpKind::AttentionForward:
      refuseAlibi(op);
      k.attentionForward(f(p[0]), f(p[1]), f(p[2]), d[0], d[1], d[2], d[3], d[4]);
      return;
    case OpKind::AttentionBackward:
      refuseAlibi(op);
      k.attentionBackward(f(p[0]), f(p[1]), f(p[2]), f(p[3]), f(p[4]), d[0], d[1], d[2], d[3], d[4]);
      return;
    case OpKind::ActivationForward:
      (d[1] == static_cast<std::int64_t>(ActivationKind::Relu) ? k.reluForward : k.geluForward)(
          f(p[0]), f(p[1]), d[0]);
      return;
    case OpKind::ActivationBackward:
      (d[1] == static_cast<std::int64_t>(ActivationKind::Relu) ? k.reluBackward : k.geluBackward)(
          f(p[0]), f(p[1]), f(p[2]), d[0]);
      return;
    case OpKind::SwigluForward:
      k.swigluForward(f(p[0]), f(p[1]), d[0], d[1]);
      return;
    case OpKind::SwigluBackward:
      k.swigluBackward(f(p[0]), f(p[1]), f(p[2]), d[0], d[1]);
      return;
    case OpKind::CrossEntropyStats:
      k.crossEntropyStats(f(p[0]), f(p[1]), ints(p[2]), d[0], d[1], d[2], d[3]);
      return;
    case OpKind::CrossEntropyBackward:
      k.crossEntropyBackward(f(p[0]), f(p[1]), ints(p[2]), static_cast<double*>(p[3]), d[0], d[1], d[2], d[3],
                             d[4], scalar);
      return;
    case OpKind::SumOfSquares:
      *static_cast<double*>(p[0]) += k.sumOfSquares(f(p[1]), d[0]);
      return;
    case OpKind::StepScalars:
      stepScalars(static_cast<double*>(p[0]), d[0]);
      return;
    case OpKind::AdamW:
      adamW(op, p);
      return;
    case OpKind::Copy:
      std::memcpy(p[0], p[1], static_cast<std::size_t>(d[0] * sizeOf(op.dtype)));
      return;
    case OpKind::AttentionMerge:
    case OpKind::RouterForward:
    case OpKind::RouterBackward:
    case OpKind::DispatchForward:
    case OpKind::DispatchBackward:
    case OpKind::CombineForward:
    case OpKind::CombineBackward:
    case OpKind::GroupedForward:
    case OpKind::GroupedBackwardInput:
    case OpKind::GroupedBackwardWeight:
      BMT_CHECK(false, "refused by notExecutable");
  }
}

}  // namespace bmt::exec
