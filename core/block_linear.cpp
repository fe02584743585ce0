// Tensor-parallel matrix products with the communication that feeds or follows them (Shoeybi et al. 2019;
// sequence parallelism: Korthikanti et al. 2022). With tp-overlap:
//   - backward, without sequence parallelism: the all-reduce of the input's gradient runs beside the product
//   of
//     the weight's gradient, as in Megatron-LM; with it, the gather of the input runs beside the product of
//     the input's gradient and its reduce-scatter beside that of the weight's;
//   - forward (and the gather of a row product's gradient), with sequence parallelism: the product is cut
//   into
//     tp parts; shards travel round a ring, each beside the product of the part that is there already as in
//     Transformer Engine's point-to-point overlap.
#include "core/block_builder.h"

namespace bmt {
namespace {

bool decomposed(const BlockShape& s) {
  return s.tp_overlap && s.sequence_parallel;
}

// `product(part, operand)` for the own shard, then for each shard that arrives from the previous rank.
template <typename Product>
void ringGather(Builder& b, const BlockShape& s, Operand shard, std::int64_t elements,
                const Product& product) {
  const DType wire = s.productType();
  const Operand buffers[2] = {b.work(elements), b.work(elements)};
  Operand here = shard;
  for (std::int64_t part = 0; part < s.tp; ++part) {
    std::int32_t arrives = -1;
    const Operand next = buffers[part % 2];
    if (part + 1 < s.tp) arrives = b.commBeside(CommKind::Shift, elements, wire, here, next);
    product(part, here);
    if (arrives >= 0) b.waitFor(arrives);
    here = next;
  }
}

}  // namespace

void columnForward(Builder& f, const BlockShape& s, Operand out, Operand x, Operand w, Operand bias,
                   std::int64_t o, std::int64_t i) {
  const Bytes mark = f.mark();
  f.quantised(true);  // x is a norm's result
  if (decomposed(s)) {
    ringGather(f, s, x, s.rows * i, [&](std::int64_t part, Operand shard) {
      f.op(OpKind::LinearForward, {s.rows, o, i}, {behind(out, part * s.rows * o, s.dtype), shard, w, bias});
    });
  } else {
    f.op(OpKind::LinearForward, {s.tokens, o, i},
         {out, f.gatherRows(x, s.tokens, i, s.productType()), w, bias});
  }
  f.quantised(false);
  f.release(mark);
}

Operand columnBackward(BackwardBuilder& back, const BlockShape& s, Operand dout, Operand x, Operand w,
                       Operand dw, Operand dbias, std::int64_t o, std::int64_t i) {
  Builder& b = back.input;
  const auto weight = [&](Operand full) {
    back.weight().op(OpKind::LinearBackwardWeight, {s.tokens, o, i, back.acc}, {dw, dbias, dout, full});
  };
  const auto input = [&](Operand dx) { b.op(OpKind::LinearBackwardInput, {s.tokens, o, i}, {dx, dout, w}); };
  if (!s.tp_overlap || s.tp == 1 || s.split_backward) {
    weight(back.weight().gatherRows(x, s.tokens, i, s.productType()));
    const Operand dx = b.work(s.tokens * i);
    input(dx);
    return b.reduceRows(dx, s.tokens, i);
  }
  const std::int64_t count = s.tokens * i;
  const Operand dx = b.work(count);
  if (!s.sequence_parallel) {
    input(dx);
    const std::int32_t summed = b.commBeside(CommKind::AllReduce, count, s.dtype, dx, dx);
    weight(x);
    b.waitFor(summed);
    return dx;
  }
  const Operand full = b.work(count), shard = b.work(s.rows * i);
  const std::int32_t gathered = b.commBeside(CommKind::AllGather, count, s.productType(), x, full);
  input(dx);
  const std::int32_t summed = b.commBeside(CommKind::ReduceScatter, count, s.dtype, dx, shard);
  b.waitFor(gathered);
  weight(full);
  b.waitFor(summed);
  return shard;
}

Operand rowForward(Builder& f, const BlockShape& s, Operand x, Operand w, std::int64_t o, std::int64_t i) {
  if (!decomposed(s)) {
    const Operand partial = f.work(s.tokens * o);
    f.op(OpKind::LinearForward, {s.tokens, o, i}, {partial, x, w, {}});
    return f.reduceRows(partial, s.tokens, o);
  }
  // The sum for each rank travels round the ring and ends there; every rank adds its part on the way.
  const std::int64_t count = s.rows * o;
  const Operand sent[2] = {f.work(count), f.work(count)}, received = f.work(count);
  std::int32_t arrives = -1;
  for (std::int64_t part = 0; part < s.tp; ++part) {
    const Operand mine = sent[part % 2];
    f.op(OpKind::LinearForward, {s.rows, o, i}, {mine, behind(x, part * s.rows * i, s.dtype), w, {}});
    if (arrives >= 0) {
      f.waitFor(arrives);
      addRows(f, count, mine, received);
    }
    if (part + 1 == s.tp) return mine;
    arrives = f.commBeside(CommKind::Shift, count, s.dtype, mine, received);
  }
  return {};
}

void rowBackward(BackwardBuilder& back, const BlockShape& s, Operand dx, Operand dout, Operand x, Operand w,
                 Operand dw, std::int64_t o, std::int64_t i) {
  Builder& b = back.input;
  b.quantiseRows(s.rows * o, dout);
  b.quantised(true);
  if (!decomposed(s)) {
    const Operand full = back.gatherKept(dout, s.tokens, o);
    b.op(OpKind::LinearBackwardInput, {s.tokens, o, i}, {dx, full, w});
    b.quantised(false);
    back.weight().op(OpKind::LinearBackwardWeight, {s.tokens, o, i, back.acc}, {dw, {}, full, x});
    return;
  }
  // The parts are kept: the weight's gradient needs all of them.
  const Operand full = back.kept(s.tokens * o);
  Operand here = dout;
  for (std::int64_t part = 0; part < s.tp; ++part) {
    const Operand next = behind(full, part * s.rows * o, s.dtype);
    std::int32_t arrives = -1;
    if (part + 1 < s.tp) arrives = b.commBeside(CommKind::Shift, s.rows * o, s.productType(), here, next);
    b.op(OpKind::LinearBackwardInput, {s.rows, o, i}, {behind(dx, part * s.rows * i, s.dtype), here, w});
    if (arrives >= 0) b.waitFor(arrives);
    here = next;
  }
  b.quantised(false);
  back.weight().op(OpKind::LinearBackwardWeight, {s.tokens, o, i, back.acc}, {dw, {}, full, x});
}

}  // namespace bmt
