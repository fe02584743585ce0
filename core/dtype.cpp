#include "core/dtype.h"

#include <array>
#include <utility>

namespace bmt {
namespace {

constexpr std::array<std::pair<DType, std::string_view>, 8> kNames{{{DType::F64, "fp64"},
                                                                    {DType::F32, "fp32"},
                                                                    {DType::TF32, "tf32"},
                                                                    {DType::BF16, "bf16"},
                                                                    {DType::F16, "fp16"},
                                                                    {DType::F8, "fp8"},
                                                                    {DType::I32, "int32"},
                                                                    {DType::I8, "int8"}}};

}  // namespace

std::string_view toString(DType type) {
  for (const auto& [value, name] : kNames) {
    if (value == type) return name;
  }
  return "unknown";
}

std::optional<DType> dtypeFromString(std::string_view text) {
  for (const auto& [value, name] : kNames) {
    if (name == text) return value;
  }
  return std::nullopt;
}

}  // namespace bmt
