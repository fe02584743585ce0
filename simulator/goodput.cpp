#include "simulator/goodput.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace bmt::sim {
namespace {

constexpr double kDay = 86400, kHour = 3600;

void needPositive(const char* what, double value, bool zero_allowed) {
  if (!std::isfinite(value) || value < 0 || (value == 0 && !zero_allowed))
    throw Error(ErrorKind::BadInput,
                fmt::format("{} is {}, expected a {} figure", what, value,
                            zero_allowed ? "non-negative" : "positive"),
                "training run");
}

}  // namespace

double youngInterval(double checkpoint_s, double mtbf_s) {
  return std::sqrt(2 * checkpoint_s * mtbf_s);
}

double dalyInterval(double checkpoint_s, double mtbf_s) {
  if (!(checkpoint_s < 2 * mtbf_s)) return mtbf_s;
  const double ratio = checkpoint_s / (2 * mtbf_s);
  return youngInterval(checkpoint_s, mtbf_s) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - checkpoint_s;
}

double goodput(double interval_s, double checkpoint_s, double restart_s, double mtbf_s) {
  if (std::isinf(mtbf_s)) return interval_s / (interval_s + checkpoint_s);
  return interval_s /
         (mtbf_s * std::exp(restart_s / mtbf_s) * std::expm1((interval_s + checkpoint_s) / mtbf_s));
}

double checkpointBytes(const ModelSpec& model, const Plan& plan) {
  const double per_parameter = plan.precision == DType::F32 ? 12 : 14;
  return per_parameter * static_cast<double>(numParams(model));
}

TrainingRun trainingRun(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan, double step_s,
                        double tokens, const FailureModel& f) {
  needPositive("tokens", tokens, false);
  needPositive("step time", step_s, false);
  needPositive("device MTBF", f.mtbf_device_h, true);
  needPositive("storage bandwidth", f.storage_bandwidth, true);
  needPositive("restart time", f.restart_s, true);
  needPositive("price", f.price_per_device_h, true);
  TrainingRun run;
  run.tokens = tokens;
  run.steps = std::ceil(tokens / static_cast<double>(plan.global_batch * model.seq_len));
  const double useful_s = run.steps * step_s;
  run.compute_days = useful_s / kDay;
  run.restart_s = f.restart_s;
  const double storage =
      f.storage_bandwidth > 0 ? f.storage_bandwidth : kLlama3StoragePerNode * cluster.numNodes();
  run.checkpoint_bytes = checkpointBytes(model, plan);
  run.checkpoint_s = run.checkpoint_bytes / storage;
  double wall_s = useful_s;
  if (f.mtbf_device_h > 0) {
    run.mtbf_s = f.mtbf_device_h * kHour / plan.numRanks();
    run.interval_young_s = youngInterval(run.checkpoint_s, run.mtbf_s);
    run.interval_s = dalyInterval(run.checkpoint_s, run.mtbf_s);
    run.goodput = goodput(run.interval_s, run.checkpoint_s, run.restart_s, run.mtbf_s);
    wall_s = useful_s / run.goodput;
    run.failures = wall_s / run.mtbf_s;
  }
  run.days = wall_s / kDay;
  run.device_hours = wall_s / kHour * plan.numRanks();
  run.cost = run.device_hours * f.price_per_device_h;
  run.assumptions = fmt::format(
      "device MTBF {:.0f} h{}; checkpoint {:.1f} GB at {}/s{}; restart {:.0f} s", f.mtbf_device_h,
      f.mtbf_device_h == kLlama3MtbfHours ? " (Llama 3: 419 interruptions in 54 days on 16,384 GPUs)" : "",
      run.checkpoint_bytes * 1e-9, formatBytes(static_cast<Bytes>(storage)),
      f.storage_bandwidth > 0 ? "" : " (Llama 3: 2 TB/s for 2,048 nodes)", f.restart_s);
  return run;
}

}  // namespace bmt::sim
