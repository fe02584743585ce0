// The ops of one model block (embedding, decoder layer, head with loss), already sharded for a
// tensor-parallel rank, and the collectives between them. Lowering instantiates a block per layer and
// micro-batch by binding its regions.
//
// Column-parallel: q, k, v and up/gate projections (rows of the weight are sharded). Row-parallel: attention
// output and down projections (columns are sharded; the partial sums are reduced, then the bias is added
// once, fused with the residual). Vocabulary-parallel embedding, head and loss. Shoeybi et al. 2019; sequence
// parallelism: Korthikanti et al. 2022. Context parallelism: block_context.cpp. Experts: block_experts.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/model_spec.h"
#include "core/op.h"
#include "core/plan.h"
#include "core/task_graph.h"

namespace bmt {

// A collective over one of the rank's groups; see Comm for the meaning of count.
struct BlockComm {
  CommKind kind = CommKind::AllReduce;
  GroupKind group = GroupKind::Tensor;
  std::int64_t count = 0;
  DType dtype = DType::F32;
  Operand src, dst;
  bool overlapped = false;  // on a lane of its own, beside the compute pieces up to the one that waits for it
};

// Either ops that run back to back, or one collective.
struct Piece {
  bool is_comm = false;
  std::vector<std::int32_t> after;  // earlier pieces of the list, on another lane, that must be finished
  std::vector<OpCall> ops;
  BlockComm comm;
};

struct BlockParam {
  std::string name;  // without the block's prefix: "attn.q.weight"
  std::int64_t global_rows = 1, global_cols = 1;
  std::int64_t row_begin = 0, rows = 1, col_begin = 0, cols = 1;
  std::int64_t offset = 0;  // elements from the block's first parameter, or first expert parameter
  bool decay = true, replicated = false, expert = false;
};

struct Block {
  std::vector<Piece> forward;         // the head's forward also computes its gradients (Region::Stream)
  std::vector<Piece> backward_first;  // first micro-batch: parameter gradients are overwritten
  std::vector<Piece> backward;        // later ones: added
  // Split backward: the two above hold the input gradients (and the norms' parameter gradients), these the
  // rest.
  std::vector<Piece> weight_first, weight;
  // Selective recompute: the attention core again, from q, k, v to its result, in place. The last
  // `score_bytes` of what is saved are then scratch of forward and backward.
  std::vector<Piece> core;
  Bytes core_work = 0, score_bytes = 0;
  Bytes saved_bytes = 0, forward_work = 0, backward_work = 0, weight_work = 0, deferred_bytes = 0;
  std::vector<BlockParam> params;         // decayed ones first, then sharded biases, then replicated ones
  std::int64_t elements = 0;              // of the block in the flat buffers (local shard)
  std::int64_t decay_elements = 0;        // the first decay_elements are decayed
  std::int64_t replicated_begin = 0;      // [replicated_begin, elements) is the same on every tensor rank
  std::int64_t replicated_decay_end = 0;  // [replicated_begin, replicated_decay_end) is decayed too
  std::int64_t expert_elements = 0;  // of this rank's experts, all decayed; they lie in their own buckets
};

// What the rank with tensor index `tp_index` computes for one micro-batch.
struct BlockShape {
  const ModelSpec* model = nullptr;
  std::int64_t batch = 1;   // sequences of a micro-batch
  std::int64_t seq = 0;     // tokens of a sequence on this rank: seq_len / cp
  std::int64_t tokens = 0;  // batch * seq
  std::int64_t rows = 0;    // rows of the residual stream on this rank: tokens, or tokens / tp with SP
  // T5: the stream holds the encoder's rows, then the decoder's; 0 otherwise.
  std::int64_t decoder_seq = 0, decoder_tokens = 0, decoder_rows = 0;
  std::int64_t tp = 1, tp_index = 0;
  std::int64_t cp = 1;
  ContextKind context = ContextKind::Ring;
  std::int64_t ep = 1, ep_index = 0;
  bool sequence_parallel = false, tp_overlap = false;
  bool split_backward = false;
  DType dtype = DType::F32;  // activations and weights
  DType grads = DType::F32;  // parameter gradients
  bool fp8 = false;          // linear layers multiply 8-bit operands
  AttentionKernel attention = AttentionKernel::Flash;
  Pointwise pointwise = Pointwise::Fused;
  bool gather_logits = false;
  std::int64_t loss_rows = 0;                                    // rows of logits at a time
  double loss_scale = 1;                                         // 1 / tokens of the global batch
  DType productType() const { return fp8 ? DType::F8 : dtype; }  // of what linear layers multiply
  std::int64_t vocab_rows() const { return ceilDiv(model->vocab, tp); }
  std::int64_t stream_rows() const { return rows + decoder_rows; }
};
BlockShape makeBlockShape(const ModelSpec& model, const Plan& plan, std::int32_t tp_index,
                          std::int32_t ep_index = 0);
// What the first stage reads of a micro-batch: tokens i32, or patches; and the last stage's targets, i32.
Bytes inputBytes(const BlockShape& shape);
std::int64_t targetElements(const BlockShape& shape);

enum class HeadTable : std::uint8_t {
  Own,  // the head block holds its weight (untied), or the last stage's copy of the tied table
  Tied  // the table of the embedding on the same rank (Region::Tied, TiedGrad)
};

Block buildEmbeddingBlock(const BlockShape& shape);
Block buildLayerBlock(const BlockShape& shape, LayerKind kind);
// `first`: this is the step's first micro-batch, so the head's parameter gradients are overwritten. Both
// variants are returned: forward = later micro-batches, backward_first = first micro-batch (the head has no
// separate backward).
Block buildHeadBlock(const BlockShape& shape, HeadTable table);

}  // namespace bmt
