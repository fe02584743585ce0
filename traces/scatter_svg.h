// Predicted against measured as an SVG: one dot per run on logarithmic axes, coloured by series, with the
// diagonal and a band of +-10 %.
#pragma once

#include <string>
#include <vector>

namespace bmt::trace {

struct ScatterPoint {
  double measured = 0, predicted = 0;  // positive
  std::string series;                  // legend entry
  std::string label;                   // shown on hover
};

std::string scatterSvg(const std::vector<ScatterPoint>& points, const std::string& title,
                       const std::string& unit);

}  // namespace bmt::trace
