// What every subcommand shares. A command registers its flags on the root app and sets `action` when it is
// chosen; main runs the action and turns errors into one line and an exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>

namespace bmt::cli {

struct Globals {
  bool json = false;         // one JSON document on stdout
  bool quiet = false;        // no progress, no summary
  bool no_progress = false;  // no progress on stderr
  std::uint64_t seed = 1;
  int jobs = 0;  // 0 = all cores
};

using Action = std::function<int()>;  // returns the exit code

void addModels(CLI::App& app, const Globals& globals, Action& action);
void addClusters(CLI::App& app, const Globals& globals, Action& action);
void addSchedules(CLI::App& app, const Globals& globals, Action& action);
void addSimulate(CLI::App& app, const Globals& globals, Action& action);
void addTune(CLI::App& app, const Globals& globals, Action& action);
void addPrepare(CLI::App& app, const Globals& globals, Action& action);
void addCalibrate(CLI::App& app, const Globals& globals, Action& action);
void addTrain(CLI::App& app, const Globals& globals, Action& action);
void addCompare(CLI::App& app, const Globals& globals, Action& action);
void addDoctor(CLI::App& app, const Globals& globals, Action& action);
void addFit(CLI::App& app, const Globals& globals, Action& action);
void addScenario(CLI::App& app, const Globals& globals, Action& action);
void addValidate(CLI::App& app, const Globals& globals, Action& action);

}  // namespace bmt::cli
