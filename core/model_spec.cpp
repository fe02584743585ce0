#include "core/model_spec.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <array>

#include "core/json.h"
#include "core/suggest.h"

namespace bmt {
namespace {

constexpr const char* kSchema = "bmtrain.model/1";

template <typename T, std::size_t N>
using Names = std::array<std::pair<const char*, T>, N>;

constexpr Names<Family, 5> kFamilies{{{"gpt2", Family::Gpt2},
                                      {"llama", Family::Llama},
                                      {"bert", Family::Bert},
                                      {"vit", Family::Vit},
                                      {"t5", Family::T5}}};
constexpr Names<NormKind, 2> kNorms{{{"layernorm", NormKind::LayerNorm}, {"rmsnorm", NormKind::RmsNorm}}};
constexpr Names<ActivationKind, 4> kActivations{{{"gelu", ActivationKind::Gelu},
                                                 {"relu", ActivationKind::Relu},
                                                 {"silu", ActivationKind::Silu},
                                                 {"relu2", ActivationKind::SquaredRelu}}};
constexpr Names<PositionKind, 4> kPositions{{{"learned", PositionKind::Learned},
                                             {"rope", PositionKind::Rope},
                                             {"alibi", PositionKind::Alibi},
                                             {"relative", PositionKind::Relative}}};

// Sizes that most models do not have: written when they differ from the default.
constexpr Names<std::int64_t ModelSpec::*, 15> kOptionalSizes{
    {{"experts", &ModelSpec::experts},
     {"top_k", &ModelSpec::top_k},
     {"moe_d_ff", &ModelSpec::moe_d_ff},
     {"shared_experts", &ModelSpec::shared_experts},
     {"dense_first_layers", &ModelSpec::dense_first_layers},
     {"moe_every", &ModelSpec::moe_every},
     {"q_rank", &ModelSpec::q_rank},
     {"kv_rank", &ModelSpec::kv_rank},
     {"rope_dim", &ModelSpec::rope_dim},
     {"v_dim", &ModelSpec::v_dim},
     {"encoder_layers", &ModelSpec::encoder_layers},
     {"decoder_seq_len", &ModelSpec::decoder_seq_len},
     {"relative_buckets", &ModelSpec::relative_buckets},
     {"patch_dim", &ModelSpec::patch_dim},
     {"token_types", &ModelSpec::token_types}}};

template <typename T, std::size_t N>
T readEnum(const Json& json, const char* key, T fallback, const Names<T, N>& names,
           const std::string& source) {
  const std::string text = jsonString(json, key, names[static_cast<std::size_t>(fallback)].first, source);
  std::vector<std::string> known;
  for (const auto& [name, value] : names) {
    if (text == name) return value;
    known.emplace_back(name);
  }
  throw Error(ErrorKind::BadInput,
              fmt::format("field '{}': '{}' is not one of {}", key, text, fmt::join(known, ", ")), source);
}

std::int64_t normParams(const ModelSpec& m) {
  return m.norm == NormKind::LayerNorm ? 2 * m.d_model : m.d_model;
}

// Matrix elements of one attention: what one token is multiplied with.
std::int64_t attentionMatrices(const ModelSpec& m) {
  const std::int64_t q = m.heads * m.d_head;
  if (m.kv_rank == 0) return m.d_model * (q + 2 * m.kv_heads * m.d_head) + q * m.d_model;
  const std::int64_t queries = m.q_rank > 0 ? m.d_model * m.q_rank + m.q_rank * q : m.d_model * q;
  const std::int64_t expanded = m.heads * (m.d_head - m.rope_dim + m.v_dim);
  return queries + m.d_model * (m.kv_rank + m.rope_dim) + m.kv_rank * expanded +
         m.heads * m.v_dim * m.d_model;
}

std::int64_t mlpMatrices(const ModelSpec& m, std::int64_t inner) {
  return (m.gated_mlp ? 3 : 2) * m.d_model * inner;
}

// What an MLP, or the router with the experts, multiplies.
std::int64_t feedForwardMatrices(const ModelSpec& m, LayerKind kind, bool active) {
  if (kind != LayerKind::Experts) return mlpMatrices(m, m.d_ff);
  const std::int64_t routed = active ? m.top_k : m.experts;
  return m.experts * m.d_model + (routed + m.shared_experts) * mlpMatrices(m, m.moe_d_ff);
}

}  // namespace

LayerKind layerKind(const ModelSpec& m, std::int64_t layer) {
  if (m.family == Family::T5) {
    if (layer >= m.encoder_layers) return LayerKind::Decoder;
    return layer + 1 == m.encoder_layers ? LayerKind::LastEncoder : LayerKind::Encoder;
  }
  if (m.experts == 0 || layer < m.dense_first_layers) return LayerKind::Dense;
  return (layer - m.dense_first_layers) % m.moe_every == m.moe_every - 1 ? LayerKind::Experts
                                                                         : LayerKind::Dense;
}

std::int64_t lossRowsPerSequence(const ModelSpec& m) {
  if (m.family == Family::Vit) return 1;
  return m.family == Family::T5 ? m.decoder_seq_len : m.seq_len;
}

std::int64_t numLayerParams(const ModelSpec& m, LayerKind kind, bool active) {
  const std::int64_t attentions = kind == LayerKind::Decoder ? 2 : 1;
  std::int64_t count = attentions * attentionMatrices(m) + feedForwardMatrices(m, kind, active);
  if (m.kv_rank > 0) count += m.q_rank + m.kv_rank;  // norms of the latents
  if (m.qk_norm) count += 2 * m.d_head;
  if (m.qkv_bias) count += attentions * (m.heads + 2 * m.kv_heads) * m.d_head;
  if (m.attn_out_bias) count += attentions * m.d_model;
  if (m.mlp_bias && kind != LayerKind::Experts) count += (m.gated_mlp ? 2 : 1) * m.d_ff + m.d_model;
  if (kind == LayerKind::Experts && m.router_bias) count += m.experts;
  if (kind == LayerKind::LastEncoder) count += normParams(m);
  return count + (attentions + 1) * normParams(m);
}

std::int64_t numLayerParams(const ModelSpec& m) {
  return numLayerParams(m, layerKind(m, 0));
}

namespace {

std::int64_t countParams(const ModelSpec& m, bool active) {
  std::int64_t count = 0;
  for (std::int64_t layer = 0; layer < m.layers; ++layer)
    count += numLayerParams(m, layerKind(m, layer), active);
  if (m.position == PositionKind::Learned) count += m.max_positions * m.d_model;
  if (m.embedding_norm) count += normParams(m);
  count += m.token_types * m.d_model;
  if (!m.post_norm) count += normParams(m);
  const std::int64_t table = m.vocab * m.d_model;
  switch (m.family) {
    case Family::Gpt2:
    case Family::Llama:
      return count + table * (m.tied_embedding ? 1 : 2);
    case Family::Bert:  // masked language head: dense, norm, bias of the logits
      return count + table + m.d_model * m.d_model + m.d_model + normParams(m) + m.vocab;
    case Family::Vit:  // patch projection, class token, classes
      return count + m.patch_dim * m.d_model + 2 * m.d_model + table + m.vocab;
    case Family::T5:  // each stack has one table of relative positions
      return count + table * (m.tied_embedding ? 1 : 2) + 2 * m.relative_buckets * m.heads;
  }
  return count;
}

}  // namespace

std::int64_t numParams(const ModelSpec& m) {
  return countParams(m, false);
}

std::int64_t numActiveParams(const ModelSpec& m) {
  return countParams(m, true);
}

double forwardFlopsPerSequence(const ModelSpec& m, bool causal_half) {
  const auto real = [](std::int64_t value) { return static_cast<double>(value); };
  const double per_pair = 2 * real(m.heads) * real(keyDim(m) + valueDim(m));
  const double half = causal_half ? 0.5 : 1;
  const double s = real(m.seq_len), d = real(m.decoder_seq_len);
  double flops = 0;
  for (std::int64_t layer = 0; layer < m.layers; ++layer) {
    const LayerKind kind = layerKind(m, layer);
    const double attention = real(attentionMatrices(m)), mlp = real(feedForwardMatrices(m, kind, true));
    if (kind == LayerKind::Encoder || kind == LayerKind::LastEncoder) {
      flops += 2 * s * (attention + mlp) + per_pair * s * s;
    } else if (kind == LayerKind::Decoder) {
      // Cross attention: queries and output act on decoder rows, keys and values on encoder rows.
      const double kv = real(2 * m.d_model * m.kv_heads * m.d_head);
      flops += 2 * d * (attention + mlp) + per_pair * d * d * half;
      flops += 2 * d * (attention - kv) + 2 * s * kv + per_pair * d * s;
    } else {
      flops += 2 * s * (attention + mlp) + per_pair * s * s * (causal(m) ? half : 1);
    }
  }
  const double c = real(m.d_model), rows = real(lossRowsPerSequence(m));
  if (m.family == Family::Vit) flops += 2 * (s - 1) * real(m.patch_dim) * c;
  if (m.family == Family::Bert) flops += 2 * rows * c * c;
  return flops + 2 * rows * real(m.vocab) * c;
}

namespace {

template <typename Add>
void validateExperts(const ModelSpec& m, const Add& add) {
  if (m.experts == 0) {
    if (m.top_k != 0 || m.moe_d_ff != 0 || m.shared_experts != 0)
      add("experts", fmt::format("0, but top_k is {}, moe_d_ff {}, shared_experts {}", m.top_k, m.moe_d_ff,
                                 m.shared_experts));
    return;
  }
  if (m.experts < 2) add("experts", fmt::format("{} is less than 2", m.experts));
  if (m.top_k < 1 || m.top_k > m.experts)
    add("top_k", fmt::format("{} is not between 1 and experts {}", m.top_k, m.experts));
  if (m.moe_d_ff < 1) add("moe_d_ff", fmt::format("{} is not positive", m.moe_d_ff));
  if (m.shared_experts < 0) add("shared_experts", fmt::format("{} is negative", m.shared_experts));
  if (m.dense_first_layers < 0 || m.dense_first_layers >= m.layers)
    add("dense_first_layers",
        fmt::format("{} leaves no layer of {} with experts", m.dense_first_layers, m.layers));
  if (m.moe_every < 1) add("moe_every", fmt::format("{} is not positive", m.moe_every));
  if (!(m.capacity_factor > 0)) add("capacity_factor", fmt::format("{} is not positive", m.capacity_factor));
  if (m.family != Family::Llama && m.family != Family::Gpt2)
    add("experts", "only decoders (gpt2, llama) can have experts in this version");
}

template <typename Add>
void validateLatent(const ModelSpec& m, const Add& add) {
  if (m.kv_rank == 0) {
    if (m.q_rank != 0 || m.rope_dim != 0 || m.v_dim != 0)
      add("kv_rank",
          fmt::format("0, but q_rank is {}, rope_dim {}, v_dim {}", m.q_rank, m.rope_dim, m.v_dim));
    return;
  }
  if (m.kv_rank < 0 || m.q_rank < 0) add("kv_rank", "a rank is negative");
  if (m.v_dim < 1) add("v_dim", fmt::format("{} is not positive", m.v_dim));
  if (m.rope_dim < 0 || m.rope_dim % 2 != 0 || m.rope_dim >= m.d_head)
    add("rope_dim", fmt::format("{} is not even and below d_head {}", m.rope_dim, m.d_head));
  if (m.kv_heads != m.heads)
    add("kv_heads", fmt::format("{}, but latent attention has as many as heads {}", m.kv_heads, m.heads));
  if (m.qkv_bias || m.attn_out_bias) add("qkv_bias", "latent attention has no biases");
}

template <typename Add>
void validateFamily(const ModelSpec& m, const Add& add) {
  if (m.family == Family::T5) {
    if (m.encoder_layers < 1 || m.encoder_layers >= m.layers)
      add("encoder_layers", fmt::format("{} is not between 1 and layers {} - 1", m.encoder_layers, m.layers));
    if (m.decoder_seq_len < 1) add("decoder_seq_len", fmt::format("{} is not positive", m.decoder_seq_len));
    if (m.position != PositionKind::Relative || m.relative_buckets < 1)
      add("position", "t5 needs relative positions and a positive relative_buckets");
  } else if (m.encoder_layers != 0 || m.decoder_seq_len != 0 || m.relative_buckets != 0) {
    add("encoder_layers", "only family t5 has an encoder and a decoder");
  }
  if ((m.family == Family::Vit) != (m.patch_dim > 0))
    add("patch_dim",
        fmt::format("is {}, but the family {} vit", m.patch_dim, m.family == Family::Vit ? "is" : "is not"));
  if (m.family == Family::Vit && m.tied_embedding) add("tied_embedding", "vit has no token table to share");
  if (m.family == Family::Bert && !m.tied_embedding)
    add("tied_embedding", "bert's head shares the token table");
  if (m.post_norm != (m.family == Family::Bert))
    add("post_norm", "is what bert has, and no other family of this version");
}

}  // namespace

std::vector<Issue> validateModel(const ModelSpec& m) {
  std::vector<Issue> issues;
  const auto add = [&](const std::string& field, const std::string& what) {
    issues.push_back({"model." + field, what});
  };
  constexpr std::int64_t kMax = std::int64_t{1} << 32;  // products of two sizes stay far from overflow
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, std::int64_t>>{{"layers", m.layers},
                                                                   {"d_model", m.d_model},
                                                                   {"heads", m.heads},
                                                                   {"kv_heads", m.kv_heads},
                                                                   {"d_head", m.d_head},
                                                                   {"d_ff", m.d_ff},
                                                                   {"vocab", m.vocab},
                                                                   {"seq_len", m.seq_len}}) {
    if (value < 1 || value > kMax) add(name, fmt::format("{} is not between 1 and {}", value, kMax));
  }
  if (!issues.empty()) return issues;
  if (m.heads % m.kv_heads != 0)
    add("kv_heads", fmt::format("{} does not divide heads {}", m.kv_heads, m.heads));
  if (m.position == PositionKind::Learned && m.max_positions < 1)
    add("max_positions", fmt::format("{} is not positive, but positions are learned", m.max_positions));
  if (m.position == PositionKind::Rope && m.d_head % 2 != 0)
    add("d_head", fmt::format("{} is odd, but rotary positions need pairs", m.d_head));
  if (m.gated_mlp && m.activation != ActivationKind::Silu && m.activation != ActivationKind::Gelu)
    add("activation", "a gated MLP needs silu or gelu");
  if (!m.gated_mlp && m.activation == ActivationKind::Silu)
    add("activation",
        "silu without a gated MLP is not supported by this version; supported: gelu, relu, relu2");
  validateExperts(m, add);
  validateLatent(m, add);
  validateFamily(m, add);
  if (!(m.norm_eps > 0)) add("norm_eps", fmt::format("{} is not positive", m.norm_eps));
  if (!(m.rope_theta > 0)) add("rope_theta", fmt::format("{} is not positive", m.rope_theta));
  return issues;
}

std::string modelToJson(const ModelSpec& m) {
  Json json;
  json["schema"] = kSchema;
  json["name"] = m.name;
  json["family"] = kFamilies[static_cast<std::size_t>(m.family)].first;
  json["layers"] = m.layers;
  json["d_model"] = m.d_model;
  json["heads"] = m.heads;
  json["kv_heads"] = m.kv_heads;
  json["d_head"] = m.d_head;
  json["d_ff"] = m.d_ff;
  json["vocab"] = m.vocab;
  json["seq_len"] = m.seq_len;
  json["max_positions"] = m.max_positions;
  json["norm"] = kNorms[static_cast<std::size_t>(m.norm)].first;
  json["activation"] = kActivations[static_cast<std::size_t>(m.activation)].first;
  json["position"] = kPositions[static_cast<std::size_t>(m.position)].first;
  json["gated_mlp"] = m.gated_mlp;
  json["tied_embedding"] = m.tied_embedding;
  json["qkv_bias"] = m.qkv_bias;
  json["attn_out_bias"] = m.attn_out_bias;
  json["mlp_bias"] = m.mlp_bias;
  json["embedding_norm"] = m.embedding_norm;
  const ModelSpec none;
  const auto put = [&](const char* key, auto value, auto unless) {
    if (value != unless) json[key] = value;
  };
  put("post_norm", m.post_norm, none.post_norm);
  put("qk_norm", m.qk_norm, none.qk_norm);
  for (const auto& [key, field] : kOptionalSizes) put(key, m.*field, none.*field);
  put("capacity_factor", m.capacity_factor, none.capacity_factor);
  put("router_bias", m.router_bias, none.router_bias);
  json["norm_eps"] = m.norm_eps;
  json["rope_theta"] = m.rope_theta;
  if (m.dropout) json["dropout"] = true;
  if (!m.not_executed.empty()) json["not_executed"] = m.not_executed;
  json["published_params"] = m.published_params;
  return json.dump(2) + "\n";
}

ModelSpec modelFromJson(const std::string& text, const std::string& source) {
  const Json json = parseJson(text, source);
  if (!json.is_object()) throw Error(ErrorKind::BadInput, "expected a JSON object", source);
  const std::string schema = jsonString(json, "schema", "", source);
  if (schema != kSchema)
    throw Error(ErrorKind::BadInput, fmt::format("schema is '{}', expected '{}'", schema, kSchema), source);
  ModelSpec m;
  m.name = jsonString(json, "name", source, source);
  m.family = readEnum(json, "family", m.family, kFamilies, source);
  const bool llama = m.family == Family::Llama;
  m.layers = jsonInt(json, "layers", 0, source);
  m.d_model = jsonInt(json, "d_model", 0, source);
  m.heads = jsonInt(json, "heads", 0, source);
  m.kv_heads = jsonInt(json, "kv_heads", m.heads, source);
  m.d_head = jsonInt(json, "d_head", m.heads > 0 ? m.d_model / m.heads : 0, source);
  m.d_ff = jsonInt(json, "d_ff", m.d_model < (std::int64_t{1} << 40) ? 4 * m.d_model : 0, source);
  m.vocab = jsonInt(json, "vocab", 0, source);
  m.seq_len = jsonInt(json, "seq_len", 0, source);
  m.norm = readEnum(json, "norm", llama ? NormKind::RmsNorm : NormKind::LayerNorm, kNorms, source);
  m.activation =
      readEnum(json, "activation", llama ? ActivationKind::Silu : ActivationKind::Gelu, kActivations, source);
  m.position =
      readEnum(json, "position", llama ? PositionKind::Rope : PositionKind::Learned, kPositions, source);
  m.max_positions =
      jsonInt(json, "max_positions", m.position == PositionKind::Learned ? m.seq_len : 0, source);
  m.gated_mlp = jsonBool(json, "gated_mlp", llama, source);
  m.tied_embedding = jsonBool(json, "tied_embedding", !llama, source);
  m.qkv_bias = jsonBool(json, "qkv_bias", !llama, source);
  m.attn_out_bias = jsonBool(json, "attn_out_bias", !llama, source);
  m.mlp_bias = jsonBool(json, "mlp_bias", !llama, source);
  m.embedding_norm = jsonBool(json, "embedding_norm", false, source);
  m.dropout = jsonBool(json, "dropout", false, source);
  m.post_norm = jsonBool(json, "post_norm", m.family == Family::Bert, source);
  m.qk_norm = jsonBool(json, "qk_norm", false, source);
  for (const auto& [key, field] : kOptionalSizes) m.*field = jsonInt(json, key, m.*field, source);
  m.capacity_factor = jsonNumber(json, "capacity_factor", 1, source);
  m.router_bias = jsonBool(json, "router_bias", false, source);
  m.norm_eps = jsonNumber(json, "norm_eps", 1e-5, source);
  m.rope_theta = jsonNumber(json, "rope_theta", 10000, source);
  m.not_executed = jsonString(json, "not_executed", "", source);
  m.published_params = jsonInt(json, "published_params", 0, source);
  throwIfAny(validateModel(m), source);
  return m;
}

ModelSpec loadModel(const std::string& name_or_path) {
  std::vector<std::string> names;
  for (const ModelSpec& preset : modelPresets()) {
    if (preset.name == name_or_path) return preset;
    names.push_back(preset.name);
  }
  struct stat info {};
  const bool path = name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json");
  if (!path && ::stat(name_or_path.c_str(), &info) != 0)
    throw Error(
        ErrorKind::BadInput,
        fmt::format(
            "'{}' is neither a preset nor a file; the nearest preset is '{}' (bmtrain models lists them)",
            name_or_path, nearestName(name_or_path, names)));
  const std::string text = readFile(name_or_path);
  const Json json = parseJson(text, name_or_path);
  if (json.is_object() && json.contains("model_type")) return modelFromHfConfig(text, name_or_path);
  return modelFromJson(text, name_or_path);
}

}  // namespace bmt
