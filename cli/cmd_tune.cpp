// bmtrain tune: simulates every legal plan and lists the best.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>

#include "cli/command.h"
#include "core/json.h"
#include "simulator/goodput.h"
#include "simulator/search.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string model, cluster, profile, strategy = "exhaustive", objective = "throughput", csv, plan_out,
                                       precision, limit, require;
  std::vector<std::int64_t> micro_batches;
  std::int64_t seq = 0, global_batch = 0, loss_chunk = 0;
  double tokens = 0;  // of the training run, for days and cost; 0 = not asked for
  sim::FailureModel failures;
  std::size_t top = 10;
  bool dry_run = false, pareto = false;
};

sim::SearchOptions searchOptions(const Globals& globals, const Options& o, const ClusterSpec& cluster) {
  if (o.strategy != "exhaustive")
    throw Error(
        ErrorKind::BadInput,
        fmt::format("--strategy {} is not supported by this version; supported: exhaustive", o.strategy));
  if ((o.objective == "time" || o.objective == "cost") && !(o.tokens > 0))
    throw Error(ErrorKind::BadInput,
                fmt::format("--objective {} needs --tokens, the length of the training run", o.objective));
  if (o.objective == "cost" && !(o.failures.price_per_device_h > 0))
    throw Error(ErrorKind::BadInput, "--objective cost needs --price, of one device-hour");
  sim::SearchOptions s;
  s.global_batch = o.global_batch;
  s.micro_batches = o.micro_batches;
  s.loss_chunk = o.loss_chunk;
  s.hybrid_only = o.require == "hybrid";
  s.by_memory = o.objective == "memory";
  s.jobs = globals.jobs;
  s.top = o.top;
  s.pareto = o.pareto;
  if (!o.limit.empty()) {
    if (!o.limit.starts_with("memory="))
      throw Error(ErrorKind::BadInput,
                  fmt::format("--limit '{}': expected memory=SHARE, such as memory=0.8", o.limit));
    try {
      std::size_t used = 0;
      s.memory_limit = std::stod(o.limit.substr(7), &used);
      if (used != o.limit.size() - 7) s.memory_limit = -1;  // "0.8x", "80%"
    } catch (const std::exception&) {
      s.memory_limit = -1;
    }
    if (!(s.memory_limit > 0 && s.memory_limit <= 1))
      throw Error(ErrorKind::BadInput,
                  fmt::format("--limit '{}': the share must lie between 0 and 1", o.limit));
  }
  const DeviceSpec& device = cluster.groups.front().device;
  const std::string precision = !o.precision.empty()   ? o.precision
                                : device.peak_bf16 > 0 ? "bf16"
                                : device.peak_fp16 > 0 ? "fp16"
                                                       : "fp32";
  s.precision = planFromText("precision=" + precision).precision;
  return s;
}

std::string csv(const sim::SearchResult& result) {
  std::string text =
      "plan,step_time_s,tokens_per_s,mfu,bubble_fraction,exposed_comm_fraction,peak_memory_bytes\n";
  for (const auto& [plan, r] : result.plans)
    text += fmt::format("\"{}\",{:.9g},{:.9g},{:.6g},{:.6g},{:.6g},{}\n", planToText(plan), r.step_time_s,
                        r.tokens_per_s, r.mfu, r.shares.bubble, r.shares.exposed, r.peak_memory);
  return text;
}

// What a training run costs with a plan. On one cluster the device-hours grow with the time, and the time
// with the step, so the plan that is best by throughput is best by time and by cost.
struct Listing {
  const ModelSpec& model;
  const ClusterSpec& cluster;
  const Options& options;

  sim::TrainingRun training(const Plan& plan, const sim::Report& r) const {
    return sim::trainingRun(model, cluster, plan, r.step_time_s, options.tokens, options.failures);
  }

  Json entry(const Plan& plan, const sim::Report& r) const {
    Json json{{"plan", planToText(plan)},
              {"step_time_s", r.step_time_s},
              {"tokens_per_s", r.tokens_per_s},
              {"tokens_per_s_per_device", r.tokens_per_s_per_device},
              {"mfu", r.mfu},
              {"bubble_fraction", r.shares.bubble},
              {"exposed_comm_fraction", r.shares.exposed},
              {"peak_memory_bytes", r.peak_memory}};
    if (options.tokens > 0) {
      const sim::TrainingRun run = training(plan, r);
      json["days"] = run.days;
      json["goodput"] = run.goodput;
      if (run.cost > 0) json["cost"] = run.cost;
    }
    return json;
  }

  // Columns behind the memory, and their heads.
  std::string columns(const Plan& plan, const sim::Report& r) const {
    if (!(options.tokens > 0)) return "";
    const sim::TrainingRun run = training(plan, r);
    return run.cost > 0 ? fmt::format(" {:>9.1f} {:>12.0f}", run.days, run.cost)
                        : fmt::format(" {:>9.1f}", run.days);
  }
  std::string heads() const {
    if (!(options.tokens > 0)) return "";
    return options.failures.price_per_device_h > 0 ? fmt::format(" {:>9} {:>12}", "days", "cost")
                                                   : fmt::format(" {:>9}", "days");
  }
};

int run(const Globals& globals, const Options& o) {
  ModelSpec model = loadModel(o.model);
  if (o.seq > 0) model.seq_len = o.seq;
  const ClusterSpec cluster = loadCluster(o.cluster);
  const trace::CostProfile profile = sim::chooseProfile(cluster, o.profile);
  sim::SearchOptions options = searchOptions(globals, o, cluster);
  if (o.dry_run) {
    const std::size_t size = sim::PlanSpace(model, cluster, options).size();
    const std::int64_t legal = sim::countLegal(model, cluster, options);
    if (globals.json) {
      fmt::print("{}\n", Json{{"schema", "bmtrain.tune/1"}, {"space_size", size}, {"legal", legal}}.dump(2));
    } else {
      fmt::print("{} combinations, {} legal plans\n", size, legal);
    }
    return 0;
  }
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  auto last = std::chrono::steady_clock::now();
  const auto start = last;
  if (!globals.quiet && !globals.no_progress) {
    options.progress = [&, terminal](std::int64_t done, std::int64_t total, double best) {
      const auto now = std::chrono::steady_clock::now();
      const double since = std::chrono::duration<double>(now - last).count();
      if (since < (terminal ? 0.2 : 5.0)) return;
      last = now;
      const double elapsed = std::chrono::duration<double>(now - start).count();
      const double left = elapsed / static_cast<double>(done) * static_cast<double>(total - done);
      fmt::print(stderr, "{}{} of {} plans, {:.0f} s left, best {}{}", terminal ? "\r" : "", done, total,
                 left, best > 0 ? formatDuration(best) : "none yet", terminal ? "   " : "\n");
    };
  }
  const sim::SearchResult result = sim::search(model, cluster, profile, options);
  if (terminal && options.progress) fmt::print(stderr, "\r{:70}\r", "");
  if (!o.csv.empty()) writeFileAtomically(o.csv, csv(result));
  const Listing listing{model, cluster, o};
  const std::size_t shown = o.top > 0 ? std::min(o.top, result.plans.size()) : result.plans.size();
  if (globals.json) {
    Json json{{"schema", "bmtrain.tune/1"},
              {"strategy", o.strategy},
              {"space_size", result.space_size},
              {"legal", result.legal},
              {"evaluated", result.evaluated},
              {"feasible", result.feasible},
              {"rejected", Json::object()},
              {"wall_s", result.wall_s},
              {"plans_per_s", static_cast<double>(result.evaluated) / result.wall_s},
              {"best", Json::array()}};
    for (const auto& [reason, count] : result.rejected) json["rejected"][reason] = count;
    for (std::size_t i = 0; i < shown; ++i)
      json["best"].push_back(listing.entry(result.plans[i].first, result.plans[i].second));
    json["pareto"] = Json::array();
    for (const std::size_t i : result.pareto)
      json["pareto"].push_back(listing.entry(result.plans[i].first, result.plans[i].second));
    fmt::print("{}\n", json.dump(2));
  } else {
    fmt::print(
        "{} on {}: {} combinations, {} legal, {} simulated, {:.1f} s; predicted with profile {} ({})\n",
        model.name, cluster.name, result.space_size, result.legal, result.evaluated, result.wall_s,
        profile.name, profile.measured ? "measured" : "assumed");
    for (const auto& [reason, count] : result.rejected) fmt::print("  rejected {:>8}  {}\n", count, reason);
    if (shown > 0)
      fmt::print("{:>4} {:>10} {:>10} {:>7} {:>7} {:>8} {:>10}{}  plan\n", "rank", "step", "tokens/s",
                 "MFU %", "bubble", "exposed", "memory", listing.heads());
    for (std::size_t i = 0; i < shown; ++i) {
      const sim::Report& r = result.plans[i].second;
      fmt::print("{:>4} {:>10} {:>10.0f} {:>7.1f} {:>6.1f}% {:>7.1f}% {:>10}{}  {}\n", i + 1,
                 formatDuration(r.step_time_s), r.tokens_per_s, 100 * r.mfu, 100 * r.shares.bubble,
                 100 * r.shares.exposed, formatBytes(r.peak_memory),
                 listing.columns(result.plans[i].first, r), planToText(result.plans[i].first));
    }
    if (o.pareto) {
      fmt::print("no other plan is both faster and smaller than these:\n");
      for (const std::size_t i : result.pareto) {
        const sim::Report& r = result.plans[i].second;
        fmt::print("     {:>10} {:>10}  {}\n", formatDuration(r.step_time_s), formatBytes(r.peak_memory),
                   planToText(result.plans[i].first));
      }
    }
  }
  if (result.plans.empty())
    throw Error(
        ErrorKind::Infeasible,
        fmt::format("no feasible plan among {} combinations (counts per reason above)", result.space_size));
  if (!o.plan_out.empty()) writeFileAtomically(o.plan_out, planToJson(result.plans.front().first));
  return 0;
}

}  // namespace

void addTune(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand("tune", "Search the best plan of a model on a cluster");
  const auto o = std::make_shared<Options>();
  command->add_option("--model", o->model, "Preset, config.json or model file")->required();
  command->add_option("--cluster", o->cluster, "PRESET:NODES, local:RANKS or a cluster file")->required();
  command->add_option("--global-batch", o->global_batch, "Sequences per step")
      ->required()
      ->check(CLI::PositiveNumber);
  command->add_option("--micro-batch", o->micro_batches, "Micro-batches to try, such as 1,2,4")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command->add_option("--seq", o->seq, "Sequence length instead of the model's")->check(CLI::PositiveNumber);
  command->add_option("--loss-chunk", o->loss_chunk, "Rows of logits at a time; 0 = all")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--precision", o->precision, "fp32, bf16, fp16; default: what the device is made for");
  command->add_option("--profile", o->profile, "Cost profile; default: this machine's, or the device's");
  command->add_option("--strategy", o->strategy, "exhaustive")->capture_default_str();
  command
      ->add_option("--objective", o->objective,
                   "time and cost need --tokens, and order plans as throughput does")
      ->check(CLI::IsMember({"throughput", "memory", "time", "cost"}))
      ->capture_default_str();
  command->add_option("--tokens", o->tokens, "Training tokens: also list days, with failures, and cost")
      ->check(CLI::PositiveNumber);
  command->add_option("--price", o->failures.price_per_device_h, "Price of one device-hour")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--require", o->require, "hybrid: more than one of dp, tp, pp above 1")
      ->check(CLI::IsMember({"hybrid"}));
  command->add_option("--limit", o->limit, "memory=SHARE of each device that a plan may use");
  command->add_option("--top", o->top, "Plans to list, exactly; 0 = simulate all that may fit")
      ->capture_default_str();
  command->add_option("--csv", o->csv, "Write the plans that were simulated and fit");
  command->add_option("--plan-out", o->plan_out, "Write the best plan");
  command->add_flag("--pareto", o->pareto, "Also list the front of step time and peak memory");
  command->add_flag("--dry-run", o->dry_run, "Only count the space");
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
