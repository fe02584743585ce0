// GPU op costs: committed profiles are sane, shapes behave as tiles and traffic demand, and the fit recovers
// what made its data.
#include "simulator/gpu_cost.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/cluster_spec.h"
#include "simulator/gpu_fit.h"

namespace bmt::sim {
namespace {

using trace::GpuConstants;

GpuConstants a100() {
  return *trace::shippedProfile("A100-SXM4-80GB")->gpu;
}

OpCall callOf(OpKind kind, std::initializer_list<std::int64_t> dim, DType type = DType::BF16) {
  OpCall call;
  call.op.kind = kind;
  call.op.dtype = type;
  std::copy(dim.begin(), dim.end(), call.op.dim.begin());
  return call;
}

TEST(ShippedProfiles, NameTheirSourcesAndStayBelowThePeaks) {
  std::map<std::string, DeviceSpec> devices;
  for (const ClusterPreset& preset : clusterPresets()) devices[preset.node.device.name] = preset.node.device;
  devices["A100-PCIe-80GB"] = devices["A100-SXM4-80GB"];  // in no preset
  const std::vector<std::string> names = trace::shippedProfiles();
  ASSERT_GE(names.size(), 7U);
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(devices.contains(name));
    const DeviceSpec& device = devices.at(name);
    const trace::CostProfile profile = *trace::shippedProfile(name);
    const GpuConstants& g = *profile.gpu;
    for (const trace::GpuField& field : trace::gpuFields())
      EXPECT_NE(g.sources.at(field.name), "") << field.name;
    EXPECT_LT(g.matmul_16, std::max(device.peak_bf16, device.peak_fp16));
    EXPECT_LE(g.matmul_8, device.peak_fp8);
    EXPECT_LT(g.memory_bandwidth, device.memory_bandwidth);
    EXPECT_LT(g.flash_forward, std::max(device.peak_bf16, device.peak_fp16));
    EXPECT_EQ(trace::profileToJson(trace::profileFromJson(trace::profileToJson(profile), "p")),
              trace::profileToJson(profile));
  }
  EXPECT_FALSE(trace::shippedProfile("Ascend-910B").has_value());
  const trace::CostProfile assumed = trace::datasheetProfile(devices.at("B300-SXM-288GB"));
  EXPECT_FALSE(assumed.measured);
  EXPECT_NE(assumed.gpu->sources.at("matmul_16").find("assumed"), std::string::npos);
}

TEST(Gemm, PaysForTilesWavesAndShortProducts) {
  const GpuConstants g = a100();
  const auto rate = [&](double m, double n, double k) {
    return 2 * m * n * k / gemmSeconds(g, m, n, k, 1, DType::BF16, 0);
  };
  for (const double k : {512.0, 4096.0, 16384.0})
    EXPECT_LE(rate(8192, 8192, k), g.matmul_16 * g.sustained * 1.0001);
  EXPECT_LT(rate(4096, 4096, 256), 0.75 * rate(4096, 4096, 4096));  // prologue and epilogue
  EXPECT_LT(rate(4096, 576, 5120),
            0.8 * rate(4096, 8192, 5120));            // three columns of tiles where 2.25 are needed
  EXPECT_LT(rate(128, 128, 512), 0.2 * g.matmul_16);  // one tile on 108 SMs
  // A product that streams more bytes than it multiplies runs at the memory's pace.
  EXPECT_NEAR(gemmSeconds(g, 16, 8192, 8192, 1, DType::BF16, 8192.0 * 8192 * 2),
              8192.0 * 8192 * 2 / g.memory_bandwidth, 1e-5);
  // 183 measured products are within 4.4 % on average (docs/validation.md); one that fills the device:
  // SimuMax@4dcaae513b a100_pcie.json, 4096 x 8192 x 8192 at 0.73 of 312 TFLOP/s, on the PCIe ceiling of
  // 252.9.
  GpuConstants pcie = g;
  pcie.matmul_16 = 252.9e12;
  const double seconds = gemmSeconds(pcie, 4096, 8192, 8192, 1, DType::BF16, 0);
  EXPECT_NEAR(2 * 4096.0 * 8192 * 8192 / seconds / 312e12, 0.73, 0.03);
}

TEST(Attention, ScoresInMemoryCostTraffic) {
  const GpuConstants g = a100();
  const auto seconds = [&](AttentionKernel kernel, std::int64_t t) {
    KernelContext context;
    context.attention = kernel;
    return gpuOpTime(g, context, callOf(OpKind::AttentionForward, {4, t, 8, 8, 96, 0})).device_s;
  };
  for (const std::int64_t t : {1024, 2048, 8192}) {
    EXPECT_LT(seconds(AttentionKernel::Flash, t), seconds(AttentionKernel::Flash1, t));
    EXPECT_LT(seconds(AttentionKernel::Flash1, t), seconds(AttentionKernel::Softmax, t));
    EXPECT_LT(seconds(AttentionKernel::Softmax, t), seconds(AttentionKernel::Unfused, t));
  }
  // FlashAttention 2 is the newest kernel of an A100; later devices have faster ones.
  EXPECT_EQ(seconds(AttentionKernel::Flash, 8192), seconds(AttentionKernel::Flash2, 8192));
  const GpuConstants h = *trace::shippedProfile("H100-SXM5-80GB")->gpu;
  KernelContext newest, second;
  second.attention = AttentionKernel::Flash2;
  const OpCall call = callOf(OpKind::AttentionForward, {4, 8192, 8, 8, 128, 1});
  const double gain = gpuOpTime(h, second, call).device_s / gpuOpTime(h, newest, call).device_s;
  EXPECT_GT(gain, 1.5);  // Shah et al. 2024, abstract: 1.5 to 2.0
  EXPECT_LT(gain, 2.0);
  // Softmax alone reads and writes the scores: 2 * 4 * 8 * 2048^2 * 2 bytes.
  EXPECT_GT(seconds(AttentionKernel::Softmax, 2048), 2.0 * 4 * 8 * 2048 * 2048 * 2 / g.memory_bandwidth);
  // Megatron-LM's fused softmax needs batch x heads in fours.
  KernelContext softmax;
  softmax.attention = AttentionKernel::Softmax;
  const double two = gpuOpTime(g, softmax, callOf(OpKind::AttentionForward, {1, 2048, 2, 2, 64, 0})).device_s;
  const double four =
      gpuOpTime(g, softmax, callOf(OpKind::AttentionForward, {1, 2048, 4, 4, 64, 0})).device_s;
  EXPECT_GT(two, four);
}

TEST(Pointwise, PlainOpsCostMoreTripsToMemory) {
  const GpuConstants g = a100();
  KernelContext fused, eager;
  eager.pointwise = Pointwise::Eager;
  for (const OpKind kind : {OpKind::SwigluForward, OpKind::SwigluBackward, OpKind::RmsNormForward}) {
    const OpCall call = callOf(kind, {8192, 8192});
    EXPECT_GT(gpuOpTime(g, eager, call).device_s, 1.5 * gpuOpTime(g, fused, call).device_s);
    EXPECT_GE(gpuOpTime(g, eager, call).calls, gpuOpTime(g, fused, call).calls);
  }
}

TEST(Fit, RecoversTheConstantsThatMadeTheData) {
  FitInput input;
  for (const ClusterPreset& preset : clusterPresets()) {
    if (preset.node.device.name == "A100-SXM4-80GB")
      input.device = preset.node.device, input.scale_up = preset.node.scale_up;
  }
  GpuConstants truth = a100();
  truth.k_ramp = 240;
  truth.sustained = 0.8;
  std::string csv =
      "gpu,op,batch,m,k,n,accumulate,achieved_tflops,seq,heads,kv_heads,qk_head_dim,v_head_dim\n";
  for (const int m : {2048, 4096, 8192}) {
    for (const int k : {512, 1024, 4096}) {
      for (const int n : {1536, 4096, 12288}) {
        const OpCall call = callOf(OpKind::LinearForward, {m, n, k});
        csv += fmt::format("A100-SXM,matmul,1,{},{},{},False,{},,,,,\n", m, k, n,
                           flops(call.op) / gpuOpTime(truth, {}, call).device_s * 1e-12);
      }
    }
  }
  input.gemm.push_back(trace::parseCsv(csv, "gemm.csv"));
  const FitResult result = fitGpu(input, a100());
  EXPECT_NEAR(result.profile.gpu->k_ramp / truth.k_ramp, 1, 0.1);
  EXPECT_NEAR(result.profile.gpu->sustained / truth.sustained, 1, 0.03);
  double worst = 0;
  for (const FitSample& s : result.samples) worst = std::max(worst, std::abs(s.predicted / s.measured - 1));
  EXPECT_LT(worst, 0.05);
  EXPECT_NE(fitToText(result).find("k_ramp"), std::string::npos);
}

}  // namespace
}  // namespace bmt::sim
