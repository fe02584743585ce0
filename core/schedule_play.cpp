// Executes a schedule without a model: unit times, or any; for checks, drawings and closed forms.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "core/schedule.h"

namespace bmt {

std::string toString(const Slot& slot) {
  static constexpr char kLetters[] = {'F', 'B', 'W', 'S'};
  return fmt::format("{}{}.{}", kLetters[static_cast<std::size_t>(slot.phase)], slot.chunk, slot.microbatch);
}

SchedulePlay playSchedule(const Schedule& s, const SlotTimes& times) {
  const auto index = [&s](std::int32_t v, std::int32_t microbatch) {
    return static_cast<std::size_t>(v) * static_cast<std::size_t>(s.num_microbatches) +
           static_cast<std::size_t>(microbatch);
  };
  const std::int32_t num_virtual = s.num_stages * s.num_chunks;
  std::vector<std::int64_t> f_end(index(num_virtual, 0), -1), b_end = f_end;
  SchedulePlay play;
  play.stages.resize(s.stages.size());
  play.busy.assign(s.stages.size(), 0);
  play.span = play.busy;
  play.peak_chunks.assign(s.stages.size(), 0);
  std::vector<std::int64_t> now(s.stages.size(), 0);
  std::vector<std::int32_t> held(s.stages.size(), 0);

  // -1 = the slot's input does not exist yet.
  const auto readyTime = [&](const Slot& slot, std::int32_t stage) -> std::int64_t {
    const std::int32_t v = s.virtualStageOf(stage, slot.chunk);
    const bool forward = slot.phase == Phase::F;
    if (forward && v == 0) return 0;
    if (slot.phase == Phase::W) return b_end[index(v, slot.microbatch)];
    if (!forward && v == num_virtual - 1) return f_end[index(v, slot.microbatch)];
    if (!forward && f_end[index(v, slot.microbatch)] < 0) return -1;
    const std::int32_t from = forward ? v - 1 : v + 1;
    const std::int64_t end = (forward ? f_end : b_end)[index(from, slot.microbatch)];
    return end < 0 || stageOf(s.placement, s.num_stages, from) == stage ? end : end + times.hop;
  };
  const auto duration = [&](Phase phase) {
    if (phase == Phase::F) return times.forward;
    if (phase == Phase::W) return times.weight;
    return s.split_backward ? times.backward - times.weight : times.backward;
  };

  const auto finish = [&](std::size_t stage, const Slot& slot, std::int64_t start, std::int64_t end) {
    const std::size_t at =
        index(s.virtualStageOf(static_cast<std::int32_t>(stage), slot.chunk), slot.microbatch);
    if (slot.phase == Phase::F) f_end[at] = end;
    if (slot.phase == Phase::B) b_end[at] = end;
    if (slot.phase == Phase::F) play.peak_chunks[stage] = std::max(play.peak_chunks[stage], ++held[stage]);
    if (slot.phase == (s.split_backward ? Phase::W : Phase::B)) --held[stage];
    play.busy[stage] += end - start;
    now[stage] = end;
    play.stages[stage].push_back({slot, start, end});
  };
  // F and the full backward (B, W) of another chunk, back to back.
  const auto isPair = [&](const std::vector<Slot>& slots, std::size_t k) {
    return times.pair > 0 && k + 2 < slots.size() && slots[k].phase == Phase::F &&
           slots[k + 1].phase == Phase::B && slots[k + 2].phase == Phase::W &&
           slots[k + 1].chunk != slots[k].chunk && slots[k + 2].chunk == slots[k + 1].chunk &&
           slots[k + 2].microbatch == slots[k + 1].microbatch;
  };

  bool progress = true;
  while (progress) {
    progress = false;
    for (std::size_t stage = 0; stage < s.stages.size(); ++stage) {
      auto& runs = play.stages[stage];
      while (runs.size() < s.stages[stage].size()) {
        const Slot& slot = s.stages[stage][runs.size()];
        const std::int64_t ready = readyTime(slot, static_cast<std::int32_t>(stage));
        if (ready < 0) break;
        if (isPair(s.stages[stage], runs.size())) {
          const std::array<Slot, 3> unit{slot, s.stages[stage][runs.size() + 1],
                                         s.stages[stage][runs.size() + 2]};
          const std::int64_t other = readyTime(unit[1], static_cast<std::int32_t>(stage));
          if (other < 0) break;
          const std::int64_t start = std::max({now[stage], ready, other}), end = start + times.pair;
          finish(stage, unit[0], start, end);
          finish(stage, unit[1], end, end);
          finish(stage, unit[2], end, end);
        } else {
          const std::int64_t start = std::max(now[stage], ready);
          finish(stage, slot, start, start + duration(slot.phase));
        }
        progress = true;
      }
    }
  }
  for (std::size_t stage = 0; stage < s.stages.size(); ++stage) {
    if (play.stages[stage].empty()) continue;
    play.span[stage] = now[stage] - play.stages[stage].front().start;
    play.makespan = std::max(play.makespan, now[stage]);
  }
  return play;
}

std::vector<std::vector<ReceiveAt>> receiveOrder(const Schedule& s, bool played) {
  std::vector<std::vector<ReceiveAt>> order(s.stages.size());
  if (!played) {
    for (std::size_t stage = 0; stage < s.stages.size(); ++stage) {
      for (std::int32_t i = 0; i < static_cast<std::int32_t>(s.stages[stage].size()); ++i)
        order[stage].push_back({std::max(0, i - 1), i});
    }
    return order;
  }
  const SchedulePlay play = playSchedule(s, {});
  const std::int32_t num_virtual = s.num_stages * s.num_chunks;
  const auto index = [&s](std::int32_t v, std::int32_t microbatch) {
    return static_cast<std::size_t>(v) * static_cast<std::size_t>(s.num_microbatches) +
           static_cast<std::size_t>(microbatch);
  };
  std::vector<std::int64_t> f_end(index(num_virtual, 0)), b_end(f_end);
  for (std::size_t stage = 0; stage < play.stages.size(); ++stage) {
    for (const SchedulePlay::Run& run : play.stages[stage]) {
      const std::int32_t v = s.virtualStageOf(static_cast<std::int32_t>(stage), run.slot.chunk);
      if (run.slot.phase == Phase::F) f_end[index(v, run.slot.microbatch)] = run.end;
      if (run.slot.phase == Phase::B) b_end[index(v, run.slot.microbatch)] = run.end;
    }
  }
  for (std::size_t stage = 0; stage < play.stages.size(); ++stage) {
    const auto& runs = play.stages[stage];
    struct Message {
      std::int64_t ready;
      std::int32_t slot;
    };
    std::vector<Message> messages;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const Slot& slot = runs[i].slot;
      const std::int32_t v = s.virtualStageOf(static_cast<std::int32_t>(stage), slot.chunk);
      const std::int32_t from = slot.phase == Phase::F ? v - 1 : v + 1;
      if (slot.phase == Phase::W || from < 0 || from >= num_virtual) continue;
      messages.push_back({(slot.phase == Phase::F ? f_end : b_end)[index(from, slot.microbatch)],
                          static_cast<std::int32_t>(i)});
    }
    std::stable_sort(messages.begin(), messages.end(),
                     [](const Message& a, const Message& b) { return a.ready < b.ready; });
    std::int32_t before = 0;
    for (const Message& message : messages) {
      while (before < message.slot && runs[static_cast<std::size_t>(before)].end <= message.ready) ++before;
      order[stage].push_back({before, message.slot});
    }
  }
  return order;
}

std::vector<Issue> validateSchedule(const Schedule& s) {
  std::vector<Issue> issues;
  const std::size_t phases = s.split_backward ? 3 : 2;
  const std::size_t expected =
      static_cast<std::size_t>(s.num_chunks) * static_cast<std::size_t>(s.num_microbatches) * phases;
  for (std::size_t stage = 0; stage < s.stages.size(); ++stage) {
    const auto& slots = s.stages[stage];
    const std::string where = fmt::format("stage {}", stage);
    if (slots.size() != expected)
      issues.push_back({where, fmt::format("has {} slots, but {} chunks x {} micro-batches x {} need {}",
                                           slots.size(), s.num_chunks, s.num_microbatches,
                                           s.split_backward ? "F, B, W" : "F, B", expected)});
    std::vector<Slot> sorted = slots;
    const auto key = [](const Slot& x) { return std::tuple(x.phase, x.chunk, x.microbatch); };
    std::sort(sorted.begin(), sorted.end(), [&](const Slot& a, const Slot& b) { return key(a) < key(b); });
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) issues.push_back({where, toString(*twice) + " appears twice"});
    std::map<std::pair<Phase, std::int16_t>, std::int32_t> next;
    for (const Slot& slot : slots) {
      const std::int32_t expected_microbatch = next[{slot.phase, slot.chunk}]++;
      if (slot.microbatch == expected_microbatch || twice != sorted.end()) continue;
      Slot wanted = slot;
      wanted.microbatch = expected_microbatch;
      issues.push_back(
          {where, fmt::format("{} comes where {} is expected: each phase of a chunk runs in ascending order",
                              toString(slot), toString(wanted))});
      break;
    }
  }
  if (!issues.empty()) return issues;
  const SchedulePlay play = playSchedule(s, {});
  for (std::size_t stage = 0; stage < s.stages.size(); ++stage) {
    const std::size_t ran = play.stages[stage].size();
    if (ran < s.stages[stage].size())
      issues.push_back(
          {fmt::format("stage {}", stage), fmt::format("{} waits for ever: the order of the stages deadlocks",
                                                       toString(s.stages[stage][ran]))});
  }
  return issues;
}

std::string drawSchedule(const Schedule& s) {
  const SchedulePlay play = playSchedule(s, {});
  const std::size_t digits = fmt::format("{}", std::max(0, s.num_microbatches - 1)).size();
  const std::size_t width = digits + (s.num_chunks > 1 ? 4 : 2);
  std::string text;
  std::int64_t busy = 0;
  for (std::size_t stage = 0; stage < play.stages.size(); ++stage) {
    std::string row(static_cast<std::size_t>(play.makespan) * width, ' ');
    for (std::size_t t = 0; t < static_cast<std::size_t>(play.makespan); ++t) row[t * width] = '.';
    for (const SchedulePlay::Run& run : play.stages[stage]) {
      static constexpr char kLetters[] = {'F', 'B', 'W', 'S'};
      const char letter = kLetters[static_cast<std::size_t>(run.slot.phase)];
      const std::string label = s.num_chunks > 1
                                    ? fmt::format("{}{}.{}", letter, run.slot.chunk, run.slot.microbatch)
                                    : fmt::format("{}{}", letter, run.slot.microbatch);
      const std::size_t at = static_cast<std::size_t>(run.start) * width;
      const std::size_t length = static_cast<std::size_t>(run.end - run.start) * width - 1;
      row.replace(at, length, fmt::format("{:-<{}}", label, length).substr(0, length));
    }
    text += fmt::format("stage {:>2} |{}\n", stage, row);
    busy += play.busy[stage];
  }
  const double total = static_cast<double>(play.makespan) * static_cast<double>(play.stages.size());
  const std::int32_t peak = *std::max_element(play.peak_chunks.begin(), play.peak_chunks.end());
  text += fmt::format(
      "{} time units with forward = 1, {}, communication = 0; idle {:.1f} %; at most {} {} in memory per "
      "stage\n",
      play.makespan, s.split_backward ? "input gradient = 1, weight gradient = 1" : "backward = 2",
      100 * (1 - static_cast<double>(busy) / total), peak,
      s.num_chunks > 1 ? "chunk activations" : "micro-batches");
  return text;
}

}  // namespace bmt
