// The plans of a sweep, addressed by number instead of held in memory: layouts (degrees, schedule, chunks)
// times the choices of each. Deterministic; legal or not.
//   On GPUs: every dp x tp x pp x cp of the devices (and ep of a model with experts), micro-batches that
//   divide the global batch, every schedule with every chunk count that divides the layers, ZeRO 0 to 3,
//   overlap of gradients and of parameters, sequence parallelism, overlapped tensor parallelism, recompute
//   policies. On CPU ranks: what the executor has kernels for.
#pragma once

#include <cstddef>
#include <vector>

#include "core/cluster_spec.h"
#include "core/plan.h"

namespace bmt::sim {

struct SpaceOptions {
  std::int64_t global_batch = 0;  // sequences per step
  std::vector<std::int64_t>
      micro_batches;  // empty: divisors of the global batch up to 64; CPU: powers of two up to 16
  DType precision = DType::F32;
  std::int64_t loss_chunk = 0;
  bool hybrid_only = false;  // more than one of dp, tp, pp above 1
};

class PlanSpace {
 public:
  PlanSpace(const ModelSpec& model, const ClusterSpec& cluster, const SpaceOptions& options);

  std::size_t size() const { return size_; }
  Plan at(std::size_t index) const;  // index < size()

  // Runs of consecutive plans with equal tp and cp: [begin, end) of each. Neighbours cost much the same, so a
  // worker takes a whole run.
  struct Run {
    std::size_t begin = 0, end = 0;
  };
  const std::vector<Run>& runs() const { return runs_; }

 private:
  struct Layout {
    Plan plan;  // what all plans of the layout share
    std::size_t begin = 0;
  };
  // What is sharded over the data axis and when its communication runs.
  struct DataChoice {
    std::int32_t zero;
    bool overlap_grad, overlap_param;
  };
  struct RecomputeChoice {
    Recompute policy;
    std::int32_t every;
  };
  const std::vector<DataChoice>& dataChoices(const Plan& layout) const;
  std::size_t choicesOf(const Plan& layout) const;
  void addLayouts(const Plan& degrees, std::int64_t layers);

  bool rich_ = false;
  std::vector<std::int64_t> micro_batches_;
  std::vector<DataChoice> sharded_, whole_;
  std::vector<RecomputeChoice> recomputes_;
  std::vector<Layout> layouts_;
  std::vector<Run> runs_;
  std::size_t size_ = 0;
};

}  // namespace bmt::sim
