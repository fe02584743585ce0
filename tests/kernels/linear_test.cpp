// Matrix products and column sums against a naive double reference, over odd shapes and those of a GPT-2
// layer.
#include "tests/kernels/check.h"

namespace bmt::test {
namespace {

struct Shape {
  Int n, o, i;
};
const Shape kShapes[] = {{1, 1, 1},    {1, 3, 17},    {3, 1, 5},      {17, 64, 1},
                         {5, 65, 3},   {64, 64, 64},  {65, 63, 66},   {17, 33, 129},
                         {2, 257, 31}, {128, 96, 48}, {100, 130, 270}};

// sum over k of a[row of k] b[column of k], written with explicit strides: element (r, c) = sum_k a[r*ar +
// k*ak] b[c*bc + k*bk]
Doubles product(const Doubles& a, Int ar, Int ak, const Doubles& b, Int bc, Int bk, Int rows, Int cols,
                Int depth) {
  Doubles out(at(rows * cols));
  for (Int r = 0; r < rows; ++r) {
    for (Int c = 0; c < cols; ++c) {
      double sum = 0;
      for (Int k = 0; k < depth; ++k) sum += a[at(r * ar + k * ak)] * b[at(c * bc + k * bk)];
      out[at(r * cols + c)] = sum;
    }
  }
  return out;
}

Doubles columnSums(const Doubles& x, Int rows, Int cols) {
  Doubles sums(at(cols));
  for (Int r = 0; r < rows; ++r) {
    for (Int c = 0; c < cols; ++c) sums[at(c)] += x[at(r * cols + c)];
  }
  return sums;
}

TEST(Linear, forwardMatchesReference) {
  forEachTable([](const Table& table) {
    for (const auto [n, o, i] : kShapes) {
      SCOPED_TRACE(shape(n, o, i));
      std::mt19937 random(1);
      Buffer x(n * i, random), w(o * i, random), bias(o, random);
      const Doubles expected = product(x.values(), i, 1, w.values(), i, 1, n, o, i);
      Buffer plain(n * o), biased(n * o);
      table.linearForward(plain, x, w, nullptr, n, o, i);
      expectClose("out", plain, expected, 3e-6);
      table.linearForward(biased, x, w, bias, n, o, i);
      Doubles with_bias = expected;
      for (Int r = 0; r < n; ++r) {
        for (Int c = 0; c < o; ++c) with_bias[at(r * o + c)] += bias.values()[at(c)];
      }
      expectClose("out with bias", biased, with_bias, 3e-6);
    }
  });
}

TEST(Linear, backwardMatchesReference) {
  forEachTable([](const Table& table) {
    for (const auto [n, o, i] : kShapes) {
      SCOPED_TRACE(shape(n, o, i));
      std::mt19937 random(2);
      Buffer x(n * i, random), w(o * i, random), dout(n * o, random);
      Buffer dx(n * i);
      table.linearBackwardInput(dx, dout, w, n, o, i);
      expectClose("dx", dx, product(dout.values(), o, 1, w.values(), 1, i, n, i, o), 3e-6);

      const Doubles weight = product(dout.values(), 1, o, x.values(), 1, i, o, i, n);
      const Doubles bias = columnSums(dout.values(), n, o);
      Buffer dw(o * i), dbias(o), alone(o);
      table.linearBackwardWeight(dw, dbias, dout, x, n, o, i, false);
      expectClose("dw", dw, weight, 3e-6);
      expectClose("dbias", dbias, bias, 3e-6);
      table.linearBackwardWeight(dw, dbias, dout, x, n, o, i, true);
      expectClose("dw added", dw, plus(weight, weight), 3e-6);
      expectClose("dbias added", dbias, plus(bias, bias), 3e-6);
      table.linearBackwardWeight(dw, nullptr, dout, x, n, o, i, false);
      expectClose("dw without bias", dw, weight, 3e-6);

      table.biasBackward(alone, dout, n, o, false);
      expectClose("bias", alone, bias, 3e-6);
      table.biasBackward(alone, dout, n, o, true);
      expectClose("bias added", alone, plus(bias, bias), 3e-6);
    }
  });
}

TEST(Linear, gradientsMatchFiniteDifferences) {
  const Int n = 7, o = 9, i = 11;
  forEachTable([&](const Table& table) {
    std::mt19937 random(3);
    Buffer x(n * i, random), w(o * i, random), bias(o, random), dout(n * o, random), dx(n * i), dw(o * i),
        dbias(o);
    const auto loss = [&](const Doubles& xs, const Doubles& ws, const Doubles& bs) {
      double sum = 0;
      for (Int r = 0; r < n; ++r) {
        for (Int c = 0; c < o; ++c) {
          double value = bs[at(c)];
          for (Int k = 0; k < i; ++k) value += xs[at(r * i + k)] * ws[at(c * i + k)];
          sum += value * dout.values()[at(r * o + c)];
        }
      }
      return sum;
    };
    table.linearBackwardInput(dx, dout, w, n, o, i);
    table.linearBackwardWeight(dw, dbias, dout, x, n, o, i, false);
    expectGradient("dx", dx, x.values(),
                   [&](const Doubles& v) { return loss(v, w.values(), bias.values()); });
    expectGradient("dw", dw, w.values(),
                   [&](const Doubles& v) { return loss(x.values(), v, bias.values()); });
    expectGradient("dbias", dbias, bias.values(),
                   [&](const Doubles& v) { return loss(x.values(), w.values(), v); });
  });
}

TEST(Linear, sameInputsGiveTheSameBits) {
  const Int n = 96, o = 130, i = 200;
  forEachTable([&](const Table& table) {
    std::mt19937 random(4);
    Buffer x(n * i, random), w(o * i, random), first(n * o), second(n * o);
    table.linearForward(first, x, w, nullptr, n, o, i);
    table.linearForward(second, x, w, nullptr, n, o, i);
    EXPECT_EQ(first.values(), second.values());
  });
}

}  // namespace
}  // namespace bmt::test
