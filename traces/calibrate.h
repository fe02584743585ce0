// calibrate: from samples, measured traces or nccl-tests output to cost constants. Pure functions; the
// measuring itself is the business of `bmtrain calibrate` (cli/cmd_calibrate.cpp).
#pragma once

#include <string>
#include <vector>

#include "core/task_graph.h"
#include "traces/cost_profile.h"
#include "traces/fit.h"
#include "traces/trace.h"

namespace bmt::trace {

// One fit per kind of op. Matrix products are held to `core_peak_flops` (0 = unknown): noise must not promise
// more than the machine has. Kinds without samples get the bandwidth of streaming kinds that were measured,
// with samples = 0.
std::vector<OpFit> fitOps(const std::vector<OpSample>& samples, double core_peak_flops);

// Scales the op costs of `base` so that they explain the compute tasks of a measured trace: with w =
// predicted seconds of kind k in task t and r = measured / predicted seconds of the task, s_k <- s_k * sum(w
// r) / sum(w), repeated (Richardson 1972, Lucy 1974: keeps every cost positive). The residuals become those
// against the trace. `graph` must be what the trace ran, layer by layer.
CostProfile refineFromTrace(const CostProfile& base, const TaskGraph& graph, const Trace& measured);

// The text output of NVIDIA's nccl-tests (out-of-place columns): size, count, type, redop, root, time us,
// algbw, busbw, #wrong. Debug lines mixed in are ignored. The number of ranks comes from the "#  Rank" lines,
// the collective from
// "# Collective test starting:" or, failing that, from `fallback_name` ("all_reduce_perf"). Error{BadInput}
// when something is missing.
CommFit fitNcclTests(const std::string& text, const std::string& source, const std::string& fallback_name);

// Residuals of every fit, for people.
std::string profileToText(const CostProfile& profile);

}  // namespace bmt::trace
