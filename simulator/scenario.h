// Scenario: two plans for one training run on the same hardware, with the durations that are claimed for
// them. Says what each claim needs of the devices, what the simulator predicts, and which claims can be true.
//   FLOPs of the run      6 N tokens, N = parameters: the least that training needs (attention adds to it)
//   utilisation needed    FLOPs / (days * devices * peak)
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "simulator/report.h"

namespace bmt::sim {

struct ScenarioPlan {
  std::string name;
  Plan plan;
  double claimed_days = 0;  // 0 = nothing is claimed
};

struct Scenario {
  std::string name;
  ModelSpec model;
  ClusterSpec cluster;
  double tokens = 0;
  ScenarioPlan baseline, tuned;
  std::vector<Plan> candidates;  // searched for the best plan beside the two
  FailureModel failures;
  double mfu_ceiling = 0.6;  // warn above: no published run of this kind reaches more
};

// "bmtrain.scenario/1". Throws Error{BadInput}.
Scenario scenarioFromJson(const std::string& text, const std::string& source);

struct Verdict {
  ScenarioPlan entry;
  std::optional<Report> report;  // with `training`; empty when the plan cannot be costed
  double needed_share = 0;       // of peak, for the claimed days
  bool reachable = true;         // needed_share <= 1, and <= what the best plan reaches
  std::string text;              // the reason
};

struct Technique {
  std::string change;   // one difference of the tuned plan, applied to the baseline
  double speed_up = 1;  // baseline step / changed step; 0: not legal or not costed alone
  bool fits = true;
  std::string note;
};

struct ScenarioReport {
  Scenario scenario;
  double flops = 0, peak_flops_per_s = 0;  // of the run; of all devices
  Verdict baseline, tuned;
  std::optional<Report> best;  // the fastest plan that fits, among baseline, tuned and candidates
  std::int64_t searched = 0;
  double claimed_speed_up = 0, speed_up = 0;  // baseline days / tuned days
  std::string target;                         // "target 3-5x: met" or "target 3-5x: not met"
  std::vector<Technique> techniques;
  std::vector<std::string> warnings;
};

ScenarioReport runScenario(const Scenario& scenario, int jobs);
std::string scenarioToJson(const ScenarioReport& report);
std::string scenarioToText(const ScenarioReport& report);

}  // namespace bmt::sim
