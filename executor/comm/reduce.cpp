#include "executor/comm/reduce.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "kernels/cpu/kernels.h"

namespace bmt::exec {
namespace {

template <typename T>
void sumElements(const std::vector<const void*>& sources, std::int64_t offset, std::int64_t n, T* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    T sum{};
    for (const void* source : sources) sum += static_cast<const T*>(source)[offset + i];
    to[i] = sum;
  }
}

void sumFloats(const std::vector<const void*>& sources, std::int64_t offset, std::int64_t n, float* to) {
  constexpr std::int64_t kBlock = 2048;
  float block[kBlock];
  const auto& k = kernels::cpu::kernels();
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t count = std::min(kBlock, n - first);
    const auto at = [&](std::size_t member) {
      return static_cast<const float*>(sources[member]) + offset + first;
    };
    if (sources.size() == 1) {
      std::memcpy(block, at(0), static_cast<std::size_t>(count) * sizeof(float));
    } else {
      k.add(block, at(0), at(1), count);
      for (std::size_t member = 2; member < sources.size(); ++member) k.add(block, block, at(member), count);
    }
    std::memcpy(to + first, block, static_cast<std::size_t>(count) * sizeof(float));
  }
}

}  // namespace

void sumInOrder(const std::vector<const void*>& sources, std::int64_t offset, std::int64_t n, DType dtype,
                void* to) {
  switch (dtype) {
    case DType::F32:
      return sumFloats(sources, offset, n, static_cast<float*>(to));
    case DType::F64:
      return sumElements(sources, offset, n, static_cast<double*>(to));
    case DType::I32:
      return sumElements(sources, offset, n, static_cast<std::int32_t*>(to));
    default:
      BMT_CHECK(false, "only fp32, fp64 and int32 are summed on CPU");
  }
}

}  // namespace bmt::exec
