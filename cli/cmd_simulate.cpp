// bmtrain simulate: one plan -> report, predicted trace, timeline.
#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "cli/command.h"
#include "core/json.h"
#include "simulator/advise.h"
#include "simulator/report.h"
#include "traces/chrome_trace.h"
#include "traces/timeline_svg.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string model, cluster, plan, profile, trace, svg, granularity = "layer", ranks = "auto";
  std::int64_t seq = 0, draws = 20, top = 8;
  std::vector<std::string> slow, slow_links;
  double jitter = 0, tokens = 0;
  sim::FailureModel failures;
  bool critical_path = false, advise = false;
};

int run(const Globals& globals, const Options& o) {
  ModelSpec model = loadModel(o.model);
  if (o.seq > 0) model.seq_len = o.seq;
  ClusterSpec cluster = loadCluster(o.cluster);
  for (const std::string& text : o.slow) cluster.slow_devices.push_back(parseSlowDevice(text));
  for (const std::string& text : o.slow_links) cluster.slow_links.push_back(parseSlowLink(text));
  const Plan plan = loadPlan(o.plan);
  throwIfAny(validatePlan(model, cluster, plan), "the plan is not legal");
  const std::vector<trace::CostProfile> profiles = sim::chooseProfiles(cluster, o.profile);
  sim::SimulateOptions options;
  if (o.ranks != "auto") options.selection = o.ranks == "all" ? RankSelection::All : RankSelection::Folded;
  options.granularity = o.granularity == "stage" ? Granularity::Stage : Granularity::Layer;
  options.explain = true;
  options.critical_tasks = o.critical_path;
  options.jitter = o.jitter;
  options.draws = o.draws;
  options.seed = globals.seed;
  options.jobs =
      globals.jobs > 0 ? globals.jobs : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  if (o.advise) {
    const sim::Advice advice = sim::advise(model, cluster, plan, profiles, options);
    fmt::print("{}", globals.json ? sim::adviceToJson(advice, o.top)
                                  : sim::reportToText(advice.base) + sim::adviceToText(advice, o.top));
    return 0;
  }
  sim::Simulation result = sim::simulatePlan(model, cluster, plan, profiles, options);
  if (o.tokens > 0)
    result.report.training =
        sim::trainingRun(model, cluster, plan, result.report.step_time_s, o.tokens, o.failures);
  if (!o.trace.empty()) trace::writeTrace(result.trace, o.trace);
  if (!o.svg.empty()) writeFileAtomically(o.svg, trace::timelineSvg({&result.trace}));
  if (globals.json) {
    fmt::print("{}", sim::reportToJson(result.report));
  } else {
    fmt::print("{}", sim::reportToText(result.report));
  }
  return 0;
}

}  // namespace

void addSimulate(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command =
      app.add_subcommand("simulate", "Predict one plan: time, memory, bubbles, communication");
  const auto o = std::make_shared<Options>();
  command->add_option("--model", o->model, "Preset, config.json or model file")->required();
  command->add_option("--cluster", o->cluster, "PRESET:NODES, local:RANKS or a cluster file")->required();
  command->add_option("--plan", o->plan, "Plan text or file")->required();
  command->add_option("--seq", o->seq, "Sequence length instead of the model's")->check(CLI::PositiveNumber);
  command->add_option("--profile", o->profile, "Cost profile; default: this machine's, or the device's");
  command->add_option("--trace", o->trace, "Write the predicted trace (Chrome JSON; .gz is compressed)");
  command->add_option("--svg", o->svg, "Write the timeline as SVG");
  command->add_option("--granularity", o->granularity, "layer or stage")
      ->check(CLI::IsMember({"layer", "stage"}))
      ->capture_default_str();
  command
      ->add_option("--ranks", o->ranks,
                   "auto, folded (one per stage; refused where ranks differ) or all; ranks that share CPU "
                   "cores are always all played")
      ->check(CLI::IsMember({"auto", "folded", "all"}))
      ->capture_default_str();
  command->add_flag("--critical-path", o->critical_path, "The tasks that decide the step, in order");
  command->add_flag("--advise", o->advise,
                    "What one change of the plan would bring, simulated; what makes it fit when it does not");
  command->add_option("--top", o->top, "Changes that --advise lists")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--slow", o->slow, "rank=R:FACTOR: its compute takes FACTOR times as long; repeatable");
  command->add_option("--slow-link", o->slow_links,
                      "node=N:FACTOR (its traffic to other nodes) or rank=R:FACTOR; repeatable");
  command
      ->add_option("--jitter", o->jitter,
                   "Sigma of a lognormal factor on every duration: mean and p95 over --draws, from --seed")
      ->check(CLI::Range(0.0, 3.0));
  command->add_option("--draws", o->draws, "Draws of --jitter")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{100000}))
      ->capture_default_str();
  command->add_option("--tokens", o->tokens, "Training tokens: days, goodput and cost")
      ->check(CLI::PositiveNumber);
  command->add_option("--price", o->failures.price_per_device_h, "Price of one device-hour")
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--mtbf-hours", o->failures.mtbf_device_h,
                   "Mean time between failures of one device; 0 = never")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--storage", o->failures.storage_bandwidth,
                   "Checkpoint bandwidth of the cluster in B/s; 0 = 0.98 GB/s per node")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--restart", o->failures.restart_s, "Seconds from a failure to training again")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
