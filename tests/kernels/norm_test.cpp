// LayerNorm, RMSNorm and the residual sum against their definitions in double; gradients by finite
// differences.
#include "tests/kernels/check.h"

namespace bmt::test {
namespace {

constexpr float kEps = 1e-5f;
struct Shape {
  Int n, c;
};
const Shape kShapes[] = {{1, 1}, {3, 2}, {1, 17}, {17, 3}, {5, 8}, {3, 64}, {2, 65}, {7, 130}, {4, 257}};

// y = x + delta? + bias?
Doubles residual(Doubles x, const Doubles* delta, const Doubles* bias) {
  for (std::size_t k = 0; k < x.size(); ++k) {
    if (delta != nullptr) x[k] += (*delta)[k];
    if (bias != nullptr) x[k] += (*bias)[k % bias->size()];
  }
  return x;
}

struct Normed {
  Doubles out, mean, rstd;
};

Normed layerNorm(const Doubles& y, const Doubles& w, const Doubles& b) {
  const std::size_t c = w.size();
  Normed result;
  for (std::size_t row = 0; row < y.size(); row += c) {
    double mean = 0, var = 0;
    for (std::size_t j = 0; j < c; ++j) mean += y[row + j] / static_cast<double>(c);
    for (std::size_t j = 0; j < c; ++j)
      var += (y[row + j] - mean) * (y[row + j] - mean) / static_cast<double>(c);
    const double rstd = 1 / std::sqrt(var + static_cast<double>(kEps));
    for (std::size_t j = 0; j < c; ++j) result.out.push_back((y[row + j] - mean) * rstd * w[j] + b[j]);
    result.mean.push_back(mean);
    result.rstd.push_back(rstd);
  }
  return result;
}

Normed rmsNorm(const Doubles& y, const Doubles& w) {
  const std::size_t c = w.size();
  Normed result;
  for (std::size_t row = 0; row < y.size(); row += c) {
    double squares = 0;
    for (std::size_t j = 0; j < c; ++j) squares += y[row + j] * y[row + j] / static_cast<double>(c);
    const double rstd = 1 / std::sqrt(squares + static_cast<double>(kEps));
    for (std::size_t j = 0; j < c; ++j) result.out.push_back(y[row + j] * rstd * w[j]);
    result.rstd.push_back(rstd);
  }
  return result;
}

// Forward of both norms, with each of delta and bias given or not, y given, absent or aliasing x.
TEST(Norm, forwardMatchesReference) {
  enum class Y { Stored, Absent, InPlace };
  forEachTable([](const Table& table) {
    for (const auto [n, c] : kShapes) {
      for (int mask = 0; mask < 4; ++mask) {
        for (const Y mode : {Y::Stored, Y::Absent, Y::InPlace}) {
          SCOPED_TRACE(shape(n, c, mask, static_cast<int>(mode)));
          std::mt19937 random(1);
          Buffer x(n * c, random, 2, 3), delta(n * c, random), bias(c, random), w(c, random), b(c, random);
          const Doubles deltas = delta.values(), biases = bias.values();
          const Doubles expected_y =
              residual(x.values(), (mask & 1) != 0 ? &deltas : nullptr, (mask & 2) != 0 ? &biases : nullptr);
          float* const delta_or_null = (mask & 1) != 0 ? static_cast<float*>(delta) : nullptr;
          float* const bias_or_null = (mask & 2) != 0 ? static_cast<float*>(bias) : nullptr;
          Buffer x_rms = x;
          {
            Buffer out(n * c), y(n * c), mean(n), rstd(n);
            float* const stored = mode == Y::Stored    ? y
                                  : mode == Y::InPlace ? x
                                                       : static_cast<float*>(nullptr);
            table.layerNormForward(out, stored, mean, rstd, x, delta_or_null, bias_or_null, w, b, n, c, kEps);
            const Normed expected = layerNorm(expected_y, w.values(), b.values());
            if (mode != Y::Absent) expectClose("y", mode == Y::Stored ? y : x, expected_y, 1e-6);
            expectClose("mean", mean, expected.mean, 2e-6);
            // With two columns the variance may be tiny, and rstd then magnifies the rounding of y.
            expectClose("rstd", rstd, expected.rstd, 1e-5);
            expectClose("out", out, expected.out, 1e-5);
          }
          Buffer out(n * c), y(n * c), rstd(n);
          float* const stored = mode == Y::Stored    ? y
                                : mode == Y::InPlace ? x_rms
                                                     : static_cast<float*>(nullptr);
          table.rmsNormForward(out, stored, rstd, x_rms, delta_or_null, bias_or_null, w, n, c, kEps);
          const Normed expected = rmsNorm(expected_y, w.values());
          if (mode != Y::Absent) expectClose("rms y", mode == Y::Stored ? y : x_rms, expected_y, 1e-6);
          expectClose("rms rstd", rstd, expected.rstd, 2e-6);
          expectClose("rms out", out, expected.out, 2e-6);
        }
      }
    }
  });
}

// A row of large mean and small spread: a one-pass variance E[x^2] - E[x]^2 would cancel to nothing here.
TEST(Norm, varianceSurvivesALargeMean) {
  const Int n = 2, c = 96;
  forEachTable([&](const Table& table) {
    std::mt19937 random(2);
    Buffer x(n * c, random, 0.5f, 1000), w(c, random), b(c, random), out(n * c), mean(n), rstd(n);
    table.layerNormForward(out, nullptr, mean, rstd, x, nullptr, nullptr, w, b, n, c, kEps);
    expectClose("rstd", rstd, layerNorm(x.values(), w.values(), b.values()).rstd, 1e-5);
  });
}

TEST(Norm, layerNormGradientsMatchFiniteDifferences) {
  forEachTable([](const Table& table) {
    for (const auto [n, c] : {Shape{1, 3}, Shape{3, 17}, Shape{5, 8}, Shape{4, 64}, Shape{6, 65}}) {
      SCOPED_TRACE(shape(n, c));
      std::mt19937 random(3);
      Buffer y(n * c, random, 2, 1), w(c, random), b(c, random), dout(n * c, random), dres(n * c, random);
      Buffer out(n * c), mean(n), rstd(n), dx(n * c), dw(c), db(c);
      table.layerNormForward(out, nullptr, mean, rstd, y, nullptr, nullptr, w, b, n, c, kEps);
      table.layerNormBackward(dx, dw, db, dout, y, w, mean, rstd, nullptr, n, c, false);
      const auto loss = [&](const Doubles& ys, const Doubles& ws, const Doubles& bs) {
        return dot(layerNorm(ys, ws, bs).out, dout.values());
      };
      expectGradient("dx", dx, y.values(), [&](const Doubles& v) { return loss(v, w.values(), b.values()); });
      expectGradient("dw", dw, w.values(), [&](const Doubles& v) { return loss(y.values(), v, b.values()); });
      expectGradient("db", db, b.values(), [&](const Doubles& v) { return loss(y.values(), w.values(), v); });

      // With a residual gradient, in place, and adding to dw and db.
      const Doubles alone = dx.values(), weight = dw.values(), bias = db.values(), through = dres.values();
      table.layerNormBackward(dres, dw, db, dout, y, w, mean, rstd, dres, n, c, true);
      expectClose("dx + dres", dres, plus(alone, through), 1e-6);
      expectClose("dw added", dw, plus(weight, weight), 1e-6);
      expectClose("db added", db, plus(bias, bias), 1e-6);
    }
  });
}

TEST(Norm, rmsNormGradientsMatchFiniteDifferences) {
  forEachTable([](const Table& table) {
    for (const auto [n, c] : {Shape{1, 3}, Shape{3, 17}, Shape{5, 8}, Shape{4, 64}, Shape{6, 65}}) {
      SCOPED_TRACE(shape(n, c));
      std::mt19937 random(4);
      Buffer y(n * c, random, 2, 1), w(c, random), dout(n * c, random), dres(n * c, random);
      Buffer out(n * c), rstd(n), dx(n * c), dw(c);
      table.rmsNormForward(out, nullptr, rstd, y, nullptr, nullptr, w, n, c, kEps);
      table.rmsNormBackward(dx, dw, dout, y, w, rstd, nullptr, n, c, false);
      const auto loss = [&](const Doubles& ys, const Doubles& ws) {
        return dot(rmsNorm(ys, ws).out, dout.values());
      };
      expectGradient("dx", dx, y.values(), [&](const Doubles& v) { return loss(v, w.values()); });
      expectGradient("dw", dw, w.values(), [&](const Doubles& v) { return loss(y.values(), v); });

      const Doubles alone = dx.values(), weight = dw.values(), through = dres.values();
      table.rmsNormBackward(dres, dw, dout, y, w, rstd, dres, n, c, true);
      expectClose("dx + dres", dres, plus(alone, through), 1e-6);
      expectClose("dw added", dw, plus(weight, weight), 1e-6);
    }
  });
}

TEST(Norm, residualAddMatchesReferenceInPlaceToo) {
  forEachTable([](const Table& table) {
    for (const auto [n, c] : kShapes) {
      SCOPED_TRACE(shape(n, c));
      std::mt19937 random(5);
      Buffer x(n * c, random), delta(n * c, random), bias(c, random), out(n * c);
      const Doubles deltas = delta.values(), biases = bias.values();
      const Doubles plain = residual(x.values(), &deltas, nullptr),
                    biased = residual(x.values(), &deltas, &biases);
      table.residualAdd(out, x, delta, nullptr, n, c);
      expectClose("out", out, plain, 1e-6);
      Buffer into_x = x;
      table.residualAdd(into_x, into_x, delta, bias, n, c);
      expectClose("into x", into_x, biased, 1e-6);
      table.residualAdd(delta, x, delta, bias, n, c);
      expectClose("into delta", delta, biased, 1e-6);
    }
  });
}

}  // namespace
}  // namespace bmt::test
