// compare: predicted against measured, joined on (rank, task). Both sides come from one program, so a task is
// the same work in both; a communication's time is its transfer (start to end), without waiting for the
// others.
//   error [%] = 100 * (predicted - measured) / measured: positive = predicted too slow
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "traces/shares.h"
#include "traces/trace.h"

namespace bmt::trace {

struct CompareRow {
  std::string name;                        // kind of task, or lane
  std::int64_t count = 0;                  // joined tasks
  double predicted_s = 0, measured_s = 0;  // totals over all ranks
  double errorPct() const;                 // 0 when nothing was measured
};

struct TaskMiss {
  TaskRef task;
  std::string name;
  TaskKind kind = TaskKind::Forward;
  Lane lane = Lane::Compute;
  double predicted_s = 0, measured_s = 0;
};

struct Comparison {
  std::string model, cluster, plan, profile;
  double predicted_step_s = 0, measured_step_s = 0;
  Shares predicted_shares, measured_shares;
  Bytes predicted_peak = 0, measured_peak = 0;  // worst rank; 0 = not in the trace
  std::vector<CompareRow> by_kind, by_lane;     // only kinds and lanes that occur
  std::vector<TaskMiss> worst;                  // by absolute miss, largest first
  std::int64_t joined = 0, only_predicted = 0, only_measured = 0;
  double errorPct() const;
};

// Error{BadInput} naming the two values when the traces are not of one model and plan, when the order is
// wrong, or when the programs differ.
Comparison compareTraces(const Trace& predicted, const Trace& measured, std::size_t num_worst = 10);

std::string comparisonToJson(const Comparison& comparison);  // schema "bmtrain.compare/1"
std::string comparisonToText(const Comparison& comparison);

}  // namespace bmt::trace
