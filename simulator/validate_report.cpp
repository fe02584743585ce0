// The documents of a validation: JSON with the fields that ../shared/INTERFACE.md promises, and tables for
// people.
#include <fmt/format.h>

#include <algorithm>

#include "core/json.h"
#include "simulator/validate.h"

namespace bmt::sim {
namespace {

Json summaryJson(const ErrorSummary& s) {
  return {{"n", s.n},
          {"mape_pct", s.mape_pct},
          {"median_ape_pct", s.median_ape_pct},
          {"p90_ape_pct", s.p90_ape_pct},
          {"bias_pct", s.bias_pct},
          {"spearman", s.spearman}};
}

Json gridJson(const GridSummary& g) {
  return {{"grid", g.name}, {"n", g.n}, {"kendall_tau", g.kendall_tau}, {"regret_pct", g.regret_pct}};
}

std::string tableRow(const std::string& name, const ErrorSummary& s) {
  return fmt::format("  {:<22} {:>5} {:>8.2f} {:>8.2f} {:>8.2f} {:>+8.2f} {:>9.3f}\n", name, s.n, s.mape_pct,
                     s.median_ape_pct, s.p90_ape_pct, s.bias_pct, s.spearman);
}

}  // namespace

std::string validationToJson(const Validation& v) {
  Json json;
  json["schema"] = "bmtrain.validate/1";
  json["rows"] = Json::array();
  for (const ValidatedRun& r : v.runs) {
    Json row;
    row["id"] = r.run.id;
    row["predicted_step_s"] = r.step_s;
    row["measured_step_s"] = r.run.step_s ? Json(*r.run.step_s) : Json(nullptr);
    row["error_pct"] = r.run.step_s ? Json(r.errorPct()) : Json(nullptr);
    row["predicted_peak_gb"] = r.peak_gib;
    row["measured_peak_gb"] = r.run.peak_gib ? Json(*r.run.peak_gib) : Json(nullptr);
    row["fits"] = r.fits;
    row["note"] = r.run.note;
    row["worked"] = r.run.outcome == Outcome::Worked;
    row["source"] = r.run.source;
    row["gpu"] = r.run.gpu;
    row["model"] = r.run.model.name;
    row["plan"] = planToText(r.run.plan);
    row["held_out"] = heldOut(r.run.id);
    row["simulate_wall_s"] = r.simulate_s;
    json["rows"].push_back(std::move(row));
  }
  json["summary"] = summaryJson(v.summary);
  json["by_source"] = Json::object();
  for (const auto& [key, s] : v.by_source) json["by_source"][key] = summaryJson(s);
  json["by_gpu"] = Json::object();
  for (const auto& [key, s] : v.by_gpu) json["by_gpu"][key] = summaryJson(s);
  json["memory"] = summaryJson(v.memory);
  json["memory_by_source"] = Json::object();
  for (const auto& [key, s] : v.memory_by_source) json["memory_by_source"][key] = summaryJson(s);
  json["grids"] = Json::array();
  for (const GridSummary& g : v.grids) json["grids"].push_back(gridJson(g));
  json["grids_by_source"] = Json::object();
  for (const auto& [key, g] : v.grids_by_source) json["grids_by_source"][key] = gridJson(g);
  json["fit"] = {{"worked", v.fit.worked},
                 {"worked_said_to_fit", v.fit.worked_said_to_fit},
                 {"did_not_fit", v.fit.failed},
                 {"did_not_fit_said_so", v.fit.failed_said_not_to_fit},
                 {"accuracy_pct", v.fit.accuracyPct()}};
  json["skipped"] = Json::array();
  for (const MeasuredRun& r : v.skipped) json["skipped"].push_back({{"id", r.id}, {"reason", r.skip}});
  return json.dump(2) + "\n";
}

std::string validationToText(const Validation& v) {
  std::string out = "step time                  n   MAPE %   median      p90     bias  Spearman\n" +
                    tableRow("all", v.summary);
  if (!v.by_source.empty()) out += "by source\n";
  for (const auto& [key, s] : v.by_source) out += tableRow(key, s);
  if (!v.by_gpu.empty()) out += "by GPU\n";
  for (const auto& [key, s] : v.by_gpu) out += tableRow(key, s);
  if (v.memory.n > 0) {
    out += "peak memory\n" + tableRow("all", v.memory);
    for (const auto& [key, s] : v.memory_by_source) out += tableRow(key, s);
  }
  if (!v.grids.empty()) {
    out += "layout grids           runs      tau   regret %\n";
    for (const auto& [key, g] : v.grids_by_source)
      out += fmt::format("  {:<18} {:>7} {:>8.3f} {:>10.2f}   (means over grids)\n", key, g.n, g.kendall_tau,
                         g.regret_pct);
    for (const GridSummary& g : v.grids)
      out += fmt::format("  {:>26} {:>8.3f} {:>10.2f}   {}\n", g.n, g.kendall_tau, g.regret_pct, g.name);
  }
  out +=
      fmt::format("memory verdicts: {} of {} working runs fit, {} of {} failed runs do not; {:.1f} % right\n",
                  v.fit.worked_said_to_fit, v.fit.worked, v.fit.failed_said_not_to_fit, v.fit.failed,
                  v.fit.accuracyPct());
  std::map<std::string, std::int64_t> reasons;
  for (const MeasuredRun& r : v.skipped) ++reasons[r.skip];
  if (!v.skipped.empty()) out += fmt::format("skipped: {}\n", v.skipped.size());
  for (const auto& [reason, n] : reasons) out += fmt::format("  {:>5}  {}\n", n, reason);
  std::vector<const ValidatedRun*> worst;
  for (const ValidatedRun& r : v.runs) {
    if (r.run.step_s) worst.push_back(&r);
  }
  std::sort(worst.begin(), worst.end(), [](const ValidatedRun* a, const ValidatedRun* b) {
    return std::abs(a->errorPct()) > std::abs(b->errorPct());
  });
  if (worst.size() > 10) worst.resize(10);
  if (!worst.empty()) out += "largest misses\n";
  for (const ValidatedRun* r : worst)
    out += fmt::format("  {:<14} {:>+7.1f} %  {:>9.4g} s, measured {:.4g} s  {}\n", r->run.id, r->errorPct(),
                       r->step_s, *r->run.step_s, planToText(r->run.plan));
  return out;
}

}  // namespace bmt::sim
