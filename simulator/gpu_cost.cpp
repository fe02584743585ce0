#include "simulator/gpu_cost.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace bmt::sim {
namespace {

using trace::GpuConstants;

struct Tile {
  double rows, cols, rate;  // rate: of the large tiles' (smaller ones load operands more often per FLOP)
};
constexpr std::array<Tile, 5> kTiles{
    {{256, 128, 1.0}, {128, 256, 1.0}, {128, 128, 0.92}, {128, 64, 0.8}, {64, 64, 0.6}}};
constexpr double kMinSplitLength = 512;  // of k per part
constexpr double kFlash1Share = 0.65;    // FlashAttention 1 over 2 (Dao 2023, abstract: 30-50 % and 50-73 %)
constexpr double kFlash2Share =
    0.57;                         // FlashAttention 2 over 3, since Hopper (Shah 2024, abstract: 1.5-2.0 x)
constexpr double kHeadRamp = 16;  // head size lost to a block's prologue

double rateOf(const GpuConstants& g, DType type) {
  switch (type) {
    case DType::BF16:
    case DType::F16:
      return g.matmul_16;
    case DType::F8:
    case DType::I8:
      return g.matmul_8 > 0 ? g.matmul_8 : g.matmul_16;
    default:
      return g.matmul_32;
  }
}

// Framework calls behind an op in an eager PyTorch program of the Megatron-LM kind: kernels, views, module
// and autograd nodes. Counted in Megatron-LM's transformer layer.
double callsOf(const Op& op, const KernelContext& c, bool scores) {
  switch (op.kind) {
    case OpKind::LinearForward:
    case OpKind::GroupedForward:
      return 4;
    case OpKind::LinearBackwardInput:
    case OpKind::LinearBackwardWeight:
    case OpKind::GroupedBackwardInput:
    case OpKind::GroupedBackwardWeight:
      return 2.5;
    case OpKind::AttentionForward:
      return scores ? 18 : 8;
    case OpKind::AttentionBackward:
      return scores ? 14 : 4;
    case OpKind::LayerNormForward:
    case OpKind::RmsNormForward:
      return 5 + (c.pointwise == Pointwise::Eager ? 6 : 0);  // with the residual before it
    case OpKind::LayerNormBackward:
    case OpKind::RmsNormBackward:
      return 4 + (c.pointwise == Pointwise::Eager ? 8 : 0);
    case OpKind::ResidualAdd:
      return 3;
    case OpKind::RopeForward:
    case OpKind::RopeBackward:
      return c.pointwise != Pointwise::Fused ? 12 : 4;
    case OpKind::ActivationForward:
    case OpKind::SwigluForward:
      return 3;
    case OpKind::ActivationBackward:
    case OpKind::SwigluBackward:
      return 2;
    case OpKind::CrossEntropyStats:
      return 16;
    case OpKind::CrossEntropyBackward:
      return 4;
    default:
      return 2;
  }
}

struct Work {
  double device_s = 0, kernels = 0;
  void add(double seconds, double launches) {
    device_s += seconds;
    kernels += launches;
  }
};

// Passes over a tensor and the kernels that make them.
struct Passes {
  double passes = 0, kernels = 1;
};

// Attention with the scores in memory: E = batch * heads * T * T scores of e bytes.
Work scoreAttention(const GpuConstants& g, const KernelContext& c, const Op& op, bool backward) {
  const auto d = [&op](std::size_t i) { return static_cast<double>(op.dim[i]); };
  const double t = d(1), head = d(4), batch = d(0) * d(2), e = static_cast<double>(sizeOf(op.dtype));
  const double keys = op.dim[6] > 0 ? d(6) : t;
  const double scores = batch * t * keys * e, rows = batch * (t + keys) / 2 * head * e;
  const auto product = [&](double m, double n, double k) {
    return gemmSeconds(g, m, n, k, batch, op.dtype, scores + 2 * rows);
  };
  const double to_scores = product(t, keys, head), from_scores = product(t, head, keys);
  // Megatron-LM's fused kernel takes batches of heads in fours (fused_softmax.py, is_kernel_available).
  const bool plain = c.attention == AttentionKernel::Unfused || op.dim[0] * op.dim[2] % 4 != 0;
  // Masked softmax in one kernel: read and write (backward: read two, write one). Plain ops: scale, mask,
  // cast to fp32, softmax, cast back.
  Work work;
  double passes = backward ? (plain ? 9 : 3) : (plain ? 12 : 2);
  double kernels = backward ? (plain ? 4 : 1) : (plain ? 5 : 1);
  if (c.dropout) {
    passes += 2.5;  // read, write, and a byte of mask
    kernels += 1;
  }
  work.add(passes * scores / g.memory_bandwidth, kernels);
  if (backward) {
    work.add(2 * to_scores + 2 * from_scores, 4);
  } else {
    work.add(to_scores + from_scores, 2);
  }
  // Heads are gathered to a contiguous tensor after (backward: before) the products.
  work.add((backward ? 4 : 2) * rows / g.memory_bandwidth, backward ? 3 : 2);
  return work;
}

Work flashAttention(const GpuConstants& g, const KernelContext& c, const Op& op, bool backward) {
  const auto d = [&op](std::size_t i) { return static_cast<double>(op.dim[i]); };
  double rate = backward ? g.flash_backward : g.flash_forward;
  const bool old = c.attention == AttentionKernel::Flash1 || c.attention == AttentionKernel::Flash2;
  // Made for Ampere's instructions; devices with 8-bit matrix units have faster ones.
  if (old && g.matmul_8 > 0) rate *= kFlash2Share;
  if (c.attention == AttentionKernel::Flash1) rate *= kFlash1Share;  // splits work less well
  const double head = d(4);
  rate *= std::min(1.0, head / (head + kHeadRamp) * (128 + kHeadRamp) / 128);
  // Blocks of 128 query rows over the SMs: the last wave is half empty on average.
  const double blocks = d(0) * d(2) * std::ceil(d(1) / 128);
  Work work;
  work.add(std::max(flops(op) / rate * (1 + 0.5 * g.sms / blocks), bytesMoved(op) / g.memory_bandwidth),
           backward ? 3 : 1);
  return work;
}

}  // namespace

double gemmSeconds(const GpuConstants& g, double m, double n, double k, double batch, DType type,
                   double bytes) {
  const double peak = rateOf(g, type), per_sm = peak / g.sms;
  double best = 0;
  for (const Tile& tile : kTiles) {
    const double tiles = std::ceil(m / tile.rows) * std::ceil(n / tile.cols) * batch;
    const double tile_flops = 2 * tile.rows * tile.cols;
    for (double split = 1; split <= 16; split *= 2) {
      if (split > 1 && (k / split < kMinSplitLength || tiles * split > 2 * g.sms)) break;
      const double waves = std::ceil(tiles * split / g.sms);
      double seconds = waves * tile_flops * (k / split + g.k_ramp) / (per_sm * tile.rate);
      if (split > 1) seconds += 2 * split * m * n * batch * 4 / g.memory_bandwidth;  // fp32 partial sums
      if (best == 0 || seconds < best) best = seconds;
    }
  }
  const double sustained = 2 * m * n * k * batch / (peak * g.sustained);
  return std::max({best, sustained, bytes / g.memory_bandwidth});
}

OpTime gpuOpTime(const GpuConstants& g, const KernelContext& c, const OpCall& call) {
  const Op& op = call.op;
  const auto d = [&op](std::size_t i) { return static_cast<double>(op.dim[i]); };
  const auto has = [&call](std::size_t operand) { return call.operands[operand].region != Region::None; };
  const double e = static_cast<double>(sizeOf(op.dtype));
  const bool eager = c.pointwise != Pointwise::Fused;
  const double mask = c.dropout ? 0.5 : 0;  // passes: one byte an element
  const bool scores = c.attention == AttentionKernel::Softmax || c.attention == AttentionKernel::Unfused;
  Work work;
  const auto stream = [&](double elements, Passes p) {
    work.add(elements * e * p.passes / g.memory_bandwidth, p.kernels);
  };
  // What follows a sub-layer: bias, dropout and residual in one kernel, or one after the other.
  const Passes residual =
      eager ? Passes{(c.dropout ? 2.5 : 0) + 3 + 1, c.dropout ? 3.0 : 2.0} : Passes{3 + mask, 1};
  switch (op.kind) {
    case OpKind::LinearForward:
      work.add(gemmSeconds(g, d(0), d(1), d(2), 1, op.dtype, bytesMoved(op)), 1);
      break;
    case OpKind::LinearBackwardInput:
      work.add(gemmSeconds(g, d(0), d(2), d(1), 1, op.dtype, bytesMoved(op)), 1);
      break;
    case OpKind::LinearBackwardWeight:
      work.add(gemmSeconds(g, d(1), d(2), d(0), 1, op.dtype, bytesMoved(op)), 1);
      if (has(1)) stream(d(0) * d(1), {1, 1});  // the bias gradient is a reduction of its own
      break;
    case OpKind::AttentionForward:
    case OpKind::AttentionBackward: {
      const bool backward = op.kind == OpKind::AttentionBackward;
      work = scores ? scoreAttention(g, c, op, backward) : flashAttention(g, c, op, backward);
      break;
    }
    case OpKind::LayerNormForward:
    case OpKind::RmsNormForward: {
      if (has(5) && op.kind == OpKind::LayerNormForward) stream(d(0) * d(1), residual);
      if (has(4) && op.kind == OpKind::RmsNormForward) stream(d(0) * d(1), residual);
      // Plain RMSNorm: cast, square, mean, scale, cast, weight, each in fp32 through memory.
      const bool plain = c.pointwise == Pointwise::Eager && op.kind == OpKind::RmsNormForward;
      stream(d(0) * d(1), plain ? Passes{18, 6} : Passes{2, 1});
      break;
    }
    case OpKind::LayerNormBackward:
    case OpKind::RmsNormBackward: {
      const bool plain = c.pointwise == Pointwise::Eager && op.kind == OpKind::RmsNormBackward;
      // dx, then the reductions of dw (and db), which read both inputs again.
      stream(d(0) * d(1), plain ? Passes{30, 10} : Passes{5, 2});
      if (has(op.kind == OpKind::LayerNormBackward ? 8 : 7))
        stream(d(0) * d(1), {3, 1});  // joins the residual's
      if (c.dropout) stream(d(0) * d(1), {2.5, 1});
      break;
    }
    case OpKind::ResidualAdd:
      stream(d(0) * d(1), residual);
      break;
    case OpKind::ActivationForward:
      stream(d(0), eager ? Passes{4, 2} : Passes{2, 1});
      break;
    case OpKind::ActivationBackward:
      stream(d(0), {3, 1});
      break;
    case OpKind::GroupedForward:
      work.add(gemmSeconds(g, d(0) / d(3), d(1), d(2), d(3), op.dtype, bytesMoved(op)), 1);
      break;
    case OpKind::GroupedBackwardInput:
      work.add(gemmSeconds(g, d(0) / d(3), d(2), d(1), d(3), op.dtype, bytesMoved(op)), 1);
      break;
    case OpKind::GroupedBackwardWeight:
      work.add(gemmSeconds(g, d(1), d(2), d(0) / d(3), d(3), op.dtype, bytesMoved(op)), 1);
      break;
    // Softmax, selection, counts and positions; in plain PyTorch each is a kernel of its own.
    case OpKind::RouterForward:
    case OpKind::RouterBackward:
      work.add(bytesMoved(op) / g.memory_bandwidth, eager ? 8 : 3);
      break;
    case OpKind::SwigluForward:
      stream(d(0) * d(1), eager ? Passes{5, 2} : Passes{3, 1});
      break;
    case OpKind::SwigluBackward:
      stream(d(0) * d(1), eager ? Passes{11, 4} : Passes{5, 1});
      break;
    case OpKind::RopeForward:
    case OpKind::RopeBackward:
      stream(d(0) * (d(2) + d(3)) * d(4), eager ? Passes{9, 8} : Passes{2, 1});
      break;
    // Logits go to fp32 first. Megatron-LM's vocabulary-parallel loss: maximum, difference, target,
    // exponential, sum, quotient, each through memory; others: one log-softmax kernel.
    case OpKind::CrossEntropyStats:
      stream(d(0) * d(1), c.attention == AttentionKernel::Softmax ? Passes{21, 8} : Passes{7, 3});
      break;
    case OpKind::CrossEntropyBackward:
      stream(d(0) * d(1), {7, 3});
      break;
    default:
      work.add(bytesMoved(op) / g.memory_bandwidth, 1);
      break;
  }
  return {work.device_s + work.kernels * g.launch_s, callsOf(op, c, scores)};
}

}  // namespace bmt::sim
