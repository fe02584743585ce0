// What one core can do with the kernels in use: for calibrate and doctor, which see the CPU only through the
// executor.
#pragma once

#include <string>

namespace bmt::exec {

// Instruction set of the kernels in use: "x86-64-v3", ... (BMT_ISA in the environment chooses, see
// kernels/cpu/kernels.h).
std::string instructionSet();

// FLOP/s of one core in a loop of fused multiply-adds on registers; best round within about `seconds`.
double measureFmaPeak(double seconds);

}  // namespace bmt::exec
