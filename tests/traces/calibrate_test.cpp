// Fits recover the constants that made the samples; profiles round-trip; refinement from a trace and
// nccl-tests import.
#include "traces/calibrate.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/lower.h"

namespace bmt::trace {
namespace {

Op linear(std::int64_t n, std::int64_t o, std::int64_t i) {
  Op op;
  op.kind = OpKind::LinearForward;
  op.dim = {n, o, i, 0, 0, 0};
  return op;
}

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::BadInput);
    return error.what();
  }
  return "accepted";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Fit, RecoversTheConstantsThatMadeTheSamples) {
  std::vector<OpSample> samples;
  for (const std::int64_t n : {16, 64, 256, 1024}) {
    for (const std::int64_t o : {64, 256}) {
      const Op op = linear(n, o, 128);
      samples.push_back({op, 2e-6 + flops(op) / 30e9 + bytesMoved(op) / 10e9});
    }
  }
  const OpFit fit = fitOp(OpKind::LinearForward, samples);
  EXPECT_NEAR(fit.overhead_s, 2e-6, 1e-10);
  EXPECT_NEAR(fit.flops_per_s, 30e9, 1e5);
  EXPECT_NEAR(fit.bytes_per_s, 10e9, 1e5);
  EXPECT_LT(fit.max_abs_error_pct, 1e-3);
  EXPECT_EQ(fit.samples, 8);
}

TEST(Fit, NeverGoesNegative) {
  // Exact solution is x = (2, -1); the best non-negative one is x = (1.5, 0) by hand: min (x - 1)^2 + (x -
  // 2)^2.
  const std::vector<double> x = nonNegativeLeastSquares({1, 1, 1, 0}, {1, 2}, 2);
  EXPECT_NEAR(x[0], 1.5, 1e-12);
  EXPECT_EQ(x[1], 0);
}

TEST(Fit, CommunicationOfRingShape) {
  std::vector<CommSample> samples;
  for (const double bytes : {1e3, 1e4, 1e5, 1e6, 1e7})
    samples.push_back({6, 1.5 * bytes, 6 * 4e-6 + 1.5 * bytes / 5e9});
  const CommFit fit = fitComm(CommKind::AllReduce, "threads", samples);
  EXPECT_NEAR(fit.alpha_s, 4e-6, 1e-10);
  EXPECT_NEAR(fit.bytes_per_s, 5e9, 1e4);
}

TEST(Calibrate, UnmeasuredKindsGetTheStreamingBandwidthAndSaySo) {
  std::vector<OpSample> samples;
  for (const std::int64_t n : {1000, 100000}) {
    Op op;
    op.kind = OpKind::Add;
    op.dim[0] = n;
    samples.push_back({op, bytesMoved(op) / 8e9});
  }
  samples.push_back({linear(64, 64, 64), 2.0 * 64 * 64 * 64 / 90e9});
  samples.push_back({linear(128, 64, 64), 2.0 * 128 * 64 * 64 / 90e9});
  const std::vector<OpFit> fits = fitOps(samples, 44e9);
  ASSERT_EQ(fits.size(), static_cast<std::size_t>(kNumOpKinds));
  for (const OpFit& fit : fits) {
    if (fit.kind == OpKind::LinearForward) {
      EXPECT_LE(fit.flops_per_s, 44e9);  // never above the peak
    } else if (fit.kind != OpKind::Add) {
      EXPECT_EQ(fit.samples, 0);
      EXPECT_NEAR(fit.bytes_per_s, 8e9, 1);
    }
  }
}

CostProfile flatProfile() {
  CostProfile profile;
  profile.name = "flat";
  profile.source = "made up";
  profile.cores = 2;
  profile.core_peak_flops = 1e12;
  for (int i = 0; i < kNumOpKinds; ++i) {
    OpFit fit;
    fit.kind = static_cast<OpKind>(i);
    fit.overhead_s = 1e-6;
    fit.bytes_per_s = 10e9;
    if (isMatrixProduct(fit.kind)) fit.flops_per_s = 20e9;
    profile.ops.push_back(fit);
  }
  profile.comms.push_back({CommKind::AllReduce, "threads", 1e-6, 1e9, 5, 1.5, 2.5});
  return profile;
}

TEST(Profile, RoundTripsAndRefusesNonsense) {
  const CostProfile profile = flatProfile();
  const std::string text = profileToJson(profile);
  EXPECT_EQ(profileToJson(profileFromJson(text, "p.json")), text);
  EXPECT_EQ(findComm(profile, CommKind::AllReduce, "mpi"), nullptr);
  ASSERT_NE(findComm(profile, CommKind::AllReduce, "threads"), nullptr);
  const auto damaged = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    return refusal([&] { profileFromJson(changed, "p.json"); });
  };
  EXPECT_TRUE(contains(damaged("bmtrain.profile/1", "other/1"), "other/1"));
  EXPECT_TRUE(contains(damaged("\"linear_forward\"", "\"linear_sideways\""), "linear_sideways"));
  EXPECT_TRUE(contains(damaged("\"cores\": 2.0", "\"cores\": -2.0"), "-2"));
  EXPECT_TRUE(contains(damaged("\"cores\": 2.0", "\"cores\": \"two\""), "cores"));
}

TEST(Profile, DatasheetStaysBelowThePeaks) {
  DeviceSpec device;
  device.name = "X";
  device.peak_bf16 = 100e12;
  device.memory_bandwidth = 2e12;
  const CostProfile profile = datasheetProfile(device);
  EXPECT_FALSE(profile.measured);
  EXPECT_TRUE(contains(profile.source, "datasheet"));
  for (const OpFit& fit : profile.ops) {
    EXPECT_LT(fit.flops_per_s, 100e12);
    EXPECT_LE(fit.bytes_per_s, 2e12);
  }
}

// A trace whose backward ops took three times and whose other ops took twice as long as the base profile
// says.
TEST(Calibrate, LearnsFromAMeasuredTrace) {
  ModelSpec model;
  model.name = "tiny";
  model.layers = 3;
  model.d_model = 64;
  model.heads = model.kv_heads = 4;
  model.d_head = 16;
  model.d_ff = 256;
  model.vocab = 128;
  model.seq_len = model.max_positions = 32;
  const Plan plan = planFromText("mb=2,gb=4");
  const TaskGraph graph = lower(model, localCluster(1), plan, RankSelection::All, Granularity::Layer);
  const CostProfile base = flatProfile();
  const auto factor = [](OpKind kind) {
    return contains(std::string(toString(kind)), "backward") ? 3.0 : 2.0;
  };
  const auto seconds = [&](const CostProfile& profile, const Op& op) {
    const OpFit& fit = *findOp(profile, op.kind);
    return fit.overhead_s + (fit.flops_per_s > 0 ? flops(op) / fit.flops_per_s : 0) +
           bytesMoved(op) / fit.bytes_per_s;
  };
  Trace trace;
  trace.source = Source::Measured;
  trace.num_ranks = 1;
  const RankProgram& program = graph.ranks.front();
  Ns now = 0;
  for (TaskId id = 0; id < static_cast<TaskId>(program.tasks.size()); ++id) {
    const Task& task = program.tasks[static_cast<std::size_t>(id)];
    Span span;
    span.task = id;
    span.kind = task.kind;
    span.lane = task.lane;
    span.slot = task.slot;
    span.start = span.posted = now;
    double length = 0;
    if (task.segment >= 0) {
      for (const OpCall& call : graph.segments[static_cast<std::size_t>(task.segment)].ops)
        length += factor(call.op.kind) * seconds(base, call.op);
    }
    span.end = now += fromSeconds(length);
    trace.spans.push_back(span);
  }
  const CostProfile refined = refineFromTrace(base, graph, trace);
  for (const Span& span : trace.spans) {
    const Task& task = program.tasks[static_cast<std::size_t>(span.task)];
    if (task.segment < 0) continue;
    double predicted = 0;
    for (const OpCall& call : graph.segments[static_cast<std::size_t>(task.segment)].ops)
      predicted += seconds(refined, call.op);
    EXPECT_NEAR(predicted / toSeconds(span.end - span.start), 1, 0.03) << taskName(graph, program, span.task);
  }
  trace.spans.front().kind = TaskKind::TensorComm;
  EXPECT_TRUE(contains(refusal([&] { refineFromTrace(base, graph, trace); }), "another version"));
}

// Shape of the text output of NVIDIA nccl-tests 2.19 (rows made up, exact for alpha = 5 us and 200 GB/s).
TEST(NcclTests, ReadsRowsAndIgnoresDebugLines) {
  const std::string head =
      "# nccl-tests version 2.19.6\n# Collective test starting: all_reduce_perf\n"
      "#  Rank  0 Group  0 Pid 101 on   host1 device  0 [0x07] NVIDIA H100\n"
      "#  Rank  1 Group  0 Pid 101 on   host1 device  1 [0x0f] NVIDIA H100\n"
      "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw "
      "  busbw #wrong\n";
  std::string rows;
  for (const double bytes : {1048576.0, 16777216.0, 268435456.0}) {
    // Two ranks: 2 steps, bytes * 2 * 1/2 sent.
    const double us = 2 * 5 + bytes / 200e9 * 1e6;
    rows += std::to_string(static_cast<long long>(bytes)) + " 262144 float sum -1 " + std::to_string(us) +
            " 1.0 1.0 0 " + std::to_string(us) + " 1.0 1.0 0\n";
    rows += "host1:101:120 [0] NCCL INFO Channel 00/24\n";
  }
  const CommFit fit = fitNcclTests(head + rows + "# Avg bus bandwidth    : 1.0\n", "log", "x");
  EXPECT_EQ(fit.kind, CommKind::AllReduce);
  EXPECT_EQ(fit.transport, "nccl");
  EXPECT_EQ(fit.samples, 3);
  EXPECT_NEAR(fit.alpha_s, 5e-6, 1e-8);
  EXPECT_NEAR(fit.bytes_per_s, 200e9, 2e7);
  EXPECT_TRUE(contains(refusal([&] { fitNcclTests(rows, "log", "all_reduce_perf.txt"); }), "0 ranks"));
  EXPECT_TRUE(contains(refusal([&] { fitNcclTests(head, "log", ""); }), "0 rows"));
  EXPECT_TRUE(contains(refusal([&] { fitNcclTests(rows, "log", "results.txt"); }), "which collective"));
}

}  // namespace
}  // namespace bmt::trace
