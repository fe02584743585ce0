// Trace: what happened when, predicted by the simulator or measured by the executor, in one type with the
// same task ids.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/task_graph.h"

namespace bmt::trace {

struct TaskRef {
  RankId rank = -1;
  TaskId task = -1;
  bool operator==(const TaskRef&) const = default;
};

struct Span {
  RankId rank = 0;
  TaskId task = 0;  // index in the rank's program: joins predicted with measured
  Lane lane = Lane::Compute;
  TaskKind kind = TaskKind::Forward;
  Slot slot;
  std::int32_t layer = -1;
  Ns start = 0, end = 0;
  Ns posted = 0;  // communication: when this rank was ready (start - posted = waiting for the others)
  TaskRef cause;  // predecessor that released it; {-1,-1} = none. Predicted traces only
  std::uint32_t name = 0;  // index in Trace::names
  Bytes bytes = 0;         // communication payload
};

struct MemorySample {
  RankId rank = 0;
  Ns time = 0;
  std::array<Bytes, kNumBufferKinds> live{};
};

enum class Source : std::uint8_t { Predicted, Measured };

struct Trace {
  Source source = Source::Predicted;
  std::string model, cluster, plan, profile;  // how it came about, as text
  std::int32_t num_ranks = 0;
  std::int32_t stages = 1;
  std::vector<Span> spans;  // by rank, then task
  std::vector<std::string> names;
  std::vector<MemorySample> memory;
  Bytes peak_memory =
      0;             // worst rank: predicted arena, or the highest byte of it that was written; 0 = unknown
  Ns step_time = 0;  // start of the first span to end of the last, over all ranks
};

}  // namespace bmt::trace
