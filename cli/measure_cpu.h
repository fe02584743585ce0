// Measuring this machine for `bmtrain calibrate`: every op in the order and memory state in which training
// runs it, collectives between threads, and what a core and the memory can do.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/cluster_spec.h"
#include "core/model_spec.h"
#include "core/plan.h"
#include "traces/fit.h"

namespace bmt::cli {

struct MeasureCase {
  ModelSpec model;
  Plan plan;
};
// Small models of both families, whole and sharded over 2 and 4 ranks, with different numbers of tokens.
std::vector<MeasureCase> defaultCases();

// Runs rank 0's program op by op (communication is left out) for `seconds`; one sample per distinct op, the
// lower quartile of its times.
std::vector<trace::OpSample> measureOps(const MeasureCase& measured, double seconds);

// Zero and Add from 16 to 1 Mi elements, on memory that rotates: programs hold only small ones, so their
// bandwidth would be a guess.
std::vector<trace::OpSample> measureStreaming();

// Extra CPU time share of the same work when `cores` copies of it run at once.
double measureContention(const MeasureCase& measured, int cores, double seconds);

// Collectives of `ranks` threads, 1 KiB to 16 MiB; sends and receives as a pipeline uses them, lane to lane.
struct CommMeasurement {
  CommKind kind = CommKind::AllReduce;
  std::vector<trace::CommSample> samples;
};
std::vector<CommMeasurement> measureComms(int ranks, double seconds);

double measureTaskOverhead();              // seconds per task of the CPU backend
double measurePeakFlops(double seconds);   // FLOP/s of one core, fused multiply-adds in the widest registers
double measureCopyBandwidth(int threads);  // B/s read + written, all threads together

}  // namespace bmt::cli
