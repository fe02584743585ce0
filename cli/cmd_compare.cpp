// bmtrain compare PREDICTED MEASURED: where and by how much a prediction missed, joined task by task.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "cli/command.h"
#include "core/json.h"
#include "traces/chrome_trace.h"
#include "traces/compare.h"
#include "traces/timeline_svg.h"

namespace bmt::cli {
namespace {

struct CompareOptions {
  std::string predicted, measured, svg;
  int worst = 10;
};

int runCompare(const Globals& globals, const CompareOptions& options) {
  const trace::Trace predicted = trace::readTrace(options.predicted);
  const trace::Trace measured = trace::readTrace(options.measured);
  const trace::Comparison comparison =
      trace::compareTraces(predicted, measured, static_cast<std::size_t>(options.worst));
  if (!options.svg.empty()) writeFileAtomically(options.svg, trace::timelineSvg({&predicted, &measured}));
  fmt::print("{}", globals.json ? trace::comparisonToJson(comparison) : trace::comparisonToText(comparison));
  return 0;
}

}  // namespace

void addCompare(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand(
      "compare", "Predicted trace vs measured trace: error per kind of task, per lane, the largest misses");
  const auto options = std::make_shared<CompareOptions>();
  command->add_option("PREDICTED", options->predicted, "Trace that `simulate --trace` wrote")->required();
  command->add_option("MEASURED", options->measured, "Trace that `train --trace` wrote")->required();
  command->add_option("--svg", options->svg, "Write both timelines, one above the other, as SVG");
  command->add_option("--worst", options->worst, "List so many of the largest misses")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  command->footer(
      "Example:\n  bmtrain compare predicted.trace.json.gz measured.trace.json.gz --svg both.svg --worst 20");
  command->callback([&globals, &action, options] {
    action = [&globals, options] { return runCompare(globals, *options); };
  });
}

}  // namespace bmt::cli
