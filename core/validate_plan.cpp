// What makes a plan illegal. Every problem is reported at once, with the two figures that disagree and, where
// there is one, the nearest legal value.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <set>

#include "core/plan.h"
#include "core/schedule.h"

namespace bmt {
namespace {

class Checker {
 public:
  Checker(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan)
      : model_(model), cluster_(cluster), plan_(plan) {}

  std::vector<Issue> run() {
    for (const auto& [name, value] :
         std::initializer_list<std::pair<const char*, std::int64_t>>{{"dp", plan_.dp},
                                                                     {"tp", plan_.tp},
                                                                     {"pp", plan_.pp},
                                                                     {"cp", plan_.cp},
                                                                     {"ep", plan_.ep},
                                                                     {"chunks", plan_.chunks},
                                                                     {"mb", plan_.micro_batch},
                                                                     {"gb", plan_.global_batch}}) {
      if (value < 1) add(name, fmt::format("{} is not positive", value));
    }
    if (!issues_.empty()) return issues_;  // everything below divides by them
    ranks();
    tensor();
    context();
    experts();
    if (plan_.batch_shares.empty()) {
      batch();
      pipeline();
    } else {
      shares();
    }
    rest();
    return issues_;
  }

 private:
  void add(const std::string& field, const std::string& what) { issues_.push_back({"plan." + field, what}); }

  // The divisor of all `values` nearest to `wanted`, the smaller one on a tie.
  static std::int64_t nearestDivisor(std::int64_t wanted, std::initializer_list<std::int64_t> values) {
    std::int64_t common = 0;
    for (const std::int64_t value : values) common = std::gcd(common, value);
    std::int64_t best = 1;
    for (std::int64_t d = 1; d * d <= common; ++d) {
      if (common % d != 0) continue;
      for (const std::int64_t candidate : {d, common / d}) {
        const std::int64_t distance = std::abs(candidate - wanted), best_distance = std::abs(best - wanted);
        if (distance < best_distance || (distance == best_distance && candidate < best)) best = candidate;
      }
    }
    return best;
  }

  void ranks() {
    // In double: four factors of 2^24 overflow an integer, and small products are exact.
    const double others = double{1} * plan_.tp * plan_.cp * plan_.pp, ranks = others * plan_.dp;
    const std::int32_t devices = cluster_.numDevices();
    if (ranks != devices) {
      std::string nearest;
      if (others <= devices && devices % static_cast<std::int32_t>(others) == 0)
        nearest = fmt::format("; nearest: dp={}", devices / static_cast<std::int32_t>(others));
      issues_.push_back(
          {"plan",
           fmt::format("dp {} x tp {} x pp {} x cp {} = {:.0f} ranks, but the cluster {} has {} devices{}",
                       plan_.dp, plan_.tp, plan_.pp, plan_.cp, ranks, cluster_.name, devices, nearest)});
    }
    static const std::vector<std::string> kAxes{"cp", "dp", "pp", "tp"};
    std::vector<std::string> axes;
    for (std::size_t at = 0; at < plan_.order.size(); at += 3) {
      axes.push_back(plan_.order.substr(at, 2));
      if (at + 2 < plan_.order.size() && plan_.order[at + 2] != '-') axes.emplace_back("?");
    }
    std::sort(axes.begin(), axes.end());
    if (axes != kAxes || plan_.order.size() != 11)
      add("order", fmt::format("'{}' is not a permutation of tp-cp-pp-dp", plan_.order));
  }

  void tensor() {
    const std::int64_t tp = plan_.tp;
    const std::int64_t nearest =
        nearestDivisor(tp, {model_.heads, model_.kv_heads, model_.d_ff, model_.moe_d_ff});
    const auto divides = [&](std::int64_t value, const char* what) {
      if (value % tp != 0)
        add("tp", fmt::format("{} does not divide {} {}; nearest legal value: {}", tp, what, value, nearest));
    };
    divides(model_.heads, "heads");
    if (model_.kv_heads != model_.heads) divides(model_.kv_heads, "kv_heads");
    divides(model_.d_ff, "d_ff");
    if (model_.experts > 0) divides(model_.moe_d_ff, "moe_d_ff");
    if (model_.vocab < tp) add("tp", fmt::format("{} is more than the vocabulary {}", tp, model_.vocab));
    if (plan_.tp_overlap && tp == 1) add("tp-overlap", "needs tp > 1, but tp is 1");
    if (!plan_.sequence_parallel) return;
    if (tp == 1) add("sp", "sequence parallelism needs tp > 1, but tp is 1");
    for (const std::int64_t seq : {model_.seq_len / std::max(1, plan_.cp), model_.decoder_seq_len}) {
      const std::int64_t tokens = plan_.micro_batch * seq;
      if (tokens % tp == 0) continue;
      add("sp", fmt::format("tp {} does not divide the {} tokens of a micro-batch; nearest tp: {}", tp,
                            tokens, nearestDivisor(tp, {tokens, nearest})));
    }
  }

  void context() {
    const std::int64_t cp = plan_.cp;
    if (cp == 1) {
      if (plan_.context != ContextKind::Ring)
        add("cp-kind", fmt::format("{} needs cp > 1, but cp is 1", toString(plan_.context)));
      return;
    }
    const bool ring = plan_.context == ContextKind::Ring;
    if (model_.family == Family::T5 || model_.family == Family::Vit)
      add("cp", fmt::format("{}, but {} is lowered with cp=1 only", cp,
                            model_.family == Family::T5 ? "an encoder-decoder" : "an image model"));
    // Zigzag order needs two equal parts a rank.
    const std::int64_t parts = ring ? 2 * cp : cp;
    if (model_.seq_len % parts != 0)
      add("cp", fmt::format("seq_len {} is not a multiple of {} ({} parts); nearest legal value: {}",
                            model_.seq_len, parts, ring ? "2 cp" : "cp",
                            ring && model_.seq_len % 2 == 0 ? nearestDivisor(cp, {model_.seq_len / 2})
                            : ring                          ? 1
                                                            : nearestDivisor(cp, {model_.seq_len})));
    if (ring) {
      if (plan_.attention == AttentionKernel::Softmax || plan_.attention == AttentionKernel::Unfused)
        add("attention", fmt::format("'{}' keeps whole rows of scores; cp-kind=ring needs flash or flash1",
                                     toString(plan_.attention)));
      return;
    }
    const std::int64_t heads = model_.heads / plan_.tp, kv_heads = model_.kv_heads / plan_.tp;
    if (heads % cp != 0 || kv_heads % cp != 0)
      add("cp", fmt::format("{} does not divide the {} heads and {} kv_heads of a tensor rank, which "
                            "cp-kind=a2a exchanges; nearest legal value: {}, or cp-kind=ring",
                            cp, heads, kv_heads, nearestDivisor(cp, {heads, kv_heads})));
  }

  void experts() {
    const std::int64_t ep = plan_.ep;
    if (model_.experts == 0) {
      if (ep != 1) add("ep", fmt::format("{}, but the model has no experts; nearest legal value: 1", ep));
      return;
    }
    const std::int64_t data = plan_.dataRanks(), nearest = nearestDivisor(ep, {data, model_.experts});
    if (data % ep != 0)
      add("ep", fmt::format("{} does not divide dp {} x cp {} = {}; nearest legal value: {}", ep, plan_.dp,
                            plan_.cp, data, nearest));
    if (model_.experts % ep != 0)
      add("ep",
          fmt::format("{} does not divide experts {}; nearest legal value: {}", ep, model_.experts, nearest));
  }

  void shares() {
    const std::vector<std::int64_t>& list = plan_.batch_shares;
    if (static_cast<std::int64_t>(list.size()) != plan_.dp)
      add("shares", fmt::format("lists {} replicas, but dp is {}", list.size(), plan_.dp));
    if (plan_.ep > 1)
      add("shares", fmt::format("replicas exchange tokens for every micro-batch with ep {}; shares need ep 1",
                                plan_.ep));
    if (std::any_of(list.begin(), list.end(), [](std::int64_t n) { return n < 1; }))
      add("shares", "every replica needs at least 1 micro-batch");
    const std::int64_t sum = std::accumulate(list.begin(), list.end(), std::int64_t{0});
    if (sum * plan_.micro_batch != plan_.global_batch)
      add("shares",
          fmt::format("adds up to {} micro-batches of {} sequences = {}, but gb is {}; nearest legal "
                      "gb: {}",
                      sum, plan_.micro_batch, sum * plan_.micro_batch, plan_.global_batch,
                      sum * plan_.micro_batch));
    // The pipeline must be legal with every replica's number of micro-batches.
    for (const std::int64_t microbatches : std::set<std::int64_t>(list.begin(), list.end())) {
      if (microbatches < 1) continue;
      Plan replica = plan_;
      replica.batch_shares.clear();
      replica.global_batch = microbatches * plan_.micro_batch * plan_.dp;
      Checker checker(model_, cluster_, replica);
      checker.pipeline();
      for (const Issue& issue : checker.issues_) {
        const auto same = [&](const Issue& known) { return known.where == issue.where; };
        if (std::none_of(issues_.begin(), issues_.end(), same)) issues_.push_back(issue);
      }
    }
  }

  void batch() {
    const std::int64_t unit = plan_.micro_batch * plan_.dp;
    if (plan_.global_batch % unit == 0) return;
    const std::int64_t below = plan_.global_batch / unit * unit;
    const std::string nearest =
        below > 0 ? fmt::format("{} or {}", below, below + unit) : fmt::format("{}", unit);
    add("gb", fmt::format("{} is not a multiple of mb {} x dp {} = {}; nearest legal value: {}",
                          plan_.global_batch, plan_.micro_batch, plan_.dp, unit, nearest));
  }

  void pipeline() {
    const std::int64_t stages = std::int64_t{plan_.pp} * plan_.chunks;
    if (model_.layers < stages) {
      // Fewer chunks where at least two remain (interleaving needs them), otherwise fewer stages.
      const bool fewer_chunks = plan_.chunks > 1 && model_.layers / plan_.pp >= 2;
      add(fewer_chunks ? "chunks" : "pp",
          fmt::format("pp {} x chunks {} = {} stages, but the model has {} layers; nearest legal value: {}",
                      plan_.pp, plan_.chunks, stages, model_.layers,
                      std::max<std::int64_t>(1, model_.layers / (fewer_chunks ? plan_.pp : plan_.chunks))));
    }
    if (!plan_.layers_per_stage.empty()) {
      const auto& layers = plan_.layers_per_stage;
      if (static_cast<std::int64_t>(layers.size()) != stages)
        add("layers", fmt::format("lists {} stages, but pp {} x chunks {} = {}", layers.size(), plan_.pp,
                                  plan_.chunks, stages));
      const std::int64_t sum = std::accumulate(layers.begin(), layers.end(), std::int64_t{0});
      if (sum != model_.layers)
        add("layers", fmt::format("adds up to {}, but the model has {} layers", sum, model_.layers));
      if (std::any_of(layers.begin(), layers.end(), [](std::int64_t n) { return n < 1; }))
        add("layers", "every stage needs at least 1 layer");
    }
    schedule();
  }

  void schedule() {
    const ScheduleKind kind = plan_.schedule;
    const std::string name(toString(kind));
    const auto families = [&] {
      if (splitsBackward(plan_) && model_.family != Family::Gpt2 && model_.family != Family::Llama)
        add("schedule", fmt::format("{} splits backward, which is lowered for decoders only; nearest legal "
                                    "value: 1f1b",
                                    name));
    };
    if (kind == ScheduleKind::File) {
      fileSchedule();
      if (issues_.empty()) families();
      return;
    }
    families();
    const bool loops = kind == ScheduleKind::Interleaved || kind == ScheduleKind::BreadthFirst;
    const bool folds = kind == ScheduleKind::ZbV || kind == ScheduleKind::DualPipeV;
    const bool automatic = kind == ScheduleKind::ZbAuto;
    if (loops && plan_.chunks < 2)
      add("chunks", fmt::format("schedule={} needs chunks of at least 2, but it is 1", name));
    if (folds && plan_.chunks != 2)
      add("chunks",
          fmt::format("schedule={} needs 2 chunks, there and back, but it is {}; nearest legal value: 2",
                      name, plan_.chunks));
    if (automatic && plan_.chunks > 2)
      add("chunks",
          fmt::format("{} are more than schedule=zb-auto takes; nearest legal value: 2", plan_.chunks));
    if (!loops && !folds && !automatic && plan_.chunks > 1)
      add("chunks", fmt::format("{} chunks need schedule=interleaved, bfs, zb-v or dualpipev, but it is {}",
                                plan_.chunks, name));
    if ((loops || folds) && plan_.pp < 2)
      add("pp", fmt::format("schedule={} needs pp of at least 2, but it is 1", name));
    const std::int64_t m = plan_.numMicrobatches(), per_microbatch = plan_.micro_batch * plan_.dp;
    if (kind == ScheduleKind::Interleaved && (m % plan_.pp != 0 || m == 0))
      add("gb",
          fmt::format(
              "schedule=interleaved needs micro-batches in multiples of pp {}, but there are {}; nearest "
              "legal gb: {}",
              plan_.pp, m, std::max<std::int64_t>(1, m / plan_.pp) * plan_.pp * per_microbatch));
    if (kind == ScheduleKind::DualPipeV && m < 2 * plan_.pp)
      add("gb", fmt::format(
                    "schedule=dualpipev needs at least 2 x pp = {} micro-batches, but there are {}; nearest "
                    "legal gb: {}",
                    2 * plan_.pp, m, 2 * plan_.pp * per_microbatch));
  }

  // What the file holds must be what the plan says.
  void fileSchedule() {
    const Schedule& s = *plan_.schedule_file.schedule;
    const auto agree = [&](const char* field, std::int64_t planned, std::int64_t held, const char* what) {
      if (planned != held)
        add(field, fmt::format("{}, but {} has {} {}; nearest legal value: {}", planned,
                               plan_.schedule_file.path, held, what, held));
    };
    agree("pp", plan_.pp, s.num_stages, "stages");
    agree("chunks", plan_.chunks, s.num_chunks, "chunks per stage");
    const std::int64_t per_microbatch = plan_.micro_batch * plan_.dp;
    if (plan_.numMicrobatches() != s.num_microbatches)
      add("gb", fmt::format("{} gives {} micro-batches, but {} has {}; nearest legal value: {}",
                            plan_.global_batch, plan_.numMicrobatches(), plan_.schedule_file.path,
                            s.num_microbatches, s.num_microbatches * per_microbatch));
  }

  void rest() {
    memory();
    if (plan_.bucket < 1) add("bucket", fmt::format("{} bytes is not positive", plan_.bucket));
    if (plan_.loss_chunk < 0) add("loss-chunk", fmt::format("{} is negative", plan_.loss_chunk));
    const std::int64_t tokens = plan_.micro_batch * lossRowsPerSequence(model_) / std::max(1, plan_.cp);
    if (plan_.loss_chunk > tokens)
      add("loss-chunk",
          fmt::format("{} rows are more than the {} tokens of a micro-batch; nearest legal value: {}",
                      plan_.loss_chunk, tokens, tokens));
    if (model_.position == PositionKind::Learned && model_.seq_len > model_.max_positions)
      issues_.push_back({"model.seq_len", fmt::format("{} is more than the {} learned positions",
                                                      model_.seq_len, model_.max_positions)});
  }

  // Memory techniques: what is sharded, computed again, moved or compressed.
  void memory() {
    if (plan_.zero < 0 || plan_.zero > 3) add("zero", fmt::format("{} is not one of 0, 1, 2, 3", plan_.zero));
    if (plan_.zero > 1 && model_.tied_embedding && plan_.pp > 1 && placementOf(plan_) != Placement::V)
      add("zero", fmt::format("{} needs an embedding that is not tied, or both its uses on one stage, but pp "
                              "is {}; nearest: zero=1",
                              plan_.zero, plan_.pp));
    if (plan_.zero > 1 && splitsBackward(plan_))
      add("zero", fmt::format("{} needs whole backwards, but schedule {} splits them; nearest: zero=1",
                              plan_.zero, scheduleName(plan_)));
    if (plan_.zero > 1 && !plan_.overlap_grad)
      add("overlap-grad",
          fmt::format("zero={} reduces gradients as they come; nearest: overlap-grad", plan_.zero));
    if (plan_.zero > 1 && !plan_.batch_shares.empty())
      add("zero",
          fmt::format("{} scatters gradients in every micro-batch, but shares give replicas different "
                      "numbers of them; nearest: zero=1",
                      plan_.zero));
    if (plan_.shard != 0) {
      if (plan_.zero == 0) add("shard", fmt::format("{} needs zero=1, 2 or 3, but zero is 0", plan_.shard));
      if (plan_.shard < 0 || plan_.dp % plan_.shard != 0)
        add("shard", fmt::format("{} does not divide dp {}; nearest legal value: {}", plan_.shard, plan_.dp,
                                 nearestDivisor(plan_.shard, {plan_.dp})));
      if (plan_.cp != 1 || plan_.ep != 1)
        add("shard", fmt::format("needs cp=1 and ep=1, but they are {} and {}", plan_.cp, plan_.ep));
    }
    if (plan_.prefetch < 0) add("prefetch", fmt::format("{} is negative", plan_.prefetch));
    if (plan_.grads != DType::F32 && plan_.grads != storageType(plan_))
      add("grads",
          fmt::format("{} gradients need {} weights and activations, but precision is {}; nearest: fp32",
                      toString(plan_.grads), toString(plan_.grads), toString(plan_.precision)));
    if (plan_.overlap_param && (plan_.zero < 1 || plan_.zero > 2))
      add("overlap-param",
          fmt::format("parameters are gathered after the update with zero=1 or 2, but zero is {}",
                      plan_.zero));
    if (plan_.compress != Compress::None && plan_.dp == 1)
      add("compress", "there is nothing to compress: dp is 1");
    if (plan_.compress != Compress::None && plan_.zero > 1)
      add("compress", fmt::format("works with zero=0 and 1, but zero is {}", plan_.zero));
    if (plan_.recompute == Recompute::Every && plan_.recompute_every < 1)
      add("recompute", fmt::format("every:{} needs at least 1 layer", plan_.recompute_every));
    if (plan_.recompute == Recompute::List &&
        static_cast<std::int64_t>(plan_.recompute_layers.size()) != model_.layers)
      add("recompute",
          fmt::format("lists {} layers, but the model has {}", plan_.recompute_layers.size(), model_.layers));
    if (plan_.offload_optimizer) add("offload", "is not lowered by this version");
    if (plan_.compress != Compress::None) add("compress", "is not lowered by this version");
  }

  const ModelSpec& model_;
  const ClusterSpec& cluster_;
  const Plan& plan_;
  std::vector<Issue> issues_;
};

}  // namespace

std::vector<Issue> validatePlan(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan) {
  std::vector<Issue> issues = validateModel(model);
  const std::vector<Issue> of_cluster = validateCluster(cluster);
  issues.insert(issues.end(), of_cluster.begin(), of_cluster.end());
  if (!issues.empty()) return issues;
  return Checker(model, cluster, plan).run();
}

}  // namespace bmt
