// CostProfile: what a device's work costs, fitted from measurements (calibrate) or taken from a datasheet.
// Few constants with a meaning; every figure says where it is from.
//   op time alone on an idle device [s] = overhead + flops / flops_per_s + bytes / bytes_per_s
//   collective time alone          [s] = steps(n) * alpha + bytes sent per rank / bytes_per_s
// with flops() and bytesMoved() of core/op.h and steps and bytes by algorithm (simulator/cost_model.h).
#pragma once

#include <string>
#include <vector>

#include "core/cluster_spec.h"
#include "core/op.h"
#include "core/task_graph.h"
#include "core/units.h"

namespace bmt::trace {

struct OpFit {
  OpKind kind = OpKind::Zero;
  double overhead_s = 0;
  double flops_per_s = 0;  // 0 = the term is absent
  double bytes_per_s = 0;  // 0 = the term is absent
  std::int64_t samples = 0;
  double mean_abs_error_pct = 0, max_abs_error_pct = 0;  // residuals of the fit
};

struct CommFit {
  CommKind kind = CommKind::AllReduce;
  std::string transport;   // "threads", "mpi", "nvlink", "network"
  double alpha_s = 0;      // per algorithm step
  double bytes_per_s = 0;  // per rank, alone
  std::int64_t samples = 0;
  double mean_abs_error_pct = 0, max_abs_error_pct = 0;
};

struct CostProfile {
  std::string name;    // device or machine
  std::string source;  // "measured 2026-12-01 on ...", "datasheet: ..."
  bool measured = false;
  double cores = 0;             // CPU: cores shared by the node's ranks; 0 = one device per rank
  double core_peak_flops = 0;   // measured FMA (or matrix) peak of one core or device [FLOP/s]
  double memory_bandwidth = 0;  // measured copy bandwidth of the node (read + write) [B/s]
  double task_overhead_s = 0;   // per task: issue, queue hand-over, event
  double contention = 0;  // CPU: extra time share of compute when all cores are busy (shared caches, memory)
  std::vector<OpFit> ops;
  std::vector<CommFit> comms;
};

const OpFit* findOp(const CostProfile& profile, OpKind kind);  // nullptr = none
const CommFit* findComm(const CostProfile& profile, CommKind kind,
                        const std::string& transport);  // nullptr = none

// JSON with schema "bmtrain.profile/1". Reading throws Error{BadInput}.
std::string profileToJson(const CostProfile& profile);
CostProfile profileFromJson(const std::string& text, const std::string& source);
CostProfile loadProfile(const std::string& path);

// Roofline from the datasheet alone, for a device without measurements; `source` says so.
CostProfile datasheetProfile(const DeviceSpec& device);

// Where `calibrate` stores the profile of this machine and `simulate` looks for it:
// $XDG_CONFIG_HOME/bmtrain/local-profile.json (default ~/.config).
std::string localProfilePath();

}  // namespace bmt::trace
