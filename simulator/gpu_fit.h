// Fits a device's GpuConstants to published measurements: matrix-product and attention shapes, collective
// sweeps and a few whole training steps. Every constant is fitted on the data that isolates it, in this
// order; what no data isolates keeps its starting value:
//   matmul_*           the best measured product (micro table, "max achieved matmul")
//   k_ramp, sustained  matrix-product shapes
//   flash_*            attention shapes
//   link_efficiency, multicast_efficiency, comm_fill_s, comm_start_s   all-reduce sweeps inside a node
//   sustained, memory_bandwidth, host_s, nic_efficiency, flash_* where no shapes exist
//                      whole steps, coordinate search inside stated bounds
#pragma once

#include <string>
#include <vector>

#include "simulator/measured_run.h"
#include "traces/cost_profile.h"
#include "traces/csv.h"

namespace bmt::sim {

struct FitInput {
  DeviceSpec device;
  LinkSpec scale_up;  // of a node of this device
  std::vector<trace::CsvTable> gemm, micro;
  std::vector<MeasuredRun> runs;  // calibration steps on this device
};

struct FitSample {
  std::string kind, name;              // "product", "attention", "all-reduce", "step"
  double measured = 0, predicted = 0;  // s
};

struct FitResult {
  trace::CostProfile profile;
  std::vector<FitSample> samples;  // with the fitted constants
};

// `start` gives the constants that are not fitted, and the starting point of the others.
FitResult fitGpu(const FitInput& input, const trace::GpuConstants& start);

// Residuals per kind, the constants with sources, and the largest misses.
std::string fitToText(const FitResult& result);

}  // namespace bmt::sim
