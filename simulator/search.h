// Search: goes through the plans of a cluster (plan_space.h), rules out what is illegal, what cannot fit
// (memory bound) and what cannot be among the best (time bound), and simulates the rest. Bounds never exceed
// the simulated value, so the best plans are those of simulating everything. Results do not depend on the
// number of threads.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "simulator/plan_space.h"
#include "simulator/report.h"

namespace bmt::sim {

struct SearchOptions : SpaceOptions {
  double memory_limit = 1.0;  // share of a device's memory that a plan may use
  bool by_memory = false;     // objective: peak memory instead of throughput
  // Plans that must be exact at the top of the list; others that cannot reach it are not simulated. 0 =
  // simulate all that may fit.
  std::size_t top = 0;
  bool pareto = false;  // the Pareto front of step time and memory must be exact, too
  int jobs = 0;         // 0 = all cores
  // Called from one thread at a time with (done, total, best step so far [s], 0 = none).
  std::function<void(std::int64_t, std::int64_t, double)> progress;
};

struct SearchResult {
  std::int64_t space_size = 0, legal = 0, evaluated = 0, feasible = 0;
  std::map<std::string, std::int64_t> rejected;  // reason -> plans
  std::vector<std::pair<Plan, Report>> plans;    // feasible ones that were simulated, best first
  std::vector<std::size_t> pareto;     // indices in plans: no other is better in both time and memory
  double wall_s = 0, sift_wall_s = 0;  // all; until only plans that bounds leave were left
};

// Legal plans of the space.
std::int64_t countLegal(const ModelSpec& model, const ClusterSpec& cluster, const SearchOptions& options);

SearchResult search(const ModelSpec& model, const ClusterSpec& cluster, const trace::CostProfile& profile,
                    const SearchOptions& options);

}  // namespace bmt::sim
