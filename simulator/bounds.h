// Lower bounds of a plan's peak memory and step time, in microseconds each: what a sweep rules out without
// playing it, and an oracle for tests. Never shown as a prediction.
//
//   memory  of pipeline rank r >= states of its parameters + activations in flight (closed forms of
//   schedule.h) times
//           what a chunk keeps. Narayanan et al. 2021; Rajbhandari et al. 2020 for the states.
//   time    >= m (F_r + B_r) + the way of the first micro-batch to rank r and of the last one back, for every
//   r;
//           F and B are the costs of the rank's chunks alone, blocking tensor collectives included.
#pragma once

#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cluster_spec.h"
#include "core/plan.h"
#include "traces/cost_profile.h"

namespace bmt::sim {

class Bounds {
 public:
  // All three are referred to; they must outlive this object.
  Bounds(const ModelSpec& model, const ClusterSpec& cluster, const trace::CostProfile& profile)
      : model_(model), cluster_(cluster), profile_(profile) {}

  // Bytes of the worst rank; of a legal plan.
  Bytes memory(const Plan& plan);
  // Seconds; 0 where nothing is known (layers that differ, ranks that share cores).
  double stepSeconds(const Plan& plan);

 private:
  // What one layer, the embedding and the head cost on a tensor rank; equal for all plans that differ only in
  // dp, pp, schedule, batch and ZeRO stage.
  struct Parts {
    Bytes layer_saved = 0, kept_stream = 0;
    std::int64_t layer_elements = 0, embedding_elements = 0, head_elements = 0;
    Bytes weight_bytes = 2, grad_bytes = 4;  // per element
    double layer_f = 0, layer_b = 0;         // seconds; b includes the weight gradient and what is recomputed
    double embedding_f = 0, embedding_b = 0,
           head = 0;  // seconds; the head's gradients are in its forward slot
    bool timed = false;
  };
  const Parts& partsOf(const Plan& plan);
  Parts measure(const Plan& plan) const;
  void time(Parts& parts, const Plan& plan) const;

  const ModelSpec& model_;
  const ClusterSpec& cluster_;
  const trace::CostProfile& profile_;
  // By what is left of a plan when those differences are taken out: sharding and batch of a micro-batch,
  // policies.
  using Key = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int64_t, std::int64_t, std::int32_t,
                         std::uint32_t>;
  static Key keyOf(const Plan& plan);
  std::int64_t chunksInFlight(const Plan& plan, std::int32_t r);
  std::map<std::tuple<ScheduleKind, std::int32_t, std::int32_t, std::int64_t>, std::vector<std::int64_t>>
      held_;
  std::map<Key, std::vector<std::pair<Plan, Parts>>> parts_;  // several where plans differ in rarer fields
};

}  // namespace bmt::sim
