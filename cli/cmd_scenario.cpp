// bmtrain scenario: a claim about two plans on the same hardware, checked.
#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "cli/command.h"
#include "core/json.h"
#include "simulator/scenario.h"

namespace bmt::cli {

void addScenario(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand(
      "scenario", "Check a claim: durations of two plans, the utilisation behind each, reachable or not");
  const auto file = std::make_shared<std::string>();
  command->add_option("file", *file, "Scenario file, for example scenarios/175b-30-to-9-days.json")
      ->required();
  command->callback([&globals, &action, file] {
    action = [&globals, file] {
      const sim::Scenario scenario = sim::scenarioFromJson(readFile(*file), *file);
      const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
      const sim::ScenarioReport report = sim::runScenario(scenario, globals.jobs > 0 ? globals.jobs : cores);
      fmt::print("{}", globals.json ? sim::scenarioToJson(report) : sim::scenarioToText(report));
      return 0;
    };
  });
}

}  // namespace bmt::cli
