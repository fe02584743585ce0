// bmtrain train: runs a plan, ranks as threads or as MPI processes, and reports what it measured beside what
// was predicted.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <csignal>

#include "cli/command.h"
#include "cli/mpi_launch.h"
#include "core/executable.h"
#include "core/json.h"
#include "core/lower.h"
#include "executor/comm/mpi_communicator.h"
#include "executor/data_loader.h"
#include "executor/trainer.h"
#include "simulator/report.h"
#include "traces/chrome_trace.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string model, cluster, plan, data, profile, trace, device = "cpu", comm = "threads", inject;
  std::int64_t seq = 0, steps = 100, warmup = -1;
  double lr = 1e-3, min_lr = -1, clip = 1, weight_decay = 0.1, deadline = 30;
};

std::atomic<bool> interrupted{false};
void onInterrupt(int) {
  interrupted = true;
}

void parseInjection(const std::string& text, exec::TrainOptions& train) {
  const auto number = [&](std::string_view part) {
    std::int32_t value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc{} || end != part.data() + part.size() || value < 0)
      throw Error(ErrorKind::BadInput, fmt::format("--inject '{}': expected kill:RANK:STEP", text));
    return value;
  };
  const std::size_t colon = text.find(':', 5);
  if (!text.starts_with("kill:") || colon == std::string::npos)
    throw Error(ErrorKind::BadInput, fmt::format("--inject '{}': expected kill:RANK:STEP", text));
  train.kill_rank = number(std::string_view(text).substr(5, colon - 5));
  train.kill_step = number(std::string_view(text).substr(colon + 1));
}

// How this process takes part: alone (ranks are threads, or it starts mpirun), or as one rank of a job.
struct Part {
  bool in_job = false;
  exec::LauncherPlace place;
  bool speaks() const { return place.rank == 0; }
};

Part partOf(Options& o) {
  Part part;
  part.in_job = exec::startedByMpiLauncher(part.place) && (part.place.size > 1 || o.comm == "mpi");
  if (part.in_job) o.comm = "mpi";
  return part;
}

void requireSupported(const Options& o) {
  if (o.device == "cuda")
    throw Error(ErrorKind::Runtime, "--device cuda: this version has no CUDA backend; use --device cpu");
  if (o.device != "cpu")
    throw Error(ErrorKind::BadInput, fmt::format("--device '{}': expected cpu or cuda", o.device));
  if (o.comm != "threads" && o.comm != "mpi")
    throw Error(ErrorKind::BadInput, fmt::format("--comm '{}': expected threads or mpi", o.comm));
  if (o.comm == "mpi" && !exec::builtWithMpi())
    throw Error(ErrorKind::Runtime,
                "--comm mpi: this build has no MPI (bmtrain doctor says why); use --comm threads");
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Median after a warm-up of two steps, where there are that many.
double stepTime(const exec::TrainResult& result) {
  std::vector<double> seconds;
  for (const exec::StepReport& step : result.steps) {
    if (step.step >= 2 || result.steps.size() <= 2) seconds.push_back(step.seconds);
  }
  return median(std::move(seconds));
}

std::string resultToJson(const exec::TrainResult& result, const Plan& plan, const Options& o, double step_s,
                         double tokens, double predicted_s) {
  Json json{{"schema", "bmtrain.train/1"},  {"plan", planToText(plan)},     {"device", o.device},
            {"num_ranks", plan.numRanks()}, {"steps", result.steps.size()}, {"losses", Json::array()},
            {"grad_norms", Json::array()}};
  for (const exec::StepReport& step : result.steps) {
    json["losses"].push_back(step.loss);
    json["grad_norms"].push_back(step.grad_norm);
  }
  json["final_loss"] = result.steps.empty() ? Json() : Json(result.steps.back().loss);
  json["step_time_s"] = step_s;
  json["tokens_per_s"] = step_s > 0 ? tokens / step_s : 0;
  json["cpu_s_per_step"] = result.cpu_seconds_per_step;
  json["peak_memory_bytes"] = result.peak_memory;
  json["peak_rss_bytes"] = result.peak_rss;
  json["predicted_step_time_s"] = predicted_s > 0 ? Json(predicted_s) : Json();
  json["prediction_error_pct"] = predicted_s > 0 ? Json(100 * (predicted_s - step_s) / step_s) : Json();
  json["skipped_steps"] = 0;
  const auto bytes = [&](TaskKind kind) { return result.comm_bytes[static_cast<std::size_t>(kind)]; };
  json["bytes_on_wire"] = {{"tensor", bytes(TaskKind::TensorComm)},
                           {"data", bytes(TaskKind::DataComm)},
                           {"pipeline", bytes(TaskKind::PipeComm)}};  // context and expert are not executed
  json["rebalances"] = 0;
  json["checkpoint"] = nullptr;
  return json.dump(2) + "\n";
}

int train(const Globals& globals, const Options& o, const Part& part) {
  requireSupported(o);
  ModelSpec model = loadModel(o.model);
  if (o.seq > 0) model.seq_len = o.seq;
  const Plan plan = loadPlan(o.plan);
  const ClusterSpec cluster =
      loadCluster(o.cluster.empty() ? fmt::format("local:{}", plan.numRanks()) : o.cluster);
  throwIfAny(validatePlan(model, cluster, plan), "the plan is not legal");
  throwIfAny(notExecutable(model, plan), "the plan cannot be executed");
  if (cluster.groups.front().device.kind != DeviceKind::Cpu)
    throw Error(ErrorKind::BadInput,
                fmt::format("--cluster {}: this version trains on local[:RANKS] only", cluster.name));
  const exec::TokenFile tokens = exec::readTokenFile(o.data);
  if (tokens.vocab > model.vocab)
    throw Error(
        ErrorKind::BadInput,
        fmt::format("has a vocabulary of {}, but the model {} has {}", tokens.vocab, model.name, model.vocab),
        o.data);
  const std::int32_t largest =
      tokens.tokens.empty() ? 0 : *std::max_element(tokens.tokens.begin(), tokens.tokens.end());
  if (largest >= model.vocab)
    throw Error(ErrorKind::BadInput,
                fmt::format("holds token {}, but the model {} has a vocabulary of {}", largest, model.name,
                            model.vocab),
                o.data);
  const exec::DataLoader loader(tokens, model.seq_len, plan.global_batch, globals.seed);

  double predicted_s = 0;
  if (!o.profile.empty())
    predicted_s = sim::simulatePlan(model, cluster, plan, trace::loadProfile(o.profile), RankSelection::All,
                                    Granularity::Layer)
                      .report.step_time_s;

  if (part.in_job && part.place.size != plan.numRanks())
    throw Error(ErrorKind::BadInput,
                fmt::format("the launcher started {} processes, the plan has {} ranks; start {}",
                            part.place.size, plan.numRanks(), plan.numRanks()));
  // One rank of a job needs only its own program; rank 0 checks all and names the tasks of all.
  const TaskGraph graph =
      part.speaks() ? lower(model, cluster, plan, RankSelection::All, Granularity::Layer)
                    : lower(model, cluster, plan, std::vector<RankId>{part.place.rank}, Granularity::Layer);
  exec::requireExecutable(graph);
  exec::TrainOptions train;
  train.steps = o.steps;
  train.lr = o.lr;
  train.min_lr = o.min_lr >= 0 ? o.min_lr : o.lr / 10;
  train.warmup = o.warmup >= 0 ? o.warmup : std::min<std::int64_t>(o.steps / 10, 100);
  train.clip = o.clip;
  train.weight_decay = o.weight_decay;
  train.seed = globals.seed;
  train.deadline_s = o.deadline;
  train.trace_steps =
      o.trace.empty() ? 0 : std::min<std::int64_t>(11, std::max<std::int64_t>(1, o.steps - 2));
  if (!o.inject.empty()) parseInjection(o.inject, train);
  if (train.kill_rank >= plan.numRanks())
    throw Error(ErrorKind::BadInput, fmt::format("--inject: rank {} is not one of the plan's {} ranks",
                                                 train.kill_rank, plan.numRanks()));
  if (o.comm == "mpi" && !part.in_job) return runUnderMpirun(plan.numRanks());
  train.stop = &interrupted;
  std::signal(SIGINT, onInterrupt);
  std::signal(part.in_job ? SIGUSR1 : SIGTERM,
              onInterrupt);  // mpirun hands on SIGUSR1; its SIGTERM means the end
  const double tokens_per_step = static_cast<double>(plan.global_batch * model.seq_len);
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  const std::int64_t every = terminal ? 1 : std::max<std::int64_t>(1, o.steps / 20);
  if (!globals.quiet && !globals.no_progress) {
    train.on_step = [&](const exec::StepReport& s) {
      if (s.step % every != 0 && s.step + 1 != o.steps) return;
      fmt::print(stderr,
                 "{}step {:>5}  loss {:8.4f}  grad norm {:8.3f}  lr {:.2e}  {:>9}  {:>7.0f} tokens/s{}",
                 terminal ? "\r" : "", s.step, s.loss, s.grad_norm, s.lr, formatDuration(s.seconds),
                 tokens_per_step / s.seconds, terminal ? "" : "\n");
    };
  }
  const exec::BatchSource batches = [&](std::int64_t step, std::int64_t begin, std::int64_t end,
                                        std::int32_t* in,
                                        std::int32_t* out) { loader.read(step, begin, end, in, out); };
  exec::TrainResult result;
  if (part.in_job) {
    exec::MpiWorld job;
    try {
      result = exec::trainProcess(graph, job, batches, train);
    } catch (const Error& error) {
      fmt::print(stderr, "bmtrain: error: {}\n", error.what());
      std::fflush(nullptr);
      job.abortJob(error.exitCode());
    }
  } else {
    result = exec::trainThreads(graph, batches, train);
  }
  const int stopped_code = part.in_job && launchedByUs() ? 0 : 130;
  if (!part.speaks()) return result.stopped ? stopped_code : 0;
  if (terminal && train.on_step) fmt::print(stderr, "\n");
  result.trace.cluster = cluster.name;
  if (!o.trace.empty() && !result.trace.spans.empty()) trace::writeTrace(result.trace, o.trace);
  const double step_s = stepTime(result);
  if (globals.json) {
    fmt::print("{}", resultToJson(result, plan, o, step_s, tokens_per_step, predicted_s));
  } else if (!globals.quiet && !result.steps.empty()) {
    fmt::print("{} steps of {} with {}: loss {:.4f} -> {:.4f}\n", result.steps.size(), model.name,
               planToText(plan), result.steps.front().loss, result.steps.back().loss);
    fmt::print(
        "measured step {} (median), {:.0f} tokens/s, {} CPU per step, peak arena {} per rank, resident {}\n",
        formatDuration(step_s), tokens_per_step / step_s, formatDuration(result.cpu_seconds_per_step),
        formatBytes(*std::max_element(result.peak_memory.begin(), result.peak_memory.end())),
        formatBytes(result.peak_rss));
    if (predicted_s > 0)
      fmt::print("predicted step {}: {:+.1f} % from the measured one\n", formatDuration(predicted_s),
                 100 * (predicted_s - step_s) / step_s);
  }
  return result.stopped ? stopped_code : 0;
}

int run(const Globals& globals, Options& o) {
  const Part part = partOf(o);
  try {
    return train(globals, o, part);
  } catch (const Error& error) {
    if (part.speaks()) throw;
    return error.exitCode();  // rank 0 finds the same and says it
  }
}

}  // namespace

void addTrain(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand("train", "Run a plan on this machine");
  const auto o = std::make_shared<Options>();
  command->add_option("--model", o->model, "Preset, config.json or model file")->required();
  command->add_option("--plan", o->plan, "Plan text or file")->required();
  command->add_option("--data", o->data, "Token file from bmtrain prepare")->required();
  command->add_option("--cluster", o->cluster, "local:RANKS; default: as many ranks as the plan has");
  command->add_option("--steps", o->steps, "Steps to train")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seq", o->seq, "Sequence length instead of the model's")->check(CLI::PositiveNumber);
  command->add_option("--device", o->device, "cpu")->capture_default_str();
  command
      ->add_option("--comm", o->comm,
                   "threads: ranks are threads of this process; mpi: processes, started with mpirun")
      ->capture_default_str();
  command->add_option("--profile", o->profile, "Also predict the step with this cost profile");
  command->add_option("--trace", o->trace, "Write the measured trace of a typical late step");
  command->add_option("--lr", o->lr, "Peak learning rate")->check(CLI::PositiveNumber)->capture_default_str();
  command->add_option("--min-lr", o->min_lr, "Learning rate at the end; default: a tenth")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--warmup", o->warmup, "Steps of linear warm-up; default: a tenth of --steps")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--clip", o->clip, "Global gradient norm limit; 0 = none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--weight-decay", o->weight_decay, "Decoupled, on matrices")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--deadline", o->deadline, "Seconds a communication may wait")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--inject", o->inject, "kill:RANK:STEP lets that rank fail in mid-step (tests)");
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
