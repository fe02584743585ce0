// Zero-bubble schedules: backward is split into the input gradient (B), which the previous stage waits for,
// and the weight gradient (W), which nobody waits for and which fills gaps.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "core/schedule_makers.h"

namespace bmt {

// Qi et al. 2023. With depth 1 a stage warms up as 1F1B does, with depth 2 with twice the forwards, which
// fills the wait for the first backward. Stage s then lags s * depth weight gradients behind: the later a
// stage, the more of its memory is free for activations that wait for W, and every stage holds as many as the
// first one (depth 1: pp; depth 2: 2 pp - 1).
std::vector<Slot> zeroBubbleStage(std::int32_t pp, std::int32_t stage, std::int32_t m, std::int32_t depth) {
  const std::int32_t lag = std::min(m, depth * stage);
  std::int32_t forwards = std::min(m, depth * (pp - 1 - stage));
  std::vector<Slot> slots;
  for (std::int32_t i = 0; i < forwards; ++i) slots.push_back(makeSlot(Phase::F, 0, i));
  for (std::int32_t i = 0; i < m; ++i) {
    if (forwards < m) slots.push_back(makeSlot(Phase::F, 0, forwards++));
    slots.push_back(makeSlot(Phase::B, 0, i));
    if (i >= lag) slots.push_back(makeSlot(Phase::W, 0, i - lag));
  }
  for (std::int32_t i = m - lag; i < m; ++i) slots.push_back(makeSlot(Phase::W, 0, i));
  return slots;
}

namespace {

// Which of several ready slots a rank takes.
struct Rule {
  bool backward_first;          // before forwards
  bool first_chunk_backward;    // of several ready backwards, that of the earlier virtual stage
  bool room_for_later_forward;  // the first chunk leaves one place free for the later ones
};

class ListScheduler {
 public:
  ListScheduler(std::int32_t pp, std::int32_t chunks, std::int32_t m, std::int32_t limit,
                const SlotTimes& times, Rule rule)
      : pp_(pp),
        chunks_(chunks),
        m_(m),
        limit_(limit),
        times_(times),
        rule_(rule),
        placement_(placementOf(ScheduleKind::ZbAuto, chunks)),
        num_virtual_(pp * chunks),
        ranks_(static_cast<std::size_t>(pp)),
        f_end_(static_cast<std::size_t>(num_virtual_) * static_cast<std::size_t>(m), -1),
        b_end_(f_end_) {
    for (Rank& rank : ranks_) {
      rank.next_f.assign(static_cast<std::size_t>(chunks), 0);
      rank.next_b.assign(static_cast<std::size_t>(chunks), 0);
    }
  }

  // Empty stages when it gets stuck: the memory limit lets no rank go on.
  Schedule run() {
    Schedule schedule{pp_, chunks_, m_, placement_, true, {}};
    for (std::int32_t r = 0; r < pp_; ++r) choose(r);
    for (std::int64_t left = std::int64_t{3} * num_virtual_ * m_; left > 0; --left) {
      std::int32_t first = -1;
      for (std::int32_t r = 0; r < pp_; ++r) {
        if (at(r).choice && (first < 0 || at(r).start < at(first).start)) first = r;
      }
      if (first < 0) return schedule;
      take(first);
    }
    for (Rank& rank : ranks_) schedule.stages.push_back(std::move(rank.slots));
    return schedule;
  }

 private:
  struct Rank {
    std::vector<Slot> slots;
    std::int64_t now = 0;
    std::int32_t held = 0;
    std::vector<std::int32_t> next_f, next_b;  // by chunk
    std::size_t next_w = 0;                    // index in `done_b`
    std::vector<Slot> done_b;                  // weight gradients follow in this order
    std::optional<Slot> choice;
    std::int64_t start = 0;
  };

  Rank& at(std::int32_t r) { return ranks_[static_cast<std::size_t>(r)]; }
  std::int32_t virtualOf(std::int32_t r, std::int32_t chunk) const {
    return virtualStage(placement_, pp_, r, chunk);
  }
  std::size_t index(std::int32_t v, std::int32_t microbatch) const {
    return static_cast<std::size_t>(v) * static_cast<std::size_t>(m_) + static_cast<std::size_t>(microbatch);
  }
  // When the result of virtual stage `from` is on rank r; -1 = not known yet.
  std::int64_t arrival(const std::vector<std::int64_t>& ends, std::int32_t from, std::int32_t microbatch,
                       std::int32_t r) const {
    const std::int64_t end = ends[index(from, microbatch)];
    return end < 0 || stageOf(placement_, pp_, from) == r ? end : end + times_.hop;
  }

  void choose(std::int32_t r) {
    Rank& rank = at(r);
    rank.choice.reset();
    std::optional<Slot> ready_f, ready_b, waiting;
    std::int64_t wait_until = 0;
    const auto consider = [&](const Slot& slot, std::int64_t ready, std::optional<Slot>& best, bool better) {
      if (ready <= rank.now) {
        if (!best || better) best = slot;
      } else if (!waiting || ready < wait_until) {
        waiting = slot;
        wait_until = ready;
      }
    };
    for (std::int32_t chunk = 0; chunk < chunks_; ++chunk) {
      const auto c = static_cast<std::size_t>(chunk);
      const std::int32_t v = virtualOf(r, chunk);
      if (const std::int32_t i = rank.next_b[c]; i < m_ && f_end_[index(v, i)] >= 0) {
        const std::int64_t ready = v == num_virtual_ - 1 ? f_end_[index(v, i)] : arrival(b_end_, v + 1, i, r);
        if (ready >= 0) consider(makeSlot(Phase::B, chunk, i), ready, ready_b, !rule_.first_chunk_backward);
      }
      const std::int32_t room = limit_ - (rule_.room_for_later_forward && chunks_ > 1 && chunk == 0 ? 1 : 0);
      if (const std::int32_t i = rank.next_f[c]; i < m_ && rank.held < room) {
        const std::int64_t ready = v == 0 ? 0 : arrival(f_end_, v - 1, i, r);
        if (ready >= 0) consider(makeSlot(Phase::F, chunk, i), ready, ready_f, true);  // later chunks first
      }
    }
    const std::optional<Slot>& first = rule_.backward_first ? ready_b : ready_f;
    const std::optional<Slot>& second = rule_.backward_first ? ready_f : ready_b;
    rank.start = rank.now;
    if (first) {
      rank.choice = first;
    } else if (second) {
      rank.choice = second;
    } else if (rank.next_w < rank.done_b.size()) {
      rank.choice = rank.done_b[rank.next_w];
      rank.choice->phase = Phase::W;
    } else if (waiting) {
      rank.choice = waiting;
      rank.start = wait_until;
    }
  }

  void take(std::int32_t r) {
    Rank& rank = at(r);
    const Slot slot = *rank.choice;
    const std::int32_t v = virtualOf(r, slot.chunk);
    const auto c = static_cast<std::size_t>(slot.chunk);
    rank.slots.push_back(slot);
    std::int32_t next = -1;  // virtual stage that may go on
    switch (slot.phase) {
      case Phase::F:
        rank.now = f_end_[index(v, slot.microbatch)] = rank.start + times_.forward;
        ++rank.held;
        ++rank.next_f[c];
        next = v + 1;
        break;
      case Phase::B:
        rank.now = b_end_[index(v, slot.microbatch)] = rank.start + times_.backward - times_.weight;
        rank.done_b.push_back(slot);
        ++rank.next_b[c];
        next = v - 1;
        break;
      default:
        rank.now = rank.start + times_.weight;
        --rank.held;
        ++rank.next_w;
        break;
    }
    choose(r);
    if (next >= 0 && next < num_virtual_) choose(stageOf(placement_, pp_, next));
  }

  std::int32_t pp_, chunks_, m_, limit_;
  SlotTimes times_;
  Rule rule_;
  Placement placement_;
  std::int32_t num_virtual_;
  std::vector<Rank> ranks_;
  std::vector<std::int64_t> f_end_, b_end_;  // by virtual stage and micro-batch; -1 = not scheduled
};

}  // namespace

Schedule zeroBubbleSchedule(std::int32_t pp, std::int32_t chunks, std::int32_t num_microbatches,
                            std::int32_t limit, const SlotTimes& times) {
  using Key = std::tuple<std::int64_t, std::int64_t, std::int32_t>;  // makespan, longest span, memory
  std::optional<Schedule> best;
  Key best_key;
  const auto offer = [&](Schedule schedule) {
    const SchedulePlay play = playSchedule(schedule, times);
    const Key key{play.makespan, *std::max_element(play.span.begin(), play.span.end()),
                  *std::max_element(play.peak_chunks.begin(), play.peak_chunks.end())};
    if (std::get<2>(key) > limit || (best && key >= best_key)) return;
    best = std::move(schedule);
    best_key = key;
  };
  for (int bits = 0; bits < (chunks > 1 ? 8 : 2); ++bits) {
    const Rule rule{(bits & 1) == 0, (bits & 2) == 0, (bits & 4) != 0};
    Schedule schedule = ListScheduler(pp, chunks, num_microbatches, limit, times, rule).run();
    if (!schedule.stages.empty()) offer(std::move(schedule));
  }
  if (chunks == 1) {
    offer(makeSchedule(ScheduleKind::ZbH1, pp, 1, num_microbatches));
    offer(makeSchedule(ScheduleKind::ZbH2, pp, 1, num_microbatches));
  }
  if (!best)
    throw Error(
        ErrorKind::BadInput,
        fmt::format("no zero-bubble order of {} chunks per rank fits in the memory of {} chunk activations",
                    chunks, limit),
        "schedule");
  return *best;
}

}  // namespace bmt
