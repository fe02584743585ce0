#include "simulator/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <thread>

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
        pipelines.push_back({ScheduleKind::GPipe, 1});
        for (std::int32_t v = 2; pp * v <= model.layers; v *= 2)
          pipelines.push_back({ScheduleKind::Interleaved, v});
      }
      for (const Pipeline& pipeline : pipelines) {
        for (const std::int64_t mb : micro_batches) {
          for (std::int32_t zero = 0; zero <= (dp > 1 ? 1 : 0); ++zero) {
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

SearchResult search(const ModelSpec& model, const ClusterSpec& cluster, const trace::CostProfile& profile,
                    const SearchOptions& o) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Plan> plans = enumeratePlans(model, cluster, o);
  struct Outcome {
    std::string rejected;  // empty = feasible
    std::optional<Report> report;
  };
  std::vector<Outcome> outcomes(plans.size());
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::int64_t done = 0;
  double best = 0;
  std::exception_ptr failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < plans.size(); i = next++) {
      Outcome& outcome = outcomes[i];
      try {
        const std::vector<Issue> issues = validatePlan(model, cluster, plans[i]);
        if (!issues.empty()) {
          outcome.rejected = reasonOf(issues);
        } else {
          outcome.report =
              simulatePlan(model, cluster, plans[i], profile, RankSelection::Folded, Granularity::Stage)
                  .report;
          if (outcome.report->memory_share > o.memory_limit) outcome.rejected = "does not fit in memory";
        }
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = plans.size();
        return;
      }
      const std::lock_guard lock(mutex);
      ++done;
      if (outcome.rejected.empty() && (best == 0 || outcome.report->step_time_s < best))
        best = outcome.report->step_time_s;
      if (o.progress) o.progress(done, static_cast<std::int64_t>(plans.size()), best);
    }
  };
  const unsigned jobs =
      o.jobs > 0 ? static_cast<unsigned>(o.jobs) : std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (unsigned j = 1; j < jobs; ++j) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);

  SearchResult result;
  result.space_size = static_cast<std::int64_t>(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    result.evaluated += outcomes[i].report ? 1 : 0;
    if (!outcomes[i].rejected.empty()) {
      ++result.rejected[outcomes[i].rejected];
    } else {
      result.plans.emplace_back(plans[i], *outcomes[i].report);
    }
  }
  result.feasible = static_cast<std::int64_t>(result.plans.size());
  std::stable_sort(result.plans.begin(), result.plans.end(), [&](const auto& a, const auto& b) {
    const auto key = [&](const Report& r) {
      return o.by_memory ? std::pair(static_cast<double>(r.peak_memory), r.step_time_s)
                         : std::pair(r.step_time_s, static_cast<double>(r.peak_memory));
    };
    return key(a.second) < key(b.second);
  });
  result.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace bmt::sim
