// Max-min fairness: no resource above capacity, and every activity is at full speed or held back by a full
// resource.
#include "simulator/fluid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace bmt::sim {
namespace {

TEST(Fluid, EqualUsersShareEqually) {
  const std::vector<double> rates = maxMinRates({{{0, 1.0}}, {{0, 1.0}}, {{0, 1.0}}, {{0, 1.0}}}, {2.0});
  for (const double rate : rates) EXPECT_DOUBLE_EQ(rate, 0.5);
}

TEST(Fluid, AloneEveryoneRunsAtFullSpeed) {
  EXPECT_EQ(maxMinRates({{{0, 1.0}}, {{1, 0.3}}}, {1.0, 1.0}), (std::vector<double>{1.0, 1.0}));
}

TEST(Fluid, TheRestOfAnUnevenLinkGoesToWhoeverCanUseIt) {
  // A and B share link 0; B is limited to 1/4 by link 1, so A gets the remaining 3/4.
  const std::vector<double> rates = maxMinRates({{{0, 1.0}}, {{0, 1.0}, {1, 1.0}}}, {1.0, 0.25});
  EXPECT_DOUBLE_EQ(rates[0], 0.75);
  EXPECT_DOUBLE_EQ(rates[1], 0.25);
}

class FluidProperty : public testing::TestWithParam<unsigned> {};

TEST_P(FluidProperty, FeasibleAndMaxMin) {
  std::mt19937 random(GetParam());
  const std::size_t num_resources = 1 + random() % 4, num_activities = 1 + random() % 7;
  std::vector<double> capacities;
  for (std::size_t r = 0; r < num_resources; ++r)
    capacities.push_back(0.1 + static_cast<double>(random() % 30) / 10);
  std::vector<std::vector<Use>> uses(num_activities);
  for (auto& activity : uses) {
    for (std::size_t r = 0; r < num_resources; ++r) {
      if (random() % 2 == 0)
        activity.push_back({static_cast<ResourceId>(r), 0.1 + static_cast<double>(random() % 10) / 10});
    }
  }
  const std::vector<double> rates = maxMinRates(uses, capacities);
  std::vector<double> load(num_resources, 0);
  for (std::size_t i = 0; i < uses.size(); ++i) {
    EXPECT_GT(rates[i], 0);
    EXPECT_LE(rates[i], 1);
    for (const Use& use : uses[i]) load[static_cast<std::size_t>(use.resource)] += rates[i] * use.demand;
  }
  for (std::size_t r = 0; r < num_resources; ++r) EXPECT_LE(load[r], capacities[r] * (1 + 1e-9));
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const bool saturated = std::any_of(uses[i].begin(), uses[i].end(), [&](const Use& use) {
      const auto r = static_cast<std::size_t>(use.resource);
      return load[r] >= capacities[r] * (1 - 1e-9);
    });
    EXPECT_TRUE(rates[i] == 1.0 || saturated) << "activity " << i << " runs at " << rates[i];
  }
  // Listing the activities in another order changes nothing.
  std::vector<std::vector<Use>> reversed(uses.rbegin(), uses.rend());
  const std::vector<double> again = maxMinRates(reversed, capacities);
  for (std::size_t i = 0; i < rates.size(); ++i) EXPECT_NEAR(rates[i], again[rates.size() - 1 - i], 1e-9);
}
INSTANTIATE_TEST_SUITE_P(Random, FluidProperty, testing::Range(0U, 200U));

}  // namespace
}  // namespace bmt::sim
