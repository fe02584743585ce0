// The kernels of this instruction set's copy; shapes in kernels/cpu/kernels.h.
#pragma once

#include "kernels/cpu/kernels.h"

namespace bmt::kernels::cpu::BMT_ISA {

void linearForward(float*, const float*, const float*, const float*, Int, Int, Int);
void linearBackwardInput(float*, const float*, const float*, Int, Int, Int);
void linearBackwardWeight(float*, float*, const float*, const float*, Int, Int, Int, bool);
void biasBackward(float*, const float*, Int, Int, bool);
void embeddingForward(float*, const std::int32_t*, const float*, Int, Int, Int, Int);
void embeddingBackward(float*, const std::int32_t*, const float*, Int, Int, Int, Int, bool);
void positionForward(float*, const float*, Int, Int, Int, Int);
void positionBackward(float*, const float*, Int, Int, Int, Int, bool);
void layerNormForward(float*, float*, float*, float*, const float*, const float*, const float*, const float*,
                      const float*, Int, Int, float);
void layerNormBackward(float*, float*, float*, const float*, const float*, const float*, const float*,
                       const float*, const float*, Int, Int, bool);
void rmsNormForward(float*, float*, float*, const float*, const float*, const float*, const float*, Int, Int,
                    float);
void rmsNormBackward(float*, float*, const float*, const float*, const float*, const float*, const float*,
                     Int, Int, bool);
void residualAdd(float*, const float*, const float*, const float*, Int, Int);
void ropeForward(float*, Int, Int, Int, Int, Int, float);
void ropeBackward(float*, Int, Int, Int, Int, Int, float);
void attentionForward(float*, float*, const float*, Int, Int, Int, Int, Int);
void attentionBackward(float*, const float*, const float*, const float*, const float*, Int, Int, Int, Int,
                       Int);
void geluForward(float*, const float*, Int);
void geluBackward(float*, const float*, const float*, Int);
void reluForward(float*, const float*, Int);
void reluBackward(float*, const float*, const float*, Int);
void swigluForward(float*, const float*, Int, Int);
void swigluBackward(float*, const float*, const float*, Int, Int);
void crossEntropyStats(float*, const float*, const std::int32_t*, Int, Int, Int, Int);
void crossEntropyBackward(float*, const float*, const std::int32_t*, double*, Int, Int, Int, Int, Int, float);
double sumOfSquares(const float*, Int);
void adamW(float*, float*, float*, const float*, Int, float, float, float, float, float, float, float, float);
void add(float*, const float*, const float*, Int);
double fmaPeak(Int, float*);

}  // namespace bmt::kernels::cpu::BMT_ISA
