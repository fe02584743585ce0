// Op: one kernel call as data. The only place that gives dim[] a meaning and where FLOPs and bytes are
// counted. Operands are (region, offset) pairs; a task binds each region to a buffer, so one list of ops
// serves every layer and micro-batch of the same shape.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/units.h"

namespace bmt {

// N = tokens (rows), C = d_model, O/I = outputs/inputs of a linear layer, T = sequence length, V = local
// vocabulary rows. Columns: dim[] meaning | operands in order (outputs first). "?" = optional operand
// (Region::None when absent). `accumulate`: 0 = parameter gradients are overwritten, 1 = added to.
enum class OpKind : std::uint8_t {
  Zero,  // n                          | out [n]
  Add,   // n                          | out [n], a [n], b [n]                 out may alias a or b
  EmbeddingForward,      // N, C, row_begin, rows      | out [N,C], tokens i32 [N], table [rows,C]
  EmbeddingBackward,     // N, C, row_begin, rows, acc | dtable [rows,C], tokens i32 [N], dout [N,C]
  PositionForward,       // N, C, T, first             | x [N,C] += table[(first + n) % T], table [T,C]
  PositionBackward,      // N, C, T, first, acc        | dtable [T,C], dout [N,C]
  LinearForward,         // N, O, I                    | out [N,O], x [N,I], w [O,I], bias? [O]
  LinearBackwardInput,   // N, O, I                    | dx [N,I], dout [N,O], w [O,I]
  LinearBackwardWeight,  // N, O, I, acc               | dw [O,I], dbias? [O], dout [N,O], x [N,I]
  BiasBackward,          // N, C, acc                  | dbias [C], dout [N,C]
  LayerNormForward,   // N, C          eps          | out [N,C], y? [N,C], mean [N], rstd [N], x [N,C], delta?
                      // [N,C],
                      //                              bias? [C], w [C], b [C];   y = x + delta + bias, out =
                      //                              norm(y)
  LayerNormBackward,  // N, C, acc                  | dx [N,C], dw [C], db [C], dout [N,C], y [N,C], w [C],
                      // mean [N],
                      //                              rstd [N], dres? [N,C];     dx = dres + ..., dx may alias
                      //                              dres
  RmsNormForward,     // N, C          eps          | out, y?, rstd, x, delta?, bias?, w
  RmsNormBackward,    // N, C, acc                  | dx, dw, dout, y, w, rstd, dres?
  ResidualAdd,        // N, C                       | out [N,C], x [N,C], delta [N,C], bias? [C]
  RopeForward,        // N, T, Hq, Hkv, D   theta   | qkv [N,(Hq+2Hkv)D], in place on q and k
  RopeBackward,       // N, T, Hq, Hkv, D   theta   | dqkv, in place
  // B, T, Hq, Hkv, D, alibi, S, Dv, full: T queries see S keys (0: T), values have Dv (0: D); full = 0:
  // causal, half of the T x S pairs; 1: all of them.
  AttentionForward,   // as above                   | out [B*T,Hq*Dv], lse f32 [B,Hq,T], qkv [B*T,(Hq+2Hkv)D],
                      //                              kv? (keys and values that are not behind the queries)
  AttentionBackward,  // as above                   | dqkv, dout, qkv, out, lse, dkv?, kv?
  ActivationForward,  // n, kind (ActivationKind)   | out [n], x [n]
  ActivationBackward,    // n, kind                    | dx [n], dout [n], x [n]
  SwigluForward,         // N, F, gelu                 | out [N,F], gate_up [N,2F]; gelu = 1: GeGLU
  SwigluBackward,        // N, F, gelu                 | dgate_up [N,2F], dout [N,F], gate_up [N,2F]
  CrossEntropyStats,     // N, V, v_begin, valid       | stats f32 [N,3], logits [N,V], targets i32 [N]
  CrossEntropyBackward,  // N, V, v_begin, valid, R  scale | logits [N,V] -> dlogits in place, stats f32
                         // [R,N,3],
                         //                              targets i32 [N], loss_sum? f64 [1] (+=)
  SumOfSquares,          // n                          | slot f64 [1] (+=), x [n]
  StepScalars,           // slots                      | scalars f64: reads slots and hyper, writes results
                         // (task_graph.h)
  AdamW,                 // n, decay, slots             | p [n], m f32 [n], v f32 [n], g f32 [n], scalars
  // Simulated only. K = experts a token goes to, E = experts, R = rows in all of this rank's expert slots.
  Copy,              // n                          | out [n], x [n]
  AttentionMerge,    // N, C                       | out [N,C], part [N,C]: adds a ring step's part, rescaled
  RouterForward,     // N, E, K                    | probs f32 [N,K], choice i32 [N,K], logits [N,E]
  RouterBackward,    // N, E, K                    | dlogits [N,E], dprobs f32 [N,K], probs, choice
  DispatchForward,   // N, C, K, R                 | out [R,C], x [N,C], choice
  DispatchBackward,  // N, C, K, R, acc            | dx [N,C] (+)=, dout [R,C], choice
  CombineForward,    // N, C, K, R                 | out [N,C], slots [R,C], probs, choice
  CombineBackward,   // N, C, K, R                 | dslots [R,C], dprobs, dout [N,C], slots, probs, choice
  GroupedForward,    // R, O, I, G                 | out [R,O], x [R,I], w [G,O,I]: R/G rows for each
  GroupedBackwardInput,   // R, O, I, G                 | dx [R,I], dout [R,O], w [G,O,I]
  GroupedBackwardWeight,  // R, O, I, G, acc            | dw [G,O,I], dout [R,O], x [R,I]
};
inline constexpr int kNumOpKinds = static_cast<int>(OpKind::GroupedBackwardWeight) + 1;
std::string_view toString(OpKind kind);

struct Op {
  OpKind kind = OpKind::Zero;
  DType dtype = DType::F32;           // of the tensors that are not marked otherwise above
  std::array<std::int64_t, 9> dim{};  // see OpKind
  double scalar = 0;                  // eps, theta or scale
  bool operator==(const Op&) const = default;
};

// Floating-point operations; 2 per multiply-add. Matrix products: 2NOI. Attention: pairs of query and key
// (causal: half) times 2(D + Dv) forward and 2(3D + 2Dv) backward: scores again, dV, dP, dQ, dK. Elementwise
// work counts its arithmetic.
double flops(const Op& op);
// Bytes read plus written, each operand once (compulsory traffic).
double bytesMoved(const Op& op);
bool isMatrixProduct(OpKind kind);  // the Linear and Grouped ops
// Query-key pairs of an attention op, over all heads and sequences.
double attentionPairs(const Op& op);

// Where an operand lives. A task binds every region it uses to (buffer, offset).
enum class Region : std::uint8_t {
  None,
  In,          // the block's input activations [rows, C]
  Out,         // its output activations [rows, C]
  Saved,       // kept from forward to backward
  Work,        // scratch of one block execution
  Stream,      // gradient of the block's output, in activation dtype [rows, C]; without a split backward it
               // becomes that of its input in place
  InGrad,      // gradient of the block's input [rows, C], where backward is split
  Deferred,    // kept from the input-gradient pass to the weight-gradient pass
  Weight,      // the block's first parameter
  Grad,        // its gradient
  Expert,      // the block's first expert parameter
  ExpertGrad,  // its gradient
  Tied,        // token table used by the head when it is tied and on the same rank
  TiedGrad,    // the head's contribution to the table's gradient
  Tokens,      // i32 [micro_batch * T]
  Targets,     // i32 [micro_batch * T]
  Scalars,     // f64, task_graph.h
  Optimizer    // f32 moments
};
inline constexpr int kNumRegions = static_cast<int>(Region::Optimizer) + 1;

struct Operand {
  Region region = Region::None;
  Bytes offset = 0;
  bool operator==(const Operand&) const = default;
};

inline constexpr int kMaxOperands = 9;

struct OpCall {
  Op op;
  std::array<Operand, kMaxOperands> operands{};
};

}  // namespace bmt
