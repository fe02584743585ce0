// Schedules: the order of forward and backward slots on every pipeline stage. Everything that knows what a
// schedule is lives here; lowering only walks the slots.
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
  std::int16_t chunk = 0;  // model chunk on this stage: virtual stage = chunk * pp + stage
  std::int32_t microbatch = 0;
  bool operator==(const Slot&) const = default;
};
std::string toString(const Slot& slot);  // "F0.3" = forward, chunk 0, micro-batch 3

struct Schedule {
  std::int32_t num_stages = 1, num_chunks = 1, num_microbatches = 1;
  std::vector<std::vector<Slot>> stages;  // [num_stages] slots in execution order
  bool operator==(const Schedule&) const = default;
};

// GPipe: Huang et al. 2019. 1F1B and interleaved: Narayanan et al. 2021 (Megatron's warm-up order). Backwards
// run in ascending micro-batch order in all of them, so gradients are summed in one order (bit-equal to one
// rank). Interleaved needs num_microbatches to be a multiple of pp (validatePlan checks).
Schedule makeSchedule(ScheduleKind kind, std::int32_t pp, std::int32_t chunks, std::int32_t num_microbatches);
Schedule makeSchedule(const Plan& plan);

// One line per stage: "0: F0.0 F0.1 B0.0 ...". Round-trips. Parsing throws Error{BadInput} with line and
// token.
std::string scheduleToText(const Schedule& schedule);
Schedule scheduleFromText(const std::string& text, const std::string& source);

// Every micro-batch runs F then B once per chunk on every stage, and executing the stages in order with the
// pipeline's dependencies reaches the end (no deadlock).
std::vector<Issue> validateSchedule(const Schedule& schedule);

// The grid over unit time steps (F = 1, B = 2) as text, for people.
std::string drawSchedule(const Schedule& schedule);

}  // namespace bmt
