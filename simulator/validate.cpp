#include "simulator/validate.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "core/lower.h"
#include "simulator/report.h"

namespace bmt::sim {
namespace {

constexpr std::int64_t kSmallestGrid = 4;

// What nvidia-smi shows beyond the framework's own allocations: the CUDA context with loaded kernels and the
// communication library's buffers.
constexpr double kContextGib = 1.5;
// Reserved over allocated bytes of PyTorch's caching allocator, median of SimuMax's B200 rows
// (validation/measured.csv, notes "reserved").
constexpr double kAllocatorShare = 1.04;

std::vector<double> ranks(const std::vector<double>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  std::vector<double> rank(values.size());
  for (std::size_t i = 0; i < order.size();) {
    std::size_t j = i;
    while (j < order.size() && values[order[j]] == values[order[i]]) ++j;
    for (std::size_t k = i; k < j; ++k) rank[order[k]] = 0.5 * static_cast<double>(i + j - 1);
    i = j;
  }
  return rank;
}

std::string gridName(const MeasuredRun& r) {
  return r.source + " " + r.model.name + " seq " + std::to_string(r.model.seq_len) + " " +
         std::to_string(r.cluster.numDevices()) + "x" + r.gpu + " gb " + std::to_string(r.plan.global_batch);
}

GridSummary gridSummary(const std::string& name, const std::vector<const ValidatedRun*>& runs) {
  GridSummary grid;
  grid.name = name;
  grid.n = static_cast<std::int64_t>(runs.size());
  std::vector<double> predicted, measured;
  for (const ValidatedRun* r : runs) {
    predicted.push_back(r->step_s);
    measured.push_back(*r->run.step_s);
  }
  grid.kendall_tau = kendallTau(predicted, measured);
  const auto picked = std::min_element(predicted.begin(), predicted.end()) - predicted.begin();
  grid.regret_pct =
      100 *
      (measured[static_cast<std::size_t>(picked)] / *std::min_element(measured.begin(), measured.end()) - 1);
  return grid;
}

struct Series {
  std::vector<double> predicted, measured;
  void add(double p, double m) {
    predicted.push_back(p);
    measured.push_back(m);
  }
  ErrorSummary summary() const { return summarize(predicted, measured); }
};

void fillSummaries(Validation& v) {
  Series all, memory;
  std::map<std::string, Series> by_source, by_gpu, memory_by_source;
  std::map<std::string, std::vector<const ValidatedRun*>> grids;
  for (const ValidatedRun& r : v.runs) {
    const bool worked = r.run.outcome == Outcome::Worked;
    (worked ? v.fit.worked : v.fit.failed) += 1;
    if (worked == r.fits) (worked ? v.fit.worked_said_to_fit : v.fit.failed_said_not_to_fit) += 1;
    if (r.run.step_s) {
      all.add(r.step_s, *r.run.step_s);
      by_source[r.run.source].add(r.step_s, *r.run.step_s);
      by_gpu[r.run.gpu].add(r.step_s, *r.run.step_s);
      grids[gridName(r.run)].push_back(&r);
    }
    if (r.run.peak_gib) {
      memory.add(r.peak_gib, *r.run.peak_gib);
      memory_by_source[r.run.source].add(r.peak_gib, *r.run.peak_gib);
    }
  }
  v.summary = all.summary();
  v.memory = memory.summary();
  for (const auto& [key, series] : by_source) v.by_source[key] = series.summary();
  for (const auto& [key, series] : by_gpu) v.by_gpu[key] = series.summary();
  for (const auto& [key, series] : memory_by_source) v.memory_by_source[key] = series.summary();
  for (const auto& [name, runs] : grids) {
    if (static_cast<std::int64_t>(runs.size()) < kSmallestGrid) continue;
    v.grids.push_back(gridSummary(name, runs));
    GridSummary& mean = v.grids_by_source[runs.front()->run.source];
    mean.n += 1;
    mean.kendall_tau += v.grids.back().kendall_tau;
    mean.regret_pct += v.grids.back().regret_pct;
  }
  for (auto& [source, mean] : v.grids_by_source) {
    mean.name = source;
    mean.kendall_tau /= static_cast<double>(mean.n);
    mean.regret_pct /= static_cast<double>(mean.n);
  }
}

}  // namespace

ValidatedRun predictRun(const MeasuredRun& run, const trace::CostProfile& profile) {
  ValidatedRun result;
  result.run = run;
  // Stage granularity suffices unless gradient buckets start inside a chunk's backward.
  const bool layers = run.plan.dp > 1 && run.plan.overlap_grad;
  const Report report = simulatePlan(run.model, run.cluster, run.plan, profile, RankSelection::Folded,
                                     layers ? Granularity::Layer : Granularity::Stage)
                            .report;
  result.step_s = report.step_time_s;
  result.peak_gib = static_cast<double>(report.peak_memory) / static_cast<double>(kGiB) +
                    (run.device_level ? kContextGib : 0);
  // A run needs its live bytes, what the allocator loses between them, and the context.
  const double needed =
      static_cast<double>(report.peak_memory) * kAllocatorShare + kContextGib * static_cast<double>(kGiB);
  result.fits = needed <= static_cast<double>(report.device_memory);
  result.simulate_s = report.simulate_wall_s;
  return result;
}

double spearman(const std::vector<double>& a, const std::vector<double>& b) {
  const std::vector<double> x = ranks(a), y = ranks(b);
  const double n = static_cast<double>(x.size());
  if (x.size() < 2) return 0;
  const double mean = (n - 1) / 2;
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mean) * (y[i] - mean);
    xx += (x[i] - mean) * (x[i] - mean);
    yy += (y[i] - mean) * (y[i] - mean);
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0;
}

double kendallTau(const std::vector<double>& a, const std::vector<double>& b) {
  double balance = 0, untied_a = 0, untied_b = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = i + 1; j < a.size(); ++j) {
      const int x = (a[i] < a[j]) - (a[i] > a[j]), y = (b[i] < b[j]) - (b[i] > b[j]);
      balance += x * y;
      untied_a += x != 0;
      untied_b += y != 0;
    }
  }
  return untied_a > 0 && untied_b > 0 ? balance / std::sqrt(untied_a * untied_b) : 0;
}

ErrorSummary summarize(const std::vector<double>& predicted, const std::vector<double>& measured) {
  ErrorSummary s;
  s.n = static_cast<std::int64_t>(predicted.size());
  if (predicted.empty()) return s;
  std::vector<double> errors;
  for (std::size_t i = 0; i < predicted.size(); ++i) {
    const double error = 100 * (predicted[i] / measured[i] - 1);
    s.bias_pct += error;
    errors.push_back(std::fabs(error));
  }
  const double n = static_cast<double>(errors.size());
  s.bias_pct /= n;
  s.mape_pct = std::accumulate(errors.begin(), errors.end(), 0.0) / n;
  std::sort(errors.begin(), errors.end());
  const auto quantile = [&](double q) {  // nearest rank
    const auto rank = static_cast<std::size_t>(std::ceil(q * n));
    return errors[std::max<std::size_t>(rank, 1) - 1];
  };
  s.median_ape_pct = quantile(0.5);
  s.p90_ape_pct = quantile(0.9);
  s.spearman = spearman(predicted, measured);
  return s;
}

Validation validateRuns(const std::vector<MeasuredRun>& runs, const ValidateOptions& options) {
  Validation v;
  std::vector<std::optional<ValidatedRun>> results(runs.size());
  std::map<std::string, trace::CostProfile> profiles;
  std::vector<std::size_t> todo;
  std::vector<std::string> failures(runs.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].skip.empty()) continue;
    todo.push_back(i);
    const std::string& device = runs[i].cluster.groups.front().device.name;
    if (!profiles.contains(device)) profiles.emplace(device, options.profile(runs[i].cluster));
  }
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::int64_t done = 0;
  const auto work = [&] {
    for (std::size_t t = next++; t < todo.size(); t = next++) {
      const std::size_t i = todo[t];
      try {
        results[i] = predictRun(runs[i], profiles.at(runs[i].cluster.groups.front().device.name));
      } catch (const Error& error) {
        failures[i] = error.what();
      }
      const std::lock_guard lock(mutex);
      ++done;
      if (options.progress) options.progress(done, static_cast<std::int64_t>(todo.size()));
    }
  };
  const unsigned jobs = options.jobs > 0 ? static_cast<unsigned>(options.jobs)
                                         : std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (unsigned j = 1; j < jobs; ++j) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (results[i]) {
      v.runs.push_back(std::move(*results[i]));
    } else {
      v.skipped.push_back(runs[i]);
      if (!failures[i].empty()) v.skipped.back().skip = failures[i];
    }
  }
  fillSummaries(v);
  return v;
}

}  // namespace bmt::sim
