// bmtrain simulate: one plan -> report, predicted trace, timeline.
#include <fmt/format.h>

#include "cli/command.h"
#include "core/json.h"
#include "simulator/report.h"
#include "traces/chrome_trace.h"
#include "traces/timeline_svg.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string model, cluster, plan, profile, trace, svg, granularity = "layer", ranks = "folded";
  std::int64_t seq = 0;
};

int run(const Globals& globals, const Options& o) {
  ModelSpec model = loadModel(o.model);
  if (o.seq > 0) model.seq_len = o.seq;
  const ClusterSpec cluster = loadCluster(o.cluster);
  const Plan plan = loadPlan(o.plan);
  throwIfAny(validatePlan(model, cluster, plan), "the plan is not legal");
  const trace::CostProfile profile = sim::chooseProfile(cluster, o.profile);
  const auto selection = o.ranks == "all" ? RankSelection::All : RankSelection::Folded;
  const auto granularity = o.granularity == "stage" ? Granularity::Stage : Granularity::Layer;
  const sim::Simulation result = sim::simulatePlan(model, cluster, plan, profile, selection, granularity);
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
                   "folded (one per stage) or all; ranks that share CPU cores are always all played")
      ->check(CLI::IsMember({"folded", "all"}))
      ->capture_default_str();
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
