// bmtrain train: runs a plan for real, on this machine's CPU, and says how fast it was.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <memory>

#include "cli/command.h"
#include "core/json.h"
#include "core/lower.h"
#include "core/units.h"
#include "executor/data_loader.h"
#include "executor/trainer.h"
#include "simulator/report.h"
#include "traces/chrome_trace.h"

namespace bmt::cli {
namespace {

constexpr std::int64_t kTracedSteps = 9;  // the last ones; the median of them is written
constexpr std::size_t kWarmupSteps = 2;   // not counted in the step time
constexpr std::int64_t kProgressLines = 40;

struct Options {
  std::string model, cluster, plan, data, trace, profile, device = "cpu", comm = "threads", inject;
  std::int64_t seq = 0, steps = 100, warmup = -1;
  double lr = 1e-3, min_lr = -1, clip = 1.0, timeout = 30;
};

std::atomic<bool> stop_requested{false};
void onInterrupt(int) {
  stop_requested = true;
}

// "kill:RANK:STEP"
void parseInject(const std::string& text, std::int32_t num_ranks, exec::TrainOptions& options) {
  if (text.empty()) return;
  std::int64_t rank = -1, step = -1;
  int used = 0;
  if (std::sscanf(text.c_str(), "kill:%ld:%ld%n", &rank, &step, &used) != 2 ||
      used != static_cast<int>(text.size()) || rank < 0 || rank >= num_ranks || step < 0)
    throw Error(
        ErrorKind::BadInput,
        fmt::format("--inject '{}': expected kill:RANK:STEP with a rank from 0 to {} and a step from 0", text,
                    num_ranks - 1));
  options.kill_rank = static_cast<RankId>(rank);
  options.kill_step = step;
}

exec::DataLoader openData(const Options& o, const ModelSpec& model, const Plan& plan, std::uint64_t seed) {
  exec::TokenFile file = exec::readTokenFile(o.data);
  for (std::size_t i = 0; i < file.tokens.size(); ++i) {
    if (file.tokens[i] < 0 || file.tokens[i] >= model.vocab)
      throw Error(
          ErrorKind::BadInput,
          fmt::format("token {} at position {} is outside the model's vocabulary of {}; use a model with a "
                      "vocabulary of at least {}, or prepare the text with a smaller one",
                      file.tokens[i], i, model.vocab, std::max(file.vocab, std::int64_t{file.tokens[i]} + 1)),
          o.data);
  }
  return exec::DataLoader(std::move(file), model.seq_len, plan.global_batch, seed);
}

double medianSeconds(const std::vector<exec::StepReport>& steps) {
  std::vector<double> seconds;
  for (std::size_t i = steps.size() > kWarmupSteps ? kWarmupSteps : 0; i < steps.size(); ++i)
    seconds.push_back(steps[i].seconds);
  if (seconds.empty()) return 0;
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

struct Outcome {
  const ModelSpec& model;
  const Plan& plan;
  const exec::TrainResult& result;
  double step_time_s, tokens_per_s;
  double predicted_s;  // 0 = no profile was given
  double errorPct() const { return 100 * (predicted_s - step_time_s) / step_time_s; }
};

void printJson(const Outcome& o, const Options& options) {
  std::vector<double> losses, norms;
  for (const exec::StepReport& step : o.result.steps) {
    losses.push_back(step.loss);
    norms.push_back(step.grad_norm);
  }
  Json json{{"schema", "bmtrain.train/1"},
            {"model", o.model.name},
            {"plan", planToText(o.plan)},
            {"device", options.device},
            {"comm", options.comm},
            {"num_ranks", o.plan.numRanks()},
            {"steps", o.result.steps.size()},
            {"losses", losses},
            {"final_loss", losses.empty() ? Json() : Json(losses.back())},
            {"grad_norms", norms},
            {"skipped_steps", 0},
            {"step_time_s", o.step_time_s},
            {"tokens_per_s", o.tokens_per_s},
            {"cpu_s_per_step", o.result.cpu_seconds_per_step},
            {"peak_memory_bytes", o.result.peak_memory},
            {"peak_rss_bytes", o.result.peak_rss}};
  json["predicted_step_time_s"] = o.predicted_s > 0 ? Json(o.predicted_s) : Json();
  json["prediction_error_pct"] = o.predicted_s > 0 ? Json(o.errorPct()) : Json();
  const auto wire = [&](TaskKind kind) { return o.result.comm_bytes[static_cast<std::size_t>(kind)]; };
  json["bytes_on_wire"] = {{"tensor", wire(TaskKind::TensorComm)},
                           {"data", wire(TaskKind::DataComm)},
                           {"pipeline", wire(TaskKind::PipeComm)}};
  json["rebalances"] = Json::array();
  json["checkpoint"] = Json();
  fmt::print("{}\n", json.dump(2));
}

void printText(const Outcome& o, const Options& options) {
  const auto& steps = o.result.steps;
  const Bytes peak = *std::max_element(o.result.peak_memory.begin(), o.result.peak_memory.end());
  fmt::print("{}: {} steps of {} on {} ranks ({}), loss {:.4f} -> {:.4f}\n", o.model.name, steps.size(),
             planToText(o.plan), o.plan.numRanks(), options.comm, steps.front().loss, steps.back().loss);
  fmt::print("  step {} (median), {:.0f} tokens/s, {:.1f} ms of CPU per step\n",
             formatDuration(o.step_time_s), o.tokens_per_s, 1e3 * o.result.cpu_seconds_per_step);
  fmt::print("  arena {} on the largest rank, {} resident at most\n", formatBytes(peak),
             formatBytes(o.result.peak_rss));
  if (o.predicted_s > 0)
    fmt::print("  predicted step {}: error {:+.1f} %\n", formatDuration(o.predicted_s), o.errorPct());
}

int run(const Globals& globals, const Options& o) {
  if (o.device != "cpu") throw Error(ErrorKind::Runtime, "no CUDA backend in this build; use --device cpu");
  if (o.comm == "mpi") throw Error(ErrorKind::Runtime, "--comm mpi is not part of this build; use --comm threads");
  ModelSpec model = loadModel(o.model);
  if (o.seq > 0) model.seq_len = o.seq;
  const Plan plan = loadPlan(o.plan);
  const ClusterSpec cluster = o.cluster.empty() ? localCluster(plan.numRanks()) : loadCluster(o.cluster);
  throwIfAny(validateModel(model), "the model is not legal");
  throwIfAny(validatePlan(model, cluster, plan), "the plan is not legal");
  const exec::DataLoader data = openData(o, model, plan, globals.seed);

  exec::TrainOptions options;
  options.steps = o.steps;
  options.lr = o.lr;
  options.min_lr = o.min_lr >= 0 ? o.min_lr : 0.1 * o.lr;
  options.warmup = o.warmup >= 0 ? o.warmup : std::min<std::int64_t>(100, o.steps / 10);
  options.clip = o.clip;
  options.seed = globals.seed;
  options.deadline_s = o.timeout;
  options.trace_steps = o.trace.empty() ? 0 : std::min(kTracedSteps, o.steps);
  options.stop = &stop_requested;
  parseInject(o.inject, plan.numRanks(), options);
  const double tokens = static_cast<double>(plan.global_batch * model.seq_len);
  const std::int64_t every = std::max<std::int64_t>(1, o.steps / kProgressLines);
  if (!globals.quiet && !globals.no_progress) {
    options.on_step = [&, every, tokens](const exec::StepReport& step) {
      if (step.step > 2 && step.step % every != 0 && step.step + 1 != o.steps) return;
      fmt::print(stderr,
                 "step {:>{}}/{}  loss {:.4f}  lr {:.2e}  grad norm {:.3f}  {:.0f} tok/s  {:.1f} ms\n",
                 step.step + 1, fmt::formatted_size("{}", o.steps), o.steps, step.loss, step.lr,
                 step.grad_norm, tokens / step.seconds, 1e3 * step.seconds);
    };
  }
  double predicted_s = 0;
  if (!o.profile.empty()) {
    predicted_s = sim::simulatePlan(model, cluster, plan, sim::chooseProfile(cluster, o.profile),
                                    RankSelection::Folded, Granularity::Layer)
                      .report.step_time_s;
  }
  std::signal(SIGINT, onInterrupt);
  const TaskGraph graph = lower(model, cluster, plan, RankSelection::All, Granularity::Layer);
  exec::TrainResult result = exec::trainThreads(
      graph,
      [&data](std::int64_t step, std::int64_t begin, std::int64_t end, std::int32_t* tokens_out,
              std::int32_t* targets_out) { data.read(step, begin, end, tokens_out, targets_out); },
      options);
  if (!o.trace.empty()) {
    result.trace.cluster = cluster.name;
    trace::writeTrace(result.trace, o.trace);
  }
  const double step_time_s = medianSeconds(result.steps);
  const Outcome outcome{model, plan, result, step_time_s, tokens / step_time_s, predicted_s};
  if (globals.json) {
    printJson(outcome, o);
  } else if (!globals.quiet) {
    printText(outcome, o);
  }
  if (!result.stopped) return 0;
  fmt::print(stderr, "bmtrain: interrupted after step {} of {}\n", result.steps.size(), o.steps);
  return 130;
}

}  // namespace

void addTrain(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand("train", "Run a plan for real and measure it");
  command->footer(
      "Example: bmtrain train --model examples/demo-model.json --plan dp=2,pp=2,mb=1,gb=8 --data text.bin "
      "--steps 100 --trace step.trace.json");
  const auto o = std::make_shared<Options>();
  command->add_option("--model", o->model, "Preset, config.json or model file")->required();
  command->add_option("--plan", o->plan, "Plan text or file")->required();
  command->add_option("--data", o->data, "Token file (bmtrain prepare)")->required();
  command->add_option("--cluster", o->cluster, "Default: local with as many ranks as the plan has");
  command->add_option("--seq", o->seq, "Sequence length instead of the model's")->check(CLI::PositiveNumber);
  command->add_option("--steps", o->steps, "Steps to train")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--device", o->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--comm", o->comm, "Ranks are threads of this process, or MPI processes")
      ->check(CLI::IsMember({"threads", "mpi"}))
      ->capture_default_str();
  command->add_option("--trace", o->trace,
                      "Write the measured trace of the median of the last 9 steps (.gz: compressed)");
  command->add_option("--profile", o->profile, "Cost profile: also predict the step and state the error");
  command->add_option("--lr", o->lr, "Peak learning rate")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--min-lr", o->min_lr, "Learning rate at the end of the cosine; default lr / 10")
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--warmup", o->warmup,
                   "Steps of linear warm-up; default a tenth of the steps, at most 100")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--clip", o->clip, "Largest global gradient norm; 0 = no clipping")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--timeout", o->timeout,
                   "Seconds that one communication may take (the first step: 10 times)")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--inject", o->inject,
                      "For tests: kill:RANK:STEP lets that rank die in the middle of that step");
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
