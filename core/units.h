// Units that every module shares: simulated or measured time, and memory sizes. Integers, so that equal
// inputs give equal outputs and comparisons need no epsilon (DESIGN.md section 5).
#pragma once

#include <cstdint>
#include <string>

namespace bmt {

using Ns = std::int64_t;     // nanoseconds, simulated or measured
using Bytes = std::int64_t;  // bytes

inline constexpr Bytes kKiB = Bytes{1} << 10;
inline constexpr Bytes kMiB = Bytes{1} << 20;
inline constexpr Bytes kGiB = Bytes{1} << 30;
inline constexpr double kNsPerSecond = 1e9;

inline double toSeconds(Ns t) {
  return static_cast<double>(t) / kNsPerSecond;
}
// Rounds up, so that a task with any work takes at least 1 ns and simulated time always advances.
Ns fromSeconds(double seconds);

// For people: "1.25 GiB", "31.4 ms", "12.3 TFLOP/s". Four significant digits at most.
std::string formatBytes(Bytes bytes);
std::string formatDuration(double seconds);
std::string formatRate(double per_second,
                       const std::string& unit);  // formatRate(3.1e12, "FLOP/s") = "3.1 TFLOP/s"

// "64MiB", "1.5GiB", "4096" -> bytes. Returns -1 when the text is not a size.
Bytes parseBytes(const std::string& text);

inline constexpr std::int64_t ceilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
inline constexpr std::int64_t roundUp(std::int64_t a, std::int64_t multiple) {
  return ceilDiv(a, multiple) * multiple;
}

}  // namespace bmt
