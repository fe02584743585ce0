// Matrix products through Eigen (row-major views), and the sums over rows that go with them.
#include <Eigen/Core>

#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/simd.h"

namespace bmt::kernels::cpu::BMT_ISA {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using View = Eigen::Map<Matrix>;
using ConstView = Eigen::Map<const Matrix>;

}  // namespace

void linearForward(float* out, const float* x, const float* w, const float* bias, Int n, Int o, Int i) {
  View result(out, n, o);
  const ConstView a(x, n, i), b(w, o, i);
  result.noalias() = a * b.transpose();
  if (bias == nullptr) return;
  for (Int row = 0; row < n; ++row) {
    float* const r = out + row * o;
    for (Int col = 0; col < o; ++col) r[col] += bias[col];
  }
}

void linearBackwardInput(float* dx, const float* dout, const float* w, Int n, Int o, Int i) {
  View result(dx, n, i);
  result.noalias() = ConstView(dout, n, o) * ConstView(w, o, i);
}

void biasBackward(float* dbias, const float* dout, Int n, Int c, bool accumulate) {
  if (!accumulate) std::memset(dbias, 0, static_cast<std::size_t>(c) * 4);
  for (Int row = 0; row < n; ++row) {
    const float* const r = dout + row * c;
    for (Int col = 0; col < c; ++col) dbias[col] += r[col];
  }
}

void linearBackwardWeight(float* dw, float* dbias, const float* dout, const float* x, Int n, Int o, Int i,
                          bool accumulate) {
  View result(dw, o, i);
  const ConstView a(dout, n, o), b(x, n, i);
  if (accumulate) {
    result.noalias() += a.transpose() * b;
  } else {
    result.noalias() = a.transpose() * b;
  }
  if (dbias != nullptr) biasBackward(dbias, dout, n, o, accumulate);
}

}  // namespace bmt::kernels::cpu::BMT_ISA
