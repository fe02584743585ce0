// Lanes are asynchronous: while a rank computes, its gradients are reduced. Seen in the trace of a real step.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/lower.h"
#include "executor/trainer.h"
#include "tests/support/random_plan.h"

namespace bmt::exec {
namespace {

// Pairs of a running gradient reduction and a running compute task of the same rank.
int overlaps(const trace::Trace& trace) {
  int count = 0;
  for (const trace::Span& data : trace.spans) {
    if (data.lane != Lane::Data || data.kind != TaskKind::DataComm) continue;
    count += static_cast<int>(
        std::count_if(trace.spans.begin(), trace.spans.end(), [&](const trace::Span& compute) {
          return compute.rank == data.rank && compute.lane == Lane::Compute && compute.start < data.end &&
                 data.start < compute.end;
        }));
  }
  return count;
}

TEST(Overlap, GradientsAreReducedWhileBackwardGoesOn) {
  ModelSpec model = test::tinyModel(Family::Gpt2);
  // Backward of a layer takes milliseconds: more than a time slice, so that other load does not hide the
  // overlap.
  model.layers = 6;
  model.d_model = 128;
  model.d_head = model.d_model / model.heads;
  model.d_ff = 512;
  model.seq_len = model.max_positions = 128;
  Plan plan = planFromText("dp=2,mb=4,gb=8,bucket=256KiB");  // several buckets
  const BatchSource zeros = [&](std::int64_t, std::int64_t begin, std::int64_t end, std::int32_t* tokens,
                                std::int32_t* targets) {
    const auto count = static_cast<std::size_t>((end - begin) * model.seq_len);
    if (tokens != nullptr) std::fill_n(tokens, count, 1);
    if (targets != nullptr) std::fill_n(targets, count, 2);
  };
  TrainOptions options;
  options.steps = 6;
  options.trace_steps = 3;
  for (const bool overlap : {true, false}) {
    plan.overlap_grad = overlap;
    const TaskGraph graph = lower(model, localCluster(2), plan, RankSelection::All, Granularity::Layer);
    const TrainResult result = trainThreads(graph, zeros, options);
    if (overlap) {
      EXPECT_GT(overlaps(result.trace), 0);
    } else {
      // Reductions then begin after the last backward; only the optimizer could still run beside them.
      for (const trace::Span& data : result.trace.spans) {
        if (data.lane != Lane::Data || data.kind != TaskKind::DataComm) continue;
        for (const trace::Span& compute : result.trace.spans) {
          if (compute.rank != data.rank || compute.kind != TaskKind::Backward) continue;
          EXPECT_LE(compute.end, data.start);
        }
      }
    }
  }
}

}  // namespace
}  // namespace bmt::exec
