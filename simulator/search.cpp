#include "simulator/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
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
#include "simulator/plan_space.h"

namespace bmt::sim {
namespace {

constexpr const char* kDoesNotFit = "does not fit in memory";

// The field of the first problem: "plan.tp" -> "tp".
std::string reasonOf(const std::vector<Issue>& issues) {
  const std::string& where = issues.front().where;
  return "illegal: " + (where.starts_with("plan.") ? where.substr(5) : where);
}

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
  Incumbents(std::size_t top, bool by_memory, bool front)
      : top_(top), by_memory_(by_memory), keep_front_(front) {}

  void add(double seconds, Bytes memory, std::size_t index) {
    best_.insert(by_memory_ ? Scored{static_cast<double>(memory), seconds, index}
                            : Scored{seconds, static_cast<double>(memory), index});
    if (best_.size() > top_) best_.erase(std::prev(best_.end()));
    if (!keep_front_) return;
    // The front: seconds ascending, memory descending.
    auto at = front_.upper_bound(seconds);
    if (at != front_.begin() && std::prev(at)->second <= memory) return;
    while (at != front_.end() && at->second >= memory) at = front_.erase(at);
    front_[seconds] = memory;
  }

  // Can neither be among the top nor, where it is asked for, on the front.
  bool rulesOut(const Candidate& c) const {
    if (best_.size() < top_) return false;
    const double bound = by_memory_ ? static_cast<double>(c.memory) : c.seconds;
    if (bound <= best_.rbegin()->first) return false;
    if (!keep_front_) return true;
    const auto at = front_.lower_bound(c.seconds);
    return at != front_.begin() && std::prev(at)->second <= c.memory;
  }

 private:
  std::size_t top_;
  bool by_memory_, keep_front_;
  std::set<Scored> best_;
  std::map<double, Bytes> front_;
};

// The candidates in the order in which they are worth simulating: by the bound of the objective. For a Pareto
// front also by mixtures of both bounds, in turn: plans near every part of the front come early and rule out
// the rest.
class Queue {
 public:
  Queue(std::vector<Candidate> candidates, const SearchOptions& o)
      : candidates_(std::move(candidates)), visited_(candidates_.size()), all_(o.top == 0) {
    std::vector<double> weights{o.by_memory ? 1.0 : 0.0};
    if (o.pareto) weights.insert(weights.end(), {0.25, 0.5, 0.75, o.by_memory ? 0.0 : 1.0});
    for (const double weight : weights) {
      std::vector<double> score(candidates_.size());
      for (std::size_t i = 0; i < score.size(); ++i)
        score[i] = (1 - weight) * std::log(1e-9 + candidates_[i].seconds) +
                   weight * std::log(1.0 + static_cast<double>(candidates_[i].memory));
      Order order{std::vector<std::uint32_t>(score.size()), 0};
      std::iota(order.list.begin(), order.list.end(), std::uint32_t{0});
      std::stable_sort(order.list.begin(), order.list.end(),
                       [&score](std::uint32_t a, std::uint32_t b) { return score[a] < score[b]; });
      orders_.push_back(std::move(order));
    }
  }

  // Null at the end.
  const Candidate* next() {
    for (std::size_t tried = 0; tried < orders_.size(); ++tried) {
      Order& order = orders_[turn_];
      turn_ = (turn_ + 1) % orders_.size();
      while (order.at < order.list.size() && visited_[order.list[order.at]]) ++order.at;
      if (order.at == order.list.size()) continue;
      const std::uint32_t found = order.list[order.at++];
      visited_[found] = true;
      return &candidates_[found];
    }
    return nullptr;
  }

  // How many plans still have to be simulated as far as is known; of a front, where counting would cost as
  // much as ruling out, those in the first order until one is ruled out.
  std::int64_t left(const Incumbents& incumbents) const {
    const Order& order = orders_.front();
    std::size_t at = order.at;
    while (at < order.list.size() && (all_ || !incumbents.rulesOut(candidates_[order.list[at]]))) ++at;
    return static_cast<std::int64_t>(at - order.at);
  }

 private:
  struct Order {
    std::vector<std::uint32_t> list;  // indices of candidates, best first
    std::size_t at = 0;
  };
  std::vector<Candidate> candidates_;
  std::vector<bool> visited_;
  bool all_;
  std::vector<Order> orders_;
  std::size_t turn_ = 0;
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

int jobsOf(const SearchOptions& o) {
  return o.jobs > 0 ? o.jobs : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
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

// What legality and bounds leave of a range of plans.
struct Sifted {
  std::vector<Candidate> candidates;
  std::map<std::string, std::int64_t> rejected;
};

Sifted sift(const ModelSpec& model, const ClusterSpec& cluster, const trace::CostProfile& profile,
            const PlanSpace& space, const PlanSpace::Run& run, double memory_limit) {
  const NodeGroup& node = cluster.groups.front();
  const bool cpu = node.device.kind == DeviceKind::Cpu, bounded = cluster.homogeneous() && !cpu;
  Bounds bounds(model, cluster, profile);
  Sifted result;
  for (std::size_t i = run.begin; i < run.end; ++i) {
    const Plan plan = space.at(i);
    const std::vector<Issue> issues = validatePlan(model, cluster, plan);
    if (!issues.empty()) {
      ++result.rejected[reasonOf(issues)];
      continue;
    }
    // A CPU cluster is there to be trained on: what would be refused then is no answer.
    if (cpu && !notExecutable(model, plan).empty()) {
      ++result.rejected["simulated, but not executed on a CPU"];
      continue;
    }
    Candidate c{i, 0, 0};
    if (bounded) c.memory = bounds.memory(plan);
    if (bounded && static_cast<double>(c.memory) > memory_limit) {
      ++result.rejected[kDoesNotFit];
      continue;
    }
    if (bounded) c.seconds = bounds.stepSeconds(plan);
    result.candidates.push_back(c);
  }
  return result;
}

}  // namespace

std::int64_t countLegal(const ModelSpec& model, const ClusterSpec& cluster, const SearchOptions& o) {
  const PlanSpace space(model, cluster, o);
  std::atomic<std::int64_t> legal{0};
  runParallel(jobsOf(o), space.runs().size(), [&](std::size_t r) {
    for (std::size_t i = space.runs()[r].begin; i < space.runs()[r].end; ++i)
      legal += validatePlan(model, cluster, space.at(i)).empty() ? 1 : 0;
  });
  return legal;
}

SearchResult search(const ModelSpec& model, const ClusterSpec& cluster, const trace::CostProfile& profile,
                    const SearchOptions& o) {
  const auto start = std::chrono::steady_clock::now();
  const auto since = [&start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const PlanSpace space(model, cluster, o);
  const int jobs = jobsOf(o);
  SearchResult result;
  result.space_size = static_cast<std::int64_t>(space.size());

  // Legality and bounds: a few microseconds a plan.
  const double limit = o.memory_limit * static_cast<double>(cluster.groups.front().device.memory);
  std::vector<Sifted> sifted(space.runs().size());
  runParallel(jobs, sifted.size(), [&](std::size_t r) {
    sifted[r] = sift(model, cluster, profile, space, space.runs()[r], limit);
  });
  std::vector<Candidate> candidates;
  for (const Sifted& part : sifted) {
    candidates.insert(candidates.end(), part.candidates.begin(), part.candidates.end());
    for (const auto& [reason, count] : part.rejected) result.rejected[reason] += count;
  }
  sifted.clear();
  result.legal = static_cast<std::int64_t>(candidates.size()) + result.rejected[kDoesNotFit];
  if (result.rejected[kDoesNotFit] == 0) result.rejected.erase(kDoesNotFit);
  result.sift_wall_s = since();

  // The most promising first. Batches have a fixed size, so that what is ruled out does not depend on the
  // threads.
  constexpr std::size_t kBatch = 64;
  Incumbents incumbents(o.top, o.by_memory, o.pareto);
  Queue queue(std::move(candidates), o);
  double best = 0;
  std::map<std::size_t, Report> reports;  // by index, so that ties keep the order of the space
  std::vector<Candidate> batch;
  std::vector<Report> played;
  while (true) {
    batch.clear();
    while (batch.size() < kBatch) {
      const Candidate* const c = queue.next();
      if (c == nullptr) break;
      if (o.top > 0 && incumbents.rulesOut(*c)) {
        ++result.rejected["cannot be among the best"];
      } else {
        batch.push_back(*c);
      }
    }
    if (batch.empty()) break;
    played.assign(batch.size(), {});
    runParallel(jobs, batch.size(), [&](std::size_t i) {
      played[i] = simulatePlan(model, cluster, space.at(batch[i].index), profile, RankSelection::Folded,
                               Granularity::Stage, {false})
                      .report;
    });
    for (std::size_t i = 0; i < batch.size(); ++i) {
      ++result.evaluated;
      if (played[i].memory_share > o.memory_limit) {
        ++result.rejected[kDoesNotFit];
        continue;
      }
      incumbents.add(played[i].step_time_s, played[i].peak_memory, batch[i].index);
      if (best == 0 || played[i].step_time_s < best) best = played[i].step_time_s;
      reports.emplace(batch[i].index, std::move(played[i]));
    }
    if (o.progress) o.progress(result.evaluated, result.evaluated + queue.left(incumbents), best);
  }

  for (auto& [index, report] : reports) result.plans.emplace_back(space.at(index), std::move(report));
  result.feasible = static_cast<std::int64_t>(result.plans.size());
  std::stable_sort(result.plans.begin(), result.plans.end(), [&](const auto& a, const auto& b) {
    const auto key = [&](const Report& r) {
      return o.by_memory ? std::pair(static_cast<double>(r.peak_memory), r.step_time_s)
                         : std::pair(r.step_time_s, static_cast<double>(r.peak_memory));
    };
    return key(a.second) < key(b.second);
  });
  if (o.pareto || o.top == 0) result.pareto = paretoFront(result.plans);
  result.wall_s = since();
  return result;
}

}  // namespace bmt::sim
