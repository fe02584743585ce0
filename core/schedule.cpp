#include "core/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <sstream>

namespace bmt {
namespace {

Slot makeSlot(Phase phase, std::int32_t chunk, std::int32_t microbatch) {
  return {phase, static_cast<std::int16_t>(chunk), microbatch};
}

std::vector<Slot> gpipeStage(std::int32_t m) {
  std::vector<Slot> slots;
  for (std::int32_t i = 0; i < m; ++i) slots.push_back(makeSlot(Phase::F, 0, i));
  for (std::int32_t i = 0; i < m; ++i) slots.push_back(makeSlot(Phase::B, 0, i));
  return slots;
}

// `forwards` and `backwards` in their own order, after `warmup` forwards strictly alternating forward,
// backward.
std::vector<Slot> alternate(const std::vector<Slot>& forwards, const std::vector<Slot>& backwards,
                            std::size_t warmup) {
  std::vector<Slot> slots(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(warmup));
  for (std::size_t i = warmup; i < forwards.size(); ++i) {
    slots.push_back(forwards[i]);
    slots.push_back(backwards[i - warmup]);
  }
  slots.insert(slots.end(), backwards.end() - static_cast<std::ptrdiff_t>(warmup), backwards.end());
  return slots;
}

std::vector<Slot> oneFOneBStage(std::int32_t pp, std::int32_t stage, std::int32_t m) {
  const std::vector<Slot> all = gpipeStage(m);
  return alternate({all.begin(), all.begin() + m}, {all.begin() + m, all.end()},
                   static_cast<std::size_t>(std::min(m, pp - stage - 1)));
}

// Groups of pp micro-batches go through chunk 0, then chunk 1, ...; backwards through the chunks in reverse.
std::vector<Slot> interleavedStage(std::int32_t pp, std::int32_t stage, std::int32_t chunks, std::int32_t m) {
  std::vector<Slot> forwards, backwards;
  for (std::int32_t group = 0; group < m; group += pp) {
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
      for (std::int32_t i = group; i < group + pp; ++i) {
        forwards.push_back(makeSlot(Phase::F, chunk, i));
        backwards.push_back(makeSlot(Phase::B, chunks - 1 - chunk, i));
      }
    }
  }
  const std::int32_t total = m * chunks;
  const std::int32_t warmup = m == pp ? total : std::min(total, (pp - stage - 1) * 2 + (chunks - 1) * pp);
  return alternate(forwards, backwards, static_cast<std::size_t>(warmup));
}

// Runs the stages in order; `start(stage, slot)` is called when a slot runs. Returns how many slots of each
// stage ran. A slot takes `length` time units; start times respect the pipeline's dependencies.
template <typename OnRun>
std::vector<std::size_t> play(const Schedule& s, OnRun on_run) {
  const auto index = [&s](std::int32_t virtual_stage, std::int32_t microbatch) {
    return static_cast<std::size_t>(virtual_stage * s.num_microbatches + microbatch);
  };
  const std::int32_t num_virtual = s.num_stages * s.num_chunks;
  std::vector<std::int64_t> f_end(static_cast<std::size_t>(num_virtual * s.num_microbatches), -1),
      b_end = f_end;
  std::vector<std::int64_t> now(s.stages.size(), 0);
  std::vector<std::size_t> next(s.stages.size(), 0);
  bool progress = true;
  while (progress) {
    progress = false;
    for (std::size_t stage = 0; stage < s.stages.size(); ++stage) {
      while (next[stage] < s.stages[stage].size()) {
        const Slot& slot = s.stages[stage][next[stage]];
        const std::int32_t v = slot.chunk * s.num_stages + static_cast<std::int32_t>(stage);
        const bool forward = slot.phase == Phase::F;
        std::int64_t ready = 0;
        if (forward && v > 0) ready = f_end[index(v - 1, slot.microbatch)];
        if (!forward)
          ready =
              v == num_virtual - 1 ? f_end[index(v, slot.microbatch)] : b_end[index(v + 1, slot.microbatch)];
        if (ready < 0) break;
        const std::int64_t start = std::max(now[stage], ready);
        const std::int64_t end = start + (forward ? 1 : 2);
        (forward ? f_end : b_end)[index(v, slot.microbatch)] = end;
        on_run(stage, slot, start, end);
        now[stage] = end;
        ++next[stage];
        progress = true;
      }
    }
  }
  return next;
}

bool parseNumber(std::string_view text, std::int32_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && value >= 0;
}

}  // namespace

std::string toString(const Slot& slot) {
  static constexpr char kLetters[] = {'F', 'B', 'W', 'S'};
  return fmt::format("{}{}.{}", kLetters[static_cast<std::size_t>(slot.phase)], slot.chunk, slot.microbatch);
}

Schedule makeSchedule(ScheduleKind kind, std::int32_t pp, std::int32_t chunks,
                      std::int32_t num_microbatches) {
  Schedule schedule{pp, chunks, num_microbatches, {}};
  for (std::int32_t stage = 0; stage < pp; ++stage) {
    switch (kind) {
      case ScheduleKind::GPipe:
        schedule.stages.push_back(gpipeStage(num_microbatches));
        break;
      case ScheduleKind::OneFOneB:
        schedule.stages.push_back(oneFOneBStage(pp, stage, num_microbatches));
        break;
      case ScheduleKind::Interleaved:
        schedule.stages.push_back(interleavedStage(pp, stage, chunks, num_microbatches));
        break;
    }
  }
  return schedule;
}

Schedule makeSchedule(const Plan& plan) {
  return makeSchedule(plan.schedule, plan.pp, plan.chunks, static_cast<std::int32_t>(plan.numMicrobatches()));
}

std::string scheduleToText(const Schedule& schedule) {
  std::string text;
  for (std::size_t stage = 0; stage < schedule.stages.size(); ++stage) {
    text += fmt::format("{}:", stage);
    for (const Slot& slot : schedule.stages[stage]) text += " " + toString(slot);
    text += '\n';
  }
  return text;
}

Schedule scheduleFromText(const std::string& text, const std::string& source) {
  constexpr std::int32_t kLimit = 1 << 20;  // keeps sizes of nonsense input bounded
  Schedule schedule{0, 1, 0, {}};
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const auto fail = [&](const std::string& what) {
      throw Error(ErrorKind::BadInput, fmt::format("line {}: {}", number, what), source);
    };
    std::istringstream tokens(line);
    std::string token;
    if (!(tokens >> token)) continue;
    if (token != fmt::format("{}:", schedule.num_stages))
      fail(fmt::format("expected stage '{}:', got '{}'", schedule.num_stages, token));
    ++schedule.num_stages;
    schedule.stages.emplace_back();
    while (tokens >> token) {
      const std::size_t dot = token.find('.');
      std::int32_t chunk = 0, microbatch = 0;
      const bool letter = token[0] == 'F' || token[0] == 'B';
      if (!letter || dot == std::string::npos ||
          !parseNumber(std::string_view(token).substr(1, dot - 1), chunk) ||
          !parseNumber(std::string_view(token).substr(dot + 1), microbatch) || chunk > 1000 ||
          microbatch > kLimit)
        fail(fmt::format("'{}' is not a slot such as F0.3 or B0.3", token));
      schedule.stages.back().push_back(makeSlot(token[0] == 'F' ? Phase::F : Phase::B, chunk, microbatch));
      schedule.num_chunks = std::max(schedule.num_chunks, chunk + 1);
      schedule.num_microbatches = std::max(schedule.num_microbatches, microbatch + 1);
    }
  }
  if (schedule.num_stages == 0) throw Error(ErrorKind::BadInput, "holds no stage lines", source);
  return schedule;
}

std::vector<Issue> validateSchedule(const Schedule& s) {
  std::vector<Issue> issues;
  const std::size_t expected =
      static_cast<std::size_t>(s.num_chunks) * static_cast<std::size_t>(s.num_microbatches) * 2;
  for (std::size_t stage = 0; stage < s.stages.size(); ++stage) {
    const auto& slots = s.stages[stage];
    const std::string where = fmt::format("stage {}", stage);
    if (slots.size() != expected)
      issues.push_back({where, fmt::format("has {} slots, but {} chunks x {} micro-batches need {}",
                                           slots.size(), s.num_chunks, s.num_microbatches, expected)});
    std::vector<Slot> sorted = slots;
    const auto key = [](const Slot& x) { return std::tuple(x.phase, x.chunk, x.microbatch); };
    std::sort(sorted.begin(), sorted.end(), [&](const Slot& a, const Slot& b) { return key(a) < key(b); });
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) issues.push_back({where, toString(*twice) + " appears twice"});
  }
  if (!issues.empty()) return issues;
  const std::vector<std::size_t> ran = play(s, [](std::size_t, const Slot&, std::int64_t, std::int64_t) {});
  for (std::size_t stage = 0; stage < s.stages.size(); ++stage) {
    if (ran[stage] < s.stages[stage].size())
      issues.push_back(
          {fmt::format("stage {}", stage), fmt::format("{} waits for ever: the order of the stages deadlocks",
                                                       toString(s.stages[stage][ran[stage]]))});
  }
  return issues;
}

std::string drawSchedule(const Schedule& s) {
  struct Cell {
    std::size_t stage;
    Slot slot;
    std::int64_t start, end;
  };
  std::vector<Cell> cells;
  std::int64_t end_time = 0;
  play(s, [&](std::size_t stage, const Slot& slot, std::int64_t start, std::int64_t end) {
    cells.push_back({stage, slot, start, end});
    end_time = std::max(end_time, end);
  });
  const std::size_t digits = fmt::format("{}", std::max(0, s.num_microbatches - 1)).size();
  const std::size_t width = digits + (s.num_chunks > 1 ? 4 : 2);
  std::vector<std::string> rows(s.stages.size(),
                                std::string(static_cast<std::size_t>(end_time) * width, ' '));
  for (auto& row : rows) {
    for (std::size_t t = 0; t < static_cast<std::size_t>(end_time); ++t) row[t * width] = '.';
  }
  std::int64_t busy = 0;
  for (const Cell& cell : cells) {
    const char letter = cell.slot.phase == Phase::F ? 'F' : 'B';
    const std::string label = s.num_chunks > 1
                                  ? fmt::format("{}{}.{}", letter, cell.slot.chunk, cell.slot.microbatch)
                                  : fmt::format("{}{}", letter, cell.slot.microbatch);
    const std::size_t at = static_cast<std::size_t>(cell.start) * width;
    const std::size_t length = static_cast<std::size_t>(cell.end - cell.start) * width - 1;
    rows[cell.stage].replace(at, length, fmt::format("{:-<{}}", label, length).substr(0, length));
    busy += cell.end - cell.start;
  }
  std::string text;
  for (std::size_t stage = 0; stage < rows.size(); ++stage)
    text += fmt::format("stage {:>2} |{}\n", stage, rows[stage]);
  const double total = static_cast<double>(end_time) * static_cast<double>(rows.size());
  text += fmt::format("{} time units with forward = 1, backward = 2, communication = 0; idle {:.1f} %\n",
                      end_time, 100 * (1 - static_cast<double>(busy) / total));
  return text;
}

}  // namespace bmt
