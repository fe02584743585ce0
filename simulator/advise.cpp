#include "simulator/advise.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <set>
#include <thread>

#include "core/json.h"
#include "core/mesh.h"

namespace bmt::sim {
namespace {

using Edit = std::pair<std::string, Json>;

// Nothing when this version does not know a key or value: such a change is not on offer.
std::optional<Plan> edited(const Plan& plan, const std::vector<Edit>& edits) {
  Json json = parseJson(planToJson(plan), "plan");
  for (const auto& [key, value] : edits) {
    json[key] = value;
    // Lists per stage or replica lose their meaning with the axis.
    if (key == "pp" || key == "chunks" || key == "schedule") json.erase("layers");
    if (key == "dp" || key == "mb") json.erase("shares");
  }
  try {
    return planFromJson(json.dump(), "plan");
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Only the keys that the change is about: "zero=1", "tp=4,dp=4".
std::string nameOf(const std::vector<Edit>& edits) {
  std::string name;
  for (const auto& [key, value] : edits) {
    if (!name.empty()) name += ",";
    if (value.is_boolean()) {
      name += value.get<bool>() ? key : "no-" + key;
    } else {
      name += key + "=" + (value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
  return name;
}

struct Outcome {
  bool illegal = false, refused = false;
  std::optional<Report> report;
};

std::vector<Outcome> play(const ModelSpec& model, const ClusterSpec& cluster,
                          const std::vector<std::pair<std::string, Plan>>& plans,
                          const std::vector<trace::CostProfile>& profiles, const SimulateOptions& options) {
  std::vector<Outcome> outcomes(plans.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < plans.size(); i = next++) {
      const Plan& plan = plans[i].second;
      try {
        outcomes[i].illegal = !validatePlan(model, cluster, plan).empty();
        if (!outcomes[i].illegal)
          outcomes[i].report = simulatePlan(model, cluster, plan, profiles, options).report;
      } catch (const Error&) {
        outcomes[i].refused = true;  // for example a precision the device has no units for
      }
    }
  };
  std::vector<std::thread> threads;
  for (int j = 1; j < options.jobs; ++j) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

std::string effectOf(const Report& base, const Change& change) {
  const double percent = 100 * (change.step_ratio - 1);
  std::string effect = fmt::format("step {:+.1f} %", std::fabs(percent) < 0.05 ? 0.0 : percent);
  if (std::llabs(change.memory_freed) > base.peak_memory / 1000) {
    effect += fmt::format(", {} {}", change.memory_freed > 0 ? "frees" : "needs",
                          formatBytes(std::llabs(change.memory_freed)));
    if (change.memory_freed < 0) effect += " more";
  }
  const double before = base.shares.bubble, after = change.report.shares.bubble;
  if (std::fabs(before - after) > 0.005)
    effect += fmt::format(", bubble {:.1f} % -> {:.1f} %", 100 * before, 100 * after);
  const double exposed = base.shares.exposed, exposed_after = change.report.shares.exposed;
  if (std::fabs(exposed - exposed_after) > 0.005)
    effect += fmt::format(", exposed communication {:.1f} % -> {:.1f} %", 100 * exposed, 100 * exposed_after);
  if (!base.fits && change.report.fits)
    effect += fmt::format(", fits in {:.0f} % of memory", 100 * change.report.memory_share);
  if (base.fits && !change.report.fits)
    effect += fmt::format(", does not fit ({:.0f} % of memory)", 100 * change.report.memory_share);
  return effect;
}

// `total` in whole parts of at least 1, in proportion to `weights` (largest remainder; ties to the first).
std::vector<std::int64_t> proportional(std::int64_t total, const std::vector<double>& weights) {
  double sum = 0;
  for (const double weight : weights) sum += weight;
  std::vector<std::int64_t> parts;
  std::vector<std::pair<double, std::size_t>> rest;
  std::int64_t given = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double exact = static_cast<double>(total) * weights[i] / sum;
    parts.push_back(std::max<std::int64_t>(1, static_cast<std::int64_t>(exact)));
    rest.emplace_back(static_cast<double>(parts.back()) - exact, i);
    given += parts.back();
  }
  std::stable_sort(rest.begin(), rest.end());
  for (std::size_t i = 0; given < total; i = (i + 1) % rest.size(), ++given) ++parts[rest[i].second];
  while (given > total) {
    --*std::max_element(parts.begin(), parts.end());
    --given;
  }
  return parts;
}

// Where devices differ: layers by the speed of the stages, micro-batches by the speed of the replicas. Speed
// of a device: its peak over its slow factor; of several, that of the slowest.
std::vector<std::pair<std::string, Plan>> balanced(const ModelSpec& model, const ClusterSpec& cluster,
                                                   const Plan& plan) {
  if (cluster.uniform()) return {};
  const Mesh mesh(plan);
  constexpr double kUnknown = 1e300;
  std::vector<double> stages(static_cast<std::size_t>(plan.numVirtualStages()), kUnknown),
      replicas(static_cast<std::size_t>(plan.dp), kUnknown);
  for (RankId rank = 0; rank < mesh.numRanks(); ++rank) {
    double speed = peakFlops(cluster.groupOf(rank).device, plan.precision);
    for (const SlowDevice& slow : cluster.slow_devices) {
      if (slow.device == rank) speed /= slow.factor;
    }
    if (!(speed > 0)) return {};  // the device has no such peak; nothing to go by
    const Coord at = mesh.coordOf(rank);
    double& replica = replicas[static_cast<std::size_t>(at.dp)];
    replica = std::min(replica, speed);
    for (std::int32_t chunk = 0; chunk < plan.chunks; ++chunk) {
      double& stage = stages[static_cast<std::size_t>(chunk * plan.pp + at.pp)];
      stage = std::min(stage, speed);
    }
  }
  std::vector<std::pair<std::string, Plan>> plans;
  if (plan.pp > 1 && model.layers >= static_cast<std::int64_t>(stages.size())) {
    Plan changed = plan;
    changed.layers_per_stage = proportional(model.layers, stages);
    plans.emplace_back(fmt::format("layers={}", fmt::join(changed.layers_per_stage, "/")), changed);
  }
  const std::int64_t microbatches = plan.global_batch / plan.micro_batch;
  if (plan.dp > 1 && microbatches >= plan.dp) {
    Plan changed = plan;
    changed.batch_shares = proportional(microbatches, replicas);
    plans.emplace_back(fmt::format("shares={}", fmt::join(changed.batch_shares, "/")), changed);
  }
  std::erase_if(plans, [&](const auto& entry) { return entry.second == plan; });
  return plans;
}

constexpr double kNoticeable = 1e-3;  // of the step or of the memory

}  // namespace

std::vector<std::pair<std::string, Plan>> neighbours(const Plan& plan) {
  std::vector<std::vector<Edit>> edits;
  for (int zero = 0; zero <= 3; ++zero) edits.push_back({{"zero", zero}});
  edits.push_back({{"sp", !plan.sequence_parallel}});
  for (const char* policy : {"none", "selective", "full", "sqrt"}) edits.push_back({{"recompute", policy}});
  edits.push_back({{"mb", plan.micro_batch * 2}});
  if (plan.micro_batch % 2 == 0) edits.push_back({{"mb", plan.micro_batch / 2}});
  if (plan.chunks > 1) {
    edits.push_back({{"chunks", plan.chunks * 2}});
    edits.push_back({{"chunks", std::max(1, plan.chunks / 2)}});
  }
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto"})
    edits.push_back({{"schedule", schedule}, {"chunks", 1}});
  for (const char* schedule : {"interleaved", "bfs", "zb-v", "dualpipev"})
    edits.push_back({{"schedule", schedule}, {"chunks", std::max(2, plan.chunks)}});
  edits.push_back({{"schedule", "interleaved"}, {"chunks", 4}});
  const std::vector<std::pair<std::string, std::int32_t>> axes{
      {"dp", plan.dp}, {"tp", plan.tp}, {"pp", plan.pp}, {"cp", plan.cp}};
  for (const auto& [more, up] : axes) {
    for (const auto& [less, down] : axes) {
      if (more != less && down % 2 == 0) edits.push_back({{more, up * 2}, {less, down / 2}});
    }
  }
  edits.push_back({{"offload", "optimizer"}});
  edits.push_back({{"compress", "int8"}});
  for (const char* precision : {"bf16", "fp16", "fp8"}) edits.push_back({{"precision", precision}});
  edits.push_back({{"overlap-grad", !plan.overlap_grad}});
  edits.push_back({{"attention", "flash"}});
  if (plan.loss_chunk == 0) edits.push_back({{"loss-chunk", 1024}});
  std::vector<std::pair<std::string, Plan>> plans;
  std::set<std::string> seen{planToText(plan)};
  for (const std::vector<Edit>& list : edits) {
    const std::optional<Plan> changed = edited(plan, list);
    if (!changed || !seen.insert(planToText(*changed)).second) continue;
    // Keys that stay as they are do not belong in the name.
    std::vector<Edit> real;
    const Json now = parseJson(planToJson(plan), "plan");
    for (const Edit& edit : list) {
      if (!now.contains(edit.first) || now.at(edit.first) != edit.second) real.push_back(edit);
    }
    plans.emplace_back(nameOf(real), *changed);
  }
  return plans;
}

Advice advise(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
              const std::vector<trace::CostProfile>& profiles, const SimulateOptions& options) {
  SimulateOptions plain = options;
  plain.explain = plain.critical_tasks = false;
  plain.jitter = 0;
  Advice advice;
  advice.base = simulatePlan(model, cluster, plan, profiles, plain).report;
  std::vector<Change> all;
  const auto evaluate = [&](const std::vector<std::pair<std::string, Plan>>& plans) {
    const std::vector<Outcome> outcomes = play(model, cluster, plans, profiles, plain);
    for (std::size_t i = 0; i < plans.size(); ++i) {
      advice.illegal += outcomes[i].illegal ? 1 : 0;
      advice.refused += outcomes[i].refused ? 1 : 0;
      if (!outcomes[i].report) continue;
      ++advice.simulated;
      Change change{plans[i].first, plans[i].second, *outcomes[i].report, 1, 0, {}};
      change.step_ratio = change.report.step_time_s / advice.base.step_time_s;
      change.memory_freed = advice.base.peak_memory - change.report.peak_memory;
      change.effect = effectOf(advice.base, change);
      all.push_back(std::move(change));
    }
  };
  std::vector<std::pair<std::string, Plan>> singles = neighbours(plan);
  for (auto& entry : balanced(model, cluster, plan)) singles.push_back(std::move(entry));
  evaluate(singles);
  const auto fits = [](const Change& change) { return change.report.fits; };
  if (!advice.base.fits && std::none_of(all.begin(), all.end(), fits)) {
    std::vector<const Change*> savers;
    for (const Change& change : all) {
      if (change.memory_freed > 0) savers.push_back(&change);
    }
    std::stable_sort(savers.begin(), savers.end(),
                     [](const Change* a, const Change* b) { return a->memory_freed > b->memory_freed; });
    if (savers.size() > 8) savers.resize(8);
    std::vector<std::pair<std::string, Plan>> pairs;
    std::set<std::string> seen;
    for (const Change* first : savers) {
      for (auto& [name, both] : neighbours(first->plan)) {
        const bool other = std::any_of(savers.begin(), savers.end(),
                                       [&name = name](const Change* s) { return s->name == name; });
        if (other && seen.insert(planToText(both)).second)
          pairs.emplace_back(first->name + " and " + name, both);
      }
    }
    advice.pairs = static_cast<std::int64_t>(pairs.size());
    evaluate(pairs);
  }
  const auto faster = [](const Change& a, const Change& b) { return a.step_ratio < b.step_ratio; };
  std::vector<Change> useful;
  if (!advice.base.fits) {
    std::copy_if(all.begin(), all.end(), std::back_inserter(useful), fits);
    std::stable_sort(useful.begin(), useful.end(), faster);
  } else {
    std::vector<Change> savers;
    for (const Change& change : all) {
      if (!change.report.fits) continue;
      const double freed =
          static_cast<double>(change.memory_freed) / static_cast<double>(advice.base.peak_memory);
      if (change.step_ratio < 1 - kNoticeable) {
        useful.push_back(change);
      } else if (freed > 10 * kNoticeable) {
        savers.push_back(change);
      }
    }
    std::stable_sort(useful.begin(), useful.end(), faster);
    // Bytes freed for the time they cost; half a percent of the step counts as free.
    const auto value = [](const Change& c) {
      return static_cast<double>(c.memory_freed) / std::max(0.005, c.step_ratio - 1);
    };
    std::stable_sort(savers.begin(), savers.end(),
                     [&](const Change& a, const Change& b) { return value(a) > value(b); });
    useful.insert(useful.end(), savers.begin(), savers.end());
  }
  advice.changes = std::move(useful);
  return advice;
}

std::string adviceToJson(const Advice& advice, std::int64_t top) {
  Json json;
  json["schema"] = "bmtrain.advice/1";
  json["plan"] = advice.base.plan;
  json["fits"] = advice.base.fits;
  json["step_time_s"] = advice.base.step_time_s;
  json["peak_memory_bytes"] = advice.base.peak_memory;
  json["simulated"] = advice.simulated;
  json["illegal"] = advice.illegal;
  json["refused"] = advice.refused;
  json["pairs"] = advice.pairs;
  json["changes"] = Json::array();
  for (const Change& c : advice.changes) {
    if (static_cast<std::int64_t>(json["changes"].size()) >= top) break;
    json["changes"].push_back({{"change", c.name},
                               {"plan", planToText(c.plan)},
                               {"fits", c.report.fits},
                               {"step_time_s", c.report.step_time_s},
                               {"step_change", c.step_ratio - 1},
                               {"memory_freed_bytes", c.memory_freed},
                               {"bubble_fraction", c.report.shares.bubble},
                               {"exposed_comm_fraction", c.report.shares.exposed},
                               {"mfu", c.report.mfu},
                               {"effect", c.effect}});
  }
  return json.dump(2) + "\n";
}

std::string adviceToText(const Advice& advice, std::int64_t top) {
  std::string out =
      advice.base.fits ? "\nwhat one change would bring\n" : "\nwhat makes it fit, cheapest first\n";
  std::int64_t shown = 0;
  for (const Change& c : advice.changes) {
    if (shown++ >= top) break;
    out += fmt::format("  {:<24} -> {}\n", c.name, c.effect);
  }
  if (advice.changes.empty())
    out += advice.base.fits ? "  nothing: no neighbour is faster or frees memory\n"
                            : "  nothing: no change of one or two decisions makes it fit\n";
  out += fmt::format("  ({} neighbours simulated, {} of them pairs; {} more are not legal", advice.simulated,
                     advice.pairs, advice.illegal);
  if (advice.refused > 0) out += fmt::format(", {} could not be costed", advice.refused);
  return out + ")\n";
}

}  // namespace bmt::sim
