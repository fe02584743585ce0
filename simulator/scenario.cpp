#include "simulator/scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/json.h"

namespace bmt::sim {
namespace {

constexpr double kDay = 86400;

ScenarioPlan planOf(const Json& json, const char* key, const std::string& source) {
  if (!json.contains(key) || !json.at(key).is_object())
    throw Error(ErrorKind::BadInput,
                fmt::format("field '{}': expected an object with 'name' and 'plan'", key), source);
  const Json& entry = json.at(key);
  ScenarioPlan plan;
  plan.name = jsonString(entry, "name", key, source);
  plan.plan = planFromText(jsonString(entry, "plan", "", source));
  plan.claimed_days = jsonNumber(entry, "claimed_days", 0, source);
  if (plan.claimed_days < 0)
    throw Error(ErrorKind::BadInput,
                fmt::format("field '{}.claimed_days': {} is negative", key, plan.claimed_days), source);
  return plan;
}

std::optional<Report> predict(const Scenario& s, const Plan& plan,
                              const std::vector<trace::CostProfile>& profiles, std::string& why) {
  const std::vector<Issue> issues = validatePlan(s.model, s.cluster, plan);
  if (!issues.empty()) {
    why = formatIssues(issues);
    while (!why.empty() && why.back() == '\n') why.pop_back();
    return std::nullopt;
  }
  try {
    SimulateOptions options;
    options.granularity = Granularity::Stage;
    Report report = simulatePlan(s.model, s.cluster, plan, profiles, options).report;
    report.training = trainingRun(s.model, s.cluster, plan, report.step_time_s, s.tokens, s.failures);
    return report;
  } catch (const Error& error) {
    why = error.what();
    return std::nullopt;
  }
}

// The differences of two plans, as keys to set; axes move together because their product is fixed.
std::vector<std::pair<std::string, Plan>> differences(const Plan& from, const Plan& to) {
  const Json a = parseJson(planToJson(from), "plan"), b = parseJson(planToJson(to), "plan");
  std::vector<std::pair<std::string, std::vector<std::string>>> bundles;
  std::vector<std::string> axes, pipeline;
  std::vector<std::string> keys;
  for (const auto& [key, value] : b.items()) keys.push_back(key);
  for (const auto& [key, value] : a.items()) {
    if (!b.contains(key)) keys.push_back(key);
  }
  for (const std::string& key : keys) {
    if (a.contains(key) && b.contains(key) && a.at(key) == b.at(key)) continue;
    if (key == "dp" || key == "tp" || key == "pp" || key == "cp" || key == "ep" || key == "layers" ||
        key == "shares") {
      axes.push_back(key);
    } else if (key == "schedule" || key == "chunks") {
      pipeline.push_back(key);
    } else {
      bundles.push_back({"", {key}});
    }
  }
  if (!pipeline.empty()) bundles.insert(bundles.begin(), {"", pipeline});
  if (!axes.empty()) bundles.insert(bundles.begin(), {"", axes});
  std::vector<std::pair<std::string, Plan>> plans;
  for (const auto& [unused, bundle] : bundles) {
    Json changed = a;
    std::string name;
    for (const std::string& key : bundle) {
      if (!name.empty()) name += ",";
      if (!b.contains(key)) {
        changed.erase(key);
        name += key + " back to its default";
        continue;
      }
      changed[key] = b.at(key);
      name += key + "=" + (b.at(key).is_string() ? b.at(key).get<std::string>() : b.at(key).dump());
    }
    plans.emplace_back(name, planFromJson(changed.dump(), "plan"));
  }
  return plans;
}

std::string percent(double share) {
  return fmt::format("{:.0f} %", 100 * share);
}

}  // namespace

Scenario scenarioFromJson(const std::string& text, const std::string& source) {
  const Json json = parseJson(text, source);
  if (!json.is_object()) throw Error(ErrorKind::BadInput, "expected a JSON object", source);
  const std::string schema = jsonString(json, "schema", "", source);
  if (schema != "bmtrain.scenario/1")
    throw Error(ErrorKind::BadInput, fmt::format("schema is '{}', expected 'bmtrain.scenario/1'", schema),
                source);
  Scenario s;
  s.name = jsonString(json, "name", source, source);
  s.model = loadModel(jsonString(json, "model", "", source));
  const std::int64_t seq = jsonInt(json, "seq", 0, source);
  if (seq > 0) s.model.seq_len = seq;
  s.cluster = loadCluster(jsonString(json, "cluster", "", source));
  s.tokens = jsonNumber(json, "tokens", 0, source);
  if (!(s.tokens > 0))
    throw Error(ErrorKind::BadInput, fmt::format("field 'tokens': {} is not positive", s.tokens), source);
  s.baseline = planOf(json, "baseline", source);
  s.tuned = planOf(json, "tuned", source);
  if (json.contains("candidates")) {
    if (!json.at("candidates").is_array())
      throw Error(ErrorKind::BadInput, "field 'candidates': expected a list of plan texts", source);
    for (const Json& plan : json.at("candidates")) {
      if (!plan.is_string())
        throw Error(ErrorKind::BadInput, "field 'candidates': expected a list of plan texts", source);
      s.candidates.push_back(planFromText(plan.get<std::string>()));
    }
  }
  s.mfu_ceiling = jsonNumber(json, "mfu_ceiling", s.mfu_ceiling, source);
  FailureModel& f = s.failures;
  f.price_per_device_h = jsonNumber(json, "price_per_device_hour", f.price_per_device_h, source);
  f.mtbf_device_h = jsonNumber(json, "mtbf_device_hours", f.mtbf_device_h, source);
  f.storage_bandwidth = jsonNumber(json, "storage_bytes_per_s", f.storage_bandwidth, source);
  f.restart_s = jsonNumber(json, "restart_s", f.restart_s, source);
  return s;
}

ScenarioReport runScenario(const Scenario& s, int jobs) {
  ScenarioReport out;
  out.scenario = s;
  const std::vector<trace::CostProfile> profiles = chooseProfiles(s.cluster, "");
  out.flops = 6 * static_cast<double>(numParams(s.model)) * s.tokens;
  for (const NodeGroup& group : s.cluster.groups)
    out.peak_flops_per_s +=
        peakFlops(group.device, s.tuned.plan.precision) * group.num_nodes * group.devices_per_node;

  // Everything is played at once: the two plans, the candidates, and the differences one at a time.
  std::vector<Plan> plans{s.baseline.plan, s.tuned.plan};
  plans.insert(plans.end(), s.candidates.begin(), s.candidates.end());
  const std::size_t first_toggle = plans.size();
  const auto toggles = differences(s.baseline.plan, s.tuned.plan);
  for (const auto& [name, plan] : toggles) plans.push_back(plan);
  std::vector<std::optional<Report>> reports(plans.size());
  std::vector<std::string> why(plans.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < plans.size(); i = next++)
      reports[i] = predict(s, plans[i], profiles, why[i]);
  };
  std::vector<std::thread> threads;
  for (int j = 1; j < jobs; ++j) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();

  for (std::size_t i = 0; i < first_toggle; ++i) {
    out.searched += reports[i] ? 1 : 0;
    if (reports[i] && reports[i]->fits &&
        (!out.best || reports[i]->training->days < out.best->training->days))
      out.best = reports[i];
  }
  const auto judge = [&](const ScenarioPlan& entry, std::size_t index) {
    Verdict v;
    v.entry = entry;
    v.report = reports[index];
    if (!v.report) v.text = "the plan cannot be predicted: " + why[index];
    if (entry.claimed_days <= 0) return v;
    v.needed_share = out.flops / (entry.claimed_days * kDay * out.peak_flops_per_s);
    const double reached =
        out.best ? out.flops / (out.best->training->days * kDay * out.peak_flops_per_s) : 0;
    const std::string need = fmt::format("{:g} days need {} of the peak of {} devices", entry.claimed_days,
                                         percent(v.needed_share), s.cluster.numDevices());
    if (v.needed_share > 1) {
      v.reachable = false;
      v.text = "refused: " + need + "; nothing runs above 100 %";
    } else if (!out.best) {
      v.reachable = false;
      v.text = need + "; no plan fits";
    } else if (v.needed_share > reached) {
      v.reachable = false;
      v.text = need + fmt::format("; the best plan found reaches {}", percent(reached));
    } else {
      v.text = "reachable: " + need + fmt::format(", and the best plan found reaches {}", percent(reached));
    }
    return v;
  };
  out.baseline = judge(s.baseline, 0);
  out.tuned = judge(s.tuned, 1);
  if (s.baseline.claimed_days > 0 && s.tuned.claimed_days > 0)
    out.claimed_speed_up = s.baseline.claimed_days / s.tuned.claimed_days;
  if (out.baseline.report && out.tuned.report)
    out.speed_up = out.baseline.report->training->days / out.tuned.report->training->days;
  // Identical hardware, model, sequence, global batch and precision, or the comparison says nothing.
  const bool same = s.baseline.plan.global_batch == s.tuned.plan.global_batch &&
                    s.baseline.plan.precision == s.tuned.plan.precision;
  if (!same)
    out.warnings.push_back("the plans differ in global batch or precision: speed-up is not like for like");
  const bool fit = out.baseline.report && out.tuned.report && out.tuned.report->fits;
  out.target = fmt::format("target 3-5x: {}", same && fit && out.speed_up >= 3 ? "met" : "not met");
  for (const Verdict* v : {&out.baseline, &out.tuned}) {
    if (!v->report) continue;
    if (!v->report->fits)
      out.warnings.push_back(fmt::format("{}: does not fit ({} of the device's memory)", v->entry.name,
                                         percent(v->report->memory_share)));
    if (v->report->mfu > s.mfu_ceiling)
      out.warnings.push_back(fmt::format("{}: predicted MFU {} is above the stated ceiling of {}",
                                         v->entry.name, percent(v->report->mfu), percent(s.mfu_ceiling)));
  }
  if (out.best && out.best->mfu > s.mfu_ceiling)
    out.warnings.push_back(fmt::format("best plan: predicted MFU {} is above the stated ceiling of {}",
                                       percent(out.best->mfu), percent(s.mfu_ceiling)));
  for (std::size_t i = 0; i < toggles.size(); ++i) {
    Technique t{toggles[i].first, 0, false, why[first_toggle + i]};
    const std::optional<Report>& r = reports[first_toggle + i];
    if (r && out.baseline.report) {
      t.speed_up = out.baseline.report->step_time_s / r->step_time_s;
      t.fits = r->fits;
      // A change of batch changes the work of a step.
      t.speed_up *= static_cast<double>(toggles[i].second.global_batch) /
                    static_cast<double>(s.baseline.plan.global_batch);
    }
    out.techniques.push_back(t);
  }
  return out;
}

std::string scenarioToJson(const ScenarioReport& r) {
  Json json;
  json["schema"] = "bmtrain.scenario-report/1";
  json["name"] = r.scenario.name;
  json["model"] = r.scenario.model.name;
  json["cluster"] = r.scenario.cluster.name;
  json["devices"] = r.scenario.cluster.numDevices();
  json["tokens"] = r.scenario.tokens;
  json["flops"] = r.flops;
  json["peak_flops_per_s"] = r.peak_flops_per_s;
  const auto verdict = [](const Verdict& v) {
    Json j{{"name", v.entry.name},
           {"plan", planToText(v.entry.plan)},
           {"claimed_days", v.entry.claimed_days},
           {"needed_share_of_peak", v.needed_share},
           {"reachable", v.reachable},
           {"verdict", v.text}};
    if (v.report) {
      j["fits"] = v.report->fits;
      j["step_time_s"] = v.report->step_time_s;
      j["mfu"] = v.report->mfu;
      j["compute_days"] = v.report->training->compute_days;
      j["goodput"] = v.report->training->goodput;
      j["days"] = v.report->training->days;
      j["device_hours"] = v.report->training->device_hours;
      j["cost"] = v.report->training->cost;
    }
    return j;
  };
  json["baseline"] = verdict(r.baseline);
  json["tuned"] = verdict(r.tuned);
  json["best"] = nullptr;
  if (r.best)
    json["best"] = {{"plan", r.best->plan},
                    {"mfu", r.best->mfu},
                    {"step_time_s", r.best->step_time_s},
                    {"days", r.best->training->days},
                    {"cost", r.best->training->cost}};
  json["plans_simulated"] = r.searched;
  json["claimed_speed_up"] = r.claimed_speed_up;
  json["speed_up"] = r.speed_up;
  json["target"] = r.target;
  json["techniques"] = Json::array();
  for (const Technique& t : r.techniques)
    json["techniques"].push_back(
        {{"change", t.change}, {"speed_up", t.speed_up}, {"fits", t.fits}, {"note", t.note}});
  json["warnings"] = r.warnings;
  return json.dump(2) + "\n";
}

std::string scenarioToText(const ScenarioReport& r) {
  const Scenario& s = r.scenario;
  std::string out = fmt::format("{}\n  {} on {} ({} devices), {:.4g} tokens\n", s.name, s.model.name,
                                s.cluster.name, s.cluster.numDevices(), s.tokens);
  out += fmt::format(
      "  work {:.4g} FLOP (6 N tokens), peak {}/s\n", r.flops,
      formatRate(r.peak_flops_per_s, "FLOP").substr(0, formatRate(r.peak_flops_per_s, "FLOP").find("/s")));
  for (const Verdict* v : {&r.baseline, &r.tuned}) {
    out += fmt::format("\n{}: {}\n  {}\n", v == &r.baseline ? "baseline" : "tuned", v->entry.name,
                       planToText(v->entry.plan));
    if (v->entry.claimed_days > 0) out += fmt::format("  claimed     {}\n", v->text);
    if (v->report) {
      const TrainingRun& t = *v->report->training;
      out += fmt::format(
          "  predicted   {:.1f} days at MFU {:.1f} % (steps alone {:.1f}, goodput {:.1f} %){}{}\n", t.days,
          100 * v->report->mfu, t.compute_days, 100 * t.goodput,
          t.cost > 0 ? fmt::format(", cost {:.4g}", t.cost) : std::string(),
          v->report->fits ? "" : ", DOES NOT FIT");
    } else {
      out += "  predicted   nothing: " + v->text + "\n";
    }
  }
  if (r.best)
    out += fmt::format("\nbest plan that fits, of {} simulated\n  {}\n  {:.1f} days at MFU {:.1f} %\n",
                       r.searched, r.best->plan, r.best->training->days, 100 * r.best->mfu);
  out += fmt::format("\nspeed-up over {}: {:.2f}x predicted", r.baseline.entry.name, r.speed_up);
  if (r.claimed_speed_up > 0) out += fmt::format(", {:.2f}x claimed", r.claimed_speed_up);
  out += "; " + r.target + "\n";
  if (!r.techniques.empty()) out += "one change of the baseline at a time\n";
  for (const Technique& t : r.techniques)
    out += fmt::format("  {:<36} {}{}\n", t.change,
                       t.speed_up > 0 ? fmt::format("{:.3f}x", t.speed_up) : "not alone: " + t.note,
                       t.speed_up > 0 && !t.fits ? ", does not fit" : "");
  if (r.best && r.best->training) out += "assumed: " + r.best->training->assumptions + "\n";
  for (const std::string& warning : r.warnings) out += "warning: " + warning + "\n";
  return out;
}

}  // namespace bmt::sim
