// bmtrain fit: published measurements of a GPU -> its cost profile, with residuals.
#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "cli/command.h"
#include "core/json.h"
#include "core/suggest.h"
#include "simulator/gpu_fit.h"
#include "simulator/report.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string device, ids, out;
  std::vector<std::string> gemm, micro, runs;
};

int run(const Globals& globals, const Options& o) {
  sim::FitInput input;
  std::vector<std::string> names;
  const ClusterPreset* preset = nullptr;
  for (const ClusterPreset& candidate : clusterPresets()) {
    names.push_back(candidate.node.device.name);
    if (preset == nullptr && candidate.node.device.name == o.device) preset = &candidate;
  }
  if (preset == nullptr)
    throw Error(ErrorKind::BadInput,
                fmt::format("unknown device; the nearest is '{}'", nearestName(o.device, names)), o.device);
  input.device = preset->node.device;
  input.scale_up = preset->node.scale_up;
  for (const std::string& file : o.gemm) input.gemm.push_back(trace::readCsv(file));
  for (const std::string& file : o.micro) input.micro.push_back(trace::readCsv(file));
  std::vector<std::string> ids;
  if (!o.ids.empty()) {
    std::istringstream text(readFile(o.ids));
    for (std::string line; std::getline(text, line);) {
      if (const std::string id = line.substr(0, line.find_first_of(" #")); !id.empty()) ids.push_back(id);
    }
  }
  for (const std::string& file : o.runs) {
    const trace::CsvTable table = trace::readCsv(file);
    for (std::size_t row = 0; row < table.rows.size(); ++row) {
      if (std::find(ids.begin(), ids.end(), table.at(row, "id")) == ids.end()) continue;
      sim::MeasuredRun measured = sim::readRun(table, row);
      if (measured.cluster.groups.empty() || measured.cluster.groups.front().device.name != o.device)
        continue;
      if (!measured.skip.empty() || !measured.step_s)
        throw Error(ErrorKind::BadInput,
                    measured.id + ": " + (measured.skip.empty() ? "no time" : measured.skip), file);
      input.runs.push_back(std::move(measured));
    }
  }
  if (!o.runs.empty() && input.runs.empty())
    throw Error(ErrorKind::BadInput, fmt::format("no row of {} is named in --ids", o.device), o.runs.front());
  // What no data isolates keeps the shipped figure, or the datasheet's.
  const trace::CostProfile start =
      trace::shippedProfile(o.device).value_or(trace::datasheetProfile(input.device));
  const sim::FitResult result = sim::fitGpu(input, *start.gpu);
  if (!o.out.empty()) writeFileAtomically(o.out, trace::profileToJson(result.profile));
  fmt::print("{}", globals.json ? trace::profileToJson(result.profile) : sim::fitToText(result));
  return 0;
}

}  // namespace

void addFit(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command =
      app.add_subcommand("fit", "Fit a GPU's cost profile to published measurements and print the residuals");
  const auto o = std::make_shared<Options>();
  command->add_option("device", o->device, "Device name, such as A100-SXM4-80GB")->required();
  command->add_option("--gemm", o->gemm, "Shapes of products and attention (validation/gemm_efficiency.csv)")
      ->check(CLI::ExistingFile);
  command->add_option("--micro", o->micro, "Ceilings and collectives (validation/micro.csv)")
      ->check(CLI::ExistingFile);
  command->add_option("--runs", o->runs, "Published steps (validation/measured.csv)")
      ->check(CLI::ExistingFile);
  command->add_option("--ids", o->ids, "File with the ids of the calibration steps, one a line")
      ->check(CLI::ExistingFile);
  command->add_option("--out", o->out, "Write the profile");
  command->footer(
      "Example: bmtrain fit A100-SXM4-80GB --gemm gemm_efficiency.csv --micro micro.csv --runs measured.csv "
      "--ids traces/data/calibration_runs.txt --out A100-SXM4-80GB.json");
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
