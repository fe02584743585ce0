// Schedules: the order of forward and backward slots on every pipeline stage. Everything that knows what a
// schedule is lives here; lowering only walks the slots.
//   schedule.cpp               GPipe, 1F1B, interleaved, breadth-first    schedule_zero_bubble.cpp  ZB-H1,
//   ZB-H2, ZB-V, automatic            schedule_dualpipe.cpp  DualPipeV           schedule_play.cpp  unit-time
//   execution, checks, drawing            schedule_text.cpp      text and CSV
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/plan.h"

namespace bmt {

enum class Phase : std::uint8_t {
  F,
  B,
  W,
  Step
};  // forward, backward (or input gradient), weight gradient, optimizer

struct Slot {
  Phase phase = Phase::F;
  std::int16_t chunk = 0;  // model chunk on this stage; see virtualStage
  std::int32_t microbatch = 0;
  bool operator==(const Slot&) const = default;
};
std::string toString(const Slot& slot);  // "F0.3" = forward, chunk 0, micro-batch 3

// Which part of the model chunk `chunk` of a pipeline rank is. The model is cut into pp * chunks virtual
// stages.
enum class Placement : std::uint8_t {
  Loop,  // chunk * pp + stage
  V      // two chunks: there and back again; rank 0 holds the first and the last virtual stage
};
constexpr std::int32_t virtualStage(Placement placement, std::int32_t pp, std::int32_t stage,
                                    std::int32_t chunk) {
  return placement == Placement::V && chunk == 1 ? 2 * pp - 1 - stage : chunk * pp + stage;
}
// The rank and chunk that hold a virtual stage: the inverse.
constexpr std::int32_t stageOf(Placement placement, std::int32_t pp, std::int32_t virtual_stage) {
  return placement == Placement::V && virtual_stage >= pp ? 2 * pp - 1 - virtual_stage : virtual_stage % pp;
}
Placement placementOf(ScheduleKind kind, std::int32_t chunks);
Placement placementOf(const Plan& plan);
// B slots compute input gradients only; every one is followed by a W slot for the weight gradients.
bool splitsBackward(ScheduleKind kind);
bool splitsBackward(const Plan& plan);

struct Schedule {
  std::int32_t num_stages = 1, num_chunks = 1, num_microbatches = 1;
  Placement placement = Placement::Loop;
  bool split_backward = false;
  std::vector<std::vector<Slot>> stages;  // [num_stages] slots in execution order
  bool operator==(const Schedule&) const = default;
  std::int32_t virtualStageOf(std::int32_t stage, std::int32_t chunk) const {
    return virtualStage(placement, num_stages, stage, chunk);
  }
};

// GPipe: Huang et al. 2019. 1F1B and interleaved: Narayanan et al. 2021 (Megatron's warm-up order).
// Breadth-first: Lamy-Poirier 2022. ZB-H1, ZB-H2: Qi et al. 2023; ZB-V: Qi et al. 2024. DualPipeV:
// DeepSeek-AI 2025. Forwards, backwards and weight gradients of a chunk each run in ascending micro-batch
// order in all of them, so gradients are summed in one order (bit-equal to one rank). Interleaved needs
// num_microbatches to be a multiple of pp, DualPipeV at least 2 pp of them; ZB-V and DualPipeV need two
// chunks (validatePlan checks all of this).
Schedule makeSchedule(ScheduleKind kind, std::int32_t pp, std::int32_t chunks, std::int32_t num_microbatches);
Schedule makeSchedule(const Plan& plan);

// Durations of slots for playing a schedule without a model, in any unit.
struct SlotTimes {
  std::int64_t forward = 1;
  std::int64_t backward = 2;  // full backward; of a split one the input gradient takes backward - weight
  std::int64_t weight = 1;
  std::int64_t hop = 0;  // a result reaches another rank so much later
  // A forward and the full backward of another chunk right after it (DualPipeV) run as one unit of that
  // length; 0 = one after the other.
  std::int64_t pair = 0;
};

// Zero-bubble order found by list scheduling: each rank takes backward, forward and weight-gradient slots as
// they become ready, never holding more than `limit` chunk activations (released at W). Several priority
// rules are tried, and ZB-H1 and ZB-H2 where they fit; the best makespan for `times` wins, then the least
// memory. pp * chunks is the memory of 1F1B. Throws Error{BadInput} when the limit is so low that no order
// exists.
Schedule zeroBubbleSchedule(std::int32_t pp, std::int32_t chunks, std::int32_t num_microbatches,
                            std::int32_t limit, const SlotTimes& times);

// What playing a schedule shows. Every slot starts as early as its stage's order and its inputs allow.
struct SchedulePlay {
  struct Run {
    Slot slot;
    std::int64_t start = 0, end = 0;
  };
  std::vector<std::vector<Run>> stages;   // slots that ran; fewer than in the schedule = it deadlocks there
  std::int64_t makespan = 0;              // end of the last slot
  std::vector<std::int64_t> busy;         // per stage
  std::vector<std::int64_t> span;         // per stage: from its first start to its last end
  std::vector<std::int32_t> peak_chunks;  // per stage: most chunk activations held at once
};
SchedulePlay playSchedule(const Schedule& schedule, const SlotTimes& times);

// When a stage asks for the inputs of its slots: `slot`'s input before slot `before` starts (both indices in
// the stage's order, before <= slot), in the order of the list. One slot ahead, where a stage hears from one
// neighbour and needs results soon after they are sent. Otherwise (`played`: V placement, breadth-first,
// files) receives are issued in the order in which results become ready when the schedule is played: one
// order for all ranks, which cannot deadlock.
struct ReceiveAt {
  std::int32_t before = 0, slot = 0;
};
std::vector<std::vector<ReceiveAt>> receiveOrder(const Schedule& schedule, bool played);
bool receivesAsPlayed(ScheduleKind kind, std::int32_t chunks);

// One line per stage: "0: F0.0 F0.1 B0.0 ...". Round-trips; W slots mean a split backward, a first line
// "placement v" the V placement. Parsing throws Error{BadInput} with line and token.
std::string scheduleToText(const Schedule& schedule);
Schedule scheduleFromText(const std::string& text, const std::string& source);

// PyTorch's pipeline schedule CSV (torch.distributed.pipelining): a row per rank, cells such as 0F1, 2B3,
// 1I0, 1W0 = virtual stage, operation (forward, full backward, input gradient, weight gradient), micro-batch.
// The time grid: empty cells are idle. Reading accepts loop and V placement; throws Error{BadInput} with row
// and cell.
std::string scheduleToCsv(const Schedule& schedule);
Schedule scheduleFromCsv(const std::string& text, const std::string& source);
// A file in CSV (.csv) or in our text form, checked by validateSchedule. Throws Error{BadInput}.
Schedule loadSchedule(const std::string& path);

// Every micro-batch runs F then B (then W) once per chunk on every stage, each phase of a chunk in ascending
// order (gradients are summed in that order), and executing the stages in order with the pipeline's
// dependencies reaches the end (no deadlock).
std::vector<Issue> validateSchedule(const Schedule& schedule);

// The grid over unit time steps (F = 1, full B = 2; split: B = 1, W = 1) as text, for people.
std::string drawSchedule(const Schedule& schedule);

}  // namespace bmt
