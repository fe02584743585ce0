// Predictions against published runs: every row simulated as the source describes it, then errors, rankings
// and whether it fits. Sorting, grouping and averaging only; nothing is fitted here.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "simulator/measured_run.h"
#include "traces/cost_profile.h"

namespace bmt::sim {

struct ValidatedRun {
  MeasuredRun run;
  double step_s = 0;    // predicted
  double peak_gib = 0;  // predicted, as the source counts it
  bool fits = true;
  double simulate_s = 0;
  double errorPct() const { return 100 * (step_s / *run.step_s - 1); }
  double memoryErrorPct() const { return 100 * (peak_gib / *run.peak_gib - 1); }
};

struct ErrorSummary {
  std::int64_t n = 0;
  double mape_pct = 0, median_ape_pct = 0, p90_ape_pct = 0, bias_pct = 0, spearman = 0;
};

// Runs that differ in layout only: same source, model, sequence length, devices and global batch.
struct GridSummary {
  std::string name;
  std::int64_t n = 0;
  double kendall_tau = 0;
  double regret_pct = 0;  // measured time of the run predicted best over the measured best
};

struct FitSummary {  // memory verdicts against outcomes
  std::int64_t worked = 0, worked_said_to_fit = 0, failed = 0, failed_said_not_to_fit = 0;
  double accuracyPct() const {
    return 100.0 * static_cast<double>(worked_said_to_fit + failed_said_not_to_fit) /
           static_cast<double>(std::max<std::int64_t>(1, worked + failed));
  }
};

struct Validation {
  std::vector<ValidatedRun> runs;    // in file order
  std::vector<MeasuredRun> skipped;  // `skip` says why
  ErrorSummary summary, memory;
  std::map<std::string, ErrorSummary> by_source, by_gpu, memory_by_source;
  std::vector<GridSummary> grids;                      // with at least 4 runs
  std::map<std::string, GridSummary> grids_by_source;  // means over the source's grids, n = grids
  FitSummary fit;
};

struct ValidateOptions {
  std::function<trace::CostProfile(const ClusterSpec&)> profile;  // called once per device name
  int jobs = 0;
  std::function<void(std::int64_t, std::int64_t)> progress;  // done, total; from one thread at a time
};

ValidatedRun predictRun(const MeasuredRun& run, const trace::CostProfile& profile);
Validation validateRuns(const std::vector<MeasuredRun>& runs, const ValidateOptions& options);

// Statistics, exposed for tests. Ties: Spearman on mean ranks, Kendall tau-b. 0 for fewer than 2 values.
double spearman(const std::vector<double>& a, const std::vector<double>& b);
double kendallTau(const std::vector<double>& a, const std::vector<double>& b);
ErrorSummary summarize(const std::vector<double>& predicted, const std::vector<double>& measured);

std::string validationToJson(const Validation& validation);  // bmtrain.validate/1
std::string validationToText(const Validation& validation);

}  // namespace bmt::sim
