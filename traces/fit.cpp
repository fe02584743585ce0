#include "traces/fit.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace bmt::trace {
namespace {

// Solves the normal equations restricted to the columns in `mask` by Gaussian elimination. Empty when
// singular.
std::vector<double> solve(const std::vector<double>& a, const std::vector<double>& b, std::size_t n,
                          unsigned mask) {
  std::vector<std::size_t> columns;
  for (std::size_t c = 0; c < n; ++c) {
    if ((mask >> c & 1U) != 0) columns.push_back(c);
  }
  const std::size_t k = columns.size();
  std::vector<std::vector<double>> m(k, std::vector<double>(k + 1, 0));
  for (std::size_t row = 0; row < b.size(); ++row) {
    for (std::size_t i = 0; i < k; ++i) {
      for (std::size_t j = 0; j < k; ++j) m[i][j] += a[row * n + columns[i]] * a[row * n + columns[j]];
      m[i][k] += a[row * n + columns[i]] * b[row];
    }
  }
  for (std::size_t i = 0; i < k; ++i) {
    std::size_t pivot = i;
    for (std::size_t r = i + 1; r < k; ++r) {
      if (std::fabs(m[r][i]) > std::fabs(m[pivot][i])) pivot = r;
    }
    if (std::fabs(m[pivot][i]) < 1e-12) return {};
    std::swap(m[i], m[pivot]);
    for (std::size_t r = 0; r < k; ++r) {
      if (r == i) continue;
      const double factor = m[r][i] / m[i][i];
      for (std::size_t c = i; c <= k; ++c) m[r][c] -= factor * m[i][c];
    }
  }
  std::vector<double> x(n, 0);
  for (std::size_t i = 0; i < k; ++i) x[columns[i]] = m[i][k] / m[i][i];
  return x;
}

struct Residuals {
  double mean_pct = 0, max_pct = 0;
};
Residuals residuals(const std::vector<double>& a, const std::vector<double>& x, std::size_t n) {
  Residuals r;
  const std::size_t rows = a.size() / n;
  for (std::size_t row = 0; row < rows; ++row) {
    double predicted = 0;
    for (std::size_t c = 0; c < n; ++c) predicted += a[row * n + c] * x[c];
    const double error = 100 * std::fabs(predicted - 1);
    r.mean_pct += error / static_cast<double>(rows);
    r.max_pct = std::max(r.max_pct, error);
  }
  return r;
}

double inverseOrZero(double x) {
  return x > 0 ? 1 / x : 0;
}

}  // namespace

std::vector<double> nonNegativeLeastSquares(const std::vector<double>& a, const std::vector<double>& b,
                                            std::size_t n) {
  BMT_CHECK(n >= 1 && n <= 3 && a.size() == b.size() * n, "one row of n <= 3 figures per sample");
  // Columns of very different sizes (seconds per FLOP beside seconds) are scaled to unit length first.
  std::vector<double> scaled = a, length(n, 0);
  for (std::size_t i = 0; i < a.size(); ++i) length[i % n] += a[i] * a[i];
  for (double& l : length) l = l > 0 ? std::sqrt(l) : 1;
  for (std::size_t i = 0; i < a.size(); ++i) scaled[i] /= length[i % n];
  std::vector<double> best(n, 0);
  double best_error = std::numeric_limits<double>::infinity();
  for (unsigned mask = 1; mask < (1U << n); ++mask) {
    std::vector<double> x = solve(scaled, b, n, mask);
    if (x.empty() || std::any_of(x.begin(), x.end(), [](double v) { return v < 0; })) continue;
    double error = 0;
    for (std::size_t row = 0; row < b.size(); ++row) {
      double value = -b[row];
      for (std::size_t c = 0; c < n; ++c) value += scaled[row * n + c] * x[c];
      error += value * value;
    }
    if (error >= best_error) continue;
    best_error = error;
    best = x;
  }
  for (std::size_t c = 0; c < n; ++c) best[c] /= length[c];
  return best;
}

OpFit fitOp(OpKind kind, const std::vector<OpSample>& samples) {
  std::vector<double> a, ones;
  for (const OpSample& s : samples) {
    a.push_back(1 / s.seconds);
    a.push_back(flops(s.op) / s.seconds);
    a.push_back(bytesMoved(s.op) / s.seconds);
    ones.push_back(1);
  }
  const std::vector<double> x = nonNegativeLeastSquares(a, ones, 3);
  const Residuals r = residuals(a, x, 3);
  return {kind,
          x[0],
          inverseOrZero(x[1]),
          inverseOrZero(x[2]),
          static_cast<std::int64_t>(samples.size()),
          r.mean_pct,
          r.max_pct};
}

CommFit fitComm(CommKind kind, const std::string& transport, const std::vector<CommSample>& samples) {
  std::vector<double> a, ones;
  for (const CommSample& s : samples) {
    a.push_back(s.steps / s.seconds);
    a.push_back(s.bytes / s.seconds);
    ones.push_back(1);
  }
  const std::vector<double> x = nonNegativeLeastSquares(a, ones, 2);
  const Residuals r = residuals(a, x, 2);
  return {kind,       transport, x[0], inverseOrZero(x[1]), static_cast<std::int64_t>(samples.size()),
          r.mean_pct, r.max_pct};
}

}  // namespace bmt::trace
