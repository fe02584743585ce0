// bmtrain: one program, one subcommand per file. Data goes to stdout, everything else to stderr; exit codes
// as in DESIGN.md section 8.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "cli/command.h"
#include "core/error.h"
#include "core/suggest.h"

namespace bmt::cli {
namespace {

// Long options of the chosen subcommand (or of the root) and all subcommand names, for "did you mean".
std::string suggestionFor(const CLI::App& app, const std::string& word) {
  std::vector<std::string> names;
  if (word.starts_with("-")) {
    for (const CLI::App* sub : app.get_subcommands()) {
      for (const CLI::Option* option : sub->get_options()) names.push_back("--" + option->get_single_name());
    }
    for (const CLI::Option* option : app.get_options()) names.push_back("--" + option->get_single_name());
  } else {
    for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
      names.push_back(sub->get_name());
  }
  return nearestName(word, names);
}

// `first` is the first word of the command line that is not an option, or empty.
int usageError(const CLI::App& app, const CLI::ParseError& error, const std::string& first) {
  std::string message = error.what();
  const bool no_command = app.get_subcommands().empty();
  if (no_command && !first.empty())
    message = "unknown command '" + first + "'; did you mean '" + suggestionFor(app, first) + "'?";
  const std::vector<std::string> extra = app.remaining(true);
  if (!no_command && dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !extra.empty()) {
    message =
        "unknown argument '" + extra.front() + "'; did you mean '" + suggestionFor(app, extra.front()) + "'?";
  }
  std::fprintf(stderr, "bmtrain: error: %s (see bmtrain --help)\n", message.c_str());
  return 2;
}

int run(int argc, char** argv) {
  CLI::App app{"BMTrain: predict, choose and run parallel plans for training transformer models", "bmtrain"};
  app.set_version_flag("--version", BMT_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  Globals globals;
  app.add_flag("--json", globals.json, "One JSON document on stdout, nothing else there");
  app.add_flag("--quiet", globals.quiet, "No progress and no summary");
  app.add_flag("--no-progress", globals.no_progress, "No progress on stderr");
  app.add_option("--seed", globals.seed, "Seed of everything random")->capture_default_str();
  app.add_option("--jobs", globals.jobs, "Threads of a search; 0 = all cores")->capture_default_str();
  Action action;
  for (const auto add : {addSimulate, addTune, addTrain, addPrepare, addCalibrate, addCompare, addModels,
                         addClusters, addSchedules, addScenario, addDoctor, addValidate, addFit}) {
    add(app, globals, action);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto* const word =
        std::find_if(argv + 1, argv + argc, [](const char* arg) { return arg[0] != '-'; });
    return usageError(app, error, word == argv + argc ? std::string() : std::string(*word));
  }
  return action();
}

}  // namespace
}  // namespace bmt::cli

int main(int argc, char** argv) {
  try {
    return bmt::cli::run(argc, argv);
  } catch (const bmt::Error& error) {
    std::fprintf(stderr, "bmtrain: error: %s\n", error.what());
    return error.exitCode();
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "bmtrain: error: out of host memory\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bmtrain: error: %s\n", error.what());
  }
  return 1;
}
