// The ops of one model block (embedding, decoder layer, head with loss), already sharded for a
// tensor-parallel rank, and the collectives between them. Lowering instantiates a block per layer and
// micro-batch by binding its regions.
//
// Column-parallel: q, k, v and up/gate projections (rows of the weight are sharded). Row-parallel: attention
// output and down projections (columns are sharded; the partial sums are reduced, then the bias is added
// once, fused with the residual). Vocabulary-parallel embedding, head and loss. Shoeybi et al. 2019; sequence
// parallelism: Korthikanti et al. 2022.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/model_spec.h"
#include "core/op.h"
#include "core/plan.h"
#include "core/task_graph.h"

namespace bmt {

// A collective over the tensor axis; see Comm for the meaning of count.
struct BlockComm {
  CommKind kind = CommKind::AllReduce;
  std::int64_t count = 0;
  DType dtype = DType::F32;
  Operand src, dst;
};

// Either ops that run back to back, or one collective.
struct Piece {
  bool is_comm = false;
  std::vector<OpCall> ops;
  BlockComm comm;
};

struct BlockParam {
  std::string name;  // without the block's prefix: "attn.q.weight"
  std::int64_t global_rows = 1, global_cols = 1;
  std::int64_t row_begin = 0, rows = 1, col_begin = 0, cols = 1;
  std::int64_t offset = 0;  // elements from the block's first parameter
  bool decay = true, replicated = false;
};

struct Block {
  std::vector<Piece> forward;         // the head's forward also computes its gradients (Region::Stream)
  std::vector<Piece> backward_first;  // first micro-batch: parameter gradients are overwritten
  std::vector<Piece> backward;        // later ones: added
  // Split backward: the two above hold the input gradients (and the norms' parameter gradients), these the
  // rest.
  std::vector<Piece> weight_first, weight;
  Bytes saved_bytes = 0, forward_work = 0, backward_work = 0, weight_work = 0, deferred_bytes = 0;
  std::vector<BlockParam> params;     // decayed ones first, then sharded biases, then replicated ones
  std::int64_t elements = 0;          // of the block in the flat buffers (local shard)
  std::int64_t decay_elements = 0;    // the first decay_elements are decayed
  std::int64_t replicated_begin = 0;  // [replicated_begin, elements) is the same on every tensor rank
};

// What the rank with tensor index `tp_index` computes for one micro-batch.
struct BlockShape {
  const ModelSpec* model = nullptr;
  std::int64_t batch = 1;   // sequences of a micro-batch
  std::int64_t tokens = 0;  // batch * seq_len
  std::int64_t rows = 0;    // rows of the residual stream on this rank: tokens, or tokens / tp with SP
  std::int64_t tp = 1, tp_index = 0;
  bool sequence_parallel = false;
  bool split_backward = false;
  DType dtype = DType::F32;  // activations and weights
  AttentionKernel attention = AttentionKernel::Flash;
  Pointwise pointwise = Pointwise::Fused;
  std::int64_t loss_rows = 0;  // rows of logits at a time
  double loss_scale = 1;       // 1 / tokens of the global batch
  std::int64_t vocab_rows() const { return ceilDiv(model->vocab, tp); }
};
BlockShape makeBlockShape(const ModelSpec& model, const Plan& plan, std::int32_t tp_index);

enum class HeadTable : std::uint8_t {
  Own,  // the head block holds its weight (untied), or the last stage's copy of the tied table
  Tied  // the table of the embedding on the same rank (Region::Tied, TiedGrad)
};

// Bytes of attention scores kept from forward to backward by one layer; 0 with fused attention.
std::int64_t savedScoreBytes(const BlockShape& shape);
// Bytes that an RMSNorm made of plain ops keeps beyond a fused one (simulated only): its input in fp32 and
// the normalised rows before the weight.
std::int64_t savedNormBytes(const BlockShape& shape);
// Bytes of fp32 logits and probabilities beside the logits, where the loss is made of plain ops (simulated
// only).
std::int64_t lossBytes(const BlockShape& shape);

Block buildEmbeddingBlock(const BlockShape& shape);
Block buildLayerBlock(const BlockShape& shape);
// `first`: this is the step's first micro-batch, so the head's parameter gradients are overwritten. Both
// variants are returned: forward = later micro-batches, backward_first = first micro-batch (the head has no
// separate backward).
Block buildHeadBlock(const BlockShape& shape, HeadTable table);

}  // namespace bmt
