// How fast the simulator is: per stage of one evaluation, over plans of a sweep, and for the largest graphs.
// CPU time of this thread, so that other load does not show. Peers' figures (FACTS.md section 0) are printed
// beside ours.
//   build/release/bin/simulator_bench [filter]
#include <fmt/format.h>
#include <time.h>

#include <string>
#include <vector>

#include "core/lower.h"
#include "simulator/bounds.h"
#include "simulator/engine.h"
#include "simulator/report.h"
#include "simulator/search.h"

namespace {

using namespace bmt;

double cpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Timer {
  double start = cpuSeconds();
  double lap() {
    const double now = cpuSeconds(), seconds = now - start;
    start = now;
    return seconds;
  }
};

void stages(const char* name, const char* model_name, const char* cluster_name, const char* plan_text,
            RankSelection selection, Granularity granularity) {
  const ModelSpec model = loadModel(model_name);
  const ClusterSpec cluster = loadCluster(cluster_name);
  const Plan plan = planFromText(plan_text);
  throwIfAny(validatePlan(model, cluster, plan), plan_text);
  const trace::CostProfile profile = sim::chooseProfile(cluster, "");
  Timer timer;
  const TaskGraph graph = lower(model, cluster, plan, selection, granularity);
  const double lowering = timer.lap();
  const sim::CostModel model_of_costs(graph, cluster, profile);
  const sim::CostTable costs = sim::costTable(graph, model_of_costs);
  const double costing = timer.lap();
  const sim::SimResult result = sim::simulate(graph, costs, model_of_costs.resources(), {false});
  const double playing = timer.lap();
  const double n = static_cast<double>(result.num_tasks);
  fmt::print(
      "{:<44}{:>9.0f} tasks  lower {:>8.1f} ms  cost {:>7.1f} ms  play {:>8.1f} ms = {:>5.2f} M tasks/s; all "
      "{:>5.2f} M tasks/s\n",
      name, n, 1e3 * lowering, 1e3 * costing, 1e3 * playing, 1e-6 * n / playing,
      1e-6 * n / (lowering + costing + playing));
}

void sweep() {
  const ModelSpec model = loadModel("gpt3-175b");
  const ClusterSpec cluster = loadCluster("dgx-a100-80g:128");
  const trace::CostProfile profile = sim::chooseProfile(cluster, "");
  sim::SearchOptions options;
  options.global_batch = 1536;
  options.precision = DType::BF16;
  options.jobs = 1;
  const sim::PlanSpace all(model, cluster, options);
  Timer timer;
  std::vector<Plan> legal;
  for (std::size_t i = 0; i < all.size(); ++i) {
    Plan plan = all.at(i);
    if (validatePlan(model, cluster, plan).empty()) legal.push_back(std::move(plan));
  }
  const double checking = timer.lap();
  sim::Bounds bounds(model, cluster, profile);
  std::vector<Plan> fitting;
  for (const Plan& plan : legal) {
    if (bounds.memory(plan) <= cluster.groups.front().device.memory && bounds.stepSeconds(plan) > 0)
      fitting.push_back(plan);
  }
  const double bounding = timer.lap();
  std::size_t played = 0;
  for (; played < fitting.size() && (played < 50 || cpuSeconds() - timer.start < 5); ++played) {
    const std::size_t at = played * 7919 % fitting.size();
    sim::simulatePlan(model, cluster, fitting[at], profile, RankSelection::Folded, Granularity::Stage,
                      {false});
  }
  const double playing = timer.lap();
  fmt::print(
      "\nGPT-3 175B on 1,024 A100, batch 1536: {} combinations, {} legal, {} not ruled out by memory\n",
      all.size(), legal.size(), fitting.size());
  fmt::print("  validation           {:>10.0f} plans per core-second\n",
             static_cast<double>(all.size()) / checking);
  fmt::print("  memory and bounds    {:>10.0f} plans per core-second\n",
             static_cast<double>(legal.size()) / bounding);
  fmt::print("  event-driven         {:>10.0f} plans per core-second (Calculon, closed form: about 245)\n",
             static_cast<double>(played) / playing);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  const auto wanted = [&](const std::string& name) { return name.find(filter) != std::string::npos; };
  fmt::print("peers: vTrain 0.14-0.2 M nodes per CPU-second, ASTRA-sim 0.016-0.021 M (FACTS.md section 0)\n");
  if (wanted("stage"))
    stages("175B on 1,024, folded, stage", "gpt3-175b", "dgx-a100-80g:128",
           "dp=16,tp=8,pp=8,mb=1,gb=1536,sp,zero=1,precision=bf16", RankSelection::Folded,
           Granularity::Stage);
  if (wanted("layer"))
    stages("405B on 16,384, folded, layer", "llama3.1-405b", "dgx-h100:2048",
           "dp=128,tp=8,pp=16,mb=1,gb=2048,sp,zero=1,precision=bf16", RankSelection::Folded,
           Granularity::Layer);
  if (wanted("all"))
    stages("175B on 1,024, all ranks, layer", "gpt3-175b", "dgx-a100-80g:128",
           "dp=16,tp=8,pp=8,mb=1,gb=256,sp,zero=1,precision=bf16", RankSelection::All, Granularity::Layer);
  if (wanted("sweep")) sweep();
  return 0;
}
