// Report: what a simulated step tells a user. Field names of the JSON document are a promise
// (bmtrain.report/1).
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "core/cluster_spec.h"
#include "core/task_graph.h"
#include "simulator/engine.h"
#include "simulator/explain.h"
#include "simulator/goodput.h"
#include "traces/cost_profile.h"
#include "traces/shares.h"

namespace bmt::sim {

struct StageMemory {
  std::int32_t stage = 0;
  std::array<Bytes, kNumBufferKinds> by_kind{};  // at the peak of the stage's worst rank
  Bytes overhead = 0;                            // arena beyond the live bytes: alignment and fragmentation
  Bytes total = 0;
};

struct AxisComm {
  std::string axis;           // "tensor", "data", "pipeline"
  double bytes_per_rank = 0;  // buffer bytes of the communications of one rank, mean over ranks
  double time_s = 0;          // mean over ranks of the time they run
  double exposed_s = 0;       // of it, time in which the rank computes nothing
};

// Steps under random task durations (cluster_costs.h).
struct JitterResult {
  double sigma = 0;
  std::int64_t draws = 0;
  std::uint64_t seed = 0;
  double mean_s = 0, p95_s = 0, min_s = 0, max_s = 0;
};

struct Report {
  std::string model, cluster, plan, profile;
  bool fits = true;
  double step_time_s = 0, tokens_per_s = 0, tokens_per_s_per_device = 0, model_tflops_per_device = 0;
  // Model FLOPs over peak: attention not halved; halved (causal); with recompute. 0 when the peak is unknown.
  double mfu = 0, mfu_causal = 0, hfu = 0;
  trace::Shares shares;
  Bytes peak_memory = 0, device_memory = 0;
  RankId worst_rank = 0;  // the rank whose memory is fullest
  double memory_share =
      0;  // peak over what is there: of the worst device, or of the CPU node its ranks share
  std::vector<StageMemory> memory;
  std::vector<AxisComm> comm;
  std::vector<std::pair<std::string, double>> critical_path;  // seconds by cause; adds up to the step
  std::vector<CriticalTask> critical_tasks;                   // when asked for
  std::optional<Explanation> explanation;                     // when asked for
  std::optional<JitterResult> jitter;                         // when asked for
  std::optional<TrainingRun> training;                        // when the number of tokens is known
  bool executed = true;  // false: a device of the cluster is simulated only
  std::int64_t num_ranks = 0, num_tasks = 0, num_events = 0;
  double simulate_wall_s = 0;
  std::vector<std::string> warnings;
};

struct Simulation {
  Report report;
  trace::Trace trace;
};

struct SimulateOptions {
  // Empty: one rank per stage where ranks are alike, all elsewhere. Folded where they differ is refused.
  std::optional<RankSelection> selection;
  Granularity granularity = Granularity::Layer;
  bool explain = false, critical_tasks = false;
  double jitter = 0;    // sigma of the lognormal factor of every duration
  bool details = true;  // names of the spans, memory over time, critical path; a sweep does without
  std::int64_t draws = 20;
  std::uint64_t seed = 1;
  int jobs = 1;
};

// `profiles`: one per node group of the cluster.
Simulation simulatePlan(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
                        const std::vector<trace::CostProfile>& profiles, const SimulateOptions& options);

// Lowers, costs and plays one legal plan. Throws Error{BadInput} for an inconsistent profile and when the
// prediction exceeds 100 % of peak.
Simulation simulatePlan(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
                        const trace::CostProfile& profile, RankSelection selection, Granularity granularity,
                        const SimOptions& options = {});

// Model FLOPs of one step: per token 6 N + 12 L T (heads * d_head), N without the input embedding's table but
// with the head (Narayanan et al. 2021 count the logit layer, not the look-up); `causal` halves the attention
// term.
double modelFlopsPerStep(const ModelSpec& model, const Plan& plan, bool causal);
// The same with the layers' second forward under full recompute (the head is not recomputed).
double hardwareFlopsPerStep(const ModelSpec& model, const Plan& plan);

std::string reportToJson(const Report& report);
std::string reportToText(const Report& report);

// The profile a command uses: the file, else the machine's calibrated one for `local` clusters, else the
// device's datasheet.
trace::CostProfile chooseProfile(const ClusterSpec& cluster, const std::string& path);
// The same for every node group; a file is for clusters of one device type.
std::vector<trace::CostProfile> chooseProfiles(const ClusterSpec& cluster, const std::string& path);

// Why ranks of the plan on this cluster are not alike; empty = they are.
std::string whyNotFolded(const ClusterSpec& cluster, const Plan& plan);

}  // namespace bmt::sim
