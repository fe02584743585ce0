// Trainer: runs a plan for a number of steps, with ranks as threads of this process or as MPI processes.
// AdamW (Loshchilov and Hutter 2019) with clipping by the global norm, linear warm-up, then cosine decay.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/task_graph.h"
#include "executor/init.h"
#include "traces/trace.h"

namespace bmt::exec {

// Fills tokens and targets [end - begin, T] with sequences [begin, end) of the step's global batch; either
// may be null.
using BatchSource = std::function<void(std::int64_t step, std::int64_t begin, std::int64_t end,
                                       std::int32_t* tokens, std::int32_t* targets)>;

struct StepReport {
  std::int64_t step = 0;
  double loss = 0, grad_norm = 0, lr = 0;
  double seconds = 0;
};

struct TrainOptions {
  std::int64_t steps = 1;
  double lr = 1e-3, min_lr = 1e-4;
  std::int64_t warmup = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip = 1.0;
  std::uint64_t seed = 1;
  InitRule init;
  std::int64_t trace_steps = 0;  // keep the spans of that many last steps; the median one becomes the trace
  bool poison = false;           // NaN in all scratch memory before every step (tests)
  double deadline_s = 30;        // of one communication; the first step gets ten times as long
  RankId kill_rank = -1;         // fault injection: this rank fails in the middle of kill_step
  std::int64_t kill_step = -1;
  const std::atomic<bool>* stop = nullptr;         // set from outside: finish the current step, then return
  std::function<void(const StepReport&)> on_step;  // called by rank 0
};

struct TrainResult {
  std::vector<StepReport> steps;
  std::vector<Bytes> peak_memory;   // per rank: highest arena byte written in the first step
  std::vector<Bytes> comm_bytes;    // by TaskKind, sum over ranks, one step
  trace::Trace trace;               // of the median traced step
  double cpu_seconds_per_step = 0;  // all threads of the process, first two steps excluded
  Bytes peak_rss = 0;               // of the process
  bool stopped = false;
};

// Throws Error: BadInput for what the CPU does not execute or a graph that does not verify, Infeasible when
// the arenas of the graph's ranks exceed the free memory (with components).
void requireExecutable(const TaskGraph& graph);

// Learning rate of a step (0-based).
double learningRate(const TrainOptions& options, std::int64_t step);

// The graph must hold all ranks (RankSelection::All, Granularity::Layer); it is verified first. Errors:
// Infeasible when the arenas exceed the free memory (with components), Runtime when a rank fails (rank and
// task named; all ranks have ended), or when loss or gradient norm is not finite.
TrainResult trainThreads(const TaskGraph& graph, const BatchSource& batches, const TrainOptions& options);

// This process runs its rank of the job. The graph holds at least that rank, on rank 0 all ranks; the caller
// has checked it with requireExecutable. The result is complete on rank 0. An exception leaves the job
// running: the caller ends it (MpiWorld::abortJob). Traces are put together on one machine only, where the
// clocks agree.
class MpiWorld;
TrainResult trainProcess(const TaskGraph& graph, MpiWorld& mpi, const BatchSource& batches,
                         const TrainOptions& options);

// Parameters of all ranks put together, by name, as after the last step of trainThreads; for tests and
// checkpoints.
struct FullTensor {
  std::string name;
  std::int64_t rows = 0, cols = 0;
  std::vector<float> values;
};
struct FinalState {
  std::vector<FullTensor> weights, gradients;
};
TrainResult trainThreads(const TaskGraph& graph, const BatchSource& batches, const TrainOptions& options,
                         FinalState* final_state);

// Free host memory: MemAvailable, and the limit of the control group if that is lower.
Bytes freeHostMemory();

}  // namespace bmt::exec
