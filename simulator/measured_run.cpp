#include "simulator/measured_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "simulator/report.h"

namespace bmt::sim {
namespace {

constexpr double kUnverifiedShare = 0.5;
constexpr double kOmniPathShare = 0.1;  // of the nominal rate, all-reduce between nodes

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

bool hasAny(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

// The number a text begins with ("50304 (inferred)" -> 50304).
std::optional<double> leadingNumber(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{}) return std::nullopt;
  return value;
}

// The number right before `unit` ("4x IB HDR, 800 Gb/s" with "Gb/s" -> 800).
std::optional<double> numberBefore(const std::string& text, const std::string& unit) {
  const std::size_t at = text.find(unit);
  if (at == std::string::npos) return std::nullopt;
  std::size_t end = at;
  while (end > 0 && text[end - 1] == ' ') --end;
  std::size_t begin = end;
  while (begin > 0 &&
         (std::isdigit(static_cast<unsigned char>(text[begin - 1])) != 0 || text[begin - 1] == '.'))
    --begin;
  return leadingNumber(text.substr(begin, end - begin));
}

// Reads the fields of one row; a missing needed field is remembered as the reason to skip.
class Row {
 public:
  Row(const trace::CsvTable& table, std::size_t row, MeasuredRun& run)
      : table_(table), row_(row), run_(run) {}

  std::string text(const char* column) const { return table_.at(row_, column); }
  std::optional<double> number(const char* column) const { return leadingNumber(text(column)); }
  std::int64_t need(const char* column) {
    const std::optional<double> value = number(column);
    if (value && *value >= 1) return static_cast<std::int64_t>(*value);
    skip(fmt::format("'{}' is {}", column, text(column).empty() ? "empty" : text(column)));
    return 1;
  }
  std::int64_t orOne(const char* column) const {
    const std::optional<double> value = number(column);
    return value && *value >= 1 ? static_cast<std::int64_t>(*value) : 1;
  }
  void skip(const std::string& why) {
    if (run_.skip.empty()) run_.skip = why;
  }
  void note(const std::string& what) { run_.note += (run_.note.empty() ? "" : "; ") + what; }

 private:
  const trace::CsvTable& table_;
  std::size_t row_;
  MeasuredRun& run_;
};

// The columns have no room for experts: their figures are those of the published model, its layers the row's.
void readExperts(Row& row, MeasuredRun& run) {
  ModelSpec& m = run.model;
  const std::string name = lower(m.name), notes = lower(row.text("notes"));
  const char* preset = nullptr;
  if (hasAny(name, {"deepseekv2", "deepseek-v2"})) preset = "deepseek-v2";
  if (hasAny(name, {"deepseekv3", "deepseek-v3"})) preset = "deepseek-v3";
  if (hasAny(name, {"mixtral"})) preset = m.d_model == 6144 ? "mixtral-8x22b" : "mixtral-8x7b";
  if (hasAny(name, {"grok"})) preset = "grok-1";
  if (hasAny(name, {"qwen3_30b", "qwen3-30b"})) preset = "qwen3-30b-a3b";
  if (hasAny(name, {"qwen3_235b", "qwen3-235b"})) preset = "qwen3-235b-a22b";
  if (preset == nullptr) return row.skip("the experts of this model are not stated");
  ModelSpec published = loadModel(preset);
  if (published.d_model != m.d_model)
    return row.skip(fmt::format("hidden {} is not that of {}, {}", m.d_model, preset, published.d_model));
  published.name = m.name;
  published.layers = m.layers;
  published.vocab = m.vocab;
  published.seq_len = m.seq_len;
  if (hasAny(notes, {"first 1 layer dense"})) published.dense_first_layers = 1;
  m = published;
  row.note(fmt::format("experts of {}", preset));
}

void readModel(Row& row, MeasuredRun& run) {
  ModelSpec& m = run.model;
  m.name = row.text("model_name");
  const std::string name = lower(m.name);
  m.layers = row.need("layers");
  m.d_model = row.need("hidden");
  m.heads = row.need("heads");
  m.kv_heads = row.number("kv_heads") ? row.need("kv_heads") : m.heads;
  m.d_ff = row.need("ffn");
  m.vocab = row.need("vocab");
  m.seq_len = row.need("seq");
  m.d_head = std::max<std::int64_t>(1, m.d_model / m.heads);
  const bool gated =
      hasAny(name, {"llama", "mistral", "mixtral", "qwen", "grok", "deepseek", "intern", "gemma", "glm"});
  const bool nemotron = hasAny(name, {"nemotron"});
  if (gated || nemotron) {
    m.family = Family::Llama;
    m.norm = gated ? NormKind::RmsNorm : NormKind::LayerNorm;
    m.gated_mlp = gated;
    m.activation = gated ? ActivationKind::Silu : ActivationKind::SquaredRelu;
    m.position = PositionKind::Rope;
    m.tied_embedding = m.qkv_bias = m.attn_out_bias = m.mlp_bias = false;
    if (row.text("notes").find("tied=yes") != std::string::npos) m.tied_embedding = true;
  } else {
    m.max_positions = m.seq_len;
    if (name.starts_with("mpt")) m.qkv_bias = m.attn_out_bias = m.mlp_bias = false;
  }
  if (hasAny(name, {"moe", "grok", "deepseek", "mixtral", "oss", "a22b", "a3b"})) readExperts(row, run);
}

void readPlan(Row& row, MeasuredRun& run) {
  Plan& p = run.plan;
  const auto degree = [&](const char* column) { return static_cast<std::int32_t>(row.need(column)); };
  p.tp = degree("tp");
  p.pp = degree("pp");
  p.dp = degree("dp");
  p.cp = static_cast<std::int32_t>(row.orOne("cp"));
  p.ep = static_cast<std::int32_t>(row.orOne("ep"));
  p.micro_batch = row.need("micro_batch");
  p.global_batch = row.need("global_batch");
  p.order = "tp-cp-dp-pp";  // Megatron-LM, DeepSpeed: tensor ranks first, pipeline stages farthest apart

  const std::string schedule = lower(row.text("schedule"));
  if (p.pp > 1) {
    const std::int64_t chunks = row.orOne("vpp");
    if (hasAny(schedule, {"interleaved"})) {
      if (row.text("vpp").empty()) row.skip("'vpp' is empty");
      p.chunks = static_cast<std::int32_t>(chunks);
      p.schedule = chunks > 1 ? ScheduleKind::Interleaved : ScheduleKind::OneFOneB;
    } else if (hasAny(schedule, {"zb"})) {
      p.schedule = hasAny(schedule, {"2p"}) ? ScheduleKind::ZbH2 : ScheduleKind::ZbH1;
    } else if (hasAny(schedule, {"gpipe"})) {
      p.schedule = ScheduleKind::GPipe;
    } else if (schedule.empty()) {
      row.skip("'schedule' is empty");
    }
  }

  const std::optional<double> zero = row.number("zero_or_fsdp");
  if (!zero && p.dp > 1) row.skip("'zero_or_fsdp' is empty");
  p.zero = static_cast<std::int32_t>(zero.value_or(0));

  const std::string sp = lower(row.text("sequence_parallel"));
  if (sp.empty() && p.tp > 1) row.skip("'sequence_parallel' is empty");
  p.sequence_parallel = sp == "yes" && p.tp > 1;

  const std::string notes = lower(row.text("notes")), source = lower(row.text("source_repo_or_paper"));
  const std::string recompute = lower(row.text("recompute"));
  if (hasAny(notes, {"remat policy custom"})) row.skip("a custom rematerialisation policy is not simulated");
  if (recompute.starts_with("full")) {
    p.recompute = Recompute::Full;
  } else if (recompute.starts_with("selective")) {
    p.recompute = Recompute::Selective;
  } else if (recompute.empty()) {
    row.skip("'recompute' is empty");
  }

  const std::string dtype = lower(row.text("dtype"));
  if (dtype.starts_with("bf16")) {
    p.precision = DType::BF16;
  } else if (dtype.starts_with("fp16")) {
    p.precision = DType::F16;
  } else if (hasAny(dtype, {"fp8"})) {
    p.precision = DType::F8;
  } else if (hasAny(dtype, {"fp4"})) {
    row.skip(dtype + " is not simulated by this version");
  } else {
    row.skip(dtype.empty() ? "'dtype' is empty" : "dtype " + dtype + " is unknown");
  }

  const std::string attention = lower(row.text("flash_attention")), optimizer = lower(row.text("optimizer"));
  const bool gpt = run.model.family == Family::Gpt2;
  const bool mpt = hasAny(source, {"llm-foundry"}), nanotron = hasAny(source, {"nanotron"});
  if (attention.starts_with("no")) {
    p.attention = hasAny(attention, {"torch"}) ? AttentionKernel::Unfused : AttentionKernel::Softmax;
    run.model.dropout = gpt && !mpt;
    if (run.model.dropout) row.note("dropout assumed, as in Megatron-LM's scripts");
  } else if (attention.starts_with("yes (v1") || mpt) {
    p.attention = AttentionKernel::Flash1;
    // mosaicml/llm-foundry@12a6319 scripts/train/benchmarking/submit_benchmarks.py: attn_impl triton.
    if (mpt) row.note("Triton FlashAttention 1, the source's default");
  } else if (hasAny(attention, {"v2"}) || nanotron || hasAny(notes, {"nvte_fused_attn=0"})) {
    p.attention = AttentionKernel::Flash2;
  } else if (!attention.starts_with("yes")) {
    if (attention.empty()) row.skip("'flash_attention' is empty");
    row.note("attention kernel unknown, fused assumed");
  }
  // Plain PyTorch norms and activations unless the row names a kernel library.
  if (!gpt && !hasAny(attention, {"te"}))
    p.pointwise = hasAny(attention, {"fused rmsnorm"}) ? Pointwise::Norms : Pointwise::Eager;
  // fp16 training with a loss scale reduces fp16 gradients (Megatron-LM, DeepSpeed); bf16 accumulates in
  // fp32, but NVIDIA's benchmark recipes switch that off (NVIDIA/NeMo scripts/llm/performance,
  // plugins.grad_reduce_in_fp32 = False).
  if (p.precision == DType::F16) p.grads = DType::F16;
  if (p.precision == DType::BF16 && optimizer == "adam") {
    p.grads = DType::BF16;
    row.note("bf16 gradients assumed for plain Adam");
    // Which layouts of hag's grid ran out of memory cannot be had with a vocabulary-parallel loss.
    if (hasAny(source, {"hagemann"}) && p.tp > 1) {
      p.gather_logits = true;
      row.note("loss on gathered logits assumed");
    }
  }

  if (hasAny(source, {"dgxc-benchmarking", "nvidia/nemo", "megatron-bridge", "mlcommons"}) &&
      !hasAny(optimizer, {"fp32 grad"})) {
    p.grads = DType::BF16;
    row.note("bf16 gradients, as in NVIDIA's benchmark recipes");
  }
  // DeepSpeed fetches parameters one by one and at most 5e7 elements ahead (zero_optimization defaults), less
  // than one matrix of a large layer: nothing is gathered beside compute.
  if (p.zero == 3 && hasAny(notes + source, {"deepspeed", "bigscience"})) {
    p.prefetch = 0;
    row.note("DeepSpeed gathers without prefetch");
  }
  p.overlap_grad = hasAny(attention, {"te"}) || p.zero >= 2;
  // NVIDIA/NeMo@023dfbe recipes, performance mode: tp_comm_overlap=True.
  const bool recipe = hasAny(source, {"dgxc-benchmarking"}) && hasAny(attention, {"te"});
  p.tp_overlap = p.tp > 1 && (recipe || hasAny(notes, {"tp overlap on", "tp comm overlap", "userbuffers"})) &&
                 !hasAny(notes, {"tp overlap off"});
  if (hasAny(notes, {"not overlapped", "overlaps off", "overlaps disabled"})) p.overlap_grad = false;
  if (hasAny(notes,
             {"dp overlap on", "dp grad/param overlap on", "dp all-gather and reduce-scatter overlapped"}))
    p.overlap_grad = true;
  if (p.dp > 1 && !p.overlap_grad) row.note("gradient reduction not overlapped");
  run.model.vocab = roundUp(run.model.vocab, 128 * p.tp);  // padded as Megatron-LM pads it
}

// The device whose name shares the first word and the memory size with `gpu`.
const ClusterPreset* findDevice(const std::string& gpu) {
  const std::size_t word = gpu.find_first_of(" -");
  const std::string family = gpu.substr(0, word);
  const ClusterPreset* found = nullptr;
  for (const ClusterPreset& preset : clusterPresets()) {
    const std::string& name = preset.node.device.name;
    if (name == gpu) return &preset;
    if (!name.starts_with(family + "-") && name != family) continue;
    const std::optional<double> gb = numberBefore(gpu, "GB");
    const bool size = !gb || static_cast<Bytes>(*gb) * kGiB == preset.node.device.memory;
    if (size && found == nullptr) found = &preset;
  }
  return found;
}

void readCluster(Row& row, MeasuredRun& run) {
  const std::int64_t devices = row.need("n_gpus");
  std::int64_t per_node = row.need("gpus_per_node");
  const ClusterPreset* const preset = findDevice(run.gpu);
  if (preset == nullptr) {
    row.skip(fmt::format("no device figures for '{}'", run.gpu));
    return;
  }
  NodeGroup node = preset->node;
  if (node.device.name != run.gpu) row.note("device " + node.device.name);
  const std::string intra = row.text("interconnect_intra"), inter = row.text("interconnect_inter");
  if (intra.find("PCIe") != std::string::npos) {
    node.scale_up.bandwidth = node.device.pcie_bandwidth;
    node.device.name = run.gpu;
  }
  if (intra.find("NVL72") != std::string::npos) per_node = std::min<std::int64_t>(72, devices);
  if (devices < per_node) per_node = devices;
  node.devices_per_node = static_cast<std::int32_t>(per_node);
  node.num_nodes = static_cast<std::int32_t>(ceilDiv(devices, per_node));
  if (devices % per_node != 0) row.skip(fmt::format("{} GPUs do not fill nodes of {}", devices, per_node));
  if (node.num_nodes > 1) {
    const std::optional<double> gbit = numberBefore(inter, "Gb/s"), gbyte = numberBefore(inter, "GB/s");
    const std::optional<double> count = numberBefore(inter, "x ");
    const double rate = gbit ? *gbit / 8 * 1e9 : gbyte ? *gbyte * 1e9 : 0;
    if (rate > 0 && inter.find("per GPU") != std::string::npos) {
      node.nics_per_node = node.devices_per_node;
      node.nic.bandwidth = rate;
    } else if (rate > 0) {
      const bool total = !count || inter.find("total") != std::string::npos;
      node.nics_per_node = count ? static_cast<std::int32_t>(*count) : std::min(8, node.devices_per_node);
      node.nic.bandwidth = total ? rate / node.nics_per_node : rate;
      if (per_node > 8)
        node.nics_per_node *= static_cast<std::int32_t>(per_node) / 4;  // per tray of an NVL72 rack
    } else {
      row.note(fmt::format("network not stated, {}x {:.0f} Gb/s per node assumed", node.nics_per_node,
                           node.nic.bandwidth * 8e-9));
    }
    if (inter.find("not verified") != std::string::npos) {
      // Not even the links are stated. The rows' own dependence on tp says that collectives run at about half
      // the rate of a DGX A100 (docs/validation.md, hag).
      node.scale_up.bandwidth *= kUnverifiedShare;
      node.nic.bandwidth *= kUnverifiedShare;
      row.note("links not stated, half the rates of a DGX A100 assumed");
    }
    if (inter.find("Omni-Path") != std::string::npos) {
      // bigscience-workshop/bigscience@9e64edec2a all_reduce_bench, 4 nodes of 8 A100: 15 to 42 Gb/s of 400.
      node.nic.bandwidth *= kOmniPathShare;
      row.note("Omni-Path at the rate the source's own benchmark reached");
    }
  } else {
    node.nics_per_node = 0;
  }
  run.cluster.name = preset->name;
  run.cluster.groups = {node};
}

// Seconds of a step from a stated throughput; conventions of validation/SOURCES.md.
void readTime(Row& row, MeasuredRun& run) {
  if (const auto seconds = row.number("iter_time_s")) {
    run.step_s = *seconds;
    return;
  }
  const double devices = row.number("n_gpus").value_or(0);
  const double tokens = static_cast<double>(run.plan.global_batch) * static_cast<double>(run.model.seq_len);
  if (const auto rate = row.number("tokens_per_s_per_gpu")) {
    run.step_s = tokens / (*rate * devices);
    return;
  }
  const auto tflops = row.number("tflops_per_gpu"), mfu = row.number("mfu_pct");
  if ((!tflops && !mfu) || run.cluster.groups.empty()) return;
  const std::string convention = lower(row.text("flops_convention"));
  const double label = row.number("params_b").value_or(0) * 1e9;
  double flops = modelFlopsPerStep(run.model, run.plan, hasAny(convention, {"causal attention halved"}));
  if (hasAny(convention, {"8*n"})) {
    flops = 8 * label * tokens;
  } else if (hasAny(convention, {"6*n*tok with"})) {
    flops = 6 * label * tokens;
  } else if (hasAny(convention, {"incl. recompute", "hardware", "megatron counter"})) {
    Plan full = run.plan;  // their counter multiplies by 4/3 whether or not the row says so
    full.recompute = Recompute::Full;
    flops = hardwareFlopsPerStep(run.model, full);
  }
  const DeviceSpec& device = run.cluster.groups.front().device;
  double peak = std::max(peakFlops(device, DType::BF16), peakFlops(device, DType::F16));
  if (hasAny(convention, {"/ 1979"})) peak = device.peak_fp8;
  const double rate = tflops ? *tflops * 1e12 : *mfu / 100 * peak;
  run.step_s = flops / rate / devices;
  row.note(fmt::format("time from {} ({})", tflops ? "TFLOP/s" : "MFU",
                       convention.empty() ? "model FLOPs assumed" : convention.substr(0, 60)));
}

}  // namespace

MeasuredRun readRun(const trace::CsvTable& table, std::size_t index) {
  MeasuredRun run;
  Row row(table, index, run);
  run.id = row.text("id");
  run.source = run.id.substr(0, run.id.find('-'));
  run.gpu = row.text("gpu");
  if (run.id.empty()) row.skip("'id' is empty");
  readModel(row, run);
  readPlan(row, run);
  readCluster(row, run);
  readTime(row, run);
  const std::string all = lower(row.text("notes") + " " + row.text("flops_convention"));
  if (run.source.ends_with("oom") && run.source != "bloom") {  // hagoom, bloomoom, tr3oom
    run.source.resize(run.source.size() - 3);
    run.outcome = hasAny(all, {"oom", "out of memory", "did not fit", "not fit", "memory error"})
                      ? Outcome::OutOfMemory
                      : Outcome::OtherFailure;
    run.step_s.reset();
  }
  run.peak_gib = row.number("peak_mem_gb");
  run.device_level = hasAny(all, {"nvidia-smi", "device-level"}) || run.source == "bloom";
  if (run.outcome == Outcome::Worked && !run.step_s && !run.peak_gib)
    row.skip("neither time nor memory is stated");
  if (run.outcome == Outcome::OtherFailure) row.skip("failed for another reason than memory");
  if (run.skip.empty()) {
    const std::vector<Issue> issues = validatePlan(run.model, run.cluster, run.plan);
    if (!issues.empty()) row.skip(formatIssues({issues.front()}));
  }
  return run;
}

bool heldOut(const std::string& id) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash % 5 < 2;
}

}  // namespace bmt::sim
