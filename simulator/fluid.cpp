#include "simulator/fluid.h"

#include <algorithm>

namespace bmt::sim {

void FairShare::clear() {
  capacities.clear();
  first_.clear();
  uses_.clear();
}

void FairShare::beginActivity() {
  first_.push_back(uses_.size());
}

void FairShare::add(std::int32_t resource, double demand) {
  for (std::size_t i = first_.back(); i < uses_.size(); ++i) {
    if (uses_[i].resource != resource) continue;
    uses_[i].demand += demand;
    return;
  }
  uses_.push_back({resource, demand});
}

void FairShare::solve() {
  const std::size_t n = first_.size();
  first_.push_back(uses_.size());
  rates.assign(n, 1.0);
  state_.assign(n, 0);
  left_ = capacities;
  demand_.assign(capacities.size(), 0);
  for (const Use& use : uses_) demand_[static_cast<std::size_t>(use.resource)] += use.demand;
  std::size_t rising = n;
  while (rising > 0) {
    // The common level at which the first resource fills up.
    double level = 1.0;
    for (std::size_t r = 0; r < left_.size(); ++r) {
      if (demand_[r] > 1e-12) level = std::min(level, std::max(0.0, left_[r]) / demand_[r]);
    }
    bool any = false;
    for (std::size_t i = 0; i < n; ++i) {
      if (state_[i] != 0) continue;
      bool limited = false;
      for (std::size_t u = first_[i]; u < first_[i + 1]; ++u) {
        const auto r = static_cast<std::size_t>(uses_[u].resource);
        limited = limited || std::max(0.0, left_[r]) / demand_[r] <= level * (1 + 1e-9);
      }
      if (level < 1.0 && !limited) continue;
      rates[i] = std::min(1.0, level);
      state_[i] = 2;
      any = true;
    }
    if (!any) break;
    for (std::size_t i = 0; i < n; ++i) {
      if (state_[i] != 2) continue;
      state_[i] = 1;
      --rising;
      for (std::size_t u = first_[i]; u < first_[i + 1]; ++u) {
        left_[static_cast<std::size_t>(uses_[u].resource)] -= rates[i] * uses_[u].demand;
        demand_[static_cast<std::size_t>(uses_[u].resource)] -= uses_[u].demand;
      }
    }
  }
}

std::vector<double> maxMinRates(const std::vector<std::vector<Use>>& uses,
                                const std::vector<double>& capacities) {
  FairShare problem;
  problem.capacities = capacities;
  for (const auto& activity : uses) {
    problem.beginActivity();
    for (const Use& use : activity) problem.add(use.resource, use.demand);
  }
  problem.solve();
  return problem.rates;
}

}  // namespace bmt::sim
