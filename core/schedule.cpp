#include "core/schedule.h"

#include <algorithm>

#include "core/schedule_makers.h"

namespace bmt {
namespace {

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
  const std::int32_t ahead = (pp - stage - 1) * (chunks > 1 ? 2 : 1);
  const std::int32_t warmup = std::min(total, ahead + (chunks - 1) * pp);
  return alternate(forwards, backwards, static_cast<std::size_t>(warmup));
}

// All micro-batches go through a chunk before any goes through the next; backwards in reverse.
std::vector<Slot> breadthFirstStage(std::int32_t chunks, std::int32_t m) {
  std::vector<Slot> slots;
  for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
    for (std::int32_t i = 0; i < m; ++i) slots.push_back(makeSlot(Phase::F, chunk, i));
  }
  for (std::int32_t chunk = chunks; chunk-- > 0;) {
    for (std::int32_t i = 0; i < m; ++i) slots.push_back(makeSlot(Phase::B, chunk, i));
  }
  return slots;
}

}  // namespace

Placement placementOf(ScheduleKind kind, std::int32_t chunks) {
  const bool v = kind == ScheduleKind::ZbV || kind == ScheduleKind::DualPipeV ||
                 (kind == ScheduleKind::ZbAuto && chunks == 2);
  return v ? Placement::V : Placement::Loop;
}

bool receivesAsPlayed(ScheduleKind kind, std::int32_t chunks) {
  return kind == ScheduleKind::BreadthFirst || kind == ScheduleKind::File ||
         placementOf(kind, chunks) == Placement::V;
}

bool splitsBackward(ScheduleKind kind) {
  return kind == ScheduleKind::ZbH1 || kind == ScheduleKind::ZbH2 || kind == ScheduleKind::ZbV ||
         kind == ScheduleKind::ZbAuto || kind == ScheduleKind::DualPipeV;
}

Placement placementOf(const Plan& plan) {
  if (plan.schedule == ScheduleKind::File) return plan.schedule_file.schedule->placement;
  return placementOf(plan.schedule, plan.chunks);
}

bool splitsBackward(const Plan& plan) {
  if (plan.schedule == ScheduleKind::File) return plan.schedule_file.schedule->split_backward;
  return splitsBackward(plan.schedule);
}

Schedule makeSchedule(ScheduleKind kind, std::int32_t pp, std::int32_t chunks,
                      std::int32_t num_microbatches) {
  // The automatic scheduler gets the memory of 1F1B: pp stages, in chunks.
  if (kind == ScheduleKind::ZbAuto || kind == ScheduleKind::ZbV)
    return zeroBubbleSchedule(pp, chunks, num_microbatches, pp * chunks, {});
  Schedule schedule{pp, chunks, num_microbatches, placementOf(kind, chunks), splitsBackward(kind), {}};
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
      case ScheduleKind::BreadthFirst:
        schedule.stages.push_back(breadthFirstStage(chunks, num_microbatches));
        break;
      case ScheduleKind::ZbH1:
        schedule.stages.push_back(zeroBubbleStage(pp, stage, num_microbatches, 1));
        break;
      case ScheduleKind::ZbH2:
        schedule.stages.push_back(zeroBubbleStage(pp, stage, num_microbatches, 2));
        break;
      case ScheduleKind::DualPipeV:
        schedule.stages.push_back(dualPipeVStage(pp, stage, num_microbatches));
        break;
      case ScheduleKind::ZbV:
      case ScheduleKind::ZbAuto:
      case ScheduleKind::File:
        break;
    }
  }
  return schedule;
}

Schedule makeSchedule(const Plan& plan) {
  if (plan.schedule == ScheduleKind::File) return *plan.schedule_file.schedule;
  return makeSchedule(plan.schedule, plan.pp, plan.chunks, static_cast<std::int32_t>(plan.numMicrobatches()));
}

}  // namespace bmt
