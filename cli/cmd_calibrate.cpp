// bmtrain calibrate: measures what the CPU backend's ops and collectives cost on this machine and fits a cost
// profile.
//
// Ops are those that real blocks of several sizes lower to, run through the executor's own dispatch on
// buffers that rotate through more memory than the caches hold, as in training. Collectives run through the
// in-process communicator. Where more ranks than cores take part, the time is divided by ranks / cores: the
// simulator shares cores itself.
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "cli/command.h"
#include "core/json.h"
#include "core/op_graph.h"
#include "executor/comm/in_process.h"
#include "executor/cpu/cpu_backend.h"
#include "kernels/cpu/kernels.h"
#include "simulator/cost_model.h"
#include "traces/cost_profile.h"
#include "traces/fit.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string cluster = "local", out, model;
  bool quick = false;
};

constexpr std::size_t kPoolFloats = std::size_t{24} << 20;  // 96 MiB: more than the last-level cache
constexpr std::int64_t kNumSlots = 8;                       // of the scalars buffer

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int32_t usableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
}

// Memory for the operands of one op at a time. Regions rotate, so that weights and gradients are cold as in
// training.
class OpBench {
 public:
  OpBench() : pool_(kPoolFloats), ints_(std::size_t{1} << 20), scalars_(64, 0.0) {
    std::minstd_rand random(1);
    for (float& x : pool_) x = static_cast<float>(random() % 2000) * 1e-4f - 0.1f;
    for (std::int32_t& x : ints_) x = static_cast<std::int32_t>(random() % 64);
    ScalarLayout layout;
    layout.num_slots = kNumSlots;
    for (const auto& [which, value] : {std::pair(ScalarLayout::kLr, 1e-9),
                                       {ScalarLayout::kBeta1, 0.9},
                                       {ScalarLayout::kBeta2, 0.95},
                                       {ScalarLayout::kEps, 1e-8},
                                       {ScalarLayout::kCorrection1, 0.5},
                                       {ScalarLayout::kCorrection2, 0.5}})
      scalars_[static_cast<std::size_t>(layout.hyper(which))] = value;
    scalars_[static_cast<std::size_t>(layout.result(ScalarLayout::kGradScale))] = 1;
  }

  // Seconds of one call, the lower quartile of at least 5 calls and `budget_s` seconds.
  double measure(const OpCall& call, double budget_s) {
    std::vector<double> seconds;
    const double start = now();
    run(call);
    while (seconds.size() < 5 || (now() - start < budget_s && seconds.size() < 200)) {
      const exec::OperandPointers operands = place(call);
      const double before = now();
      exec::runOp(call.op, operands);
      seconds.push_back(now() - before);
    }
    return quantile(std::move(seconds), 0.25);
  }
  void run(const OpCall& call) { exec::runOp(call.op, place(call)); }

 private:
  exec::OperandPointers place(const OpCall& call) {
    exec::OperandPointers pointers{};
    // Every operand gets room for the largest tensor of the op; the pool is far larger than any op of the
    // grid.
    const auto footprint = static_cast<std::size_t>(bytesMoved(call.op) / 4) + 4096;
    for (std::size_t i = 0; i < call.operands.size(); ++i) {
      const Region region = call.operands[i].region;
      if (region == Region::None) continue;
      if (region == Region::Tokens || region == Region::Targets) {
        pointers[i] = ints_.data();
      } else if (region == Region::Scalars) {
        pointers[i] = scalars_.data();
      } else {
        if (at_ + footprint > pool_.size()) at_ = 0;
        pointers[i] = pool_.data() + at_;
        at_ += footprint;
      }
    }
    return pointers;
  }

  std::vector<float> pool_;
  std::vector<std::int32_t> ints_;
  std::vector<double> scalars_;
  std::size_t at_ = 0;
};

struct GridPoint {
  Family family;
  std::int64_t d_model, heads, seq, batch, vocab, tp;
};

// The distinct ops of a model's blocks, with the operands they really have.
std::vector<OpCall> opsOf(const ModelSpec& model, std::int64_t batch, std::int64_t tp) {
  Plan plan;
  plan.tp = static_cast<std::int32_t>(tp);
  plan.micro_batch = plan.global_batch = batch;
  const BlockShape shape = makeBlockShape(model, plan, 0);
  std::vector<OpCall> calls;
  const auto add = [&](const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) calls.insert(calls.end(), piece.ops.begin(), piece.ops.end());
  };
  for (const Block& block :
       {buildEmbeddingBlock(shape), buildLayerBlock(shape), buildHeadBlock(shape, HeadTable::Own)}) {
    add(block.forward);
    add(block.backward);
    OpCall norm, adam;
    norm.op = {OpKind::SumOfSquares, DType::F32, {block.elements}, 0};
    norm.operands[0] = {Region::Scalars, 0};
    norm.operands[1] = {Region::Grad, 0};
    adam.op = {OpKind::AdamW, DType::F32, {block.elements, 1, kNumSlots}, 0};
    for (std::size_t i = 0; i < 4; ++i) adam.operands[i] = {Region::Weight, 0};
    adam.operands[4] = {Region::Scalars, 0};
    calls.push_back(norm);
    calls.push_back(adam);
  }
  for (const std::int64_t n : {std::int64_t{1} << 12, std::int64_t{1} << 18}) {
    OpCall zero, sum;
    zero.op = {OpKind::Zero, DType::F32, {n}, 0};
    zero.operands[0] = {Region::Work, 0};
    sum.op = {OpKind::Add, DType::F32, {n}, 0};
    for (std::size_t i = 0; i < 3; ++i) sum.operands[i] = {Region::Work, 0};
    calls.push_back(zero);
    calls.push_back(sum);
  }
  return calls;
}

ModelSpec gridModel(const GridPoint& g) {
  ModelSpec m;
  m.name = "calibration";
  m.family = g.family;
  m.layers = 4;
  m.d_model = g.d_model;
  m.heads = m.kv_heads = g.heads;
  m.d_head = g.d_model / g.heads;
  m.d_ff = 4 * g.d_model;
  m.vocab = g.vocab;
  m.seq_len = m.max_positions = g.seq;
  if (g.family == Family::Gpt2) return m;
  m.norm = NormKind::RmsNorm;
  m.activation = ActivationKind::Silu;
  m.position = PositionKind::Rope;
  m.gated_mlp = true;
  m.d_ff = 8 * g.d_model / 3 / 32 * 32;
  m.tied_embedding = m.qkv_bias = m.attn_out_bias = m.mlp_bias = false;
  return m;
}

std::vector<trace::OpFit> fitOps(OpBench& bench, const Options& o) {
  std::vector<GridPoint> grid{
      {Family::Gpt2, 128, 4, 64, 2, 2048, 1},   {Family::Gpt2, 256, 4, 128, 1, 4096, 1},
      {Family::Gpt2, 256, 4, 128, 4, 4096, 1},  {Family::Gpt2, 256, 4, 128, 2, 4096, 2},
      {Family::Llama, 128, 4, 128, 1, 2048, 1}, {Family::Llama, 256, 8, 128, 2, 4096, 2}};
  if (!o.quick) {
    for (const GridPoint& g :
         {GridPoint{Family::Gpt2, 512, 8, 256, 1, 8192, 1}, GridPoint{Family::Gpt2, 320, 5, 128, 2, 4096, 1},
          GridPoint{Family::Gpt2, 256, 8, 256, 2, 4096, 4}, GridPoint{Family::Llama, 384, 6, 128, 2, 4096, 1},
          GridPoint{Family::Llama, 256, 8, 64, 4, 4096, 4}})
      grid.push_back(g);
  }
  std::map<OpKind, std::vector<trace::OpSample>> samples;
  std::vector<Op> seen;
  const auto measure = [&](const std::vector<OpCall>& calls) {
    for (const OpCall& call : calls) {
      if (std::find(seen.begin(), seen.end(), call.op) != seen.end()) continue;
      seen.push_back(call.op);
      samples[call.op.kind].push_back({call.op, bench.measure(call, o.quick ? 0.01 : 0.03)});
    }
  };
  if (!o.model.empty()) {
    const ModelSpec model = loadModel(o.model);
    for (const std::int64_t batch : {1, 2, 4}) measure(opsOf(model, batch, 1));
  }
  for (const GridPoint& g : grid) measure(opsOf(gridModel(g), g.batch, g.tp));
  std::vector<trace::OpFit> fits;
  for (const auto& [kind, list] : samples) fits.push_back(trace::fitOp(kind, list));
  // Kinds that are too short to measure, or that the grid does not hold: a call of nothing.
  for (int kind = 0; kind < kNumOpKinds; ++kind) {
    if (samples.contains(static_cast<OpKind>(kind))) continue;
    fits.push_back({static_cast<OpKind>(kind), 1e-7, 0, 0, 0, 0, 0});
  }
  return fits;
}

double peakOfCore() {
  double best = 0;
  float sink = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    const double start = now();
    const double flops = kernels::cpu::kernels().fmaPeak(2000000, &sink);
    best = std::max(best, flops / (now() - start));
  }
  return best;
}

double copyBandwidth() {
  const std::size_t size = std::size_t{64} << 20;
  std::vector<char> from(size, 1), to(size, 2);
  double best = 0;
  for (int repeat = 0; repeat < 8; ++repeat) {
    const double start = now();
    std::memcpy(to.data(), from.data(), size);
    best = std::max(best, 2 * static_cast<double>(size) / (now() - start));
  }
  return best;
}

// How much slower the ops of a layer run when every core runs them at once.
double contention(std::int32_t cores) {
  if (cores < 2) return 0;
  const std::vector<OpCall> calls = opsOf(gridModel({Family::Gpt2, 256, 4, 128, 2, 2048, 1}), 2, 1);
  const auto layer = [&](OpBench& bench) {
    for (const OpCall& call : calls) bench.run(call);
  };
  std::vector<std::unique_ptr<OpBench>> benches;
  for (std::int32_t i = 0; i < cores; ++i) benches.push_back(std::make_unique<OpBench>());
  std::vector<double> ratios;
  for (int repeat = 0; repeat < 7; ++repeat) {
    constexpr int kRounds = 3;
    double start = now();
    for (int round = 0; round < kRounds; ++round) layer(*benches[0]);
    const double alone = now() - start;
    std::vector<std::thread> threads;
    start = now();
    for (std::int32_t i = 0; i < cores; ++i)
      threads.emplace_back([&, i] {
        for (int round = 0; round < kRounds; ++round) layer(*benches[static_cast<std::size_t>(i)]);
      });
    for (std::thread& thread : threads) thread.join();
    ratios.push_back((now() - start) / alone);
  }
  return std::max(0.0, quantile(ratios, 0.5) - 1);
}

// Seconds of one collective of n thread ranks, median over repeats; all repeats are captured and replayed at
// once.
double measureComm(CommKind kind, std::int32_t n, std::int64_t count, int repeats) {
  exec::InProcessWorld world(60);
  std::vector<double> seconds(static_cast<std::size_t>(n), 0);
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      exec::CpuBackend backend;
      exec::InProcessCommunicator communicator(world, backend, rank);
      std::vector<float> data(static_cast<std::size_t>(count), 1.0f),
          shard(static_cast<std::size_t>(count), 1.0f);
      backend.beginCapture(2);
      backend.record(Lane::Compute, 0);
      for (int i = 0; i < repeats; ++i) {
        exec::CommCall call;
        call.kind = kind == CommKind::Send && rank == 1 ? CommKind::Recv : kind;
        call.group = 0;
        call.seq = static_cast<std::uint64_t>(i);
        for (RankId member = 0; member < n; ++member) call.members.push_back(member);
        call.index = rank;
        call.count = count;
        call.order = i;
        const bool gather = kind == CommKind::AllGather;
        call.src = gather ? shard.data() : data.data();
        call.dst = kind == CommKind::ReduceScatter ? shard.data() : data.data();
        call.name = "calibration";
        communicator.run(Lane::Compute, call);
      }
      backend.record(Lane::Compute, 1);
      backend.endCapture();
      for (int pass = 0; pass < 3; ++pass) {
        communicator.beginStep(60);
        backend.replay();
        const double taken = toSeconds(backend.timeOf(1) - backend.timeOf(0)) / repeats;
        double& best = seconds[static_cast<std::size_t>(rank)];
        best = pass == 0 ? taken : std::min(best, taken);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(seconds.begin(), seconds.end());
}

std::vector<trace::CommFit> fitComms(std::int32_t cores, bool quick) {
  std::vector<trace::CommFit> fits;
  for (const CommKind kind :
       {CommKind::AllReduce, CommKind::AllGather, CommKind::ReduceScatter, CommKind::Send}) {
    std::vector<trace::CommSample> samples;
    for (const std::int32_t n : {2, 4}) {
      if (kind == CommKind::Send && n != 2) continue;
      for (std::int64_t count = 256; count <= (quick ? 1 << 19 : 1 << 21); count *= 8) {
        const int repeats = static_cast<int>(std::clamp<std::int64_t>((1 << 20) / count, 4, 100));
        const double oversubscribed = std::max(1.0, static_cast<double>(n) / cores);
        const sim::CommShape shape = sim::commShape(kind, static_cast<double>(count) * 4, n, true);
        samples.push_back({shape.steps, shape.bytes, measureComm(kind, n, count, repeats) / oversubscribed});
      }
    }
    fits.push_back(trace::fitComm(kind, "threads", samples));
  }
  return fits;
}

double taskOverhead() {
  constexpr int kTasks = 2000;
  exec::CpuBackend backend;
  float value = 0;
  Op op;
  op.dim[0] = 1;
  exec::OperandPointers operands{};
  operands[0] = &value;
  backend.beginCapture(2 * kTasks);
  for (int i = 0; i < kTasks; ++i) {
    backend.record(Lane::Compute, 2 * i);
    backend.launch(Lane::Compute, op, operands);
    backend.record(Lane::Compute, 2 * i + 1);
  }
  backend.endCapture();
  double best = 1;
  for (int repeat = 0; repeat < 10; ++repeat) {
    const double start = now();
    backend.replay();
    best = std::min(best, (now() - start) / kTasks);
  }
  return best;
}

std::string today() {
  const std::time_t time = std::time(nullptr);
  char text[16] = {};
  std::tm parts{};
  ::localtime_r(&time, &parts);
  std::strftime(text, sizeof(text), "%Y-%m-%d", &parts);
  return text;
}

void print(const trace::CostProfile& p) {
  fmt::print(
      "{}: {:.0f} cores, FMA peak {} per core, copy bandwidth {}, contention {:.1f} %, task overhead {}\n\n",
      p.name, p.cores, formatRate(p.core_peak_flops, "FLOP"), formatRate(p.memory_bandwidth, "B"),
      100 * p.contention, formatDuration(p.task_overhead_s));
  fmt::print("{:<24} {:>8} {:>12} {:>14} {:>14} {:>18}\n", "op (measured)", "samples", "overhead", "rate",
             "bandwidth", "residual mean/max");
  for (const trace::OpFit& f : p.ops) {
    if (f.samples == 0) continue;
    fmt::print("{:<24} {:>8} {:>12} {:>14} {:>14} {:>9.1f} % / {:.0f} %\n", toString(f.kind), f.samples,
               formatDuration(f.overhead_s), f.flops_per_s > 0 ? formatRate(f.flops_per_s, "FLOP") : "-",
               f.bytes_per_s > 0 ? formatRate(f.bytes_per_s, "B") : "-", f.mean_abs_error_pct,
               f.max_abs_error_pct);
  }
  fmt::print("\n{:<24} {:>8} {:>12} {:>14} {:>33}\n", "collective (threads)", "samples", "per barrier",
             "bandwidth", "residual mean/max");
  for (const trace::CommFit& f : p.comms)
    fmt::print("{:<24} {:>8} {:>12} {:>14} {:>24.1f} % / {:.0f} %\n", toString(f.kind), f.samples,
               formatDuration(f.alpha_s), formatRate(f.bytes_per_s, "B"), f.mean_abs_error_pct,
               f.max_abs_error_pct);
}

int run(const Globals& globals, const Options& o) {
  const ClusterSpec cluster = loadCluster(o.cluster);
  if (cluster.groups.front().device.kind != DeviceKind::Cpu)
    throw Error(ErrorKind::BadInput,
                fmt::format("--cluster {}: this version calibrates local[:RANKS] only", o.cluster));
  const double start = now();
  const auto say = [&](const char* what) {
    if (!globals.quiet && !globals.no_progress) fmt::print(stderr, "calibrate: {}\n", what);
  };
  char host[256] = "this machine";
  ::gethostname(host, sizeof(host) - 1);
  trace::CostProfile p;
  p.name = fmt::format("local-cpu {}", kernels::cpu::kernels().name);
  p.source = fmt::format("measured {} on {}", today(), host);
  p.measured = true;
  p.cores = usableCores();
  say("peak and bandwidth");
  p.core_peak_flops = peakOfCore();
  p.memory_bandwidth = copyBandwidth();
  p.task_overhead_s = taskOverhead();
  say("ops");
  {
    OpBench bench;
    p.ops = fitOps(bench, o);
  }
  say("all cores at once");
  p.contention = contention(usableCores());
  say("collectives");
  p.comms = fitComms(usableCores(), o.quick);
  const std::string path = o.out.empty() ? trace::localProfilePath() : o.out;
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;  // a folder that cannot be made shows when the file is written
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  writeFileAtomically(path, trace::profileToJson(p));
  if (globals.json) {
    fmt::print("{}", trace::profileToJson(p));
  } else if (!globals.quiet) {
    print(p);
    fmt::print("\nwrote {} after {:.0f} s\n", path, now() - start);
  }
  return 0;
}

}  // namespace

void addCalibrate(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand("calibrate", "Measure this machine and fit its cost profile");
  const auto o = std::make_shared<Options>();
  command->add_option("--cluster", o->cluster, "local[:RANKS]")->capture_default_str();
  command->add_option("--model", o->model, "Also measure the shapes of this model");
  command->add_option("--out", o->out, "Profile to write; default: where simulate looks for it");
  command->add_flag("--quick", o->quick, "Fewer shapes, shorter measurements");
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
