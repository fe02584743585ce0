// The sum that every reduction of the CPU communicators uses: in member order, so that results are the same
// in every run, on every rank, and with threads as with processes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace bmt::exec {

// to [n] = sum over members of sources[member][offset, offset + n), in member order; F32, F64 or I32. `to`
// may be one of the summed ranges (blocks are summed aside first), but must not overlap one in any other way.
void sumInOrder(const std::vector<const void*>& sources, std::int64_t offset, std::int64_t n, DType dtype,
                void* to);

}  // namespace bmt::exec
