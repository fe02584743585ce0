// Failures and checkpoints turned into goodput, time to train and cost.
//   M      mean time between failures of the job = device MTBF / devices (independent, exponential failures)
//   delta  time of a checkpoint = its bytes / storage bandwidth (training stands still meanwhile)
//   tau    useful time between checkpoints
//     Young 1974            sqrt(2 delta M)
//     Daly 2006, eq. 37     sqrt(2 delta M) (1 + sqrt(delta / (2 M)) / 3 + (delta / (2 M)) / 9) - delta
//                           for delta < 2 M, else M
//   wall time per useful time, Daly 2006, eq. 20:  M e^(R/M) (e^((tau + delta)/M) - 1) / tau
//   goodput = its inverse
#pragma once

#include <string>

#include "core/cluster_spec.h"
#include "core/model_spec.h"
#include "core/plan.h"

namespace bmt::sim {

double youngInterval(double checkpoint_s, double mtbf_s);
double dalyInterval(double checkpoint_s, double mtbf_s);
// Share of wall time that is useful, in (0, 1]; mtbf_s = infinity: only checkpoints cost.
double goodput(double interval_s, double checkpoint_s, double restart_s, double mtbf_s);

// Llama 3 (Dubey et al. 2024, table 5): 419 unexpected interruptions in 54 days on 16,384 GPUs.
inline constexpr double kLlama3MtbfHours = 54.0 * 24 * 16384 / 419;
// The same paper, section 3.3.1: storage sustains 2 TB/s for up to 16,384 GPUs in nodes of 8.
inline constexpr double kLlama3StoragePerNode = 2e12 / 2048;

struct FailureModel {
  double mtbf_device_h = kLlama3MtbfHours;  // 0 = devices never fail
  double storage_bandwidth = 0;             // B/s of the whole cluster; 0 = kLlama3StoragePerNode per node
  double restart_s = 600;                   // detect, reschedule, load: assumed, the paper gives no mean
  double price_per_device_h = 0;            // 0 = unknown
};

struct TrainingRun {
  double tokens = 0;
  double steps = 0;         // whole steps, rounded up
  double compute_days = 0;  // steps alone
  double mtbf_s = 0;        // of the job; 0 = never fails
  double checkpoint_bytes = 0, checkpoint_s = 0, restart_s = 0;
  double interval_young_s = 0, interval_s = 0;  // Daly's is used
  double goodput = 1;
  double days = 0;                    // with checkpoints and failures
  double device_hours = 0, cost = 0;  // cost: 0 when no price is known
  double failures = 0;                // expected over the run
  std::string assumptions;
};

// Weights and optimizer state of the whole model: 16-bit weights with an fp32 copy and two moments, 14 bytes
// a parameter; fp32 weights and two moments, 12.
double checkpointBytes(const ModelSpec& model, const Plan& plan);

// Throws Error{BadInput} for figures that are not positive and finite.
TrainingRun trainingRun(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan, double step_s,
                        double tokens, const FailureModel& failures);

}  // namespace bmt::sim
