// Cluster presets. Peaks are dense, per direction where it is a link. Figures: NVIDIA datasheets and system
// guides as collected by stas00/ml-engineering@744d01e18b (accelerator and network READMEs), the DGX A100
// paper figures of Narayanan et al. 2021, and bigscience-workshop/bigscience for Jean Zay. Latencies:
// NVIDIA/nccl@5067397c26 src/graph/tuning.cc (3.4 us per NVLink hop, 14 us per network hop, Simple protocol).
#include "core/cluster_spec.h"

namespace bmt {
namespace {

constexpr double kTera = 1e12, kGiga = 1e9;
constexpr Ns kNvlinkHop = 3400, kNetworkHop = 14000;

struct Peaks {
  double fp32, tf32, fp16, bf16, fp8;  // TFLOP/s
};

DeviceSpec gpu(const char* name, Bytes memory_gb, Peaks peaks, double bandwidth_gb, double pcie_gb,
               const char* source) {
  DeviceSpec d;
  d.name = name;
  d.memory = memory_gb * kGiB;
  d.peak_fp32 = peaks.fp32 * kTera;
  d.peak_tf32 = peaks.tf32 * kTera;
  d.peak_fp16 = peaks.fp16 * kTera;
  d.peak_bf16 = peaks.bf16 * kTera;
  d.peak_fp8 = peaks.fp8 * kTera;
  d.memory_bandwidth = bandwidth_gb * kGiga;
  d.pcie_bandwidth = pcie_gb * kGiga;
  d.source = source;
  return d;
}

ClusterPreset node(const char* name, const char* description, const DeviceSpec& device, std::int32_t devices,
                   double scale_up_gb, std::int32_t nics, double nic_gbit) {
  ClusterPreset preset;
  preset.name = name;
  preset.description = description;
  preset.node.device = device;
  preset.node.devices_per_node = devices;
  preset.node.scale_up = {scale_up_gb * kGiga, kNvlinkHop};
  preset.node.nics_per_node = nics;
  preset.node.nic = {nic_gbit / 8 * kGiga, kNetworkHop};
  return preset;
}

std::vector<ClusterPreset> makePresets() {
  const char* const sheet = "datasheet, collected by stas00/ml-engineering@744d01e18b";
  const Peaks v100{15.7, 0, 125, 0, 0}, a100{19.5, 156, 312, 312, 0}, hopper{67, 494.5, 989, 989, 1979};
  const Peaks blackwell{80, 1125, 2250, 2250, 4500}, gb200{80, 1250, 2500, 2500, 5000};
  const DeviceSpec v100_16 = gpu("V100-SXM2-16GB", 16, v100, 900, 16, "datasheet");
  const DeviceSpec v100_32 = gpu("V100-SXM2-32GB", 32, v100, 900, 16, "datasheet");
  const DeviceSpec a100_40 = gpu("A100-SXM4-40GB", 40, a100, 1555, 31, sheet);
  const DeviceSpec a100_80 = gpu("A100-SXM4-80GB", 80, a100, 2039, 31, sheet);
  const DeviceSpec h100 = gpu("H100-SXM5-80GB", 80, hopper, 3350, 63, sheet);
  const DeviceSpec h200 = gpu("H200-SXM5-141GB", 141, hopper, 4800, 63, sheet);
  const DeviceSpec b200 = gpu("B200-SXM-180GB", 180, blackwell, 8000, 63, sheet);
  const DeviceSpec b300 = gpu("B300-SXM-288GB", 288, blackwell, 8000, 63, sheet);
  const DeviceSpec gb = gpu("GB200-186GB", 186, gb200, 8000, 63, sheet);
  DeviceSpec ascend =
      gpu("Ascend-910B", 64, {0, 0, 320, 0, 0}, 400, 31, "secondary pages, low confidence; not executed");
  ascend.kind = DeviceKind::Npu;
  ascend.executed = false;
  return {
      node("dgx-v100-16g", "DGX-1: 8x V100 16 GB, cube mesh modelled as flat 150 GB/s, 4x 100 Gb/s", v100_16,
           8, 150, 4, 100),
      node("dgx-v100-32g", "DGX-1: 8x V100 32 GB, cube mesh modelled as flat 150 GB/s, 4x 100 Gb/s", v100_32,
           8, 150, 4, 100),
      node("dgx2", "DGX-2: 16x V100 32 GB, NVSwitch, 8x 100 Gb/s", v100_32, 16, 150, 8, 100),
      node("dgx-a100-40g", "DGX A100: 8x A100 40 GB, NVSwitch, 8x HDR 200 Gb/s", a100_40, 8, 300, 8, 200),
      node("dgx-a100-80g", "DGX A100: 8x A100 80 GB, NVSwitch, 8x HDR 200 Gb/s", a100_80, 8, 300, 8, 200),
      node("dgx-h100", "DGX H100: 8x H100 80 GB, NVSwitch, 8x NDR 400 Gb/s", h100, 8, 450, 8, 400),
      node("dgx-h200", "DGX H200: 8x H200 141 GB, NVSwitch, 8x NDR 400 Gb/s", h200, 8, 450, 8, 400),
      node("dgx-b200", "DGX B200: 8x B200 180 GB, NVSwitch, 8x NDR 400 Gb/s", b200, 8, 900, 8, 400),
      node("dgx-b300", "DGX B300: 8x B300 288 GB, NVSwitch, 8x XDR 800 Gb/s", b300, 8, 900, 8, 800),
      node("gb200-nvl72", "GB200 NVL72: one 72-GPU NVLink domain, 400 Gb/s per GPU", gb, 72, 900, 72, 400),
      node("p4d", "AWS p4d: 8x A100 40 GB, 4x 100 Gb/s", a100_40, 8, 300, 4, 100),
      node("p5", "AWS p5: 8x H100 80 GB, 32x 100 Gb/s", h100, 8, 450, 32, 100),
      node("a3-mega", "GCP A3 Mega: 8x H100 80 GB, 8x 200 Gb/s", h100, 8, 450, 8, 200),
      node("nd-h100-v5", "Azure ND H100 v5: 8x H100 80 GB, 8x 400 Gb/s", h100, 8, 450, 8, 400),
      node("jean-zay-v100", "Jean Zay: 4x V100 32 GB, 4x 100 Gb/s Omni-Path", v100_32, 4, 150, 4, 100),
      node("jean-zay-a100", "Jean Zay: 8x A100 80 GB, 4x 100 Gb/s Omni-Path", a100_80, 8, 300, 4, 100),
      node("ascend-910b", "8x Ascend 910B, 8x 200 Gb/s (not executed; low-confidence figures)", ascend, 8, 28,
           8, 200),
  };
}

}  // namespace

const std::vector<ClusterPreset>& clusterPresets() {
  static const std::vector<ClusterPreset> presets = makePresets();
  return presets;
}

}  // namespace bmt
