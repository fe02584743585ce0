#include "cli/measure_cpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>

#include "core/lower.h"
#include "executor/comm/in_process.h"
#include "executor/cpu/core_speed.h"
#include "executor/cpu/cpu_backend.h"
#include "executor/init.h"
#include "simulator/cost_model.h"

namespace bmt::cli {
namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double threadCpuSeconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Mean of the middle half. A step is the sum of its ops, so a mean is what adds up; the outer quarters hold
// preemptions and lucky caches.
double midMean(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t quarter = values.size() / 4;
  const auto first = values.begin() + static_cast<std::ptrdiff_t>(quarter);
  const auto last = values.end() - static_cast<std::ptrdiff_t>(quarter);
  return std::accumulate(first, last, 0.0) / static_cast<double>(last - first);
}

// Rank 0 of a plan, ready to run op by op on the calling thread.
class OpPlayer {
 public:
  explicit OpPlayer(const MeasureCase& measured)
      : graph_(lower(measured.model, localCluster(measured.plan.numRanks()), measured.plan,
                     std::vector<RankId>{0}, Granularity::Layer)),
        program_(graph_.ranks.front()) {
    arena_ = static_cast<char*>(backend_.allocate(program_.arena));
    for (const ParamShard& shard : program_.params)
      exec::initShard(at<float>(program_.weights) + shard.offset, shard, graph_.model, 1, {});
    std::mt19937 random(7);
    for (const BufferId buffer : {program_.tokens, program_.targets}) {
      if (buffer < 0) continue;
      const auto count = program_.buffers[static_cast<std::size_t>(buffer)].bytes / 4;
      for (std::int64_t i = 0; i < count; ++i)
        at<std::int32_t>(buffer)[i] =
            static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(graph_.model.vocab));
    }
    capture();
  }
  ~OpPlayer() { backend_.release(arena_); }
  OpPlayer(const OpPlayer&) = delete;
  OpPlayer& operator=(const OpPlayer&) = delete;

  struct Call {
    Op op;
    exec::OperandPointers operands{};
    std::size_t distinct = 0;  // index in distinctOps
  };
  const std::vector<Op>& distinctOps() const { return distinct_; }
  const std::vector<Call>& calls() const { return calls_; }

  // The learning rate is zero, so that weights stay what they are whatever is left out.
  void beginStep() {
    auto* const scalars = at<double>(program_.scalars);
    std::fill(scalars, scalars + graph_.scalars.size(), 0.0);
    const auto set = [&](ScalarLayout::Hyper which, double value) {
      scalars[graph_.scalars.hyper(which)] = value;
    };
    set(ScalarLayout::kBeta1, 0.9);
    set(ScalarLayout::kBeta2, 0.95);
    set(ScalarLayout::kEps, 1e-8);
    set(ScalarLayout::kCorrection1, 0.1);
    set(ScalarLayout::kCorrection2, 0.05);
    set(ScalarLayout::kLossScale, 1);
  }
  void step() {
    beginStep();
    for (const Call& call : calls_) exec::runOp(call.op, call.operands);
  }

 private:
  template <typename T>
  T* at(BufferId buffer) {
    return reinterpret_cast<T*>(arena_ + program_.buffers[static_cast<std::size_t>(buffer)].offset);
  }

  void capture() {
    for (const Task& task : program_.tasks) {
      if (task.comm >= 0) continue;
      const auto bindings = program_.bindingsOf(task);
      for (const OpCall& source : graph_.segments[static_cast<std::size_t>(task.segment)].ops) {
        Call call;
        call.op = source.op;
        for (std::size_t i = 0; i < source.operands.size(); ++i) {
          const Operand& operand = source.operands[i];
          if (operand.region == Region::None) continue;
          const Arg& arg = bindings[static_cast<std::size_t>(operand.region)];
          if (arg.buffer < 0) continue;
          call.operands[i] = at<char>(arg.buffer) + arg.offset + operand.offset;
        }
        const auto known = std::find(distinct_.begin(), distinct_.end(), call.op);
        call.distinct = static_cast<std::size_t>(known - distinct_.begin());
        if (known == distinct_.end()) distinct_.push_back(call.op);
        calls_.push_back(call);
      }
    }
  }

  TaskGraph graph_;
  const RankProgram& program_;
  exec::CpuBackend backend_;
  char* arena_ = nullptr;
  std::vector<Op> distinct_;
  std::vector<Call> calls_;
};

MeasureCase makeCase(bool llama, std::int64_t width, std::int64_t layers, std::int64_t seq,
                     std::int64_t vocab, const std::string& plan) {
  MeasureCase result;
  ModelSpec& m = result.model;
  m.name = fmt::format("{}-{}x{}", llama ? "llama" : "gpt2", layers, width);
  m.layers = layers;
  m.d_model = width;
  m.d_head = 32;
  m.heads = m.kv_heads = width / m.d_head;
  m.d_ff = 4 * width;
  m.vocab = vocab;
  m.seq_len = m.max_positions = seq;
  if (llama) {
    m.family = Family::Llama;
    m.kv_heads = std::max<std::int64_t>(4, m.heads / 2);
    m.d_ff = 8 * width / 3 / 32 * 32;
    m.norm = NormKind::RmsNorm;
    m.activation = ActivationKind::Silu;
    m.position = PositionKind::Rope;
    m.max_positions = 0;
    m.gated_mlp = true;
    m.tied_embedding = m.qkv_bias = m.attn_out_bias = m.mlp_bias = false;
  }
  result.plan = planFromText(plan);
  throwIfAny(validatePlan(m, localCluster(result.plan.numRanks()), result.plan),
             "calibration case " + m.name);
  return result;
}

// Runs `body(rank)` on `n` threads at once and returns when all are done.
void onThreads(int n, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back([&body, i] { body(i); });
}

// One rank of a communication measurement.
struct CommRank {
  CommRank(exec::InProcessWorld& world, RankId rank) : communicator(world, backend, rank) {}
  exec::CpuBackend backend;
  exec::InProcessCommunicator communicator;
  std::vector<float> from, to;
  double seconds = 0;
};

// Replays what was captured on all ranks until `budget` is spent; middle mean of rank 0's times.
double replayAll(std::vector<std::unique_ptr<CommRank>>& ranks, double budget) {
  std::barrier barrier(static_cast<std::ptrdiff_t>(ranks.size()));
  std::atomic<bool> more{true};
  std::vector<double> times;
  onThreads(static_cast<int>(ranks.size()), [&](int index) {
    CommRank& rank = *ranks[static_cast<std::size_t>(index)];
    const auto begin = Clock::now();
    for (int round = 0; more.load(); ++round) {
      rank.communicator.beginStep(60);
      barrier.arrive_and_wait();
      const auto start = Clock::now();
      rank.backend.replay();
      if (index == 0) {
        if (round > 0) times.push_back(since(start));
        if (round >= 3 && since(begin) > budget) more = false;
      }
      barrier.arrive_and_wait();
    }
  });
  return midMean(times);
}

double measureCollective(CommKind kind, int ranks, std::int64_t count, int repeats, double budget) {
  exec::InProcessWorld world(60);
  std::vector<std::unique_ptr<CommRank>> all;
  for (RankId rank = 0; rank < ranks; ++rank) {
    all.push_back(std::make_unique<CommRank>(world, rank));
    CommRank& self = *all.back();
    self.from.assign(static_cast<std::size_t>(count), 1.0f);
    self.to.assign(static_cast<std::size_t>(count), 0.0f);
    self.backend.beginCapture(0);
    for (int i = 0; i < repeats; ++i) {
      exec::CommCall call;
      call.kind = kind;
      call.group = packGroup(GroupKind::World, 0);
      call.seq = static_cast<std::uint64_t>(i);
      for (RankId member = 0; member < ranks; ++member) call.members.push_back(member);
      call.index = rank;
      call.count = count;
      call.src = self.from.data();
      call.dst = kind == CommKind::AllReduce ? self.from.data() : self.to.data();
      call.order = i;
      call.name = "calibration";
      self.communicator.run(Lane::Compute, call);
    }
    self.backend.endCapture();
  }
  return replayAll(all, budget) / repeats;
}

// A message goes back and forth between two ranks, from the Compute lane over SendF and RecvF to the other's
// Compute lane.
double measurePingPong(std::int64_t count, int hops, double budget) {
  exec::InProcessWorld world(60);
  std::vector<std::unique_ptr<CommRank>> all;
  for (RankId rank = 0; rank < 2; ++rank) {
    all.push_back(std::make_unique<CommRank>(world, rank));
    CommRank& self = *all.back();
    self.from.assign(static_cast<std::size_t>(count), 1.0f);
    self.to.assign(static_cast<std::size_t>(count), 0.0f);
    self.backend.beginCapture(2 * hops);
    for (int hop = 0; hop < hops; ++hop) {
      const bool sends = hop % 2 == rank;
      const Lane lane = sends ? Lane::SendF : Lane::RecvF;
      exec::CommCall call;
      call.kind = sends ? CommKind::Send : CommKind::Recv;
      call.group = packGroup(GroupKind::ForwardPair, hop % 2);
      call.seq = static_cast<std::uint64_t>(hop);
      call.members = {hop % 2, 1 - hop % 2};
      call.index = sends ? 0 : 1;
      call.count = count;
      call.src = self.from.data();
      call.dst = self.to.data();
      call.order = hop;
      call.name = "calibration";
      if (sends) {
        self.backend.record(Lane::Compute, 2 * hop);
        self.backend.wait(lane, 2 * hop);
      }
      self.communicator.run(lane, call);
      if (!sends) {
        self.backend.record(lane, 2 * hop + 1);
        self.backend.wait(Lane::Compute, 2 * hop + 1);
      }
    }
    self.backend.endCapture();
  }
  return replayAll(all, budget) / hops;
}

}  // namespace

std::vector<MeasureCase> defaultCases() {
  return {
      makeCase(false, 256, 2, 128, 4096, "dp=1,mb=4,gb=8"),
      makeCase(false, 256, 2, 128, 4096, "tp=2,mb=2,gb=4"),
      makeCase(true, 256, 2, 128, 4096, "dp=1,mb=2,gb=4"),
      makeCase(true, 256, 2, 128, 4096, "tp=2,mb=4,gb=8,sp"),
      makeCase(false, 128, 3, 64, 2048, "dp=1,mb=2,gb=4"),
      makeCase(false, 256, 2, 64, 4096, "tp=4,mb=4,gb=8"),
      makeCase(true, 128, 3, 64, 2048, "dp=1,mb=4,gb=8"),
      makeCase(true, 256, 2, 64, 4096, "tp=4,mb=2,gb=4"),
      makeCase(false, 384, 2, 256, 4096, "dp=1,mb=1,gb=2"),
      makeCase(true, 384, 2, 256, 2048, "dp=1,mb=1,gb=2"),
      makeCase(false, 384, 2, 128, 8192, "tp=2,mb=1,gb=2,sp"),
  };
}

std::vector<trace::OpSample> measureOps(const MeasureCase& measured, double seconds) {
  OpPlayer player(measured);
  player.step();
  std::vector<std::vector<double>> times(player.distinctOps().size());
  const auto begin = Clock::now();
  for (int round = 0; round < 3 || since(begin) < seconds; ++round) {
    player.beginStep();
    auto last = Clock::now();
    for (const OpPlayer::Call& call : player.calls()) {
      exec::runOp(call.op, call.operands);
      const auto now = Clock::now();
      times[call.distinct].push_back(std::chrono::duration<double>(now - last).count());
      last = now;
    }
  }
  std::vector<trace::OpSample> samples;
  for (std::size_t i = 0; i < times.size(); ++i)
    samples.push_back({player.distinctOps()[i], std::max(1e-9, midMean(times[i]))});
  return samples;
}

std::vector<trace::OpSample> measureStreaming() {
  std::vector<trace::OpSample> samples;
  std::vector<float> pool(std::size_t{8} << 20, 1.0f);
  for (const OpKind kind : {OpKind::Zero, OpKind::Add}) {
    for (const std::int64_t n :
         {std::int64_t{16}, std::int64_t{1} << 12, std::int64_t{1} << 16, std::int64_t{1} << 20}) {
      Op op;
      op.kind = kind;
      op.dim[0] = n;
      std::vector<double> times;
      std::size_t at = 0;
      for (int repeat = 0; repeat < 40; ++repeat) {
        exec::OperandPointers operands{};
        for (std::size_t i = 0; i < 3; ++i) {
          if (at + static_cast<std::size_t>(n) > pool.size()) at = 0;
          operands[i] = pool.data() + at;
          at += static_cast<std::size_t>(n);
        }
        const auto start = Clock::now();
        exec::runOp(op, operands);
        times.push_back(since(start));
      }
      samples.push_back({op, std::max(1e-9, midMean(std::move(times)))});
    }
  }
  return samples;
}

double measureContention(const MeasureCase& measured, int cores, double seconds) {
  if (cores < 2) return 0;
  std::vector<std::unique_ptr<OpPlayer>> players;
  for (int i = 0; i < cores; ++i) players.push_back(std::make_unique<OpPlayer>(measured));
  // CPU time, not wall time: other programs on this machine must not count as contention.
  const auto timed = [](OpPlayer& player) {
    const double start = threadCpuSeconds();
    player.step();
    return threadCpuSeconds() - start;
  };
  std::vector<double> alone;
  std::vector<std::vector<double>> together(static_cast<std::size_t>(cores));
  for (const auto& player : players) player->step();
  const auto begin = Clock::now();
  for (int round = 0; round < 3 || since(begin) < seconds; ++round) {
    constexpr int kSteps = 3;
    for (int i = 0; i < kSteps; ++i) alone.push_back(timed(*players[0]));
    std::barrier barrier(cores);
    onThreads(cores, [&](int index) {
      const auto at = static_cast<std::size_t>(index);
      barrier.arrive_and_wait();
      for (int i = 0; i < kSteps; ++i) together[at].push_back(timed(*players[at]));
    });
  }
  double sum = 0;
  for (auto& times : together) sum += midMean(std::move(times));
  return std::max(0.0, sum / cores / midMean(std::move(alone)) - 1);
}

std::vector<CommMeasurement> measureComms(int ranks, double seconds) {
  const std::vector<Bytes> sizes{kKiB, 8 * kKiB, 64 * kKiB, 512 * kKiB, 2 * kMiB, 16 * kMiB};
  const double budget = seconds / (4 * static_cast<double>(sizes.size()));
  std::vector<CommMeasurement> measurements;
  for (const CommKind kind :
       {CommKind::AllReduce, CommKind::AllGather, CommKind::ReduceScatter, CommKind::Send}) {
    if (kind == CommKind::Send && ranks != 2) continue;
    CommMeasurement measurement{kind, {}};
    for (const Bytes bytes : sizes) {
      const int repeats = static_cast<int>(std::clamp<Bytes>(4 * kMiB / bytes, 2, 64));
      const std::int64_t count = bytes / 4 / ranks * ranks;
      const sim::CommShape shape = sim::commShape(kind, static_cast<double>(count * 4), ranks, true);
      const double each = kind == CommKind::Send ? measurePingPong(count, repeats, budget)
                                                 : measureCollective(kind, ranks, count, repeats, budget);
      measurement.samples.push_back({shape.steps, shape.bytes, each});
    }
    measurements.push_back(std::move(measurement));
  }
  return measurements;
}

double measureTaskOverhead() {
  constexpr int kTasks = 2000, kRounds = 20;
  exec::CpuBackend backend;
  backend.beginCapture(2 * kTasks);
  for (int task = 0; task < kTasks; ++task) {
    backend.record(Lane::Compute, 2 * task);
    backend.record(Lane::Compute, 2 * task + 1);
  }
  backend.endCapture();
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = Clock::now();
    backend.replay();
    times.push_back(since(start) / kTasks);
  }
  return midMean(times);
}

double measurePeakFlops(double seconds) {
  return exec::measureFmaPeak(seconds);
}

double measureCopyBandwidth(int threads) {
  constexpr int kRounds = 5;
  constexpr std::size_t kSize = std::size_t{64} << 20;
  std::barrier barrier(threads + 1);
  std::vector<std::jthread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&barrier] {
      std::vector<char> from(kSize, 1), to(kSize, 2);
      for (int round = 0; round < kRounds; ++round) {
        barrier.arrive_and_wait();
        std::memcpy(to.data(), from.data(), kSize);
        from[static_cast<std::size_t>(round)] = to[kSize - 1];
        barrier.arrive_and_wait();
      }
    });
  }
  double best_s = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    barrier.arrive_and_wait();
    const auto start = Clock::now();
    barrier.arrive_and_wait();
    best_s = std::min(best_s, since(start));
  }
  return 2.0 * static_cast<double>(kSize) * threads / best_s;
}

}  // namespace bmt::cli
