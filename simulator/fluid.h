// Max-min fair sharing of resources among running activities ("progressive filling", Bertsekas and Gallager
// 1992).
#pragma once

#include <cstdint>
#include <vector>

#include "simulator/cost_model.h"

namespace bmt::sim {

// An activity's rate y in (0, 1]: it loads every resource it uses with y * demand. Sets rates[i] of every
// activity in `uses`; capacities[r] is what resource r offers.
std::vector<double> maxMinRates(const std::vector<std::vector<Use>>& uses,
                                const std::vector<double>& capacities);

}  // namespace bmt::sim
