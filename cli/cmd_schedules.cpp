// bmtrain schedules: draws any pipeline schedule, ours or a user's text file.
#include <fmt/format.h>

#include "cli/command.h"
#include "core/json.h"
#include "core/schedule.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string show, file;
  std::int32_t pp = 4, microbatches = 8, chunks = 1;
  bool text = false;
};

int run(const Globals& globals, const Options& o) {
  if (o.show.empty() && o.file.empty()) {
    if (globals.json) {
      fmt::print("{}\n", Json::array({"gpipe", "1f1b", "interleaved"}).dump());
      return 0;
    }
    fmt::print(
        "gpipe        all forwards, then all backwards (Huang et al. 2019)\n"
        "1f1b         one forward, one backward after a warm-up (Narayanan et al. 2021)\n"
        "interleaved  1f1b over several model chunks per stage (Narayanan et al. 2021)\n");
    return 0;
  }
  Schedule schedule;
  if (!o.file.empty()) {
    schedule = scheduleFromText(readFile(o.file), o.file);
  } else {
    Plan plan = planFromText("schedule=" + o.show);
    if (o.pp < 1 || o.microbatches < 1 || o.chunks < 1 || o.pp > 4096 || o.microbatches > 65536 ||
        o.chunks > 256)
      throw Error(ErrorKind::BadInput,
                  fmt::format("--pp {} --microbatches {} --chunks {}: expected 1..4096, 1..65536, 1..256",
                              o.pp, o.microbatches, o.chunks));
    constexpr std::int64_t kMaxSlots = 4'000'000;
    const std::int64_t slots = std::int64_t{2} * o.pp * o.microbatches * o.chunks;
    if (slots > kMaxSlots)
      throw Error(ErrorKind::BadInput,
                  fmt::format("--pp {} --microbatches {} --chunks {}: {} slots, at most {} are drawn", o.pp,
                              o.microbatches, o.chunks, slots, kMaxSlots));
    const bool interleaved = plan.schedule == ScheduleKind::Interleaved;
    if (interleaved && (o.chunks < 2 || o.microbatches % o.pp != 0))
      throw Error(
          ErrorKind::BadInput,
          fmt::format(
              "interleaved needs --chunks of at least 2 (is {}) and --microbatches in multiples of --pp {} "
              "(is {})",
              o.chunks, o.pp, o.microbatches));
    if (!interleaved && o.chunks != 1)
      throw Error(ErrorKind::BadInput, fmt::format("--chunks {} needs --show interleaved", o.chunks));
    schedule = makeSchedule(plan.schedule, o.pp, o.chunks, o.microbatches);
  }
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
  fmt::print("{}", o.text ? scheduleToText(schedule) : drawSchedule(schedule));
  return 0;
}

}  // namespace

void addSchedules(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand("schedules", "List pipeline schedules, or draw one");
  const auto o = std::make_shared<Options>();
  command->add_option("--show", o->show, "Schedule to draw: gpipe, 1f1b, interleaved");
  command->add_option("--file", o->file, "Draw a schedule in text form");
  command->add_option("--pp", o->pp, "Pipeline stages")->capture_default_str();
  command->add_option("--microbatches", o->microbatches, "Micro-batches")->capture_default_str();
  command->add_option("--chunks", o->chunks, "Model chunks per stage (interleaved)")->capture_default_str();
  command->add_flag("--text", o->text, "Print the text form instead of the grid");
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
