// bmtrain schedules: draws any pipeline schedule, ours or a user's file, and writes it as text or CSV.
#include <fmt/format.h>

#include "cli/command.h"
#include "core/json.h"
#include "core/schedule.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string show, file, format = "grid";
  std::int32_t pp = 4, microbatches = 8, chunks = 0;
};

struct Known {
  ScheduleKind kind;
  const char* what;
};
constexpr Known kKnown[] = {
    {ScheduleKind::GPipe, "all forwards, then all backwards (Huang et al. 2019)"},
    {ScheduleKind::OneFOneB, "one forward, one backward after a warm-up (Narayanan et al. 2021)"},
    {ScheduleKind::Interleaved, "1f1b over several model chunks per stage (Narayanan et al. 2021)"},
    {ScheduleKind::BreadthFirst,
     "looped breadth-first: all micro-batches through a chunk at a time (Lamy-Poirier 2022)"},
    {ScheduleKind::ZbH1, "zero bubble with the memory of 1f1b (Qi et al. 2023)"},
    {ScheduleKind::ZbH2, "zero bubble with twice the memory of 1f1b (Qi et al. 2023)"},
    {ScheduleKind::ZbV, "zero bubble with the memory of 1f1b, two chunks in a V (Qi et al. 2024)"},
    {ScheduleKind::ZbAuto, "zero bubble found by list scheduling with the memory of 1f1b; 1 or 2 chunks"},
    {ScheduleKind::DualPipeV, "paired forwards and backwards, two chunks in a V (DeepSeek-AI 2025)"}};

Schedule fromOptions(const Options& o) {
  Plan plan = planFromText("schedule=" + o.show);
  const bool folds = placementOf(plan.schedule, 2) == Placement::V && plan.schedule != ScheduleKind::ZbAuto;
  const bool loops =
      plan.schedule == ScheduleKind::Interleaved || plan.schedule == ScheduleKind::BreadthFirst;
  plan.pp = o.pp;
  plan.chunks = o.chunks > 0 ? o.chunks : folds || loops ? 2 : 1;
  if (o.pp < 1 || o.microbatches < 1 || plan.chunks < 1 || o.pp > 4096 || o.microbatches > 65536 ||
      plan.chunks > 256)
    throw Error(ErrorKind::BadInput,
                fmt::format("--pp {} --microbatches {} --chunks {}: expected 1..4096, 1..65536, 1..256", o.pp,
                            o.microbatches, plan.chunks));
  constexpr std::int64_t kMaxSlots = 4'000'000;
  const std::int64_t slots =
      std::int64_t{splitsBackward(plan.schedule) ? 3 : 2} * o.pp * o.microbatches * plan.chunks;
  if (slots > kMaxSlots)
    throw Error(ErrorKind::BadInput,
                fmt::format("--pp {} --microbatches {} --chunks {}: {} slots, at most {} are drawn", o.pp,
                            o.microbatches, plan.chunks, slots, kMaxSlots));
  // The rules for plans, on a model that has enough layers for any of them.
  ModelSpec model = loadModel("gpt2-124m");
  model.layers = std::int64_t{plan.pp} * plan.chunks;
  plan.global_batch = o.microbatches;
  throwIfAny(validatePlan(model, localCluster(plan.pp), plan), "--show " + o.show);
  return makeSchedule(plan);
}

int run(const Globals& globals, const Options& o) {
  if (o.show.empty() && o.file.empty()) {
    if (globals.json) {
      Json names = Json::array();
      for (const Known& known : kKnown) names.push_back(std::string(toString(known.kind)));
      fmt::print("{}\n", names.dump());
      return 0;
    }
    for (const Known& known : kKnown) fmt::print("{:<12} {}\n", toString(known.kind), known.what);
    return 0;
  }
  const Schedule schedule = o.file.empty() ? fromOptions(o) : loadSchedule(o.file);
  throwIfAny(validateSchedule(schedule), o.file.empty() ? o.show : o.file);
  if (globals.json) {
    Json stages = Json::array();
    for (const auto& slots : schedule.stages) {
      Json row = Json::array();
      for (const Slot& slot : slots) row.push_back(toString(slot));
      stages.push_back(row);
    }
    fmt::print("{}\n", stages.dump());
    return 0;
  }
  fmt::print("{}", o.format == "csv"    ? scheduleToCsv(schedule)
                   : o.format == "text" ? scheduleToText(schedule)
                                        : drawSchedule(schedule));
  return 0;
}

}  // namespace

void addSchedules(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand("schedules", "List pipeline schedules, or draw one");
  const auto o = std::make_shared<Options>();
  command->add_option("--show", o->show, "Schedule to draw; without it, all names");
  command->add_option("--file", o->file,
                      "Draw a schedule from a file: .csv as PyTorch writes it, otherwise our text form");
  command->add_option("--pp", o->pp, "Pipeline stages")->capture_default_str();
  command->add_option("--microbatches", o->microbatches, "Micro-batches")->capture_default_str();
  command->add_option("--chunks", o->chunks,
                      "Model chunks per stage; default: 1, or 2 where the schedule needs them");
  command->add_option("--format", o->format, "grid, text, or csv (PyTorch's pipeline schedule)")
      ->check(CLI::IsMember({"grid", "text", "csv"}))
      ->capture_default_str();
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
