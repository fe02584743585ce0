// Element types of tensors. Bytes per element live here and nowhere else.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/units.h"

namespace bmt {

enum class DType : std::uint8_t { F64, F32, TF32, BF16, F16, F8, I32, I8 };

constexpr Bytes sizeOf(DType type) {
  switch (type) {
    case DType::F64:
      return 8;
    case DType::F32:
    case DType::TF32:  // stored as F32, multiplied with 10-bit mantissas
    case DType::I32:
      return 4;
    case DType::BF16:
    case DType::F16:
      return 2;
    case DType::F8:
    case DType::I8:
      return 1;
  }
  return 0;
}

std::string_view toString(DType type);  // "fp32", "bf16", ...
std::optional<DType> dtypeFromString(std::string_view text);

}  // namespace bmt
