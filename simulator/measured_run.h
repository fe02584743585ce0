// One row of a table of published runs (columns of validation/measured.csv) read as model, cluster and plan,
// with what was measured. Nothing here depends on the outcome: the same rules apply to every row, and what a
// row leaves open is filled by a stated assumption in `note`.
#pragma once

#include <optional>
#include <string>

#include "core/cluster_spec.h"
#include "core/model_spec.h"
#include "core/plan.h"
#include "traces/csv.h"

namespace bmt::sim {

enum class Outcome { Worked, OutOfMemory, OtherFailure };

struct MeasuredRun {
  std::string id, source, gpu;  // source: the id up to its first '-', without a trailing "oom"
  Outcome outcome = Outcome::Worked;
  ModelSpec model;
  ClusterSpec cluster;
  Plan plan;
  std::optional<double> step_s;  // measured, or derived from the throughput the row states
  std::optional<double> peak_gib;
  bool device_level = false;  // peak_gib is the whole device's use, contexts included (nvidia-smi)
  std::string note;           // assumptions
  std::string skip;           // why it cannot be simulated; empty = it can
};

MeasuredRun readRun(const trace::CsvTable& table, std::size_t row);

// The rows that were looked at while the cost model was made, and those kept apart: FNV-1a of the id modulo
// 5, of which 0 and 1 are held out.
bool heldOut(const std::string& id);

}  // namespace bmt::sim
