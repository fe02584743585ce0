// Plan: every field is a decision of whoever trains. Plain data; validatePlan says whether it is legal for a
// model on a cluster. Text form (docs/formats.md):
// "dp=8,tp=4,pp=2,mb=1,gb=512,schedule=1f1b,zero=1,sp,recompute=full".
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/cluster_spec.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/model_spec.h"
#include "core/units.h"

namespace bmt {

// In the order of their names: "gpipe", "1f1b", "interleaved", "bfs" (looped breadth-first), "zb-h1",
// "zb-h2", "zb-v", "zb-auto", "dualpipev"; and a schedule file of the user's, whose path is the name.
enum class ScheduleKind : std::uint8_t {
  GPipe,
  OneFOneB,
  Interleaved,
  BreadthFirst,
  ZbH1,
  ZbH2,
  ZbV,
  ZbAuto,
  DualPipeV,
  File
};
inline constexpr int kNumScheduleKinds = static_cast<int>(ScheduleKind::File);  // that have a maker

struct Schedule;
// A schedule read from a file: equal when the paths are.
struct ScheduleFile {
  std::string path;
  std::shared_ptr<const Schedule> schedule;
  bool operator==(const ScheduleFile& other) const { return path == other.path; }
};
// How attention is computed: one fused kernel that keeps no scores (the newest for the device, or
// FlashAttention 2 or 1), or scores in memory with Megatron-LM's fused mask-and-softmax kernel, or with plain
// PyTorch ops (fp32 softmax).
enum class AttentionKernel : std::uint8_t {
  Flash,
  Flash2,
  Flash1,
  Softmax,
  Unfused
};  // "flash", "flash2", "flash1", "softmax", "unfused"
inline bool keepsScores(AttentionKernel kernel) {
  return kernel == AttentionKernel::Softmax || kernel == AttentionKernel::Unfused;
}
// Element-wise chains: fused kernels; norms fused and the rest op by op; all op by op, as plain PyTorch runs
// them.
enum class Pointwise : std::uint8_t { Fused, Norms, Eager };  // "fused", "norms", "eager"
// What is computed again in the backward pass (Chen et al. 2016; Korthikanti et al. 2022). "none";
// "selective": only the attention core (scores, softmax, values); "full": each layer from its input;
// "every:K": segments of K layers, each from the input of its first; "sqrt": K = ceil(sqrt(layers of the
// chunk)); a list: a policy for each layer of the model, "full*8/selective*16/none*72".
enum class Recompute : std::uint8_t { None, Selective, Full, Every, Sqrt, List };
// How gradients travel over the data axis: as they are; 8-bit integers with a scale for each chunk; the
// largest share of entries with their indices; entries above an absolute threshold with their indices.
enum class Compress : std::uint8_t {
  None,
  Int8,
  TopK,
  Threshold
};  // "none", "int8", "topk:F", "threshold:X"

// How attention sees the whole sequence when it is cut over cp: keys and values circulate (Liu, Zaharia,
// Abbeel 2023; zigzag order, so that causal work is equal), or heads are exchanged for tokens by
// all-to-alls (DeepSpeed-Ulysses, Jacobs et al. 2023).
enum class ContextKind : std::uint8_t { Ring, AllToAll };  // "ring", "a2a"

struct Plan {
  std::int32_t dp = 1, tp = 1, pp = 1;  // data, tensor, pipeline parallel degrees; ranks = dp * tp * pp
  std::int32_t cp = 1;  // context parallel degree: the tokens of a sequence are cut over cp ranks
  std::int32_t ep = 1;  // expert parallel degree, inside dp * cp: experts are cut over ep ranks
  ContextKind context = ContextKind::Ring;
  std::int64_t micro_batch = 1;   // sequences per micro-batch and replica
  std::int64_t global_batch = 1;  // sequences per step over all replicas
  ScheduleKind schedule = ScheduleKind::OneFOneB;
  ScheduleFile schedule_file;  // with ScheduleKind::File
  std::int32_t chunks = 1;     // model chunks per pipeline rank (interleaved: > 1)
  // Layers of virtual stage v = chunk * pp + stage, v = 0 .. pp*chunks-1. Empty = as even as possible.
  std::vector<std::int64_t> layers_per_stage;
  // Micro-batches of each dp replica ("shares=5/3"), for replicas of unequal speed. Empty = equal shares.
  std::vector<std::int64_t> batch_shares;
  // What is sharded over the data axis (Rajbhandari et al. 2020): 0 nothing, 1 optimizer states, 2 gradients
  // too, 3 parameters too.
  std::int32_t zero = 0;
  std::int32_t shard = 0;          // hybrid sharding: over this many data ranks, copies above; 0 = all
  std::int32_t prefetch = 1;       // zero=3: layers whose parameters are gathered ahead of use
  bool sequence_parallel = false;  // shard norms and residuals over tp along tokens
  bool tp_overlap = false;         // tensor-parallel communication beside the products it feeds or follows
  Recompute recompute = Recompute::None;
  std::int32_t recompute_every = 0;         // K of "every:K"
  std::vector<Recompute> recompute_layers;  // [layers] of the list: None, Selective or Full
  // Of matrix products. fp32, tf32 (fp32 storage), bf16, fp16 (16-bit weights and activations, fp32 master
  // weights and moments), fp8 (linear layers multiply 8-bit operands, Transformer Engine).
  DType precision = DType::F32;
  Bytes bucket = 25 * kMiB;        // gradient bucket of the dp reduction
  bool overlap_grad = true;        // reduce a bucket as soon as its last micro-batch is done
  bool overlap_param = false;      // zero 1, 2: gather parameters beside the next step's forward
  bool offload_optimizer = false;  // states and update on the host (ZeRO-Offload, Ren et al. 2021)
  Compress compress = Compress::None;
  double compress_value = 0;  // topk: share of entries; threshold: absolute value
  // Rows of the logits computed at a time in head and loss; 0 = the whole micro-batch. Small values save the
  // (tokens, vocab) buffer.
  std::int64_t loss_chunk = 0;
  AttentionKernel attention = AttentionKernel::Flash;
  Pointwise pointwise = Pointwise::Fused;
  bool gather_logits = false;         // tensor ranks gather the logits and each computes the whole loss
  DType grads = DType::F32;           // parameter gradients, in memory and on the wire of the dp reduction
  std::string order = "tp-cp-pp-dp";  // fastest-varying axis first

  bool operator==(const Plan&) const = default;
  std::int32_t numRanks() const { return dp * tp * pp * cp; }
  std::int32_t dataRanks() const { return dp * cp; }             // sum their gradients
  std::int32_t expertDataRanks() const { return dp * cp / ep; }  // sum the gradients of their experts
  // Of one replica; of the busiest one where shares differ.
  std::int64_t numMicrobatches() const;
  std::int64_t microbatchesOf(std::int32_t replica) const;
  // The replica's first sequence in the global batch; replicas take theirs one after the other.
  std::int64_t firstSequenceOf(std::int32_t replica) const;
  std::int32_t numVirtualStages() const { return pp * chunks; }
};

// Type in which weights and activations are stored.
DType storageType(const Plan& plan);

std::string_view toString(ScheduleKind kind);
std::string scheduleName(const Plan& plan);   // its kind, or the path of its file
std::string_view toString(Recompute policy);  // "every" and "list" without their figures
std::string recomputeText(const Plan& plan);  // with them: "every:4", "full*2/none*10"
std::string compressText(const Plan& plan);
std::string_view toString(AttentionKernel kernel);
std::string_view toString(Pointwise fusion);
std::string_view toString(ContextKind kind);

// Text or a path of a JSON file. Errors name the unknown key and the nearest key. Throws Error{BadInput}.
Plan loadPlan(const std::string& text_or_path);
Plan planFromText(const std::string& text);
std::string planToText(const Plan& plan);  // canonical; planFromText(planToText(p)) == p
Plan planFromJson(const std::string& text, const std::string& source);
std::string planToJson(const Plan& plan);

// Layers of each virtual stage (see layers_per_stage), defaults filled in. The remainder goes to the middle
// stages first: the first also holds the embedding and the last the head.
std::vector<std::int64_t> layersOfStages(const ModelSpec& model, const Plan& plan);

// Which layers of a chunk are computed again together: segment s covers layers [begin, end) of the chunk, all
// with the same policy (None, Selective or Full; several layers only where Full).
struct RecomputeSegment {
  std::int64_t begin = 0, end = 0;
  Recompute policy = Recompute::None;
  bool operator==(const RecomputeSegment&) const = default;
};
// `first`: global index of the chunk's first layer.
std::vector<RecomputeSegment> recomputeSegments(const Plan& plan, std::int64_t first, std::int64_t layers);

// Everything that makes the plan illegal, at once; empty = legal. `where` is "plan.tp" etc.
std::vector<Issue> validatePlan(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan);

}  // namespace bmt
