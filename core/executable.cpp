#include "core/executable.h"

#include <fmt/format.h>

namespace bmt {

std::vector<Issue> notExecutable(const ModelSpec& m, const Plan& plan) {
  std::vector<Issue> issues;
  const auto refuse = [&](bool refused, const char* where, const std::string& what) {
    if (refused) issues.push_back({where, what + " is simulated but not executed in this version"});
  };
  refuse(plan.precision != DType::F32, "plan.precision",
         fmt::format("{} (executed: fp32)", toString(plan.precision)));
  refuse(plan.attention != AttentionKernel::Flash, "plan.attention",
         fmt::format("'{}' (kernels here are fused)", toString(plan.attention)));
  refuse(plan.gather_logits, "plan.gather-logits", "a loss on gathered logits");
  refuse(plan.pointwise != Pointwise::Fused, "plan.pointwise",
         fmt::format("'{}' (kernels here are fused)", toString(plan.pointwise)));
  refuse(plan.grads != DType::F32, "plan.grads", fmt::format("{} (executed: fp32)", toString(plan.grads)));
  refuse(plan.zero > 1, "plan.zero", fmt::format("zero={} (executed: 0, 1)", plan.zero));
  refuse(plan.overlap_param, "plan.overlap-param", "gathering parameters beside the next step's forward");
  refuse(plan.offload_optimizer, "plan.offload", "the optimizer on the host");
  refuse(plan.compress != Compress::None, "plan.compress", "compress=" + compressText(plan));
  refuse(plan.cp > 1, "plan.cp", fmt::format("context parallelism of {}", plan.cp));
  refuse(plan.ep > 1, "plan.ep", fmt::format("expert parallelism of {}", plan.ep));
  refuse(plan.tp_overlap && plan.sequence_parallel, "plan.tp-overlap", "with sequence parallelism, overlap");
  refuse(m.experts > 0, "model.experts", "a mixture of experts");
  refuse(m.kv_rank > 0, "model.kv_rank", "latent attention");
  refuse(m.qk_norm, "model.qk_norm", "the norm of queries and keys");
  refuse(m.family != Family::Gpt2 && m.family != Family::Llama, "model.family",
         "a family other than gpt2 and llama");
  refuse(m.position == PositionKind::Alibi, "model.position", "ALiBi attention");
  refuse(m.gated_mlp && m.activation != ActivationKind::Silu, "model.activation", "a gated MLP with gelu");
  refuse(m.activation == ActivationKind::SquaredRelu, "model.activation", "the squared ReLU");
  refuse(m.dropout, "model.dropout", "dropout");
  refuse(!m.not_executed.empty(), "model", m.not_executed);
  return issues;
}

}  // namespace bmt
