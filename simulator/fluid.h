// Max-min fair sharing of resources among running activities ("progressive filling", Bertsekas and Gallager
// 1992). An activity's rate y in (0, 1] loads every resource it uses with y * demand. All rates rise together
// until a resource is full; its users freeze; the others go on.
#pragma once

#include <cstdint>
#include <vector>

#include "simulator/cost_model.h"

namespace bmt::sim {

// One problem; its vectors are kept for the next one, so that solving does not allocate.
class FairShare {
 public:
  std::vector<double> capacities;  // by resource; filled by the caller
  std::vector<double> rates;       // by activity; set by solve()

  void clear();
  void beginActivity();
  // Demand of the latest activity; several for one resource add up.
  void add(std::int32_t resource, double demand);
  void solve();

 private:
  std::vector<std::size_t> first_;  // by activity: its first use; the last one ends with uses_
  std::vector<Use> uses_;
  std::vector<double> left_, demand_;
  std::vector<char> state_;  // 0 rising, 1 frozen, 2 freezes in this round
};

// The same for one problem at a time.
std::vector<double> maxMinRates(const std::vector<std::vector<Use>>& uses,
                                const std::vector<double>& capacities);

}  // namespace bmt::sim
