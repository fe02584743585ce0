// Hugging Face config.json -> ModelSpec. Missing fields take the defaults of the model type's configuration
// class.
#include <fmt/format.h>

#include "core/json.h"
#include "core/model_spec.h"

namespace bmt {
namespace {

class HfConfig {
 public:
  HfConfig(const Json& json, const std::string& source) : json_(json), source_(source) {}
  std::int64_t integer(const char* key, std::int64_t fallback) const {
    return null(key) ? fallback : jsonInt(json_, key, fallback, source_);
  }
  double number(const char* key, double fallback) const {
    return null(key) ? fallback : jsonNumber(json_, key, fallback, source_);
  }
  bool boolean(const char* key, bool fallback) const {
    return null(key) ? fallback : jsonBool(json_, key, fallback, source_);
  }
  std::string text(const char* key, const char* fallback) const {
    return null(key) ? fallback : jsonString(json_, key, fallback, source_);
  }
  [[noreturn]] void refuse(const std::string& what) const { throw Error(ErrorKind::BadInput, what, source_); }
  bool absent(const char* key) const { return !json_.contains(key); }
  bool present(const char* key) const { return json_.contains(key) && !null(key); }

 private:
  bool null(const char* key) const { return json_.contains(key) && json_.at(key).is_null(); }
  const Json& json_;
  const std::string& source_;
};

ActivationKind activation(const HfConfig& c, const char* key, const char* fallback) {
  const std::string name = c.text(key, fallback);
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return ActivationKind::Gelu;
  if (name == "relu") return ActivationKind::Relu;
  if (name == "relu2") return ActivationKind::SquaredRelu;
  if (name == "silu" || name == "swish") return ActivationKind::Silu;
  c.refuse(
      fmt::format("field '{}': activation '{}' is not supported; supported: gelu_new, gelu_pytorch_tanh, "
                  "relu, relu2, silu",
                  key, name));
}

ModelSpec gpt2(const HfConfig& c) {
  ModelSpec m;
  m.layers = c.integer("n_layer", 12);
  m.d_model = c.integer("n_embd", 768);
  m.heads = m.kv_heads = c.integer("n_head", 12);
  m.d_ff = c.integer("n_inner", 4 * m.d_model);
  m.vocab = c.integer("vocab_size", 50257);
  m.seq_len = m.max_positions = c.integer("n_positions", 1024);
  m.activation = activation(c, "activation_function", "gelu_new");
  m.norm_eps = c.number("layer_norm_epsilon", 1e-5);
  m.tied_embedding = c.boolean("tie_word_embeddings", true);
  return m;
}

ModelSpec llamaLike(const HfConfig& c, const std::string& type) {
  const bool qwen = type == "qwen2", mistral = type == "mistral";
  ModelSpec m;
  m.family = Family::Llama;
  m.layers = c.integer("num_hidden_layers", 32);
  m.d_model = c.integer("hidden_size", 4096);
  m.heads = c.integer("num_attention_heads", 32);
  m.kv_heads = c.integer("num_key_value_heads", mistral ? 8 : qwen ? 32 : m.heads);
  m.d_head = c.integer("head_dim", m.heads > 0 ? m.d_model / m.heads : 0);
  m.d_ff = c.integer("intermediate_size", mistral ? 14336 : qwen ? 22016 : 11008);
  m.vocab = c.integer("vocab_size", qwen ? 151936 : 32000);
  m.seq_len = c.integer("max_position_embeddings", qwen ? 32768 : mistral ? 131072 : 2048);
  m.norm = NormKind::RmsNorm;
  m.activation = activation(c, "hidden_act", "silu");
  m.position = PositionKind::Rope;
  m.gated_mlp = true;
  m.norm_eps = c.number("rms_norm_eps", 1e-6);
  m.rope_theta = c.number("rope_theta", 10000);
  // Both change which positions attend to which, or at what angle; their cost is that of plain attention or
  // less.
  const std::int64_t window =
      c.integer("sliding_window", mistral && c.absent("sliding_window") ? 4096 : m.seq_len);
  if (c.boolean("use_sliding_window", mistral) && window < m.seq_len)
    m.not_executed = fmt::format("sliding_window {} below the sequence length {}", window, m.seq_len);
  if (c.present("rope_scaling")) m.not_executed = "rope_scaling";
  m.tied_embedding = c.boolean("tie_word_embeddings", false);
  m.qkv_bias = qwen || c.boolean("attention_bias", false);
  m.attn_out_bias = !qwen && c.boolean("attention_bias", false);
  m.mlp_bias = c.boolean("mlp_bias", false);
  return m;
}

ModelSpec opt(const HfConfig& c) {
  ModelSpec m;
  m.layers = c.integer("num_hidden_layers", 12);
  m.d_model = c.integer("hidden_size", 768);
  if (c.integer("word_embed_proj_dim", m.d_model) != m.d_model)
    c.refuse(fmt::format(
        "field 'word_embed_proj_dim': {} differs from hidden_size {}; an embedding projection is not "
        "supported",
        c.integer("word_embed_proj_dim", 0), m.d_model));
  if (!c.boolean("do_layer_norm_before", true))
    c.refuse("field 'do_layer_norm_before': false (post-norm) is not supported");
  m.heads = m.kv_heads = c.integer("num_attention_heads", 12);
  m.d_ff = c.integer("ffn_dim", 3072);
  m.vocab = c.integer("vocab_size", 50272);
  m.seq_len = c.integer("max_position_embeddings", 2048);
  m.max_positions = m.seq_len + 2;
  m.activation = activation(c, "activation_function", "relu");
  m.qkv_bias = m.attn_out_bias = m.mlp_bias = c.boolean("enable_bias", true);
  m.tied_embedding = c.boolean("tie_word_embeddings", true);
  return m;
}

ModelSpec bloom(const HfConfig& c) {
  ModelSpec m;
  m.layers = c.integer("n_layer", c.integer("num_hidden_layers", 2));
  m.d_model = c.integer("hidden_size", c.integer("n_embed", 64));
  m.heads = m.kv_heads = c.integer("n_head", c.integer("num_attention_heads", 8));
  m.d_ff = 4 * m.d_model;
  m.vocab = c.integer("vocab_size", 250880);
  m.seq_len = c.integer("seq_length", 2048);
  m.position = PositionKind::Alibi;
  m.embedding_norm = true;
  m.norm_eps = c.number("layer_norm_epsilon", 1e-5);
  return m;
}

ModelSpec mixtral(const HfConfig& c) {
  ModelSpec m = llamaLike(c, "mixtral");
  m.kv_heads = c.integer("num_key_value_heads", 8);
  m.d_ff = m.moe_d_ff = c.integer("intermediate_size", 14336);
  m.experts = c.integer("num_local_experts", 8);
  m.top_k = c.integer("num_experts_per_tok", 2);
  return m;
}

ModelSpec deepseek(const HfConfig& c, const std::string& type) {
  const bool v3 = type == "deepseek_v3";
  ModelSpec m = llamaLike(c, type);
  m.kv_heads = m.heads;
  m.d_ff = c.integer("intermediate_size", v3 ? 18432 : 11008);
  m.q_rank = c.integer("q_lora_rank", c.present("kv_lora_rank") && !c.present("q_lora_rank") ? 0 : 1536);
  m.kv_rank = c.integer("kv_lora_rank", 512);
  m.rope_dim = c.integer("qk_rope_head_dim", 64);
  m.d_head = m.rope_dim + c.integer("qk_nope_head_dim", 128);
  m.v_dim = c.integer("v_head_dim", 128);
  m.experts = c.integer("n_routed_experts", v3 ? 256 : 0);
  if (m.experts > 0) {
    m.top_k = c.integer("num_experts_per_tok", v3 ? 8 : 6);
    m.moe_d_ff = c.integer("moe_intermediate_size", v3 ? 2048 : 1407);
    m.shared_experts = c.integer("n_shared_experts", v3 ? 1 : 0);
    m.dense_first_layers = c.integer("first_k_dense_replace", v3 ? 3 : 0);
    m.moe_every = c.integer("moe_layer_freq", 1);
    m.router_bias = v3;
  }
  return m;
}

// BERT and ViT use the exact GELU; the difference from the tanh form is simulated as nothing.
ActivationKind exactGelu(const HfConfig& c, ModelSpec& m) {
  if (c.text("hidden_act", "gelu") != "gelu") return activation(c, "hidden_act", "gelu");
  m.not_executed = "the exact (erf) GELU";
  return ActivationKind::Gelu;
}

ModelSpec bert(const HfConfig& c) {
  ModelSpec m;
  m.family = Family::Bert;
  m.post_norm = m.embedding_norm = true;
  m.layers = c.integer("num_hidden_layers", 12);
  m.d_model = c.integer("hidden_size", 768);
  m.heads = m.kv_heads = c.integer("num_attention_heads", 12);
  m.d_ff = c.integer("intermediate_size", 3072);
  m.vocab = c.integer("vocab_size", 30522);
  m.seq_len = m.max_positions = c.integer("max_position_embeddings", 512);
  m.token_types = c.integer("type_vocab_size", 2);
  m.activation = exactGelu(c, m);
  m.norm_eps = c.number("layer_norm_eps", 1e-12);
  return m;
}

ModelSpec vit(const HfConfig& c, const Json& json) {
  ModelSpec m;
  m.family = Family::Vit;
  m.layers = c.integer("num_hidden_layers", 12);
  m.d_model = c.integer("hidden_size", 768);
  m.heads = m.kv_heads = c.integer("num_attention_heads", 12);
  m.d_ff = c.integer("intermediate_size", 3072);
  const std::int64_t image = c.integer("image_size", 224), patch = c.integer("patch_size", 16);
  if (patch < 1 || image % patch != 0)
    c.refuse(fmt::format("field 'patch_size': {} does not divide image_size {}", patch, image));
  m.patch_dim = c.integer("num_channels", 3) * patch * patch;
  m.seq_len = m.max_positions = (image / patch) * (image / patch) + 1;
  const bool labels = json.contains("id2label") && json.at("id2label").is_object();
  m.vocab = c.integer("num_labels", labels ? static_cast<std::int64_t>(json.at("id2label").size()) : 1000);
  m.qkv_bias = c.boolean("qkv_bias", true);
  m.activation = exactGelu(c, m);
  m.norm_eps = c.number("layer_norm_eps", 1e-12);
  m.tied_embedding = false;
  return m;
}

ModelSpec t5(const HfConfig& c) {
  ModelSpec m;
  m.family = Family::T5;
  m.encoder_layers = c.integer("num_layers", 6);
  m.layers = m.encoder_layers + c.integer("num_decoder_layers", m.encoder_layers);
  m.d_model = c.integer("d_model", 512);
  m.heads = m.kv_heads = c.integer("num_heads", 8);
  m.d_head = c.integer("d_kv", 64);
  m.d_ff = c.integer("d_ff", 2048);
  m.vocab = c.integer("vocab_size", 32128);
  m.seq_len = c.integer("n_positions", 512);
  m.decoder_seq_len =
      114;  // targets of the span corruption of 512 tokens (Raffel et al. 2020, section 3.1.4)
  m.relative_buckets = c.integer("relative_attention_num_buckets", 32);
  const std::string act = c.text("feed_forward_proj", "relu");
  m.gated_mlp = act.starts_with("gated-");
  m.activation = act.ends_with("gelu")   ? ActivationKind::Gelu
                 : act.ends_with("silu") ? ActivationKind::Silu
                                         : ActivationKind::Relu;
  m.norm = NormKind::RmsNorm;
  m.position = PositionKind::Relative;
  m.qkv_bias = m.attn_out_bias = m.mlp_bias = false;
  m.norm_eps = c.number("layer_norm_epsilon", 1e-6);
  m.tied_embedding = c.boolean("tie_word_embeddings", true);
  return m;
}

}  // namespace

ModelSpec modelFromHfConfig(const std::string& text, const std::string& source) {
  const Json json = parseJson(text, source);
  if (!json.is_object()) throw Error(ErrorKind::BadInput, "expected a JSON object", source);
  const HfConfig config(json, source);
  const std::string type = config.text("model_type", "");
  ModelSpec m;
  if (type == "gpt2") {
    m = gpt2(config);
  } else if (type == "llama" || type == "mistral" || type == "qwen2") {
    m = llamaLike(config, type);
  } else if (type == "opt") {
    m = opt(config);
  } else if (type == "bloom") {
    m = bloom(config);
  } else if (type == "mixtral") {
    m = mixtral(config);
  } else if (type == "deepseek_v2" || type == "deepseek_v3") {
    m = deepseek(config, type);
  } else if (type == "bert") {
    m = bert(config);
  } else if (type == "vit") {
    m = vit(config, json);
  } else if (type == "t5") {
    m = t5(config);
  } else {
    config.refuse(
        fmt::format("model_type '{}' is not supported; supported: gpt2, llama, mistral, qwen2, opt, "
                    "bloom, mixtral, deepseek_v2, deepseek_v3, bert, vit, t5",
                    type));
  }
  if (m.d_head == 0 && m.heads > 0) m.d_head = m.d_model / m.heads;
  m.name = config.text("_name_or_path", source.c_str());
  if (m.name.empty()) m.name = source;
  throwIfAny(validateModel(m), source);
  return m;
}

}  // namespace bmt
