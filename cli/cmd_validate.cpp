// bmtrain validate: published runs -> predicted against measured.
#include <fmt/format.h>

#include <algorithm>

#include "cli/command.h"
#include "core/json.h"
#include "simulator/report.h"
#include "simulator/validate.h"
#include "traces/scatter_svg.h"

namespace bmt::cli {
namespace {

struct Options {
  std::vector<std::string> files, sources;
  std::string svg, profiles, tiers;
  bool hold_out = false, fit_rows = false;
};

// A profile of the device in the given folder, else the one shipped, else the datasheet.
trace::CostProfile profileFor(const ClusterSpec& cluster, const std::string& folder) {
  if (folder.empty()) return sim::chooseProfile(cluster, "");
  return trace::loadProfile(folder + "/" + cluster.groups.front().device.name + ".json");
}

int run(const Globals& globals, const Options& o) {
  std::vector<sim::MeasuredRun> runs;
  for (const std::string& file : o.files) {
    const trace::CsvTable table = trace::readCsv(file);
    if (table.column("id") < 0 || table.column("layers") < 0)
      throw Error(ErrorKind::BadInput,
                  "has no columns 'id' and 'layers'; expected those of validation/measured.csv", file);
    for (std::size_t row = 0; row < table.rows.size(); ++row) {
      const std::string tier = table.at(row, "tier");
      if (!o.tiers.empty() && (tier.empty() || o.tiers.find(tier) == std::string::npos)) continue;
      sim::MeasuredRun measured = sim::readRun(table, row);
      if (!o.sources.empty() &&
          std::find(o.sources.begin(), o.sources.end(), measured.source) == o.sources.end())
        continue;
      const bool held_out = sim::heldOut(measured.id);
      if ((o.hold_out && !held_out) || (o.fit_rows && held_out)) continue;
      runs.push_back(std::move(measured));
    }
  }
  sim::ValidateOptions options;
  options.jobs = globals.jobs;
  options.profile = [&](const ClusterSpec& cluster) { return profileFor(cluster, o.profiles); };
  if (!globals.quiet && !globals.no_progress) {
    options.progress = [](std::int64_t done, std::int64_t total) {
      if (done % 50 == 0 || done == total)
        fmt::print(stderr, "\r{} of {} runs{}", done, total, done == total ? "\n" : "");
    };
  }
  const sim::Validation validation = sim::validateRuns(runs, options);
  if (!o.svg.empty()) {
    std::vector<trace::ScatterPoint> points;
    for (const sim::ValidatedRun& r : validation.runs) {
      if (r.run.step_s)
        points.push_back({*r.run.step_s, r.step_s, r.run.source + ", " + r.run.gpu,
                          fmt::format("{}: {:+.1f} %", r.run.id, r.errorPct())});
    }
    writeFileAtomically(o.svg, trace::scatterSvg(points, "Step time: predicted and measured", "s"));
  }
  fmt::print("{}", globals.json ? sim::validationToJson(validation) : sim::validationToText(validation));
  return 0;
}

}  // namespace

void addValidate(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command =
      app.add_subcommand("validate", "Predict published runs and compare with what was measured");
  const auto o = std::make_shared<Options>();
  command->add_option("files", o->files, "CSV files with the columns of validation/measured.csv")
      ->required()
      ->check(CLI::ExistingFile);
  command->add_option("--source", o->sources, "Only rows whose id starts with one of these (kort sc21 ...)");
  command->add_option("--tiers", o->tiers, "Only these tiers, such as AB");
  command->add_option("--svg", o->svg, "Write the predicted-against-measured plot");
  command->add_option("--profiles", o->profiles, "Folder of cost profiles instead of the shipped ones");
  CLI::Option* const hold = command->add_flag("--hold-out", o->hold_out,
                                              "Only the rows that were kept apart while the model was made");
  command->add_flag("--fit-rows", o->fit_rows, "Only the other rows")->excludes(hold);
  command->footer(
      "Example: bmtrain validate measured.csv did_not_fit.csv --tiers AB --hold-out --svg plot.svg\n"
      "A row is held out when FNV-1a(id) mod 5 is 0 or 1.");
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
