// Model presets. Sizes are those of the authors' papers or released configuration files; published_params is
// the exact element count of the released weights where it is known, otherwise the figure of the paper
// (tests/core/model_spec_test.cpp states the tolerance of each).
#include "core/model_spec.h"

namespace bmt {
namespace {

ModelSpec gpt(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
              std::int64_t vocab, std::int64_t seq, std::int64_t published) {
  ModelSpec m;
  m.name = name;
  m.layers = layers;
  m.d_model = d_model;
  m.heads = m.kv_heads = heads;
  m.d_head = d_model / heads;
  m.d_ff = 4 * d_model;
  m.vocab = vocab;
  m.seq_len = m.max_positions = seq;
  m.published_params = published;
  return m;
}

ModelSpec llama(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
                std::int64_t kv_heads, std::int64_t d_ff, std::int64_t vocab, std::int64_t seq,
                std::int64_t published) {
  ModelSpec m;
  m.name = name;
  m.family = Family::Llama;
  m.layers = layers;
  m.d_model = d_model;
  m.heads = heads;
  m.kv_heads = kv_heads;
  m.d_head = d_model / heads;
  m.d_ff = d_ff;
  m.vocab = vocab;
  m.seq_len = seq;
  m.norm = NormKind::RmsNorm;
  m.activation = ActivationKind::Silu;
  m.position = PositionKind::Rope;
  m.gated_mlp = true;
  m.tied_embedding = m.qkv_bias = m.attn_out_bias = m.mlp_bias = false;
  m.published_params = published;
  return m;
}

ModelSpec llama3(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
                 std::int64_t d_ff, std::int64_t published) {
  ModelSpec m = llama(name, layers, d_model, heads, 8, d_ff, 128256, 8192, published);
  m.rope_theta = 500000;
  return m;
}

ModelSpec qwen2(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
                std::int64_t kv_heads, std::int64_t d_ff, std::int64_t vocab, bool tied,
                std::int64_t published) {
  ModelSpec m = llama(name, layers, d_model, heads, kv_heads, d_ff, vocab, 4096, published);
  m.qkv_bias = true;
  m.tied_embedding = tied;
  m.norm_eps = 1e-6;
  m.rope_theta = 1000000;
  return m;
}

// OPT: ReLU; its position table has two extra rows (padding offset).
ModelSpec opt(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
              std::int64_t published) {
  ModelSpec m = gpt(name, layers, d_model, heads, 50272, 2048, published);
  m.activation = ActivationKind::Relu;
  m.max_positions = 2050;
  return m;
}

// BLOOM: ALiBi and a LayerNorm after the embedding.
ModelSpec bloom(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
                std::int64_t published) {
  ModelSpec m = gpt(name, layers, d_model, heads, 250880, 2048, published);
  m.position = PositionKind::Alibi;
  m.max_positions = 0;
  m.embedding_norm = true;
  return m;
}

// Mixture of experts on a llama-like decoder; every layer has experts.
ModelSpec withExperts(ModelSpec m, std::int64_t experts, std::int64_t top_k, std::int64_t d_ff) {
  m.experts = experts;
  m.top_k = top_k;
  m.moe_d_ff = d_ff;
  return m;
}

ModelSpec qwen3Moe(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
                   std::int64_t dense_ff, std::int64_t expert_ff, std::int64_t published) {
  ModelSpec m = withExperts(llama(name, layers, d_model, heads, 4, dense_ff, 151936, 4096, published), 128, 8,
                            expert_ff);
  m.d_head = 128;
  m.qk_norm = true;
  m.norm_eps = 1e-6;
  m.rope_theta = 1000000;
  return m;
}

// DeepSeek-V2 and V3: latent attention with heads of 128 + 64 rotated elements.
ModelSpec deepseek(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
                   std::int64_t q_rank, std::int64_t d_ff, std::int64_t vocab, std::int64_t experts,
                   std::int64_t top_k, std::int64_t expert_ff, std::int64_t published) {
  ModelSpec m = withExperts(llama(name, layers, d_model, heads, heads, d_ff, vocab, 4096, published), experts,
                            top_k, expert_ff);
  m.d_head = 192;
  m.q_rank = q_rank;
  m.kv_rank = 512;
  m.rope_dim = 64;
  m.v_dim = 128;
  m.shared_experts = 2;
  m.dense_first_layers = 1;
  m.norm_eps = 1e-6;
  return m;
}

ModelSpec deepseekV3() {
  ModelSpec m = deepseek("deepseek-v3", 61, 7168, 128, 1536, 18432, 129280, 256, 8, 2048, 671026419200);
  m.shared_experts = 1;
  m.dense_first_layers = 3;
  m.router_bias = true;
  return m;
}

ModelSpec deepseekMoe() {
  ModelSpec m =
      withExperts(llama("deepseek-moe-16b", 28, 2048, 16, 16, 10944, 102400, 4096, 16375728128), 64, 6, 1408);
  m.shared_experts = 2;
  m.dense_first_layers = 1;
  return m;
}

ModelSpec grok1() {
  ModelSpec m = withExperts(llama("grok-1", 64, 6144, 48, 8, 32768, 131072, 8192, 314000000000), 8, 2, 32768);
  m.activation = ActivationKind::Gelu;
  m.tied_embedding = true;
  return m;
}

// Nemotron: squared ReLU, LayerNorm, rotary positions.
ModelSpec nemotron(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
                   std::int64_t kv_heads, std::int64_t published) {
  ModelSpec m = llama(name, layers, d_model, heads, kv_heads, 4 * d_model, 256000, 4096, published);
  m.norm = NormKind::LayerNorm;
  m.activation = ActivationKind::SquaredRelu;
  m.gated_mlp = false;
  return m;
}

ModelSpec gemma(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
                std::int64_t kv_heads, std::int64_t d_ff, std::int64_t published) {
  ModelSpec m = llama(name, layers, d_model, heads, kv_heads, d_ff, 256000, 8192, published);
  m.d_head = 256;
  m.activation = ActivationKind::Gelu;
  m.tied_embedding = true;
  m.norm_eps = 1e-6;
  return m;
}

// Devlin et al. 2019; counts of the released weights with the masked language head.
ModelSpec bert(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
               std::int64_t published) {
  ModelSpec m = gpt(name, layers, d_model, heads, 30522, 512, published);
  m.family = Family::Bert;
  m.post_norm = m.embedding_norm = true;
  m.token_types = 2;
  m.norm_eps = 1e-12;
  return m;
}

// Dosovitskiy et al. 2021: patches of a 224 x 224 image, 1,000 classes.
ModelSpec vit(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
              std::int64_t d_ff, std::int64_t patch, std::int64_t published) {
  const std::int64_t patches = (224 / patch) * (224 / patch);
  ModelSpec m = gpt(name, layers, d_model, heads, 1000, patches + 1, published);
  m.family = Family::Vit;
  m.d_ff = d_ff;
  m.patch_dim = 3 * patch * patch;
  m.tied_embedding = false;
  m.norm_eps = 1e-6;
  return m;
}

// Raffel et al. 2020; `layers` of each stack, 512 tokens in and 114 out (their pre-training lengths).
ModelSpec t5(const char* name, std::int64_t layers, std::int64_t d_model, std::int64_t heads,
             std::int64_t d_head, std::int64_t d_ff, std::int64_t published) {
  ModelSpec m = gpt(name, 2 * layers, d_model, heads, 32128, 512, published);
  m.family = Family::T5;
  m.d_head = d_head;
  m.d_ff = d_ff;
  m.encoder_layers = layers;
  m.decoder_seq_len = 114;
  m.relative_buckets = 32;
  m.max_positions = 0;
  m.norm = NormKind::RmsNorm;
  m.activation = ActivationKind::Relu;
  m.position = PositionKind::Relative;
  m.qkv_bias = m.attn_out_bias = m.mlp_bias = false;
  m.norm_eps = 1e-6;
  return m;
}

std::vector<ModelSpec> makePresets() {
  std::vector<ModelSpec> presets{
      // Radford et al. 2019; counts of the released weights.
      gpt("gpt2-124m", 12, 768, 12, 50257, 1024, 124439808),
      gpt("gpt2-355m", 24, 1024, 16, 50257, 1024, 354823168),
      gpt("gpt2-774m", 36, 1280, 20, 50257, 1024, 774030080),
      gpt("gpt2-1.5b", 48, 1600, 25, 50257, 1024, 1557611200),
      // Brown et al. 2020, Table 2.1 (rounded by the authors).
      gpt("gpt3-125m", 12, 768, 12, 50257, 2048, 125000000),
      gpt("gpt3-350m", 24, 1024, 16, 50257, 2048, 356000000),
      gpt("gpt3-760m", 24, 1536, 16, 50257, 2048, 760000000),
      gpt("gpt3-1.3b", 24, 2048, 16, 50257, 2048, 1300000000),
      gpt("gpt3-2.7b", 32, 2560, 32, 50257, 2048, 2700000000),
      gpt("gpt3-6.7b", 32, 4096, 32, 50257, 2048, 6700000000),
      gpt("gpt3-13b", 40, 5120, 40, 50257, 2048, 13000000000),
      gpt("gpt3-175b", 96, 12288, 96, 50257, 2048, 175000000000),
      // Narayanan et al. 2021, Korthikanti et al. 2022, Smith et al. 2022.
      gpt("megatron-22b", 48, 6144, 64, 51200, 2048, 22000000000),
      gpt("megatron-175b", 96, 12288, 96, 51200, 2048, 175000000000),
      gpt("megatron-530b", 105, 20480, 128, 51200, 2048, 530000000000),
      gpt("megatron-1t", 128, 25600, 160, 51200, 2048, 1008000000000),
      // Touvron et al. 2023; counts of the released weights.
      llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048, 6738415616),
      llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048, 13015864320),
      llama("llama-33b", 60, 6656, 52, 52, 17920, 32000, 2048, 32528943616),
      llama("llama-65b", 80, 8192, 64, 64, 22016, 32000, 2048, 65285660672),
      llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, 6738415616),
      llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000, 4096, 13015864320),
      llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000, 4096, 68976648192),
      llama3("llama3-8b", 32, 4096, 32, 14336, 8030261248),
      llama3("llama3-70b", 80, 8192, 64, 28672, 70553706496),
      llama3("llama3.1-405b", 126, 16384, 128, 53248, 405853388800),
      qwen2("qwen2-0.5b", 24, 896, 14, 2, 4864, 151936, true, 494032768),
      qwen2("qwen2-1.5b", 28, 1536, 12, 2, 8960, 151936, true, 1543714304),
      qwen2("qwen2-7b", 28, 3584, 28, 4, 18944, 152064, false, 7615616512),
      qwen2("qwen2-72b", 80, 8192, 64, 8, 29568, 152064, false, 72706203648),
      llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 8192, 7241732096),
      // Zhang et al. 2022.
      opt("opt-125m", 12, 768, 12, 125239296),
      opt("opt-1.3b", 24, 2048, 32, 1315758080),
      opt("opt-2.7b", 32, 2560, 32, 2651596800),
      opt("opt-6.7b", 32, 4096, 32, 6658473984),
      opt("opt-13b", 40, 5120, 40, 12853473280),
      opt("opt-30b", 48, 7168, 56, 29974540288),
      opt("opt-66b", 64, 9216, 72, 66000000000),
      // BigScience 2022.
      bloom("bloom-560m", 24, 1024, 16, 559214592),
      bloom("bloom-1b7", 24, 2048, 16, 1722408960),
      bloom("bloom-7b1", 30, 4096, 32, 7069016064),
      bloom("bloom-176b", 70, 14336, 112, 176247271424),
      // Mixture of experts. Jiang et al. 2024 (Mixtral), DeepSeek-AI 2024, Qwen team 2025: counts of the
      // released weights, DeepSeek-V3 without its prediction module; xAI 2024 (rounded by the authors).
      withExperts(llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 4096, 46702792704), 8, 2, 14336),
      withExperts(llama("mixtral-8x22b", 56, 6144, 48, 8, 16384, 32768, 4096, 140630071296), 8, 2, 16384),
      deepseekMoe(),
      deepseek("deepseek-v2-lite", 27, 2048, 16, 0, 10944, 102400, 64, 6, 1408, 15706484224),
      deepseek("deepseek-v2", 60, 5120, 128, 1536, 12288, 102400, 160, 6, 1536, 235741434880),
      deepseekV3(),
      qwen3Moe("qwen3-30b-a3b", 48, 2048, 32, 6144, 768, 30532122624),
      qwen3Moe("qwen3-235b-a22b", 94, 4096, 64, 12288, 1536, 235093634560),
      grok1(),
      // Parmar et al. 2024, NVIDIA 2024 (rounded by the authors); Gemma team 2024.
      nemotron("nemotron4-15b", 32, 6144, 48, 8, 15600000000),
      nemotron("nemotron4-340b", 96, 18432, 96, 8, 340000000000),
      gemma("gemma-2b", 18, 2048, 8, 1, 16384, 2506172416),
      gemma("gemma-7b", 28, 3072, 16, 16, 24576, 8537680896),
      bert("bert-base", 12, 768, 12, 109514298),
      bert("bert-large", 24, 1024, 16, 335174458),
      vit("vit-b-16", 12, 768, 12, 3072, 16, 86567656),
      vit("vit-l-16", 24, 1024, 16, 4096, 16, 304326632),
      vit("vit-h-14", 32, 1280, 16, 5120, 14, 632045800),
      t5("t5-small", 6, 512, 8, 64, 2048, 60506624),
      t5("t5-base", 12, 768, 12, 64, 3072, 222903552),
      t5("t5-large", 24, 1024, 16, 64, 4096, 737668096),
      t5("t5-3b", 24, 1024, 32, 128, 16384, 2851598336),
      t5("t5-11b", 24, 1024, 128, 128, 65536, 11307321344),
  };
  return presets;
}

}  // namespace

const std::vector<ModelSpec>& modelPresets() {
  static const std::vector<ModelSpec> presets = makePresets();
  return presets;
}

}  // namespace bmt
