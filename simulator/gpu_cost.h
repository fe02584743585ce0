// What an op takes on a GPU, from its shape and a few constants of the device (trace::GpuConstants).
//
//   matrix product   waves of tiles over the SMs, each tile (k + ramp) long; never faster than the device's
//   sustained
//                    rate or than its operands can be streamed. Tile and split of k are the fastest of the
//                    few that libraries carry (cuBLAS heuristics do the same).
//   attention        fused: FLOPs over a measured rate; otherwise two (backward: four) batched products and
//   the
//                    passes over the scores in memory
//   everything else  bytes over the achieved bandwidth. The op list is leaner than what frameworks launch, so
//   each
//                    op is charged for the kernels that stand behind it there: bias-dropout-add and norm
//                    apart, fp32 cross entropy, and with `eager` every element-wise step with its own trip to
//                    memory
//   every kernel     a launch gap on the device, and the host's time: a stream of kernels shorter than the
//   host's
//                    time per kernel runs at the host's pace
#pragma once

#include "core/plan.h"
#include "core/task_graph.h"
#include "traces/cost_profile.h"

namespace bmt::sim {

struct KernelContext {
  AttentionKernel attention = AttentionKernel::Flash;
  Pointwise pointwise = Pointwise::Fused;
  bool dropout = false;
};

struct OpTime {
  double device_s = 0;  // launch gaps included
  double calls = 0;     // of the framework, on the host
};

OpTime gpuOpTime(const trace::GpuConstants& gpu, const KernelContext& context, const OpCall& call);

// out [m, n] = a [m, k] b [k, n], `batch` times; `bytes` = traffic of all operands. Without a launch gap.
double gemmSeconds(const trace::GpuConstants& gpu, double m, double n, double k, double batch, DType type,
                   double bytes);

}  // namespace bmt::sim
