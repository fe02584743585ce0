// Text and CSV forms of a schedule.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>

#include "core/json.h"
#include "core/schedule_makers.h"

namespace bmt {
namespace {

constexpr std::int32_t kMaxChunks = 1000, kMaxMicrobatches = 1 << 20;  // keep sizes of nonsense input bounded

bool parseNumber(std::string_view text, std::int32_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && value >= 0;
}

void widen(Schedule& schedule, std::int32_t chunk, std::int32_t microbatch) {
  schedule.num_chunks = std::max(schedule.num_chunks, chunk + 1);
  schedule.num_microbatches = std::max(schedule.num_microbatches, microbatch + 1);
}

}  // namespace

std::string scheduleToText(const Schedule& schedule) {
  std::string text = schedule.placement == Placement::V ? "placement v\n" : "";
  for (std::size_t stage = 0; stage < schedule.stages.size(); ++stage) {
    text += fmt::format("{}:", stage);
    for (const Slot& slot : schedule.stages[stage]) text += " " + toString(slot);
    text += '\n';
  }
  return text;
}

Schedule scheduleFromText(const std::string& text, const std::string& source) {
  Schedule schedule{0, 1, 0, Placement::Loop, false, {}};
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const auto fail = [&](const std::string& what) {
      throw Error(ErrorKind::BadInput, fmt::format("line {}: {}", number, what), source);
    };
    std::istringstream tokens(line);
    std::string token;
    if (!(tokens >> token)) continue;
    if (token == "placement" && schedule.num_stages == 0) {
      if (!(tokens >> token) || (token != "v" && token != "loop")) fail("placement is 'loop' or 'v'");
      schedule.placement = token == "v" ? Placement::V : Placement::Loop;
      continue;
    }
    if (token != fmt::format("{}:", schedule.num_stages))
      fail(fmt::format("expected stage '{}:', got '{}'", schedule.num_stages, token));
    ++schedule.num_stages;
    schedule.stages.emplace_back();
    while (tokens >> token) {
      const std::size_t dot = token.find('.');
      std::int32_t chunk = 0, microbatch = 0;
      const std::size_t phase = std::string_view("FBW").find(token[0]);
      if (phase == std::string_view::npos || dot == std::string::npos ||
          !parseNumber(std::string_view(token).substr(1, dot - 1), chunk) ||
          !parseNumber(std::string_view(token).substr(dot + 1), microbatch) || chunk > kMaxChunks ||
          microbatch > kMaxMicrobatches)
        fail(fmt::format("'{}' is not a slot such as F0.3, B0.3 or W0.3", token));
      schedule.stages.back().push_back(makeSlot(static_cast<Phase>(phase), chunk, microbatch));
      schedule.split_backward = schedule.split_backward || phase == static_cast<std::size_t>(Phase::W);
      widen(schedule, chunk, microbatch);
    }
  }
  if (schedule.num_stages == 0) throw Error(ErrorKind::BadInput, "holds no stage lines", source);
  if (schedule.placement == Placement::V && schedule.num_chunks != 2)
    throw Error(ErrorKind::BadInput,
                fmt::format("placement v needs 2 chunks per stage, the slots have {}", schedule.num_chunks),
                source);
  return schedule;
}

Schedule loadSchedule(const std::string& path) {
  const std::string text = readFile(path);
  Schedule schedule = path.ends_with(".csv") ? scheduleFromCsv(text, path) : scheduleFromText(text, path);
  throwIfAny(validateSchedule(schedule), path);
  return schedule;
}

std::string scheduleToCsv(const Schedule& s) {
  const SchedulePlay play = playSchedule(s, {1, s.split_backward ? 2 : 1, 1, 0});  // one cell per slot
  std::string text;
  for (std::size_t stage = 0; stage < play.stages.size(); ++stage) {
    std::vector<std::string> cells(static_cast<std::size_t>(play.makespan));
    for (const SchedulePlay::Run& run : play.stages[stage]) {
      const std::int32_t v = s.virtualStageOf(static_cast<std::int32_t>(stage), run.slot.chunk);
      const char letter = run.slot.phase == Phase::F   ? 'F'
                          : run.slot.phase == Phase::W ? 'W'
                          : s.split_backward           ? 'I'
                                                       : 'B';
      cells[static_cast<std::size_t>(run.start)] = fmt::format("{}{}{}", v, letter, run.slot.microbatch);
    }
    text += fmt::format("{}\n", fmt::join(cells, ","));
  }
  return text;
}

Schedule scheduleFromCsv(const std::string& text, const std::string& source) {
  struct Cell {
    std::int32_t v = 0, microbatch = 0;
    char letter = 'F';
  };
  std::vector<std::vector<Cell>> rows;
  std::vector<std::set<std::int32_t>> held;  // virtual stages of each row
  Schedule s{0, 1, 0, Placement::Loop, false, {}};
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.find_first_not_of(", \t\r") == std::string::npos) continue;
    rows.emplace_back();
    held.emplace_back();
    std::istringstream cells(line);
    std::string cell;
    for (int column = 1; std::getline(cells, cell, ','); ++column) {
      std::erase_if(cell, [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '"'; });
      if (cell.empty()) continue;
      const std::size_t at = cell.find_first_not_of("0123456789");
      Cell parsed;
      if (at == std::string::npos || at == 0 ||
          std::string_view("FBIW").find(cell[at]) == std::string_view::npos ||
          !parseNumber(std::string_view(cell).substr(0, at), parsed.v) ||
          !parseNumber(std::string_view(cell).substr(at + 1), parsed.microbatch) ||
          parsed.microbatch > kMaxMicrobatches || parsed.v > kMaxChunks * kMaxChunks)
        throw Error(ErrorKind::BadInput,
                    fmt::format("row {} cell {}: '{}' is not an operation such as 0F1, 0B1, 0I1 or 0W1",
                                rows.size(), column, cell),
                    source);
      parsed.letter = cell[at];
      s.split_backward = s.split_backward || parsed.letter == 'I' || parsed.letter == 'W';
      rows.back().push_back(parsed);
      held.back().insert(parsed.v);
    }
  }
  s.num_stages = static_cast<std::int32_t>(rows.size());
  if (rows.empty()) throw Error(ErrorKind::BadInput, "holds no operations", source);
  // The placement that explains which virtual stages each row holds.
  const auto explains = [&](Placement placement, std::int32_t chunks) {
    for (std::int32_t stage = 0; stage < s.num_stages; ++stage) {
      std::set<std::int32_t> expected;
      for (std::int32_t chunk = 0; chunk < chunks; ++chunk)
        expected.insert(virtualStage(placement, s.num_stages, stage, chunk));
      if (held[static_cast<std::size_t>(stage)] != expected) return false;
    }
    return true;
  };
  s.num_chunks = static_cast<std::int32_t>(std::min<std::size_t>(held.front().size(), kMaxChunks));
  if (s.num_chunks == 2 && s.num_stages > 1 && explains(Placement::V, 2)) {
    s.placement = Placement::V;
  } else if (!explains(Placement::Loop, s.num_chunks)) {
    throw Error(
        ErrorKind::BadInput,
        fmt::format(
            "its {} rows hold stages in no known placement: row 1 has {{{}}}, expected row r to hold r, "
            "r + {}, ... or, for two stages per row, r and {} - r",
            s.num_stages, fmt::join(held.front(), ", "), s.num_stages, 2 * s.num_stages - 1),
        source);
  }
  for (std::size_t stage = 0; stage < rows.size(); ++stage) {
    s.stages.emplace_back();
    for (const Cell& cell : rows[stage]) {
      const bool second = s.placement == Placement::V && cell.v >= s.num_stages;
      const std::int32_t chunk = s.placement == Placement::V ? (second ? 1 : 0) : cell.v / s.num_stages;
      widen(s, chunk, cell.microbatch);
      const Phase phase = cell.letter == 'F' ? Phase::F : cell.letter == 'W' ? Phase::W : Phase::B;
      s.stages.back().push_back(makeSlot(phase, chunk, cell.microbatch));
      // A full backward among split ones is both parts in a row.
      if (cell.letter == 'B' && s.split_backward)
        s.stages.back().push_back(makeSlot(Phase::W, chunk, cell.microbatch));
    }
  }
  return s;
}

}  // namespace bmt
