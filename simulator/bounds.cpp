#include "simulator/bounds.h"

#include <algorithm>
#include <set>

#include "core/lower.h"
#include "core/op_graph.h"
#include "core/schedule.h"
#include "simulator/cost_model.h"

namespace bmt::sim {
namespace {

// Chunk activations that rank r holds at least, at its peak (FACTS 1.2; Narayanan 2021, Qi 2023).
std::int64_t inFlight(const Plan& plan, std::int32_t r) {
  const std::int64_t m = plan.numMicrobatches(), p = plan.pp, v = plan.chunks;
  switch (plan.schedule) {
    case ScheduleKind::GPipe:
    case ScheduleKind::BreadthFirst:
      return m * v;
    case ScheduleKind::Interleaved:
      return std::min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1);
    default:
      return std::min(m, p - r);
  }
}

// Of schedules without a closed form for every rank: the most chunks between F and W in each stage's order.
std::vector<std::int64_t> mostHeld(const Plan& plan) {
  const Schedule schedule = makeSchedule(plan);
  std::vector<std::int64_t> most(schedule.stages.size());
  for (std::size_t stage = 0; stage < most.size(); ++stage) {
    std::int64_t held = 0;
    for (const Slot& slot : schedule.stages[stage]) {
      if (slot.phase == Phase::F) most[stage] = std::max(most[stage], ++held);
      if (slot.phase == (schedule.split_backward ? Phase::W : Phase::B)) --held;
    }
  }
  return most;
}

bool drainsBackward(ScheduleKind kind) {
  return kind == ScheduleKind::GPipe || kind == ScheduleKind::OneFOneB || kind == ScheduleKind::Interleaved ||
         kind == ScheduleKind::BreadthFirst;
}

}  // namespace

Bounds::Parts Bounds::measure(const Plan& plan) const {
  Parts parts;
  BlockShape shape = makeBlockShape(model_, plan, 0);
  const bool keeps = plan.recompute == Recompute::None;
  // Of several kinds of layers the least of each.
  std::set<LayerKind> kinds;
  for (std::int64_t l = 0; l < model_.layers; ++l) kinds.insert(layerKind(model_, l));
  for (const LayerKind kind : kinds) {
    const Block layer = buildLayerBlock(shape, kind);
    const bool first = kind == *kinds.begin();
    const Bytes saved = keeps ? layer.saved_bytes : 0;
    const std::int64_t elements = layer.elements + layer.expert_elements;
    parts.layer_saved = first ? saved : std::min(parts.layer_saved, saved);
    parts.layer_elements = first ? elements : std::min(parts.layer_elements, elements);
  }
  // The inputs of all layers are kept, unless whole runs of layers are computed again.
  if (keeps || plan.recompute == Recompute::Full || plan.recompute == Recompute::Selective)
    parts.kept_stream = shape.rows * model_.d_model * sizeOf(plan.precision);
  parts.embedding_elements = buildEmbeddingBlock(shape).elements;
  parts.head_elements = buildHeadBlock(shape, HeadTable::Own).elements;
  parts.weight_bytes = sizeOf(plan.precision);
  parts.grad_bytes = sizeOf(plan.grads);
  if (kinds.size() == 1 && cluster_.homogeneous() && cluster_.groups.front().device.kind == DeviceKind::Gpu)
    time(parts, plan);
  return parts;
}

// Plays nothing: lowers one micro-batch of a model with one, then two layers on one stage, and one layer on
// each of two stages, and reads the tasks' costs apart.
void Bounds::time(Parts& parts, const Plan& plan) const {
  const std::int32_t devices = cluster_.numDevices();
  const auto seconds = [&](std::int64_t layers, std::int32_t pp, std::int32_t stage, TaskKind kind,
                           bool& ok) {
    ModelSpec small = model_;
    small.layers = layers;
    Plan one = plan;
    one.pp = pp;
    one.chunks = 1;
    one.schedule = splitsBackward(plan) ? ScheduleKind::ZbH1 : ScheduleKind::OneFOneB;
    one.layers_per_stage.clear();
    one.batch_shares.clear();
    one.zero = one.shard = 0;
    // In segments, too, every layer is computed again. A list treats layers unlike: at least the time
    // without.
    if (one.recompute == Recompute::Every || one.recompute == Recompute::Sqrt)
      one.recompute = Recompute::Full;
    if (one.recompute == Recompute::List) one.recompute = Recompute::None;
    one.recompute_every = 0;
    one.recompute_layers.clear();
    const std::int32_t others = one.tp * one.cp * pp;
    one.dp = std::max(1, devices / others);
    one.global_batch = one.micro_batch * one.dp;
    if (!validatePlan(small, cluster_, one).empty()) {
      ok = false;
      return 0.0;
    }
    Coord coord;
    coord.pp = stage;
    const TaskGraph graph =
        lower(small, cluster_, one, std::vector<RankId>{Mesh(one).rankOf(coord)}, Granularity::Stage);
    const CostModel costs(graph, cluster_, profile_);
    double sum = 0;
    for (const Task& task : graph.ranks.front().tasks) {
      if (task.comm < 0 && task.kind == kind)
        sum += toSeconds(costs.compute(graph.ranks.front(), task).duration);
    }
    return sum;
  };
  bool ok = true;
  const double f1 = seconds(1, 1, 0, TaskKind::Forward, ok), f2 = seconds(2, 1, 0, TaskKind::Forward, ok);
  const auto backward = [&](std::int64_t layers, std::int32_t pp, std::int32_t stage) {
    return seconds(layers, pp, stage, TaskKind::Backward, ok) +
           seconds(layers, pp, stage, TaskKind::WeightGrad, ok);
  };
  const double b1 = backward(1, 1, 0), b2 = backward(2, 1, 0);
  // The cost of a task is not quite the sum of its parts (one issue per task); a bound takes what is surely
  // there.
  parts.layer_f = std::max(0.0, f2 - f1);
  parts.layer_b = std::max(0.0, b2 - b1);
  parts.embedding_b = std::max(0.0, b1 - parts.layer_b);
  if (devices % (2 * plan.tp * plan.cp) == 0) {
    parts.embedding_f = std::max(0.0, seconds(2, 2, 0, TaskKind::Forward, ok) - parts.layer_f);
    parts.head = std::max(0.0, seconds(2, 2, 1, TaskKind::Forward, ok) - parts.layer_f);
  }
  parts.timed = ok;
}

const Bounds::Parts& Bounds::partsOf(const Plan& plan) {
  const Plan defaults;
  Plan key = plan;
  key.dp = key.pp = key.chunks = 1;
  key.global_batch = 0;
  key.schedule = splitsBackward(plan) ? ScheduleKind::ZbH1 : ScheduleKind::OneFOneB;
  key.layers_per_stage.clear();
  key.batch_shares.clear();
  key.zero = key.shard = 0;
  key.bucket = defaults.bucket;
  key.overlap_grad = defaults.overlap_grad;
  key.overlap_param = false;
  auto& list = parts_[keyOf(key)];
  for (const auto& known : list) {
    if (known.first == key) return known.second;
  }
  return list.emplace_back(key, measure(plan)).second;
}

Bounds::Key Bounds::keyOf(const Plan& p) {
  const std::uint32_t flags = (p.sequence_parallel ? 1U : 0U) | (p.tp_overlap ? 2U : 0U) |
                              (splitsBackward(p) ? 4U : 0U) | (static_cast<std::uint32_t>(p.recompute) << 3);
  return {p.tp, p.cp, p.ep, p.micro_batch, p.loss_chunk, p.recompute_every, flags};
}

std::int64_t Bounds::chunksInFlight(const Plan& plan, std::int32_t r) {
  if (!splitsBackward(plan)) return inFlight(plan, r);
  const auto [entry, inserted] = held_.try_emplace(
      std::tuple(plan.schedule, plan.pp, plan.chunks, plan.numMicrobatches()), std::vector<std::int64_t>{});
  if (inserted) entry->second = mostHeld(plan);
  return entry->second[static_cast<std::size_t>(r)];
}

Bytes Bounds::memory(const Plan& plan) {
  const Parts& parts = partsOf(plan);
  const std::vector<std::int64_t> layers = layersOfStages(model_, plan);
  const Placement placement = placementOf(plan);
  const std::int64_t shards = std::max(1, plan.dataRanks());
  // Per element: weights, gradients, moments and the fp32 master copy of 16-bit weights, each over its
  // shards.
  const double states = sizeOf(plan.precision) == 4 ? 8 : 12;
  const double per_element =
      static_cast<double>(parts.weight_bytes) / static_cast<double>(plan.zero >= 3 ? shards : 1) +
      static_cast<double>(parts.grad_bytes) / static_cast<double>(plan.zero >= 2 ? shards : 1) +
      states / static_cast<double>(plan.zero >= 1 ? shards : 1);
  Bytes worst = 0;
  for (std::int32_t r = 0; r < plan.pp; ++r) {
    double elements = 0;
    std::int64_t most = 0, least = model_.layers;  // layers of the rank's largest and smallest chunk
    for (std::int32_t chunk = 0; chunk < plan.chunks; ++chunk) {
      const std::int32_t v = virtualStage(placement, plan.pp, r, chunk);
      const std::int64_t n = layers[static_cast<std::size_t>(v)];
      most = std::max(most, n);
      least = std::min(least, n);
      elements += static_cast<double>(n * parts.layer_elements);
      if (v == 0) elements += static_cast<double>(parts.embedding_elements);
      // A tied head on the same rank shares the embedding's table.
      const bool shares = model_.tied_embedding && (plan.pp == 1 || placement == Placement::V);
      if (v == plan.numVirtualStages() - 1 && !shares) elements += static_cast<double>(parts.head_elements);
    }
    // All but one of the chunks in flight keep everything; the layer that runs may have given up a part of
    // the last.
    const std::int64_t chunks = chunksInFlight(plan, r);
    const Bytes kept = least * parts.layer_saved + std::max<std::int64_t>(0, least - 1) * parts.kept_stream;
    worst = std::max(worst, static_cast<Bytes>(elements * per_element) + chunks * kept);
  }
  return worst;
}

double Bounds::stepSeconds(const Plan& plan) {
  const Parts& parts = partsOf(plan);
  if (!parts.timed) return 0;
  const std::vector<std::int64_t> layers = layersOfStages(model_, plan);
  const Placement placement = placementOf(plan);
  const auto m = static_cast<double>(plan.numMicrobatches());
  const std::int32_t last = plan.numVirtualStages() - 1;
  const auto forward = [&](std::int32_t v) {
    return static_cast<double>(layers[static_cast<std::size_t>(v)]) * parts.layer_f +
           (v == 0 ? parts.embedding_f : 0) + (v == last ? parts.head : 0);
  };
  const auto backward = [&](std::int32_t v) {
    return static_cast<double>(layers[static_cast<std::size_t>(v)]) * parts.layer_b +
           (v == 0 ? parts.embedding_b : 0);
  };
  double bound = 0, way = 0;
  for (std::int32_t r = 0; r < plan.pp; ++r) {
    double busy = 0;
    for (std::int32_t chunk = 0; chunk < plan.chunks; ++chunk) {
      const std::int32_t v = virtualStage(placement, plan.pp, r, chunk);
      busy += forward(v) + backward(v);
    }
    bound = std::max(bound, m * busy + way);
    // Rank r is the only holder of virtual stage r, in either placement.
    way += forward(r) + (drainsBackward(plan.schedule) ? backward(r) : 0);
  }
  return bound;
}

}  // namespace bmt::sim
