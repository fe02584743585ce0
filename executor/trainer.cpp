#include "executor/trainer.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <numbers>
#include <thread>
#include <type_traits>

#include "core/error.h"
#include "core/executable.h"
#include "core/memory_plan.h"
#include "core/verify.h"
#include "executor/comm/in_process.h"
#include "executor/comm/mpi_communicator.h"
#include "executor/cpu/cpu_backend.h"
#include "executor/program_runner.h"

namespace bmt::exec {
namespace {

constexpr double kFirstStepFactor = 10;   // the first step gets that many deadlines: everything is cold
constexpr std::int64_t kWarmupSteps = 2;  // excluded from CPU time: page faults, first touches

double cpuSeconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

Bytes peakRss() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<Bytes>(usage.ru_maxrss) * 1024;
}

void requireMemory(const TaskGraph& graph) {
  Bytes needed = 0;
  std::array<Bytes, kNumBufferKinds> parts{};
  for (const RankProgram& program : graph.ranks) {
    needed += program.arena;
    const MemoryUse use = memoryUse(program);
    for (std::size_t kind = 0; kind < parts.size(); ++kind) parts[kind] += use.at_peak[kind];
  }
  const Bytes free = freeHostMemory();
  if (needed <= free) return;
  std::string components;
  for (std::size_t kind = 0; kind < parts.size(); ++kind) {
    if (parts[kind] > 0)
      components += fmt::format("{}{} {}", components.empty() ? "" : ", ",
                                toString(static_cast<BufferKind>(kind)), formatBytes(parts[kind]));
  }
  const char* advice = "use a smaller model";
  if (graph.plan.zero == 0 && graph.plan.dp > 1) {
    advice = "try zero=1";
  } else if (graph.plan.recompute == Recompute::None) {
    advice = "try recompute=full";
  } else if (graph.plan.micro_batch > 1) {
    advice = "try a smaller mb";
  }
  throw Error(ErrorKind::Infeasible, fmt::format("the plan needs {} on this machine, {} are free ({}); {}",
                                                 formatBytes(needed), formatBytes(free), components, advice));
}

// What the rank threads of a process share. `mpi` is null when all ranks are threads of this process.
struct Shared {
  const TaskGraph& graph;
  const BatchSource& batches;
  const TrainOptions& options;
  MpiWorld* mpi;
  InProcessWorld world;
  std::atomic<std::int64_t> last_step;  // steps beyond it are not started
  std::mutex mutex;
  TrainResult result;
  std::vector<std::vector<trace::Span>> traced;  // per traced step: spans of all ranks
  std::string first_error;
};

class RankThread {
 public:
  RankThread(Shared& shared, std::size_t index)
      : shared_(shared),
        program_(shared.graph.ranks[index]),
        index_(index),
        communicator_(shared.mpi != nullptr
                          ? shared.mpi->communicator(backend_)
                          : std::make_unique<InProcessCommunicator>(shared.world, backend_, program_.rank)),
        runner_(shared.graph, program_, backend_, *communicator_, midStep()) {
    backend_.onFailure([this](const std::string& reason) { communicator_->abort(reason); });
    for (const ParamShard& p : program_.params)
      initShard(runner_.data<float>(program_.weights) + p.offset, p, shared.graph.model, shared.options.seed,
                shared.options.init);
  }

  void run() {
    const TrainOptions& o = shared_.options;
    double cpu_start = cpuSeconds();
    std::int64_t cpu_from = 0;
    for (std::int64_t step = 0; step < o.steps && step <= shared_.last_step.load(); ++step) {
      step_ = step;
      if ((program_.rank == 0 || shared_.mpi != nullptr) && step == std::min(kWarmupSteps, o.steps - 1)) {
        cpu_start = cpuSeconds();
        cpu_from = step;
      }
      const StepReport report = oneStep(step);
      cpu_seconds_per_step_ = (cpuSeconds() - cpu_start) / static_cast<double>(step + 1 - cpu_from);
      if (program_.rank == 0) {
        shared_.result.steps.push_back(report);
        shared_.result.cpu_seconds_per_step = cpu_seconds_per_step_;
        if (o.on_step) o.on_step(report);
      }
      if (shared_.mpi != nullptr &&
          shared_.mpi->broadcast(o.stop != nullptr && o.stop->load() ? 1 : 0) != 0) {
        shared_.result.stopped = true;
        shared_.last_step = step;
      }
      // The last steps, and the one after which the user stopped the run.
      if (step >= o.steps - o.trace_steps || step == shared_.last_step.load()) keepSpans(step);
      if (shared_.mpi != nullptr || program_.rank != 0 || shared_.result.stopped) continue;
      // The others are at most in the next step, which cannot finish without this rank.
      if (o.stop != nullptr && o.stop->load()) {
        shared_.result.stopped = true;
        shared_.last_step = std::min(o.steps - 1, step + 1);
      }
    }
    const std::lock_guard lock(shared_.mutex);
    shared_.result.peak_memory[index_] = high_water_;
    const std::vector<Bytes> bytes = runner_.commBytes();
    for (std::size_t kind = 0; kind < bytes.size(); ++kind) shared_.result.comm_bytes[kind] += bytes[kind];
  }

  double cpuSecondsPerStep() const { return cpu_seconds_per_step_; }
  const float* weights() const { return runner_.data<float>(program_.weights); }
  const float* gradients() const { return runner_.data<float>(program_.gradients); }
  const RankProgram& program() const { return program_; }

 private:
  ProgramRunner::MidStep midStep() {
    if (shared_.options.kill_rank != program_.rank) return {};
    return [this](const std::string& task) {
      if (step_ == shared_.options.kill_step && shared_.mpi != nullptr) std::raise(SIGKILL);
      if (step_ == shared_.options.kill_step)
        throw Error(ErrorKind::Runtime, fmt::format("killed by --inject in step {}", step_),
                    fmt::format("rank {} {}", program_.rank, task));
    };
  }

  StepReport oneStep(std::int64_t step) {
    const TrainOptions& o = shared_.options;
    const Plan& plan = shared_.graph.plan;
    if (o.poison || step == 0) runner_.poison();  // the first step also measures how much memory is touched
    const std::int64_t begin = plan.firstSequenceOf(program_.coord.dp);
    const std::int64_t per_replica = plan.microbatchesOf(program_.coord.dp) * plan.micro_batch;
    if (program_.tokens >= 0 || program_.targets >= 0)
      shared_.batches(step, begin, begin + per_replica,
                      program_.tokens >= 0 ? runner_.data<std::int32_t>(program_.tokens) : nullptr,
                      program_.targets >= 0 ? runner_.data<std::int32_t>(program_.targets) : nullptr);
    const ScalarLayout& layout = shared_.graph.scalars;
    auto* const scalars = runner_.data<double>(program_.scalars);
    const auto hyper = [&](ScalarLayout::Hyper which) -> double& { return scalars[layout.hyper(which)]; };
    const double t = static_cast<double>(step + 1);
    hyper(ScalarLayout::kLr) = learningRate(o, step);
    hyper(ScalarLayout::kBeta1) = o.beta1;
    hyper(ScalarLayout::kBeta2) = o.beta2;
    hyper(ScalarLayout::kEps) = o.eps;
    hyper(ScalarLayout::kWeightDecay) = o.weight_decay;
    hyper(ScalarLayout::kCorrection1) = 1 - std::pow(o.beta1, t);
    hyper(ScalarLayout::kCorrection2) = 1 - std::pow(o.beta2, t);
    hyper(ScalarLayout::kClip) = o.clip;
    hyper(ScalarLayout::kLossScale) =
        1.0 / static_cast<double>(plan.global_batch * shared_.graph.model.seq_len);
    communicator_->beginStep(step == 0 ? kFirstStepFactor * o.deadline_s : o.deadline_s);
    const Ns start = backend_.now();
    runner_.step();
    StepReport report;
    report.step = step;
    report.seconds = toSeconds(backend_.now() - start);
    if (step == 0) high_water_ = runner_.touchedHighWater();
    report.lr = learningRate(o, step);
    report.loss = scalars[layout.result(ScalarLayout::kLoss)];
    report.grad_norm = scalars[layout.result(ScalarLayout::kGradNorm)];
    if (!std::isfinite(report.loss) || !std::isfinite(report.grad_norm))
      throw Error(
          ErrorKind::Runtime,
          fmt::format("step {}: loss {} and gradient norm {} are not finite; lower --lr or raise --warmup",
                      step, report.loss, report.grad_norm),
          fmt::format("rank {}", program_.rank));
    return report;
  }

  void keepSpans(std::int64_t step) {
    if (shared_.traced.empty()) return;
    std::vector<trace::Span> spans = runner_.spans();
    const auto at = static_cast<std::size_t>(step) % shared_.traced.size();
    const std::lock_guard lock(shared_.mutex);
    auto& all = shared_.traced[at];
    all.insert(all.end(), spans.begin(), spans.end());
  }

  Shared& shared_;
  const RankProgram& program_;
  std::size_t index_;
  std::int64_t step_ = 0;
  Bytes high_water_ = 0;
  double cpu_seconds_per_step_ = 0;
  CpuBackend backend_;
  std::unique_ptr<Communicator> communicator_;
  ProgramRunner runner_;
};

// The traced step of median duration, times from its start.
trace::Trace medianTrace(const TaskGraph& graph, std::vector<std::vector<trace::Span>> traced) {
  trace::Trace result;
  result.source = trace::Source::Measured;
  result.model = graph.model.name;
  result.plan = planToText(graph.plan);
  result.num_ranks = static_cast<std::int32_t>(graph.ranks.size());
  result.stages = graph.plan.pp;
  std::erase_if(traced, [](const auto& spans) { return spans.empty(); });
  if (traced.empty()) return result;
  const auto bounds = [](const std::vector<trace::Span>& spans) {
    Ns begin = spans.front().posted, end = 0;
    for (const trace::Span& span : spans) {
      begin = std::min(begin, span.posted);
      end = std::max(end, span.end);
    }
    return std::pair(begin, end);
  };
  const auto duration = [&](const auto& spans) { return bounds(spans).second - bounds(spans).first; };
  std::sort(traced.begin(), traced.end(),
            [&](const auto& a, const auto& b) { return duration(a) < duration(b); });
  result.spans = std::move(traced[traced.size() / 2]);
  const auto [begin, end] = bounds(result.spans);
  std::sort(result.spans.begin(), result.spans.end(), [](const trace::Span& a, const trace::Span& b) {
    return std::pair(a.rank, a.task) < std::pair(b.rank, b.task);
  });
  std::map<std::string, std::uint32_t> names;
  for (trace::Span& span : result.spans) {
    span.start -= begin;
    span.end -= begin;
    span.posted -= begin;
    const std::string name = taskName(graph, graph.ranks[static_cast<std::size_t>(span.rank)], span.task);
    const auto [entry, inserted] = names.try_emplace(name, static_cast<std::uint32_t>(result.names.size()));
    if (inserted) result.names.push_back(name);
    span.name = entry->second;
  }
  result.step_time = end - begin;
  return result;
}

void gather(const RankThread& rank, const float* flat, std::map<std::string, FullTensor>& tensors) {
  for (const ParamShard& p : rank.program().params) {
    FullTensor& tensor = tensors[p.name];
    tensor.name = p.name;
    tensor.rows = p.global_rows;
    tensor.cols = p.global_cols;
    tensor.values.resize(static_cast<std::size_t>(p.global_rows * p.global_cols));
    for (std::int64_t row = 0; row < p.rows; ++row) {
      const float* const from = flat + p.offset + row * p.cols;
      std::copy(from, from + p.cols,
                tensor.values.begin() +
                    static_cast<std::ptrdiff_t>((p.row_begin + row) * p.global_cols + p.col_begin));
    }
  }
}

std::vector<FullTensor> values(std::map<std::string, FullTensor> tensors) {
  std::vector<FullTensor> list;
  for (auto& [name, tensor] : tensors) list.push_back(std::move(tensor));
  return list;
}

}  // namespace

Bytes freeHostMemory() {
  Bytes free = INT64_MAX;
  std::ifstream info("/proc/meminfo");
  for (std::string key; info >> key;) {
    Bytes kib = 0;
    if (key == "MemAvailable:" && info >> kib) free = kib * kKiB;
    info.ignore(256, '\n');
  }
  std::ifstream limit_file("/sys/fs/cgroup/memory.max"), used_file("/sys/fs/cgroup/memory.current");
  Bytes limit = 0, used = 0;
  if (limit_file >> limit && used_file >> used) free = std::min(free, limit - used);
  return free;
}

double learningRate(const TrainOptions& o, std::int64_t step) {
  if (step < o.warmup) return o.lr * static_cast<double>(step + 1) / static_cast<double>(o.warmup);
  const std::int64_t rest = std::max<std::int64_t>(1, o.steps - o.warmup);
  const double done = std::min(1.0, static_cast<double>(step - o.warmup) / static_cast<double>(rest));
  return o.min_lr + 0.5 * (o.lr - o.min_lr) * (1 + std::cos(std::numbers::pi * done));
}

TrainResult trainThreads(const TaskGraph& graph, const BatchSource& batches, const TrainOptions& options) {
  return trainThreads(graph, batches, options, nullptr);
}

void requireExecutable(const TaskGraph& graph) {
  BMT_CHECK(graph.granularity == Granularity::Layer, "execution needs Layer granularity");
  throwIfAny(notExecutable(graph.model, graph.plan), graph.model.name);
  throwIfAny(verify(graph), "the lowered programs");
  requireMemory(graph);
}

TrainResult trainThreads(const TaskGraph& graph, const BatchSource& batches, const TrainOptions& options,
                         FinalState* final_state) {
  BMT_CHECK(static_cast<std::int32_t>(graph.ranks.size()) == graph.plan.numRanks(),
            "execution needs all ranks");
  requireExecutable(graph);
  Shared shared{graph, batches, options, nullptr, InProcessWorld(options.deadline_s), {}, {}, {}, {}, {}};
  shared.last_step = options.steps - 1;
  shared.result.peak_memory.resize(graph.ranks.size());
  shared.result.comm_bytes.resize(kNumTaskKinds);
  shared.traced.resize(static_cast<std::size_t>(std::min(options.trace_steps, options.steps)));
  std::vector<std::unique_ptr<RankThread>> ranks(graph.ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < graph.ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        // Constructed on its own thread: memory is first touched where it is used.
        ranks[i] = std::make_unique<RankThread>(shared, i);
        ranks[i]->run();
      } catch (const std::exception& error) {
        shared.world.abort(error.what());
        const std::lock_guard lock(shared.mutex);
        if (shared.first_error.empty()) shared.first_error = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (!shared.first_error.empty())
    throw Error(ErrorKind::Runtime,
                shared.world.reason().empty() ? shared.first_error : shared.world.reason());
  if (final_state != nullptr) {
    std::map<std::string, FullTensor> weights, gradients;
    for (const auto& rank : ranks) {
      gather(*rank, rank->weights(), weights);
      gather(*rank, rank->gradients(), gradients);
    }
    final_state->weights = values(std::move(weights));
    final_state->gradients = values(std::move(gradients));
  }
  shared.result.trace = medianTrace(graph, std::move(shared.traced));
  shared.result.trace.peak_memory =
      *std::max_element(shared.result.peak_memory.begin(), shared.result.peak_memory.end());
  shared.result.peak_rss = peakRss();
  return std::move(shared.result);
}

namespace {

// What every process sends to rank 0 at the end: this, then the spans of its traced steps, one step after the
// other.
struct ProcessSummary {
  Bytes peak_memory = 0, peak_rss = 0;
  double cpu_seconds_per_step = 0;
  std::array<Bytes, kNumTaskKinds> comm_bytes{};
};
static_assert(std::is_trivially_copyable_v<ProcessSummary> && std::is_trivially_copyable_v<trace::Span>);

std::string packed(const ProcessSummary& summary, const std::vector<std::vector<trace::Span>>& traced) {
  std::string bytes(reinterpret_cast<const char*>(&summary), sizeof(summary));
  for (const auto& spans : traced)
    bytes.append(reinterpret_cast<const char*>(spans.data()), spans.size() * sizeof(trace::Span));
  return bytes;
}

// A process sees when it posted, not when the others did: a communication begins when its last member has
// posted (rule R3).
void setCommonStarts(const TaskGraph& graph, std::vector<trace::Span>& spans) {
  std::map<std::pair<GroupId, std::uint64_t>, Ns> last_post;
  const auto commOf = [&](const trace::Span& span) -> const Comm* {
    const RankProgram& program = graph.ranks[static_cast<std::size_t>(span.rank)];
    const std::int32_t comm = program.tasks[static_cast<std::size_t>(span.task)].comm;
    return comm < 0 ? nullptr : &program.comms[static_cast<std::size_t>(comm)];
  };
  for (const trace::Span& span : spans) {
    const Comm* const comm = commOf(span);
    if (comm == nullptr) continue;
    Ns& latest = last_post.try_emplace({comm->group, comm->seq}, span.posted).first->second;
    latest = std::max(latest, span.posted);
  }
  for (trace::Span& span : spans) {
    const Comm* const comm = commOf(span);
    // A small message may reach a fast receiver before the sender's clock is read; never let a span end
    // before it begins.
    if (comm != nullptr) span.start = std::min(span.end, last_post.at({comm->group, comm->seq}));
  }
}

}  // namespace

TrainResult trainProcess(const TaskGraph& graph, MpiWorld& mpi, const BatchSource& batches,
                         const TrainOptions& options) {
  const std::uint64_t hash = graphHash(graph);
  const std::vector<std::string> hashes =
      mpi.gather(std::string(reinterpret_cast<const char*>(&hash), sizeof(hash)));
  for (std::size_t rank = 0; rank < hashes.size(); ++rank) {
    std::uint64_t other = 0;
    std::memcpy(&other, hashes[rank].data(), sizeof(other));
    if (other != hash)
      throw Error(
          ErrorKind::Runtime,
          fmt::format(
              "rank {} has another model or plan (hash {:016x}) than rank 0 ({:016x}); start all processes "
              "with the same files and version",
              rank, other, hash));
  }
  Shared shared{graph, batches, options, &mpi, InProcessWorld(options.deadline_s), {}, {}, {}, {}, {}};
  shared.last_step = options.steps - 1;
  shared.result.peak_memory.resize(graph.ranks.size());
  shared.result.comm_bytes.resize(kNumTaskKinds);
  shared.traced.resize(static_cast<std::size_t>(std::min(options.trace_steps, options.steps)));
  const auto own = std::find_if(graph.ranks.begin(), graph.ranks.end(),
                                [&](const RankProgram& p) { return p.rank == mpi.rank(); });
  BMT_CHECK(own != graph.ranks.end(), "the graph lacks this process's rank");
  const auto index = static_cast<std::size_t>(own - graph.ranks.begin());
  RankThread rank(shared, index);
  rank.run();

  ProcessSummary summary{shared.result.peak_memory[index], peakRss(), rank.cpuSecondsPerStep(), {}};
  std::copy(shared.result.comm_bytes.begin(), shared.result.comm_bytes.end(), summary.comm_bytes.begin());
  const std::vector<std::string> all =
      mpi.gather(packed(summary, mpi.oneHost() ? shared.traced : decltype(shared.traced){}));
  if (mpi.rank() != 0) return std::move(shared.result);
  TrainResult result = std::move(shared.result);
  result.cpu_seconds_per_step = 0;
  result.peak_rss = 0;
  std::fill(result.comm_bytes.begin(), result.comm_bytes.end(), 0);
  std::vector<std::vector<trace::Span>> traced(shared.traced.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::memcpy(&summary, all[r].data(), sizeof(summary));
    result.peak_memory[r] = summary.peak_memory;
    result.peak_rss += summary.peak_rss;
    result.cpu_seconds_per_step += summary.cpu_seconds_per_step;
    for (std::size_t kind = 0; kind < summary.comm_bytes.size(); ++kind)
      result.comm_bytes[kind] += summary.comm_bytes[kind];
    const std::size_t per_step = graph.ranks[r].tasks.size();
    std::vector<trace::Span> spans((all[r].size() - sizeof(summary)) / sizeof(trace::Span));
    if (!spans.empty())
      std::memcpy(spans.data(), all[r].data() + sizeof(summary), spans.size() * sizeof(trace::Span));
    for (std::size_t i = 0; i < spans.size(); ++i) {
      // A run that was stopped has fewer traced steps.
      if (i / per_step < traced.size()) traced[i / per_step].push_back(spans[i]);
    }
  }
  for (auto& spans : traced) setCommonStarts(graph, spans);
  result.trace = medianTrace(graph, std::move(traced));
  result.trace.peak_memory = *std::max_element(result.peak_memory.begin(), result.peak_memory.end());
  return result;
}

}  // namespace bmt::exec
