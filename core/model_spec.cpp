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

constexpr Names<Family, 2> kFamilies{{{"gpt2", Family::Gpt2}, {"llama", Family::Llama}}};
constexpr Names<NormKind, 2> kNorms{{{"layernorm", NormKind::LayerNorm}, {"rmsnorm", NormKind::RmsNorm}}};
constexpr Names<ActivationKind, 3> kActivations{
    {{"gelu", ActivationKind::Gelu}, {"relu", ActivationKind::Relu}, {"silu", ActivationKind::Silu}}};
constexpr Names<PositionKind, 3> kPositions{
    {{"learned", PositionKind::Learned}, {"rope", PositionKind::Rope}, {"alibi", PositionKind::Alibi}}};

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

}  // namespace

std::int64_t numLayerParams(const ModelSpec& m) {
  const std::int64_t q = m.heads * m.d_head, kv = m.kv_heads * m.d_head;
  const std::int64_t inner = (m.gated_mlp ? 2 : 1) * m.d_ff;
  std::int64_t count = m.d_model * (q + 2 * kv) + q * m.d_model + m.d_model * inner + m.d_ff * m.d_model;
  if (m.qkv_bias) count += q + 2 * kv;
  if (m.attn_out_bias) count += m.d_model;
  if (m.mlp_bias) count += inner + m.d_model;
  return count + 2 * normParams(m);
}

std::int64_t numParams(const ModelSpec& m) {
  std::int64_t count = m.vocab * m.d_model * (m.tied_embedding ? 1 : 2);
  if (m.position == PositionKind::Learned) count += m.max_positions * m.d_model;
  if (m.embedding_norm) count += normParams(m);
  return count + m.layers * numLayerParams(m) + normParams(m);
}

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
  if (m.gated_mlp && m.activation != ActivationKind::Silu) add("activation", "a gated MLP needs silu");
  if (!m.gated_mlp && m.activation == ActivationKind::Silu)
    add("activation", "silu without a gated MLP is not supported by this version; supported: gelu, relu");
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
