// Embeddings, activations, optimizer and small loops against their definitions in double; gradients by finite
// differences.
#include "tests/kernels/check.h"

namespace bmt::test {
namespace {

const Int kSizes[] = {1, 3, 7, 8, 9, 16, 17, 31, 64, 65, 1000, 5001};

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double silu(double x) {
  return x / (1 + std::exp(-x));
}

Doubles mapped(Doubles x, double (*f)(double)) {
  std::transform(x.begin(), x.end(), x.begin(), f);
  return x;
}

TEST(Activations, forwardMatchesReference) {
  forEachTable([](const Table& table) {
    for (const Int n : kSizes) {
      SCOPED_TRACE(shape(n));
      std::mt19937 random(1);
      Buffer x(n, random, 3), out(n), relu(n);
      table.geluForward(out, x, n);
      expectClose("gelu", out, mapped(x.values(), gelu), 1e-6);
      table.reluForward(relu, x, n);
      expectClose("relu", relu, mapped(x.values(), [](double v) { return std::max(v, 0.0); }), 0);
    }
  });
}

// Far from zero: GELU tends to x and to 0, its slope to 1 and to 0; nothing overflows to NaN.
TEST(Activations, limitsAreFinite) {
  forEachTable([](const Table& table) {
    Buffer x(8), ones(8), out(8), slope(8);
    const float values[] = {-1e4f, -100, -20, -0.0f, 0.0f, 20, 100, 1e4f};
    for (Int k = 0; k < 8; ++k) {
      x[k] = values[k];
      ones[k] = 1;
    }
    table.geluForward(out, x, 8);
    expectClose("gelu", out, {0, 0, 0, 0, 0, 20, 100, 1e4}, 1e-9);
    table.geluBackward(slope, ones, x, 8);
    expectClose("slope", slope, {0, 0, 0, 0.5, 0.5, 1, 1, 1}, 1e-9);
    Buffer gate_up(8), swiglu(4);
    for (Int k = 0; k < 4; ++k) {
      gate_up[k] = k % 2 == 0 ? -1e4f : 1e4f;
      gate_up[4 + k] = 2;
    }
    table.swigluForward(swiglu, gate_up, 1, 4);
    expectClose("swiglu", swiglu, {0, 2e4, 0, 2e4}, 1e-9);
  });
}

// A NaN must come out as NaN, whatever its payload, or a wrong buffer would go unseen.
TEST(Activations, nanIsKept) {
  forEachTable([](const Table& table) {
    for (const std::uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7fc0beefu, 0xffffffffu}) {
      Buffer x(3), out(3);
      for (Int k = 0; k < 3; ++k) x[k] = std::bit_cast<float>(bits);
      table.geluForward(out, x, 3);
      for (Int k = 0; k < 3; ++k) EXPECT_TRUE(std::isnan(out[k])) << std::hex << bits << ": " << out[k];
      Buffer logits(3), stats(3);
      for (Int k = 0; k < 3; ++k) logits[k] = 1;
      logits[1] = std::bit_cast<float>(bits);
      const std::int32_t target = 0;
      table.crossEntropyStats(stats, logits, &target, 1, 3, 0, 3);
      EXPECT_TRUE(std::isnan(stats[1])) << std::hex << bits << ": " << stats[1];
    }
  });
}

TEST(Activations, gradientsMatchFiniteDifferences) {
  forEachTable([](const Table& table) {
    for (const Int n : {1, 3, 17, 64, 65, 200}) {
      SCOPED_TRACE(shape(n));
      std::mt19937 random(2);
      Buffer x(n, random, 2), dout(n, random), dx(n), drelu(n);
      table.geluBackward(dx, dout, x, n);
      expectGradient("gelu", dx, x.values(),
                     [&](const Doubles& v) { return dot(mapped(v, gelu), dout.values()); });
      table.reluBackward(drelu, dout, x, n);
      expectGradient("relu", drelu, x.values(), [&](const Doubles& v) {
        return dot(mapped(v, [](double u) { return std::max(u, 0.0); }), dout.values());
      });
      const Doubles expected = dx.values();
      table.geluBackward(dout, dout, x, n);
      expectClose("gelu in place", dout, expected, 0);
    }
  });
}

TEST(Activations, swigluMatchesReferenceAndFiniteDifferences) {
  const auto swiglu = [](const Doubles& gate_up, Int n, Int f) {
    Doubles out;
    for (Int r = 0; r < n; ++r) {
      for (Int j = 0; j < f; ++j)
        out.push_back(silu(gate_up[at(r * 2 * f + j)]) * gate_up[at(r * 2 * f + f + j)]);
    }
    return out;
  };
  forEachTable([&](const Table& table) {
    for (const auto& [n, f] : {std::pair<Int, Int>{1, 1}, {3, 17}, {2, 64}, {5, 65}}) {
      SCOPED_TRACE(shape(n, f));
      std::mt19937 random(3);
      Buffer gate_up(n * 2 * f, random, 2), dout(n * f, random), out(n * f), dgate_up(n * 2 * f);
      table.swigluForward(out, gate_up, n, f);
      expectClose("out", out, swiglu(gate_up.values(), n, f), 1e-6);
      table.swigluBackward(dgate_up, dout, gate_up, n, f);
      expectGradient("dgate_up", dgate_up, gate_up.values(),
                     [&](const Doubles& v) { return dot(swiglu(v, n, f), dout.values()); });
    }
  });
}

// Two shards of a table of 10 rows, one token outside both halves' range each time: the shards' sum is the
// whole lookup.
TEST(Embedding, shardsSumToTheWhole) {
  const std::vector<std::int32_t> tokens = {9, 0, 4, 5, 4, 4, 7};
  const Int n = 7, rows = 10;
  forEachTable([&](const Table& table) {
    for (const Int c : {1, 3, 17, 64, 65}) {
      SCOPED_TRACE(shape(c));
      std::mt19937 random(4);
      Buffer weights(rows * c, random), dout(n * c, random), whole(n * c), low(n * c), high(n * c);
      Doubles expected, gradient(at(rows * c));
      for (Int i = 0; i < n; ++i) {
        for (Int j = 0; j < c; ++j) {
          expected.push_back(weights.values()[at(tokens[at(i)] * c + j)]);
          gradient[at(tokens[at(i)] * c + j)] += dout.values()[at(i * c + j)];
        }
      }
      table.embeddingForward(whole, tokens.data(), weights, n, c, 0, rows);
      expectClose("whole", whole, expected, 0);
      table.embeddingForward(low, tokens.data(), weights, n, c, 0, 5);
      table.embeddingForward(high, tokens.data(), weights + 5 * c, n, c, 5, 5);
      for (Int k = 0; k < n * c; ++k) low[k] += high[k];
      expectClose("sum of shards", low, expected, 0);

      Buffer dtable(rows * c), dhigh(5 * c);
      table.embeddingBackward(dtable, tokens.data(), dout, n, c, 0, rows, false);
      expectClose("dtable", dtable, gradient, 1e-6);
      table.embeddingBackward(dtable, tokens.data(), dout, n, c, 0, rows, true);
      expectClose("dtable added", dtable, plus(gradient, gradient), 1e-6);
      table.embeddingBackward(dhigh, tokens.data(), dout, n, c, 5, 5, false);
      expectClose("shard", dhigh, Doubles(gradient.begin() + 5 * c, gradient.end()), 1e-6);
    }
  });
}

TEST(Embedding, positionsRepeatEverySequence) {
  const Int t = 5, n = 13, first = 3;
  forEachTable([&](const Table& table) {
    for (const Int c : {1, 3, 17, 64}) {
      SCOPED_TRACE(shape(c));
      std::mt19937 random(5);
      Buffer x(n * c, random), weights(t * c, random), dout(n * c, random), dtable(t * c);
      Doubles expected = x.values(), gradient(at(t * c));
      for (Int i = 0; i < n; ++i) {
        for (Int j = 0; j < c; ++j) {
          expected[at(i * c + j)] += weights.values()[at((first + i) % t * c + j)];
          gradient[at((first + i) % t * c + j)] += dout.values()[at(i * c + j)];
        }
      }
      table.positionForward(x, weights, n, c, t, first);
      expectClose("x", x, expected, 1e-6);
      table.positionBackward(dtable, dout, n, c, t, first, false);
      expectClose("dtable", dtable, gradient, 1e-6);
      table.positionBackward(dtable, dout, n, c, t, first, true);
      expectClose("dtable added", dtable, plus(gradient, gradient), 1e-6);
    }
  });
}

TEST(Optimizer, sumOfSquaresMatchesReference) {
  forEachTable([](const Table& table) {
    for (const Int n : {Int{0}, Int{1}, Int{7}, Int{17}, Int{4096}, Int{4097}, Int{100003}}) {
      std::mt19937 random(6);
      Buffer x(n, random);
      EXPECT_NEAR(table.sumOfSquares(x, n), dot(x.values(), x.values()), 1e-6 * static_cast<double>(n)) << n;
    }
  });
}

// Three steps of AdamW (Loshchilov and Hutter 2019, algorithm 2) with scaled gradients.
TEST(Optimizer, adamWMatchesReference) {
  const double lr = 1e-2, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1, grad_scale = 0.25;
  forEachTable([&](const Table& table) {
    for (const Int n : kSizes) {
      SCOPED_TRACE(shape(n));
      std::mt19937 random(7);
      Buffer p(n, random), m(n), v(n);
      for (Int k = 0; k < n; ++k) m[k] = v[k] = 0;
      Doubles ps = p.values(), ms(at(n)), vs(at(n));
      for (int step = 1; step <= 3; ++step) {
        Buffer g(n, random);
        const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
        const Doubles gs = g.values();
        for (std::size_t k = 0; k < ps.size(); ++k) {
          const double grad = gs[k] * grad_scale;
          ms[k] = beta1 * ms[k] + (1 - beta1) * grad;
          vs[k] = beta2 * vs[k] + (1 - beta2) * grad * grad;
          ps[k] -= lr * decay * ps[k];
          ps[k] -= lr * (ms[k] / correction1) / (std::sqrt(vs[k] / correction2) + eps);
        }
        const auto f = [](double value) { return static_cast<float>(value); };
        table.adamW(p, m, v, g, n, f(lr), f(beta1), f(beta2), f(eps), f(decay), f(correction1),
                    f(correction2), f(grad_scale));
        g.expectGuardsIntact("g");
      }
      expectClose("m", m, ms, 1e-6);
      expectClose("v", v, vs, 1e-6);
      expectClose("p", p, ps, 1e-6);
    }
  });
}

TEST(Add, matchesReferenceInPlaceToo) {
  forEachTable([](const Table& table) {
    for (const Int n : kSizes) {
      std::mt19937 random(8);
      Buffer a(n, random), b(n, random), out(n);
      const Doubles expected = plus(a.values(), b.values());
      table.add(out, a, b, n);
      expectClose("out", out, expected, 1e-6);
      Buffer into_b = b;
      table.add(into_b, a, into_b, n);
      expectClose("into b", into_b, expected, 1e-6);
      table.add(a, a, b, n);
      expectClose("into a", a, expected, 1e-6);
    }
  });
}

}  // namespace
}  // namespace bmt::test
