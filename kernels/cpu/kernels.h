// CPU kernels, fp32: free functions on raw row-major pointers, one thread per call (ranks are threads;
// parallelism is above). Every function here forwards to the copy that was compiled for the best instruction
// set of this CPU (x86-64-v2, v3 or v4); matrix products are Eigen's. Results are bit-identical for equal
// inputs and shapes on one instruction set.
//
// N = tokens (rows), C = model width, O/I = outputs/inputs, T = sequence length, V = local vocabulary rows.
// `accumulate`: false = a parameter gradient is overwritten, true = added to. Pointers marked ? may be null.
#pragma once

#include <cstdint>

namespace bmt::kernels::cpu {

using Int = std::int64_t;

// All kernels of one instruction set.
struct Table {
  const char* name;  // "x86-64-v3"

  // out [N,O] = x [N,I] * w [O,I]^T + bias? [O]
  void (*linearForward)(float* out, const float* x, const float* w, const float* bias, Int n, Int o, Int i);
  // dx [N,I] = dout [N,O] * w [O,I]
  void (*linearBackwardInput)(float* dx, const float* dout, const float* w, Int n, Int o, Int i);
  // dw [O,I] (+)= dout [N,O]^T * x [N,I];  dbias? [O] (+)= column sums of dout
  void (*linearBackwardWeight)(float* dw, float* dbias, const float* dout, const float* x, Int n, Int o,
                               Int i, bool accumulate);
  // dbias [C] (+)= column sums of dout [N,C]
  void (*biasBackward)(float* dbias, const float* dout, Int n, Int c, bool accumulate);

  // out [N,C] = table [rows,C] at tokens [N] - row_begin; zeros where the token lies outside [row_begin,
  // row_begin + rows)
  void (*embeddingForward)(float* out, const std::int32_t* tokens, const float* table, Int n, Int c,
                           Int row_begin, Int rows);
  void (*embeddingBackward)(float* dtable, const std::int32_t* tokens, const float* dout, Int n, Int c,
                            Int row_begin, Int rows, bool accumulate);
  // x [N,C] += table [T,C] row (first + n) % T
  void (*positionForward)(float* x, const float* table, Int n, Int c, Int t, Int first);
  void (*positionBackward)(float* dtable, const float* dout, Int n, Int c, Int t, Int first, bool accumulate);

  // y = x + delta? + bias? (stored if y is given; y may alias x);  out = (y - mean) * rstd * w + b;  mean,
  // rstd [N]
  void (*layerNormForward)(float* out, float* y, float* mean, float* rstd, const float* x, const float* delta,
                           const float* bias, const float* w, const float* b, Int n, Int c, float eps);
  // dx [N,C] = dres? + gradient through the norm (dx may alias dres);  dw, db [C] (+)=
  void (*layerNormBackward)(float* dx, float* dw, float* db, const float* dout, const float* y,
                            const float* w, const float* mean, const float* rstd, const float* dres, Int n,
                            Int c, bool accumulate);
  // out = y * rstd * w, rstd = 1 / sqrt(mean(y^2) + eps)
  void (*rmsNormForward)(float* out, float* y, float* rstd, const float* x, const float* delta,
                         const float* bias, const float* w, Int n, Int c, float eps);
  void (*rmsNormBackward)(float* dx, float* dw, const float* dout, const float* y, const float* w,
                          const float* rstd, const float* dres, Int n, Int c, bool accumulate);
  // out [N,C] = x + delta + bias? [C]; out may alias x or delta
  void (*residualAdd)(float* out, const float* x, const float* delta, const float* bias, Int n, Int c);

  // Rotary positions in place on the q and k heads of qkv [N, (Hq+2Hkv)*D]: pairs (i, i + D/2), position =
  // row % T.
  void (*ropeForward)(float* qkv, Int n, Int t, Int hq, Int hkv, Int d, float theta);
  void (*ropeBackward)(float* dqkv, Int n, Int t, Int hq, Int hkv, Int d, float theta);

  // Causal attention, scale 1/sqrt(D); query head h uses key/value head h / (Hq/Hkv). Works on blocks of 64
  // queries against the keys they see: scratch is 2 * 64 * T floats per thread, no (T,T) matrix.  lse
  // [B,Hq,T] = log-sum-exp, for backward.
  void (*attentionForward)(float* out, float* lse, const float* qkv, Int b, Int t, Int hq, Int hkv, Int d);
  void (*attentionBackward)(float* dqkv, const float* dout, const float* qkv, const float* out,
                            const float* lse, Int b, Int t, Int hq, Int hkv, Int d);

  // GELU, tanh approximation (Hendrycks and Gimpel 2016). dx may alias dout.
  void (*geluForward)(float* out, const float* x, Int n);
  void (*geluBackward)(float* dx, const float* dout, const float* x, Int n);
  void (*reluForward)(float* out, const float* x, Int n);
  void (*reluBackward)(float* dx, const float* dout, const float* x, Int n);
  // out [N,F] = silu(gate) * up, gate_up [N,2F] = rows [gate | up]
  void (*swigluForward)(float* out, const float* gate_up, Int n, Int f);
  void (*swigluBackward)(float* dgate_up, const float* dout, const float* gate_up, Int n, Int f);

  // Vocabulary-parallel cross-entropy. stats [N,3] = (max, sum exp(l - max), target logit or 0) over the
  // first `valid` columns of this shard, whose first column is vocabulary entry v_begin.
  void (*crossEntropyStats)(float* stats, const float* logits, const std::int32_t* targets, Int n, Int v,
                            Int v_begin, Int valid);
  // logits -> (softmax - onehot) * scale in place, given the stats [R,N,3] of all R shards; columns from
  // `valid` on become 0. *loss_sum? += sum of the rows' losses. A negative target masks its row.
  void (*crossEntropyBackward)(float* logits, const float* stats, const std::int32_t* targets,
                               double* loss_sum, Int n, Int v, Int v_begin, Int valid, Int r, float scale);

  double (*sumOfSquares)(const float* x, Int n);
  // Decoupled weight decay (Loshchilov and Hutter 2019); g is multiplied by grad_scale first.
  void (*adamW)(float* p, float* m, float* v, const float* g, Int n, float lr, float beta1, float beta2,
                float eps, float weight_decay, float correction1, float correction2, float grad_scale);
  void (*add)(float* out, const float* a, const float* b, Int n);  // out may alias a or b

  // Multiply-adds in registers, for the peak rate: returns the floating-point operations done; *sink keeps
  // the result.
  double (*fmaPeak)(Int rounds, float* sink);
};

// The table in use: the best the CPU supports, or the one that environment variable BMT_ISA (v2, v3, v4) asks
// for. Aborts with a clear line when BMT_ISA names one that this CPU or build lacks.
const Table& kernels();
// Tables that run on this CPU, weakest first.
struct Tables {
  const Table* table[3];
  int count;
};
Tables availableTables();

}  // namespace bmt::kernels::cpu
