// ModelSpec: the algorithm that is trained; knows nothing of ranks. Parameter counts are derived from it in
// one place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"

namespace bmt {

enum class Family : std::uint8_t { Gpt2, Llama };  // block structure; both are pre-norm decoders
enum class NormKind : std::uint8_t { LayerNorm, RmsNorm };
enum class ActivationKind : std::uint8_t { Gelu, Relu, Silu };  // Gelu = tanh approximation
enum class PositionKind : std::uint8_t { Learned, Rope, Alibi };

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
  bool gated_mlp = false;      // down(act(gate(x)) * up(x))
  bool tied_embedding = true;  // output head shares the token embedding
  bool qkv_bias = true;
  bool attn_out_bias = true;
  bool mlp_bias = true;
  bool embedding_norm = false;  // BLOOM: LayerNorm right after the token embedding
  bool dropout = false;         // on attention weights, sub-layer outputs and embedding; simulated only
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  // Something the model does that is simulated but not executed ("rope_scaling llama3"); empty = nothing.
  std::string not_executed;
  std::int64_t published_params = 0;  // 0 = unknown; as stated by the model's authors or its weight files

  bool operator==(const ModelSpec&) const = default;
};

// Exact number of trainable parameters; the token embedding counts once when tied.
std::int64_t numParams(const ModelSpec& model);
std::int64_t numLayerParams(const ModelSpec& model);

// Every problem of the spec itself (sizes positive, kv_heads divides heads, ...).
std::vector<Issue> validateModel(const ModelSpec& model);

const std::vector<ModelSpec>& modelPresets();
// A preset name, a Hugging Face config.json, or one of our model files. Throws Error{BadInput}; an unknown
// name gets the nearest preset suggested.
ModelSpec loadModel(const std::string& name_or_path);
ModelSpec modelFromJson(const std::string& text, const std::string& source);
std::string modelToJson(const ModelSpec& model);
// `text` is the content of a Hugging Face config.json (model_type gpt2, llama, mistral, qwen2, opt, bloom).
ModelSpec modelFromHfConfig(const std::string& text, const std::string& source);

}  // namespace bmt
