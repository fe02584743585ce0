// Router and experts (Shazeer et al. 2017; Lepikhin et al. 2021 for the capacity) instead of the MLP.
//   Each token goes to K of E experts. Every rank sends each expert at most `slots` = capacity_factor N K / E
//   rows (static programs: always exactly that many), R = E slots rows in all. The ranks of an Expert group
//   hold E / ep experts each: an all-to-all of R rows takes the rows there, one back. Bytes sent per
//   direction: 2 N C K (ep - 1) / ep in 16 bit at capacity factor 1. Experts are sharded over tp like an MLP.
//   With sequence parallelism each tensor rank dispatches its own rows and the experts' rows are gathered and
//   reduced over tp; without it every tensor rank dispatches all rows.
#include "core/block_builder.h"

namespace bmt {
namespace {

struct Sizes {
  std::int64_t rows, c, experts, k, sent, at_experts, groups, ff, pre_cols;
  std::int64_t tokens_gathered;  // at_experts / sent: tp with sequence parallelism
};

Sizes sizesOf(const BlockShape& s) {
  const ModelSpec& m = *s.model;
  Sizes n;
  n.rows = s.rows;
  n.c = m.d_model;
  n.experts = m.experts;
  n.k = m.top_k;
  const double slots =
      m.capacity_factor * static_cast<double>(s.rows * m.top_k) / static_cast<double>(m.experts);
  n.sent = m.experts * std::max<std::int64_t>(1, static_cast<std::int64_t>(slots + 0.999999));
  n.tokens_gathered = s.sequence_parallel ? s.tp : 1;
  n.at_experts = n.sent * n.tokens_gathered;
  n.groups = m.experts / s.ep;
  n.ff = m.moe_d_ff / s.tp;
  n.pre_cols = m.gated_mlp ? 2 * n.ff : n.ff;
  return n;
}

std::string expertName(std::int64_t expert, const char* matrix) {
  return "mlp.experts." + std::to_string(expert) + matrix;
}
std::string firstUp(const BlockShape& s) {
  return expertName(s.ep_index * (s.model->experts / s.ep),
                    s.model->gated_mlp ? ".gate.weight" : ".up.weight");
}
std::string firstDown(const BlockShape& s) {
  return expertName(s.ep_index * (s.model->experts / s.ep), ".down.weight");
}

// Rows to the ranks that hold the experts (or back), and over tp with sequence parallelism.
void exchange(Builder& b, const BlockShape& s, const Sizes& n, Operand from, Operand to) {
  b.comm(CommKind::AllToAll, n.sent * n.c, s.dtype, from, to, GroupKind::Expert);
}

// Rows arrive ordered by the rank they come from, then by expert; each expert needs its rows together.
void sortRows(Builder& b, const BlockShape& s, const Sizes& n, Operand slots) {
  if (n.groups > 1 && !(s.ep == 1 && !s.sequence_parallel))
    b.op(OpKind::Copy, {n.at_experts * n.c}, {slots, slots});
}

// [R, C] of this rank's rows -> `slots` at the experts.
void toExperts(Builder& b, const BlockShape& s, const Sizes& n, Operand rows, Operand slots) {
  const Operand here = s.sequence_parallel && s.ep > 1 ? b.work(n.sent * n.c) : slots;
  if (s.ep > 1) exchange(b, s, n, rows, here);
  if (s.sequence_parallel)
    b.comm(CommKind::AllGather, n.at_experts * n.c, s.dtype, s.ep > 1 ? here : rows, slots);
  sortRows(b, s, n, slots);
}

// What the experts give, partial sums over tp -> `rows` of this rank; still partial without sequence
// parallelism.
void fromExperts(Builder& b, const BlockShape& s, const Sizes& n, Operand slots, Operand rows) {
  const Operand here = s.sequence_parallel && s.ep > 1 ? b.work(n.sent * n.c) : rows;
  sortRows(b, s, n, slots);
  if (s.sequence_parallel) b.comm(CommKind::ReduceScatter, n.at_experts * n.c, s.dtype, slots, here);
  if (s.ep > 1) exchange(b, s, n, s.sequence_parallel ? here : slots, rows);
}

// Nothing is moved: the experts read and write the rows where dispatch and combine do.
bool local(const BlockShape& s) {
  return s.ep == 1 && !s.sequence_parallel;
}

void activate(Builder& b, const ModelSpec& m, const Sizes& n, bool forward, Operand out, Operand dout,
              Operand pre) {
  if (m.gated_mlp) {
    const std::int64_t gelu = m.activation == ActivationKind::Gelu ? 1 : 0;
    if (forward) {
      b.op(OpKind::SwigluForward, {n.at_experts, n.ff, gelu}, {out, pre});
    } else {
      b.op(OpKind::SwigluBackward, {n.at_experts, n.ff, gelu}, {out, dout, pre});
    }
    return;
  }
  const auto kind = static_cast<std::int64_t>(m.activation);
  if (forward) {
    b.op(OpKind::ActivationForward, {n.at_experts * n.ff, kind}, {out, pre});
  } else {
    b.op(OpKind::ActivationBackward, {n.at_experts * n.ff, kind}, {out, dout, pre});
  }
}

}  // namespace

void declareExperts(Params& params, const BlockShape& s, ParamGroup group) {
  const ModelSpec& m = *s.model;
  if (m.shared_experts > 0) declareMlp(params, s, "mlp.shared", m.shared_experts * m.moe_d_ff, group);
  if (group == ParamGroup::ReplicatedMatrices)
    params.replicate("mlp.router.weight", m.experts, m.d_model, true);
  if (group == ParamGroup::Replicated && m.router_bias)
    params.replicate("mlp.router.bias", 1, m.experts, false);
  if (group != ParamGroup::Matrices) return;
  const std::int64_t local = m.experts / s.ep, first = s.ep_index * local;
  for (std::int64_t e = first; e < first + local; ++e) {
    if (m.gated_mlp) params.expertRows(expertName(e, ".gate.weight"), m.moe_d_ff, m.d_model);
    params.expertRows(expertName(e, ".up.weight"), m.moe_d_ff, m.d_model);
  }
  for (std::int64_t e = first; e < first + local; ++e)
    params.expertCols(expertName(e, ".down.weight"), m.d_model, m.moe_d_ff);
}

void layoutExperts(Half& half, Half& shared, SavedLayout& saved, const BlockShape& s) {
  const Sizes n = sizesOf(s);
  half.probs = saved.add(n.rows * n.k, DType::F32);
  half.choice = saved.add(n.rows * n.k, DType::I32);
  half.slots = saved.add(n.at_experts * n.c, s.dtype);
  half.projected = saved.add(n.at_experts * n.pre_cols, s.dtype);
  half.result = saved.add(n.at_experts * n.ff, s.dtype);
  half.outputs = saved.add(n.sent * n.c, s.dtype);
  if (shared.inner > 0) layoutMlp(shared, saved, s);
}

Operand expertsForward(Builder& f, const BlockShape& s, const Params& params, const Half& half,
                       const Half& shared) {
  const ModelSpec& m = *s.model;
  const Sizes n = sizesOf(s);
  const Operand total = f.work(n.rows * n.c);
  const Operand logits = f.work(n.rows * n.experts);
  f.op(OpKind::LinearForward, {n.rows, n.experts, n.c},
       {logits, half.norm, params.weight("mlp.router.weight"), {}});
  f.op(OpKind::RouterForward, {n.rows, n.experts, n.k}, {half.probs, half.choice, logits});
  const Operand sent = local(s) ? half.slots : f.work(n.sent * n.c);
  f.op(OpKind::DispatchForward, {n.rows, n.c, n.k, n.sent}, {sent, half.norm, half.choice});
  toExperts(f, s, n, sent, half.slots);
  f.op(OpKind::GroupedForward, {n.at_experts, n.pre_cols, n.c, n.groups},
       {half.projected, half.slots, params.weight(firstUp(s))});
  activate(f, m, n, true, half.result, {}, half.projected);
  const Operand out = local(s) ? half.outputs : f.work(n.at_experts * n.c);
  f.op(OpKind::GroupedForward, {n.at_experts, n.c, n.ff, n.groups},
       {out, half.result, params.weight(firstDown(s))});
  fromExperts(f, s, n, out, half.outputs);
  f.op(OpKind::CombineForward, {n.rows, n.c, n.k, n.sent}, {total, half.outputs, half.probs, half.choice});
  if (!s.sequence_parallel) f.reduceRows(total, n.rows, n.c);  // in place
  if (shared.inner > 0) addRows(f, n.rows * n.c, total, mlpForward(f, s, params, shared));
  return total;
}

Operand expertsBackward(BackwardBuilder& back, const BlockShape& s, const Params& params, const Half& half,
                        const Half& shared, Operand dout) {
  Builder &b = back.input, &w = back.weight();
  const std::int64_t acc = back.acc;
  const ModelSpec& m = *s.model;
  const Sizes n = sizesOf(s);
  const Operand dnorm = b.work(n.rows * n.c);
  const Operand dprobs = b.work(n.rows * n.k, DType::F32),
                dslots = local(s) ? back.kept(n.sent * n.c) : b.work(n.sent * n.c);
  b.op(OpKind::CombineBackward, {n.rows, n.c, n.k, n.sent},
       {dslots, dprobs, dout, half.outputs, half.probs, half.choice});
  if (!s.sequence_parallel && s.tp > 1) b.comm(CommKind::AllReduce, n.rows * n.k, DType::F32, dprobs, dprobs);
  const Operand there = local(s) ? dslots : back.kept(n.at_experts * n.c);
  toExperts(b, s, n, dslots, there);
  const Operand dact = m.gated_mlp ? b.work(n.at_experts * n.ff) : back.kept(n.at_experts * n.ff);
  b.op(OpKind::GroupedBackwardInput, {n.at_experts, n.c, n.ff, n.groups},
       {dact, there, params.weight(firstDown(s))});
  w.op(OpKind::GroupedBackwardWeight, {n.at_experts, n.c, n.ff, n.groups, acc},
       {params.grad(firstDown(s)), there, half.result});
  const Operand dpre = m.gated_mlp ? back.kept(n.at_experts * n.pre_cols) : dact;
  activate(b, m, n, false, dpre, dact, half.projected);
  w.op(OpKind::GroupedBackwardWeight, {n.at_experts, n.pre_cols, n.c, n.groups, acc},
       {params.grad(firstUp(s)), dpre, half.slots});
  const Operand dx = b.work(n.at_experts * n.c), returned = local(s) ? dx : b.work(n.sent * n.c);
  b.op(OpKind::GroupedBackwardInput, {n.at_experts, n.pre_cols, n.c, n.groups},
       {dx, dpre, params.weight(firstUp(s))});
  fromExperts(b, s, n, dx, returned);
  b.op(OpKind::DispatchBackward, {n.rows, n.c, n.k, n.sent, 0}, {dnorm, returned, half.choice});
  if (!s.sequence_parallel) b.reduceRows(dnorm, n.rows, n.c);
  if (shared.inner > 0) addRows(b, n.rows * n.c, dnorm, mlpBackward(back, s, params, shared, dout));
  const Operand dlogits = back.kept(n.rows * n.experts), drouter = b.work(n.rows * n.c);
  b.op(OpKind::RouterBackward, {n.rows, n.experts, n.k}, {dlogits, dprobs, half.probs, half.choice});
  w.op(OpKind::LinearBackwardWeight, {n.rows, n.experts, n.c, acc},
       {params.grad("mlp.router.weight"), {}, dlogits, half.norm});
  b.op(OpKind::LinearBackwardInput, {n.rows, n.experts, n.c},
       {drouter, dlogits, params.weight("mlp.router.weight")});
  addRows(b, n.rows * n.c, dnorm, drouter);
  return dnorm;
}

}  // namespace bmt
