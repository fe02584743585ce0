#include "core/units.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <utility>

namespace bmt {
namespace {

// Four significant digits without exponents, for numbers between 1 and 9999.
std::string significant(double value) {
  const double magnitude = std::fabs(value);
  if (magnitude >= 1000) return fmt::format("{:.0f}", value);
  if (magnitude >= 100) return fmt::format("{:.1f}", value);
  if (magnitude >= 10) return fmt::format("{:.2f}", value);
  return fmt::format("{:.3f}", value);
}

}  // namespace

Ns fromSeconds(double seconds) {
  return static_cast<Ns>(std::ceil(seconds * kNsPerSecond));
}

std::string formatBytes(Bytes bytes) {
  static constexpr std::array<const char*, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes > -1024 && bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (std::fabs(value) >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{} {}", significant(value), kUnits[unit]);
}

std::string formatDuration(double seconds) {
  const double magnitude = std::fabs(seconds);
  if (magnitude == 0) return "0 s";
  if (magnitude < 1e-6) return fmt::format("{} ns", significant(seconds * 1e9));
  if (magnitude < 1e-3) return fmt::format("{} us", significant(seconds * 1e6));
  if (magnitude < 1) return fmt::format("{} ms", significant(seconds * 1e3));
  if (magnitude < 600) return fmt::format("{} s", significant(seconds));
  if (magnitude < 2 * 3600) return fmt::format("{} min", significant(seconds / 60));
  if (magnitude < 2 * 86400) return fmt::format("{} h", significant(seconds / 3600));
  return fmt::format("{} days", significant(seconds / 86400));
}

std::string formatRate(double per_second, const std::string& unit) {
  static constexpr std::array<const char*, 6> kPrefixes{"", "k", "M", "G", "T", "P"};
  std::size_t prefix = 0;
  double value = per_second;
  while (std::fabs(value) >= 1000 && prefix + 1 < kPrefixes.size()) {
    value /= 1000;
    ++prefix;
  }
  return fmt::format("{} {}{}/s", significant(value), kPrefixes[prefix], unit);
}

Bytes parseBytes(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || !(value >= 0)) return -1;
  std::string unit(end, text.data() + text.size());
  double scale = 1;
  if (!unit.empty() && unit != "B") {
    static constexpr std::array<std::pair<char, double>, 4> kScales{
        {{'K', 1024.0}, {'M', 1048576.0}, {'G', 1073741824.0}, {'T', 1099511627776.0}}};
    bool known = false;
    for (const auto& [letter, factor] : kScales) {
      if (std::toupper(static_cast<unsigned char>(unit[0])) != letter) continue;
      const std::string rest = unit.substr(1);
      known = rest.empty() || rest == "iB";
      scale = factor;
    }
    if (!known) return -1;
  }
  value *= scale;
  if (!(value < 9.2e18)) return -1;
  return static_cast<Bytes>(value);
}

}  // namespace bmt
