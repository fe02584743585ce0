// bmtrain calibrate: what this machine's work costs -> cost profile. Also learns from a measured trace
// (--from) or from the output of nccl-tests (--nccl-tests). The rest of the program only reads profiles.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <ctime>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "cli/command.h"
#include "cli/measure_cpu.h"
#include "core/json.h"
#include "core/lower.h"
#include "traces/calibrate.h"
#include "traces/chrome_trace.h"

namespace bmt::cli {
namespace {

struct CalibrateOptions {
  std::string cluster = "local", model, plan, from, nccl_tests, out, profile;
  std::int64_t seq = 0;
  bool quick = false;
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

std::string hostName() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "this machine";
}

ModelSpec modelOf(const std::string& name, std::int64_t seq) {
  ModelSpec model = loadModel(name);
  if (seq > 0) model.seq_len = seq;
  return model;
}

trace::CostProfile measureMachine(const CalibrateOptions& o, const Globals& globals) {
  const ClusterSpec cluster = loadCluster(o.cluster);
  const NodeGroup& node = cluster.groups.front();
  if (node.device.kind != DeviceKind::Cpu || cluster.numNodes() != 1)
    throw Error(ErrorKind::BadInput,
                fmt::format("--cluster {}: only this machine's CPU can be measured (local or local:RANKS)",
                            o.cluster));
  const auto cores = static_cast<int>(node.cores_per_node);
  const auto say = [&](const std::string& what) {
    if (!globals.quiet && !globals.no_progress) fmt::print(stderr, "calibrate: {}\n", what);
  };
  std::vector<MeasureCase> cases = defaultCases();
  if (!o.model.empty()) {
    MeasureCase own{modelOf(o.model, o.seq), loadPlan(o.plan.empty() ? "mb=1,gb=1" : o.plan)};
    throwIfAny(validatePlan(own.model, localCluster(own.plan.numRanks()), own.plan), "the plan is not legal");
    cases.push_back(std::move(own));
  }
  trace::CostProfile profile;
  profile.name = fmt::format("{} CPU", hostName());
  profile.source =
      fmt::format("measured {} on {} by bmtrain calibrate{}", today(), hostName(), o.quick ? " --quick" : "");
  profile.measured = true;
  profile.cores = cores;
  say("peak of a core, memory bandwidth, overhead per task");
  profile.core_peak_flops = measurePeakFlops(0.3);
  profile.memory_bandwidth = measureCopyBandwidth(cores);
  profile.task_overhead_s = measureTaskOverhead();
  std::vector<trace::OpSample> samples = measureStreaming();
  for (const MeasureCase& measured : cases) {
    say(fmt::format("ops of {}, plan {}", measured.model.name, planToText(measured.plan)));
    for (const trace::OpSample& sample : measureOps(measured, o.quick ? 0.5 : 1.5)) samples.push_back(sample);
  }
  profile.ops = trace::fitOps(samples, profile.core_peak_flops);
  say(fmt::format("contention of {} cores", cores));
  profile.contention = measureContention(cases.front(), cores, o.quick ? 1.5 : 4);
  std::map<CommKind, std::vector<trace::CommSample>> comms;
  for (int ranks = 2; ranks <= std::clamp(cores, 2, 8); ranks *= 2) {
    say(fmt::format("communication of {} ranks", ranks));
    for (const CommMeasurement& measured : measureComms(ranks, o.quick ? 2 : 8)) {
      auto& list = comms[measured.kind];
      list.insert(list.end(), measured.samples.begin(), measured.samples.end());
    }
  }
  for (const auto& [kind, list] : comms) profile.comms.push_back(trace::fitComm(kind, "threads", list));
  return profile;
}

std::string baseProfilePath(const CalibrateOptions& o) {
  return o.profile.empty() ? trace::localProfilePath() : o.profile;
}

trace::CostProfile fromTrace(const CalibrateOptions& o) {
  const trace::Trace measured = trace::readTrace(o.from);
  if (measured.source != trace::Source::Measured)
    throw Error(ErrorKind::BadInput, "is a predicted trace; --from needs one that `train --trace` wrote",
                o.from);
  const trace::CostProfile base = trace::loadProfile(baseProfilePath(o));
  if (base.cores > 0 && measured.num_ranks > base.cores)
    throw Error(ErrorKind::BadInput,
                fmt::format("{} ranks shared {:.0f} cores, so its times hold waiting as well as work; trace "
                            "a plan of at most "
                            "{:.0f} ranks",
                            measured.num_ranks, base.cores, base.cores),
                o.from);
  const ModelSpec model = modelOf(o.model.empty() ? measured.model : o.model, o.seq);
  const Plan plan = planFromText(measured.plan);
  const ClusterSpec cluster = localCluster(plan.numRanks());
  throwIfAny(validatePlan(model, cluster, plan), o.from);
  return trace::refineFromTrace(base, lower(model, cluster, plan, RankSelection::All, Granularity::Layer),
                                measured);
}

trace::CostProfile fromNcclTests(const CalibrateOptions& o) {
  const trace::CommFit fit = trace::fitNcclTests(readFile(o.nccl_tests), o.nccl_tests,
                                                 std::filesystem::path(o.nccl_tests).filename().string());
  trace::CostProfile profile;
  if (!o.profile.empty()) profile = trace::loadProfile(o.profile);
  if (profile.name.empty()) profile.name = "nccl-tests";
  profile.source += fmt::format("{}nccl-tests: {}", profile.source.empty() ? "" : "; ", o.nccl_tests);
  profile.measured = true;
  std::erase_if(profile.comms, [&](const trace::CommFit& old) {
    return old.kind == fit.kind && old.transport == fit.transport;
  });
  profile.comms.push_back(fit);
  return profile;
}

int runCalibrate(const Globals& globals, const CalibrateOptions& o) {
  trace::CostProfile profile;
  if (!o.nccl_tests.empty()) {
    if (o.out.empty())
      throw Error(ErrorKind::BadInput,
                  "--nccl-tests needs --out FILE: the figures are not those of this machine's CPU");
    profile = fromNcclTests(o);
  } else if (!o.from.empty()) {
    profile = fromTrace(o);
  } else {
    profile = measureMachine(o, globals);
  }
  const std::string path = o.out.empty() ? trace::localProfilePath() : o.out;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code failure;
  if (!folder.empty()) std::filesystem::create_directories(folder, failure);
  if (failure)
    throw Error(ErrorKind::Runtime, "cannot create the folder: " + failure.message(), folder.string());
  writeFileAtomically(path, trace::profileToJson(profile));
  if (globals.json) {
    fmt::print("{}", trace::profileToJson(profile));
  } else if (!globals.quiet) {
    fmt::print("{}\nstored in {}\n", trace::profileToText(profile), path);
  }
  return 0;
}

}  // namespace

void addCalibrate(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand(
      "calibrate", "Measure this machine (or learn from a trace, or from nccl-tests) -> cost profile");
  const auto o = std::make_shared<CalibrateOptions>();
  command->add_option("--cluster", o->cluster, "local or local:RANKS")->capture_default_str();
  command->add_option("--model", o->model,
                      "Also measure this model's shapes; with --from: the model of the trace");
  command->add_option("--plan", o->plan, "Plan of --model")->needs("--model");
  command->add_option("--seq", o->seq, "Sequence length instead of the model's")->check(CLI::PositiveNumber);
  command->add_flag("--quick", o->quick, "A third of the time, larger errors");
  auto* const from = command->add_option("--from", o->from, "Refine the profile with a measured trace");
  command->add_option("--nccl-tests", o->nccl_tests, "Take communication from the text output of nccl-tests")
      ->excludes(from);
  command->add_option("--profile", o->profile, "Profile that --from and --nccl-tests start from");
  command->add_option("--out", o->out, "Write the profile here instead of " + trace::localProfilePath());
  command->footer(
      "Examples:\n  bmtrain calibrate\n  bmtrain calibrate --model gpt2 --seq 256 --plan tp=2,mb=1,gb=2 "
      "--out mine.json\n"
      "  bmtrain calibrate --from measured.trace.json.gz");
  command->callback([&globals, &action, o] { action = [&globals, o] { return runCalibrate(globals, *o); }; });
}

}  // namespace bmt::cli
