#include "traces/scatter_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

namespace bmt::trace {
namespace {

constexpr double kSize = 560, kLeft = 70, kTop = 40, kLegend = 190;
// Okabe and Ito 2008, and darker relatives: distinguishable with colour blindness.
constexpr std::array<const char*, 12> kColours{"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                               "#E69F00", "#56B4E9", "#4D4D4D", "#8C6D00",
                                               "#00455C", "#7A2E00", "#5B3A6B", "#2E6B00"};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

std::string scatterSvg(const std::vector<ScatterPoint>& points, const std::string& title,
                       const std::string& unit) {
  double low = 1e300, high = 0;
  for (const ScatterPoint& p : points) {
    low = std::min({low, p.measured, p.predicted});
    high = std::max({high, p.measured, p.predicted});
  }
  if (points.empty()) low = 1, high = 10;
  const double first = std::floor(std::log10(low)), last = std::max(first + 1, std::ceil(std::log10(high)));
  const auto scaled = [&](double value) { return (std::log10(value) - first) / (last - first) * kSize; };
  const auto x = [&](double value) { return kLeft + scaled(value); };
  const auto y = [&](double value) { return kTop + kSize - scaled(value); };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
      "<text x=\"{2}\" y=\"24\" font-size=\"15\">{3}</text>\n",
      kLeft + kSize + kLegend, kTop + kSize + 56, kLeft, escaped(title));
  const double a = std::pow(10, first), b = std::pow(10, last);
  svg += fmt::format(
      "<clipPath id=\"plot\"><rect x=\"{0}\" y=\"{1}\" width=\"{2}\" height=\"{2}\"/></clipPath>\n"
      "<polygon clip-path=\"url(#plot)\" fill=\"#eee\" points=\"{3:.1f},{4:.1f} {5:.1f},{6:.1f} "
      "{5:.1f},{7:.1f} "
      "{3:.1f},{8:.1f}\"/>\n",
      kLeft, kTop, kSize, x(a), y(1.1 * a), x(b), y(1.1 * b), y(0.9 * b), y(0.9 * a));
  svg += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#999\"/>\n",
                     x(a), y(a), x(b), y(b));
  svg +=
      fmt::format("<rect x=\"{0}\" y=\"{1}\" width=\"{2}\" height=\"{2}\" fill=\"none\" stroke=\"#333\"/>\n",
                  kLeft, kTop, kSize);
  for (double power = first; power <= last; ++power) {
    const double value = std::pow(10, power);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{:g}</text>\n", x(value),
                       kTop + kSize + 18, value);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{:g}</text>\n", kLeft - 6,
                       y(value) + 4, value);
  }
  svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">measured [{}]</text>\n",
                     kLeft + kSize / 2, kTop + kSize + 42, escaped(unit));
  svg += fmt::format(
      "<text transform=\"translate(18 {:.1f}) rotate(-90)\" text-anchor=\"middle\">predicted [{}]</text>\n",
      kTop + kSize / 2, escaped(unit));
  std::map<std::string, std::vector<const ScatterPoint*>> series;
  for (const ScatterPoint& p : points) series[p.series].push_back(&p);
  std::size_t index = 0;
  for (const auto& [name, members] : series) {
    const char* const colour = kColours[index % kColours.size()];
    svg += fmt::format("<g fill=\"{}\" fill-opacity=\"0.65\">\n", colour);
    for (const ScatterPoint* p : members)
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"><title>{}</title></circle>\n",
                         x(p->measured), y(p->predicted), escaped(p->label));
    const double at = kTop + 14 + 18 * static_cast<double>(index);
    svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\"/></g>\n", kLeft + kSize + 22, at - 4);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{} ({})</text>\n", kLeft + kSize + 34, at,
                       escaped(name), members.size());
    ++index;
  }
  return svg + "</svg>\n";
}

}  // namespace bmt::trace
