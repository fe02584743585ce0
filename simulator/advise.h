// What one change of a plan would bring: every neighbour is simulated, nothing is estimated by rule.
// Neighbours: zero +-1, sp, recompute, micro-batch x2 and /2, chunks x2 and /2, schedules, two axes traded by
// 2, offload, precision, overlap, attention, loss chunks. Where the plan does not fit and no single change
// makes it fit, pairs of the changes that free most memory are tried too.
#pragma once

#include <string>
#include <vector>

#include "simulator/report.h"

namespace bmt::sim {

struct Change {
  std::string name;  // "zero=1", "tp=4,dp=4"
  Plan plan;
  Report report;           // of the changed plan
  double step_ratio = 1;   // changed / unchanged step
  Bytes memory_freed = 0;  // of the worst device; negative: needs more
  std::string effect;      // "step -3.1 %, frees 11.2 GiB, bubble 11.1 % -> 5.9 %"
};

struct Advice {
  Report base;
  // The plan fits: faster changes that fit, fastest first, then those that free memory, the most per lost
  // time first. It does not fit: changes that make it fit, fastest first.
  std::vector<Change> changes;
  std::int64_t simulated = 0, illegal = 0,
               refused = 0;  // neighbours; refused: legal, but could not be costed
  std::int64_t pairs = 0;    // of them, combinations of two changes
};

// `options.explain` and jitter are not needed. Deterministic for any number of jobs.
Advice advise(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
              const std::vector<trace::CostProfile>& profiles, const SimulateOptions& options);

// Plans that differ from `plan` in one decision, legal or not, with the name of the change.
std::vector<std::pair<std::string, Plan>> neighbours(const Plan& plan);

std::string adviceToJson(const Advice& advice, std::int64_t top);
std::string adviceToText(const Advice& advice, std::int64_t top);

}  // namespace bmt::sim
