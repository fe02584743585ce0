// Parameter counts of the presets against the published ones, and reading of Hugging Face configurations.
#include "core/model_spec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <set>

namespace bmt {
namespace {

// Models whose authors published a rounded figure only; all others state the exact element count of the
// released weights. GPT-3 (Brown et al. 2020, Table 2.1), Megatron (names of the papers), OPT-66B (Zhang et
// al. 2022), Grok-1 (xAI 2024), Nemotron-4 (NVIDIA 2024).
bool roundedByItsAuthors(const std::string& name) {
  return name.starts_with("gpt3-") || name.starts_with("megatron-") || name == "opt-66b" ||
         name.starts_with("nemotron") || name == "grok-1";
}

TEST(ModelPresets, HaveThePublishedParameterCounts) {
  ASSERT_GE(modelPresets().size(), 25U);
  std::set<std::string> names;
  for (const ModelSpec& model : modelPresets()) {
    EXPECT_TRUE(names.insert(model.name).second) << model.name << " is there twice";
    EXPECT_TRUE(validateModel(model).empty()) << model.name << ": " << formatIssues(validateModel(model));
    ASSERT_GT(model.published_params, 0) << model.name;
    if (roundedByItsAuthors(model.name)) {
      const double error =
          static_cast<double>(numParams(model)) / static_cast<double>(model.published_params) - 1;
      EXPECT_LT(std::fabs(error), 0.02)
          << model.name << ": " << numParams(model) << ", published " << model.published_params;
    } else {
      EXPECT_EQ(numParams(model), model.published_params) << model.name;
    }
  }
}

// Written out by hand for the smallest GPT-2, so that numParams is not only compared with tables.
TEST(ModelSpec, CountsGpt2ByHand) {
  const std::int64_t c = 768;
  const std::int64_t layer = 2 * (c + c)          // two LayerNorms
                             + c * 3 * c + 3 * c  // query, key, value
                             + c * c + c          // attention output
                             + c * 4 * c + 4 * c  // up
                             + 4 * c * c + c;     // down
  const ModelSpec model = loadModel("gpt2-124m");
  EXPECT_EQ(numLayerParams(model), layer);
  EXPECT_EQ(numParams(model), 50257 * c + 1024 * c + 12 * layer + 2 * c);
}

TEST(ModelSpec, UntyingAddsOneEmbedding) {
  ModelSpec model = loadModel("gpt2-124m");
  const std::int64_t tied = numParams(model);
  model.tied_embedding = false;
  EXPECT_EQ(numParams(model) - tied, 50257 * 768);
}

TEST(ModelSpec, EveryPresetSurvivesItsFile) {
  for (const ModelSpec& model : modelPresets())
    EXPECT_EQ(modelFromJson(modelToJson(model), "text"), model) << model.name;
}

TEST(ModelSpec, UnknownNameSuggestsTheNearest) {
  try {
    loadModel("llama3-8x");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.exitCode(), 2);
    EXPECT_NE(std::string(error.what()).find("llama3-8b"), std::string::npos) << error.what();
  }
}

TEST(ModelSpec, ReportsEveryProblemAtOnce) {
  ModelSpec model = loadModel("llama2-70b");
  model.vocab = 0;
  model.layers = -1;
  EXPECT_EQ(validateModel(model).size(), 2U) << formatIssues(validateModel(model));
  model = loadModel("llama2-70b");
  model.kv_heads = 7;
  const std::string text = formatIssues(validateModel(model));
  EXPECT_NE(text.find("7"), std::string::npos) << text;
  EXPECT_NE(text.find("64"), std::string::npos) << text;
}

TEST(HfConfig, Gpt2) {
  const ModelSpec model = modelFromHfConfig(
      R"({"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 1024, "vocab_size": 50257,
          "n_inner": null, "activation_function": "gelu_new"})",
      "config.json");
  EXPECT_EQ(numParams(model), 354823168);
}

TEST(HfConfig, Llama3WithGroupedQueries) {
  const ModelSpec model = modelFromHfConfig(
      R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
          "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "rms_norm_eps": 1e-05,
          "rope_theta": 500000.0, "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": false})",
      "config.json");
  EXPECT_EQ(numParams(model), 8030261248);
  EXPECT_EQ(model.rope_theta, 500000.0);
}

TEST(HfConfig, Qwen2HasBiasOnlyOnQueryKeyValue) {
  const ModelSpec model = modelFromHfConfig(
      R"({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
          "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936, "tie_word_embeddings": true})",
      "config.json");
  EXPECT_EQ(numParams(model), 494032768);
  EXPECT_TRUE(model.qkv_bias);
  EXPECT_FALSE(model.attn_out_bias);
}

TEST(HfConfig, RefusesWhatItCannotRepresent) {
  for (const char* text :
       {R"({"model_type": "mamba"})",                                       //
        R"({"model_type": "gpt2", "activation_function": "gelu_banana"})",  //
        R"({"model_type": "opt", "do_layer_norm_before": false})",          //
        R"({"model_type": "gpt2", "n_layer": "twelve"})", R"([1, 2])", R"({"model_type": )"}) {
    EXPECT_THROW(modelFromHfConfig(text, "config.json"), Error) << text;
  }
}

}  // namespace
}  // namespace bmt
