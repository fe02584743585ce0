#include "simulator/plan_space.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace bmt::sim {
namespace {

constexpr std::int64_t kLargestMicroBatch = 64, kLargestContext = 16;

std::vector<std::int32_t> divisors(std::int64_t n) {
  std::vector<std::int32_t> list;
  for (std::int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) list.push_back(static_cast<std::int32_t>(d));
  }
  return list;
}

}  // namespace

PlanSpace::PlanSpace(const ModelSpec& model, const ClusterSpec& cluster, const SpaceOptions& o)
    : rich_(cluster.groups.front().device.kind != DeviceKind::Cpu), micro_batches_(o.micro_batches) {
  if (micro_batches_.empty() && rich_) {
    for (const std::int32_t d : divisors(o.global_batch)) {
      if (d <= kLargestMicroBatch) micro_batches_.push_back(d);
    }
  } else if (micro_batches_.empty()) {
    micro_batches_ = {1, 2, 4, 8, 16};
  }
  whole_ = {{0, true, false}};
  if (rich_) {
    sharded_ = {{0, true, false}, {0, false, false}, {1, true, false}, {1, false, false},
                {1, true, true},  {2, true, false},  {2, true, true},  {3, true, false}};
    recomputes_ = {{Recompute::None, 0}, {Recompute::Selective, 0}, {Recompute::Full, 0},
                   {Recompute::Sqrt, 0}, {Recompute::Every, 2},     {Recompute::Every, 4}};
  } else {
    sharded_ = {{0, true, false}, {1, true, false}};
    recomputes_ = {{Recompute::None, 0}, {Recompute::Full, 0}};
  }
  const std::int32_t devices = cluster.numDevices();
  Plan base;
  base.global_batch = o.global_batch;
  base.precision = o.precision;
  base.loss_chunk = o.loss_chunk;
  for (const std::int32_t tp : divisors(devices)) {
    for (const std::int32_t cp : divisors(rich_ ? devices / tp : 1)) {
      if (cp > kLargestContext) break;
      const std::size_t begin = size_;
      for (const std::int32_t pp : divisors(devices / tp / cp)) {
        const std::int32_t dp = devices / tp / cp / pp;
        if (o.hybrid_only && (dp > 1) + (tp > 1) + (pp > 1) < 2) continue;
        const std::int64_t experts =
            rich_ && model.experts > 0 ? std::gcd(model.experts, std::int64_t{dp} * cp) : 1;
        for (const std::int32_t ep : divisors(experts)) {
          base.dp = dp;
          base.tp = tp;
          base.pp = pp;
          base.cp = cp;
          base.ep = ep;
          addLayouts(base, model.layers);
        }
      }
      if (size_ > begin) runs_.push_back({begin, size_});
    }
  }
}

void PlanSpace::addLayouts(const Plan& degrees, std::int64_t layers) {
  const auto add = [&](ScheduleKind schedule, std::int32_t chunks) {
    Layout layout{degrees, size_};
    layout.plan.schedule = schedule;
    layout.plan.chunks = chunks;
    size_ += choicesOf(layout.plan);
    layouts_.push_back(layout);
  };
  add(ScheduleKind::OneFOneB, 1);
  if (degrees.pp == 1) return;
  for (const ScheduleKind kind : {ScheduleKind::GPipe, ScheduleKind::ZbH1, ScheduleKind::ZbH2}) add(kind, 1);
  for (const ScheduleKind kind : {ScheduleKind::ZbV, ScheduleKind::DualPipeV}) add(kind, 2);
  for (const ScheduleKind kind : {ScheduleKind::Interleaved, ScheduleKind::BreadthFirst}) {
    for (std::int32_t v = 2; degrees.pp * v <= layers; ++v) {
      if (layers % (degrees.pp * v) == 0 || v == 2) add(kind, v);
    }
  }
}

const std::vector<PlanSpace::DataChoice>& PlanSpace::dataChoices(const Plan& layout) const {
  return layout.dataRanks() > 1 ? sharded_ : whole_;
}

std::size_t PlanSpace::choicesOf(const Plan& layout) const {
  const std::size_t tensor = layout.tp == 1 ? 1 : rich_ ? 4 : 2;
  return micro_batches_.size() * dataChoices(layout).size() * recomputes_.size() * tensor;
}

Plan PlanSpace::at(std::size_t index) const {
  BMT_CHECK(index < size_, "plan beyond the space");
  const auto after = std::upper_bound(layouts_.begin(), layouts_.end(), index,
                                      [](std::size_t i, const Layout& l) { return i < l.begin; });
  const Layout& layout = *std::prev(after);
  Plan plan = layout.plan;
  std::size_t rest = index - layout.begin;
  const auto digit = [&rest](std::size_t radix) {
    const std::size_t value = rest % radix;
    rest /= radix;
    return value;
  };
  const std::vector<DataChoice>& data = dataChoices(plan);
  const DataChoice& choice = data[digit(data.size())];
  plan.zero = choice.zero;
  plan.overlap_grad = choice.overlap_grad;
  plan.overlap_param = choice.overlap_param;
  if (plan.tp > 1) {
    plan.sequence_parallel = digit(2) == 1;
    if (rich_) plan.tp_overlap = digit(2) == 1;
  }
  const RecomputeChoice& recompute = recomputes_[digit(recomputes_.size())];
  plan.recompute = recompute.policy;
  plan.recompute_every = recompute.every;
  plan.micro_batch = micro_batches_[digit(micro_batches_.size())];
  return plan;
}

}  // namespace bmt::sim
