// The table of this instruction set's copy, and its scratch memory.
#include <cstdlib>
#include <new>

#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/simd.h"

#define BMT_STRING_OF(x) #x
#define BMT_STRING(x) BMT_STRING_OF(x)

namespace bmt::kernels::cpu::BMT_ISA {
namespace {

struct Scratch {
  float* data = nullptr;
  Int size = 0;
  ~Scratch() { std::free(data); }
};
thread_local Scratch scratch_slots[4];

}  // namespace

float* scratch(int slot, Int floats) {
  Scratch& s = scratch_slots[slot];
  if (s.size < floats) {
    std::free(s.data);
    s.size = (floats + 1023) / 1024 * 1024;
    s.data = static_cast<float*>(std::aligned_alloc(64, static_cast<std::size_t>(s.size) * 4));
    if (s.data == nullptr) {
      s.size = 0;
      throw std::bad_alloc();
    }
  }
  return s.data;
}

const Table& table();
const Table& table() {
#if defined(__x86_64__)
  static constexpr const char* kName = "x86-64-" BMT_STRING(BMT_ISA);
#else
  static constexpr const char* kName = BMT_STRING(BMT_ISA);
#endif
  static const Table instance{kName,
                              linearForward,
                              linearBackwardInput,
                              linearBackwardWeight,
                              biasBackward,
                              embeddingForward,
                              embeddingBackward,
                              positionForward,
                              positionBackward,
                              layerNormForward,
                              layerNormBackward,
                              rmsNormForward,
                              rmsNormBackward,
                              residualAdd,
                              ropeForward,
                              ropeBackward,
                              attentionForward,
                              attentionBackward,
                              geluForward,
                              geluBackward,
                              reluForward,
                              reluBackward,
                              swigluForward,
                              swigluBackward,
                              crossEntropyStats,
                              crossEntropyBackward,
                              sumOfSquares,
                              adamW,
                              add,
                              fmaPeak};
  return instance;
}

}  // namespace bmt::kernels::cpu::BMT_ISA
