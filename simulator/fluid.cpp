#include "simulator/fluid.h"

#include <algorithm>
#include <limits>

namespace bmt::sim {

std::vector<double> maxMinRates(const std::vector<std::vector<Use>>& uses,
                                const std::vector<double>& capacities) {
  std::vector<double> rates(uses.size(), 1.0), left = capacities, demand(capacities.size(), 0);
  std::vector<char> frozen(uses.size(), 0);
  for (const auto& activity : uses) {
    for (const Use& use : activity) demand[static_cast<std::size_t>(use.resource)] += use.demand;
  }
  std::size_t active = uses.size();
  while (active > 0) {
    // The common level at which the first resource fills up.
    double level = 1.0;
    for (std::size_t r = 0; r < left.size(); ++r) {
      if (demand[r] > 1e-12) level = std::min(level, std::max(0.0, left[r]) / demand[r]);
    }
    bool any = false;
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (frozen[i] != 0) continue;
      const bool limited = std::any_of(uses[i].begin(), uses[i].end(), [&](const Use& use) {
        const auto r = static_cast<std::size_t>(use.resource);
        return std::max(0.0, left[r]) / demand[r] <= level * (1 + 1e-9);
      });
      if (level < 1.0 && !limited) continue;
      rates[i] = std::min(1.0, level);
      frozen[i] = 2;  // freezes in this round
      any = true;
    }
    if (!any) break;
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (frozen[i] != 2) continue;
      frozen[i] = 1;
      --active;
      for (const Use& use : uses[i]) {
        left[static_cast<std::size_t>(use.resource)] -= rates[i] * use.demand;
        demand[static_cast<std::size_t>(use.resource)] -= use.demand;
      }
    }
  }
  return rates;
}

}  // namespace bmt::sim
