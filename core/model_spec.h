// ModelSpec: the algorithm that is trained; knows nothing of ranks. Parameter counts are derived from it in
// one place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"

namespace bmt {

// What the model is for; decides embedding and head. Gpt2, Llama: decoders; Bert: bidirectional with a masked
// language head; Vit: image patches to classes; T5: encoder and decoder with cross attention.
enum class Family : std::uint8_t { Gpt2, Llama, Bert, Vit, T5 };
enum class NormKind : std::uint8_t { LayerNorm, RmsNorm };
enum class ActivationKind : std::uint8_t { Gelu, Relu, Silu, SquaredRelu };  // Gelu = tanh approximation
enum class PositionKind : std::uint8_t { Learned, Rope, Alibi, Relative };   // Relative: T5's bucketed bias
// Layers of a model may differ in kind. LastEncoder: also holds the norm at the end of T5's encoder.
enum class LayerKind : std::uint8_t { Dense, Experts, Encoder, LastEncoder, Decoder };

struct ModelSpec {
  std::string name;
  Family family = Family::Gpt2;
  std::int64_t layers = 0;
  std::int64_t d_model = 0;   // hidden size C
  std::int64_t heads = 0;     // query heads
  std::int64_t kv_heads = 0;  // key/value heads; = heads without grouped queries
  std::int64_t d_head = 0;    // usually d_model / heads
  std::int64_t d_ff = 0;      // inner size of the MLP
  std::int64_t vocab = 0;
  std::int64_t seq_len = 0;        // training sequence length T
  std::int64_t max_positions = 0;  // rows of the learned position table; 0 when there is none
  NormKind norm = NormKind::LayerNorm;
  ActivationKind activation = ActivationKind::Gelu;
  PositionKind position = PositionKind::Learned;
  bool gated_mlp = false;      // down(act(gate(x)) * up(x)); act is silu or gelu
  bool tied_embedding = true;  // output head shares the token embedding
  bool qkv_bias = true;
  bool attn_out_bias = true;
  bool mlp_bias = true;
  bool embedding_norm = false;  // BLOOM: LayerNorm right after the token embedding
  bool dropout = false;         // on attention weights, sub-layer outputs and embedding; simulated only
  bool post_norm = false;       // BERT: norm(x + sublayer(x)); no norm before the head
  bool qk_norm = false;         // Qwen 3: RMSNorm over d_head of every query and key head
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;

  // Mixture of experts: layers from dense_first_layers on, every moe_every-th of them, have a router and
  // `experts` MLPs of inner size moe_d_ff instead of the MLP; each token goes to top_k of them and to the
  // shared ones. An expert takes at most capacity_factor * tokens * top_k / experts tokens of every rank:
  // the programs are static.
  std::int64_t experts = 0, top_k = 0, moe_d_ff = 0, shared_experts = 0;
  std::int64_t dense_first_layers = 0, moe_every = 1;
  double capacity_factor = 1;
  bool router_bias = false;  // DeepSeek-V3's balancing bias, one element an expert

  // Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are expanded
  // from kv_rank elements a token, queries from q_rank (0 = directly from C); rope_dim elements of d_head
  // are rotated and shared by all heads; values have v_dim. kv_rank 0 = plain attention.
  std::int64_t q_rank = 0, kv_rank = 0, rope_dim = 0, v_dim = 0;

  // T5: the first encoder_layers of `layers` encode seq_len tokens; the others decode decoder_seq_len.
  std::int64_t encoder_layers = 0, decoder_seq_len = 0, relative_buckets = 0;
  // ViT: patch_dim = 3 * patch^2 inputs a patch; seq_len = patches + 1 (class token); vocab = classes.
  std::int64_t patch_dim = 0;
  std::int64_t token_types = 0;  // BERT: rows of the segment table

  // Something the model does that is simulated but not executed ("rope_scaling llama3"); empty = nothing.
  std::string not_executed;
  std::int64_t published_params = 0;  // 0 = unknown; as stated by the model's authors or its weight files

  bool operator==(const ModelSpec&) const = default;
};

LayerKind layerKind(const ModelSpec& model, std::int64_t layer);
// Sizes that depend on the kind of attention: columns of all query heads, of all value heads (= inputs of the
// output projection), and of one head's keys and values.
inline std::int64_t keyDim(const ModelSpec& m) {
  return m.d_head;
}
inline std::int64_t valueDim(const ModelSpec& m) {
  return m.kv_rank > 0 ? m.v_dim : m.d_head;
}
inline bool causal(const ModelSpec& m) {
  return m.family == Family::Gpt2 || m.family == Family::Llama;
}
// Rows of the residual stream a sequence has (T5: encoder and decoder), and rows with a loss.
inline std::int64_t rowsPerSequence(const ModelSpec& m) {
  return m.seq_len + m.decoder_seq_len;
}
std::int64_t lossRowsPerSequence(const ModelSpec& model);

// Exact number of trainable parameters; the token embedding counts once when tied.
std::int64_t numParams(const ModelSpec& model);
// Of a layer of the first kind that the model has, and of a kind. `active` counts only the experts that one
// token uses.
std::int64_t numLayerParams(const ModelSpec& model);
std::int64_t numLayerParams(const ModelSpec& model, LayerKind kind, bool active = false);
// Parameters that one token uses: top_k and the shared ones of the experts.
std::int64_t numActiveParams(const ModelSpec& model);
// FLOPs of matrix products and attention of one sequence's forward pass; attention of a causal model counts
// half when `causal_half`.
double forwardFlopsPerSequence(const ModelSpec& model, bool causal_half);

// Every problem of the spec itself (sizes positive, kv_heads divides heads, ...).
std::vector<Issue> validateModel(const ModelSpec& model);

const std::vector<ModelSpec>& modelPresets();
// A preset name, a Hugging Face config.json, or one of our model files. Throws Error{BadInput}; an unknown
// name gets the nearest preset suggested.
ModelSpec loadModel(const std::string& name_or_path);
ModelSpec modelFromJson(const std::string& text, const std::string& source);
std::string modelToJson(const ModelSpec& model);
// `text` is the content of a Hugging Face config.json (model types: see hf_config.cpp).
ModelSpec modelFromHfConfig(const std::string& text, const std::string& source);

}  // namespace bmt
