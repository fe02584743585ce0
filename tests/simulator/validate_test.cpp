// Rows of published runs become plans by fixed rules; statistics equal hand-computed values.
#include "simulator/validate.h"

#include <gtest/gtest.h>

#include <cmath>

#include "traces/csv.h"

namespace bmt::sim {
namespace {

const char* const kHeader =
    "id,model_name,layers,hidden,heads,kv_heads,ffn,vocab,seq,params_b,gpu,n_gpus,gpus_per_node,interconnect_"
    "intra,"
    "interconnect_inter,dtype,tp,pp,dp,cp,ep,vpp,schedule,zero_or_fsdp,sequence_parallel,micro_batch,global_"
    "batch,"
    "recompute,flash_attention,iter_time_s,tokens_per_s_per_gpu,tflops_per_gpu,mfu_pct,peak_mem_gb,flops_"
    "convention,"
    "notes\n";

MeasuredRun runOf(const std::string& row) {
  return readRun(trace::parseCsv(kHeader + row + "\n", "test.csv"), 0);
}

TEST(MeasuredRun, ReadsModelClusterAndPlan) {
  // Korthikanti et al. 2022, Table 5: 175B with full recompute, interleaved 3.
  const MeasuredRun run = runOf(
      "kort-003,GPT-175B,96,12288,96,96,49152,51200,2048,175,A100-SXM4-80GB,64,8,NVLink3+NVSwitch 300 "
      "GB/s/dir/GPU,"
      "8x HDR InfiniBand 200 Gb/s per node,fp16,8,8,1,1,1,3,interleaved-1f1b,0,no,1,64,full,no,18.13,,,,,,");
  EXPECT_EQ(run.skip, "");
  EXPECT_EQ(
      planToText(run.plan),
      "dp=1,tp=8,pp=8,mb=1,gb=64,schedule=interleaved,chunks=3,recompute=full,precision=fp16,no-overlap-grad,"
      "attention=softmax,grads=fp16,order=tp-cp-dp-pp");
  EXPECT_TRUE(run.model.dropout);
  EXPECT_EQ(run.cluster.numNodes(), 8);
  EXPECT_EQ(run.cluster.groups[0].nics_per_node, 8);
  EXPECT_DOUBLE_EQ(run.cluster.groups[0].nic.bandwidth, 25e9);
  EXPECT_DOUBLE_EQ(*run.step_s, 18.13);
  EXPECT_EQ(run.source, "kort");
}

TEST(MeasuredRun, TurnsThroughputIntoTimeByTheSourcesConvention) {
  // Narayanan et al. 2021: hardware FLOPs with recompute; 1T on 3,072 GPUs at 163 TFLOP/s: 96 B s l h^2 (1 +
  // s/6h + V/16lh) / (n X) with B 3072, l 128, h 25600.
  const std::string start =
      "sc21-010,GPT-1T,128,25600,160,160,102400,51200,2048,1008,A100-SXM4-80GB,3072,8,,8x HDR InfiniBand 200 "
      "Gb/s per "
      "node,fp16,8,64,6,1,1,1,1f1b,0,no,1,3072,full,no,,";
  const double h = 25600, s = 2048, l = 128, v = 51200, b = 3072;
  const double flops = 96 * b * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h));
  EXPECT_NEAR(*runOf(start + ",163,,,hardware FLOPs incl. recompute,").step_s / (flops / 3072 / 163e12), 1,
              2e-3);
  EXPECT_NEAR(*runOf(start + ",163,,,hardware 8*N*tok with N = label size,").step_s,
              8 * 1008e9 * b * s / 3072 / 163e12, 1e-9);
  EXPECT_NEAR(*runOf(start + "250,,,,,").step_s, b * s / 250 / 3072, 1e-9);
}

TEST(MeasuredRun, TakesExpertsFromThePublishedModelAndOverlapFromTheNotes) {
  // NVIDIA/dgxc-benchmarking, Grok-1 on 1,024 H100; the notes column of another row of the source.
  const MeasuredRun run = runOf(
      "dgxc-195,Grok-1-314B MoE (8 experts top-2),64,6144,48,8,32768,128256,8192,314,H100-SXM5-80GB,1024,8,"
      "NVLink4 900 GB/s bidir,8x 400 Gb/s InfiniBand per "
      "node,bf16,4,8,16,2,8,8,interleaved-1f1b,1,yes,1,2048,"
      "none,yes,21,,,,,,TP comm overlap on; DP overlap on.");
  EXPECT_EQ(run.skip, "");
  EXPECT_EQ(run.model.experts, 8);
  EXPECT_EQ(run.model.top_k, 2);
  EXPECT_EQ(run.model.layers, 64);
  EXPECT_EQ(run.plan.ep, 8);
  EXPECT_EQ(run.plan.cp, 2);
  EXPECT_TRUE(run.plan.tp_overlap);
}

TEST(MeasuredRun, SkipsOnlyForAReason) {
  const std::string start =
      "x-1,GPT,24,2048,16,16,8192,50257,2048,,A100-SXM4-80GB,8,8,NVLink,,bf16,1,1,8,1,1,1,none,";
  EXPECT_EQ(runOf(start + "0,,4,64,none,yes,1.0,,,,,,").skip, "");  // no sequence parallelism without tp
  EXPECT_EQ(runOf(start + "0,,,64,none,yes,1.0,,,,,,").skip, "'micro_batch' is empty");
  EXPECT_EQ(runOf(start + "0,,4,64,,yes,1.0,,,,,,").skip, "'recompute' is empty");
  EXPECT_EQ(runOf(start + "0,,4,64,none,yes,,,,,,,").skip, "neither time nor memory is stated");
  const MeasuredRun oom = runOf("hagoom-1" + start.substr(3) + "1,,4,64,none,yes,,,,,,outcome: OOM Error,");
  EXPECT_EQ(oom.outcome, Outcome::OutOfMemory);
  EXPECT_EQ(oom.source, "hag");
  EXPECT_EQ(runOf("bloom-1" + start.substr(3) + "1,,4,64,none,yes,1.0,,,,,,").outcome, Outcome::Worked);
  EXPECT_EQ(oom.skip, "");
}

TEST(Statistics, EqualHandComputedValues) {
  const ErrorSummary s = summarize({110, 95, 100, 80}, {100, 100, 100, 100});
  EXPECT_EQ(s.n, 4);
  EXPECT_NEAR(s.mape_pct, 8.75, 1e-9);
  EXPECT_NEAR(s.bias_pct, -3.75, 1e-9);
  EXPECT_NEAR(s.median_ape_pct, 5, 1e-9);
  EXPECT_NEAR(s.p90_ape_pct, 20, 1e-9);
  EXPECT_NEAR(spearman({1, 2, 3, 4}, {10, 20, 40, 30}), 0.8, 1e-9);
  EXPECT_NEAR(kendallTau({1, 2, 3, 4}, {10, 20, 40, 30}), 4.0 / 6, 1e-9);
  EXPECT_NEAR(kendallTau({1, 1, 2}, {1, 2, 3}), 2 / std::sqrt(2.0 * 3), 1e-9);
}

TEST(Csv, ReadsQuotesAndRefusesUnevenRows) {
  const trace::CsvTable t = trace::parseCsv("a,b\r\n\"x, \"\"y\"\"\n z\", 2 \n", "t");
  ASSERT_EQ(t.rows.size(), 1U);
  EXPECT_EQ(t.at(0, "a"), "x, \"y\"\n z");
  EXPECT_EQ(t.at(0, "b"), "2");
  EXPECT_EQ(t.at(0, "c"), "");
  EXPECT_THROW(trace::parseCsv("a,b\n1\n", "t"), Error);
  EXPECT_THROW(trace::parseCsv("a,b\n\"1,2\n", "t"), Error);
  EXPECT_THROW(trace::parseCsv("", "t"), Error);
}

}  // namespace
}  // namespace bmt::sim
