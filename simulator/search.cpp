#include "simulator/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

#include "core/executable.h"
#include "core/schedule.h"
#include "simulator/bounds.h"

namespace bmt::sim {
namespace {

std::vector<std::int32_t> divisors(std::int32_t n) {
  std::vector<std::int32_t> list;
  for (std::int32_t d = 1; d <= n; ++d) {
    if (n % d == 0) list.push_back(d);
  }
  return list;
}

// The field of the first problem: "plan.tp" -> "tp".
std::string reasonOf(const std::vector<Issue>& issues) {
  const std::string& where = issues.front().where;
  return "illegal: " + (where.starts_with("plan.") ? where.substr(5) : where);
}

}  // namespace

std::vector<Plan> enumeratePlans(const ModelSpec& model, const ClusterSpec& cluster, const SearchOptions& o) {
  std::vector<std::int64_t> micro_batches = o.micro_batches;
  if (micro_batches.empty()) micro_batches = {1, 2, 4, 8, 16};
  const std::int32_t devices = cluster.numDevices();
  struct Pipeline {
    ScheduleKind schedule;
    std::int32_t chunks;
  };
  std::vector<Plan> plans;
  for (const std::int32_t tp : divisors(devices)) {
    for (const std::int32_t pp : divisors(devices / tp)) {
      const std::int32_t dp = devices / tp / pp;
      if (o.hybrid_only && (dp > 1) + (tp > 1) + (pp > 1) < 2) continue;
      std::vector<Pipeline> pipelines{{ScheduleKind::OneFOneB, 1}};
      if (pp > 1) {
        for (const ScheduleKind kind : {ScheduleKind::GPipe, ScheduleKind::ZbH1, ScheduleKind::ZbH2})
          pipelines.push_back({kind, 1});
        for (const ScheduleKind kind : {ScheduleKind::ZbV, ScheduleKind::DualPipeV})
          pipelines.push_back({kind, 2});
        for (const ScheduleKind kind : {ScheduleKind::Interleaved, ScheduleKind::BreadthFirst}) {
          for (std::int32_t v = 2; pp * v <= model.layers; ++v) {
            if (model.layers % (pp * v) == 0 || v == 2) pipelines.push_back({kind, v});
          }
        }
      }
      for (const Pipeline& pipeline : pipelines) {
        for (const std::int64_t mb : micro_batches) {
          for (std::int32_t zero = 0; zero <= (dp > 1 ? 3 : 0); ++zero) {
            for (int sp = 0; sp <= (tp > 1 ? 1 : 0); ++sp) {
              for (const Recompute recompute : {Recompute::None, Recompute::Full}) {
                Plan plan;
                plan.dp = dp;
                plan.tp = tp;
                plan.pp = pp;
                plan.micro_batch = mb;
                plan.global_batch = o.global_batch;
                plan.schedule = pipeline.schedule;
                plan.chunks = pipeline.chunks;
                plan.zero = zero;
                plan.sequence_parallel = sp == 1;
                plan.recompute = recompute;
                plan.precision = o.precision;
                plan.loss_chunk = o.loss_chunk;
                plans.push_back(plan);
              }
            }
          }
        }
      }
    }
  }
  return plans;
}

namespace {

struct Candidate {
  std::size_t index = 0;  // in the enumeration
  Bytes memory = 0;       // lower bounds
  double seconds = 0;
};

// Better first; the enumeration breaks ties.
struct Scored {
  double first = 0, second = 0;
  std::size_t index = 0;
  bool operator<(const Scored& other) const {
    return std::tie(first, second, index) < std::tie(other.first, other.second, other.index);
  }
};

// What the evaluated plans so far rule out.
class Incumbents {
 public:
  Incumbents(std::size_t top, bool by_memory) : top_(top), by_memory_(by_memory) {}

  void add(double seconds, Bytes memory, std::size_t index) {
    best_.insert(by_memory_ ? Scored{static_cast<double>(memory), seconds, index}
                            : Scored{seconds, static_cast<double>(memory), index});
    if (best_.size() > top_) best_.erase(std::prev(best_.end()));
    // The front: seconds ascending, memory descending.
    auto at = front_.upper_bound(seconds);
    if (at != front_.begin() && std::prev(at)->second <= memory) return;
    while (at != front_.end() && at->second >= memory) at = front_.erase(at);
    front_[seconds] = memory;
  }

  // Can neither be among the top nor on the front.
  bool rulesOut(const Candidate& c) const {
    if (best_.size() < top_) return false;
    const double bound = by_memory_ ? static_cast<double>(c.memory) : c.seconds;
    if (bound <= best_.rbegin()->first) return false;
    const auto at = front_.lower_bound(c.seconds);
    return at != front_.begin() && std::prev(at)->second <= c.memory;
  }

 private:
  std::size_t top_;
  bool by_memory_;
  std::set<Scored> best_;
  std::map<double, Bytes> front_;
};

void runParallel(int jobs, std::size_t count, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto loop = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        work(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = count;
      }
    }
  };
  std::vector<std::thread> threads;
  for (int j = 1; j < jobs; ++j) threads.emplace_back(loop);
  loop();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

std::vector<std::size_t> paretoFront(const std::vector<std::pair<Plan, Report>>& plans) {
  std::vector<std::size_t> order(plans.size()), front;
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const auto key = [&](std::size_t i) {
      return std::pair(plans[i].second.step_time_s, plans[i].second.peak_memory);
    };
    return key(a) < key(b);
  });
  for (const std::size_t i : order) {
    if (front.empty() || plans[i].second.peak_memory < plans[front.back()].second.peak_memory)
      front.push_back(i);
  }
  return front;
}

}  // namespace

SearchResult search(const ModelSpec& model, const ClusterSpec& cluster, const trace::CostProfile& profile,
                    const SearchOptions& o) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Plan> plans = enumeratePlans(model, cluster, o);
  SearchResult result;
  result.space_size = static_cast<std::int64_t>(plans.size());

  // Legality and bounds: a few microseconds a plan.
  Bounds bounds(model, cluster, profile);
  const NodeGroup& node = cluster.groups.front();
  const bool gpu = cluster.homogeneous() && node.device.kind != DeviceKind::Cpu;
  const double limit = o.memory_limit * static_cast<double>(node.device.memory);
  std::vector<Candidate> candidates;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const std::vector<Issue> issues = validatePlan(model, cluster, plans[i]);
    if (!issues.empty()) {
      ++result.rejected[reasonOf(issues)];
      continue;
    }
    // A CPU cluster is there to be trained on: what would be refused then is no answer.
    if (node.device.kind == DeviceKind::Cpu && !notExecutable(model, plans[i]).empty()) {
      ++result.rejected["simulated, but not executed on a CPU"];
      continue;
    }
    Candidate c{i, 0, 0};
    if (gpu) c = {i, bounds.memory(plans[i]), bounds.stepSeconds(plans[i])};
    if (gpu && static_cast<double>(c.memory) > limit) {
      ++result.rejected["does not fit in memory"];
    } else {
      candidates.push_back(c);
    }
  }
  // The most promising first. Batches have a fixed size, so that what is ruled out does not depend on the
  // threads.
  std::stable_sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    return o.by_memory ? a.memory < b.memory : a.seconds < b.seconds;
  });
  constexpr std::size_t kBatch = 64;
  const int jobs = o.jobs > 0 ? o.jobs : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  Incumbents incumbents(o.top, o.by_memory);
  double best = 0;
  std::vector<std::optional<Report>> reports(plans.size());
  std::vector<Candidate> batch;
  for (std::size_t done = 0; done < candidates.size();) {
    batch.clear();
    while (done < candidates.size() && batch.size() < kBatch) {
      const Candidate& c = candidates[done++];
      if (o.top > 0 && incumbents.rulesOut(c)) {
        ++result.rejected["cannot be among the best"];
      } else {
        batch.push_back(c);
      }
    }
    runParallel(jobs, batch.size(), [&](std::size_t i) {
      reports[batch[i].index] = simulatePlan(model, cluster, plans[batch[i].index], profile,
                                             RankSelection::Folded, Granularity::Stage, {false})
                                    .report;
    });
    for (const Candidate& c : batch) {
      std::optional<Report>& report = reports[c.index];
      ++result.evaluated;
      if (report->memory_share > o.memory_limit) {
        ++result.rejected["does not fit in memory"];
        report.reset();
        continue;
      }
      incumbents.add(report->step_time_s, report->peak_memory, c.index);
      if (best == 0 || report->step_time_s < best) best = report->step_time_s;
    }
    if (o.progress)
      o.progress(static_cast<std::int64_t>(done), static_cast<std::int64_t>(candidates.size()), best);
  }

  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (reports[i]) result.plans.emplace_back(plans[i], std::move(*reports[i]));
  }
  result.feasible = static_cast<std::int64_t>(result.plans.size());
  std::stable_sort(result.plans.begin(), result.plans.end(), [&](const auto& a, const auto& b) {
    const auto key = [&](const Report& r) {
      return o.by_memory ? std::pair(static_cast<double>(r.peak_memory), r.step_time_s)
                         : std::pair(r.step_time_s, static_cast<double>(r.peak_memory));
    };
    return key(a.second) < key(b.second);
  });
  result.pareto = paretoFront(result.plans);
  result.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace bmt::sim
