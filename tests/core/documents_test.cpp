// Every document that a user can hand in: damaged copies of valid ones give a clear Error or a valid value,
// never a crash; and the mistakes that would otherwise pass without a word are refused.
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "core/cluster_spec.h"
#include "core/model_spec.h"
#include "core/plan.h"
#include "core/schedule.h"

namespace bmt {
namespace {

std::string messageOf(const std::function<void()>& read) {
  try {
    read();
  } catch (const Error& error) {
    EXPECT_EQ(error.exitCode(), 2);
    return error.what();
  }
  return "";
}

void expectRefused(const std::function<void()>& read, const std::string& part) {
  const std::string message = messageOf(read);
  EXPECT_NE(message.find(part), std::string::npos) << "'" << message << "' lacks '" << part << "'";
}

struct Document {
  const char* name;
  std::string text;
  std::function<void(const std::string&)> read;
};

std::vector<Document> documents() {
  const Plan plan =
      planFromText("dp=2,tp=4,pp=2,mb=1,gb=8,schedule=interleaved,chunks=2,layers=3/3/3/3,zero=1,sp");
  const char* const hf =
      R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 100, "rms_norm_eps": 1e-5, "tie_word_embeddings": false})";
  return {{"plan text", planToText(plan), [](const std::string& t) { planFromText(t); }},
          {"plan", planToJson(plan), [](const std::string& t) { planFromJson(t, "plan.json"); }},
          {"model", modelToJson(loadModel("qwen2-0.5b")),
           [](const std::string& t) { modelFromJson(t, "model.json"); }},
          {"config", hf, [](const std::string& t) { modelFromHfConfig(t, "config.json"); }},
          {"cluster", clusterToJson(loadCluster("dgx-h100:4")),
           [](const std::string& t) { clusterFromJson(t, "c.json"); }},
          {"schedule", scheduleToText(makeSchedule(ScheduleKind::OneFOneB, 3, 1, 4)),
           [](const std::string& t) { validateSchedule(scheduleFromText(t, "s.txt")); }}};
}

TEST(Documents, DamagedOnesNeverCrash) {
  std::mt19937 random(11);
  for (const Document& document : documents()) {
    document.read(document.text);  // the original is valid
    for (int i = 0; i < 1500; ++i) {
      std::string text = document.text;
      if (random() % 4 == 0) text.resize(random() % text.size());
      for (unsigned flips = 1 + random() % 4; flips > 0 && !text.empty(); --flips) {
        char& c = text[random() % text.size()];
        static constexpr char kLikely[] = "0123456789-.,:=/{}[]\"eE";
        c = random() % 2 == 0 ? static_cast<char>(random()) : kLikely[random() % (sizeof(kLikely) - 1)];
      }
      try {
        document.read(text);
      } catch (const Error& error) {
        EXPECT_EQ(error.exitCode(), 2) << document.name << ": " << text;
        EXPECT_FALSE(std::string(error.what()).empty());
      }
    }
  }
}

TEST(Documents, ClustersSurviveTheirFile) {
  for (const ClusterPreset& preset : clusterPresets()) {
    const ClusterSpec cluster = loadCluster(preset.name + ":3");
    EXPECT_EQ(clusterFromJson(clusterToJson(cluster), preset.name), cluster);
    EXPECT_EQ(cluster.numNodes(), 3);
    EXPECT_EQ(cluster.nodeOf(cluster.numDevices() - 1), 2);
  }
  expectRefused([] { loadCluster("dgx-h10:2"); }, "dgx-h100");
  expectRefused([] { loadCluster("dgx-h100:0"); }, "'0'");
}

TEST(Documents, WhatWouldPassWithoutAWordIsRefused) {
  const auto json = [](const char* text) { return [text] { planFromJson(text, "plan.json"); }; };
  expectRefused(json(R"({"dp": 1, "dp": 2})"), "'dp' is given twice");
  expectRefused(json(R"({"overlap-grad": true, "no-overlap-grad": true})"), "keep one");
  expectRefused(json(R"({"layers": [9223372036854775807, 9223372036854775807]})"), "9223372036854775807");
  expectRefused(json(R"({"layers": [18446744073709551615]})"), "18446744073709551615");
  expectRefused([] { planFromText("layers=6/6/"); }, "whole number");
  const ModelSpec model = loadModel("gpt2-124m");
  EXPECT_NE(formatIssues(validatePlan(model, localCluster(1), planFromText("loss-chunk=999999999")))
                .find("1024 tokens"),
            std::string::npos);
  EXPECT_NE(
      formatIssues(validatePlan(model, localCluster(2), planFromText("dp=16777216,tp=16777216,pp=16777216")))
          .find("4722366482869645213696 ranks"),
      std::string::npos);
}

TEST(Documents, ConfigsWithUnsupportedPositionsSaySo) {
  const std::string start = R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4)";
  EXPECT_EQ(modelFromHfConfig(start + "}", "c").not_executed, "");
  EXPECT_EQ(modelFromHfConfig(start + R"(, "rope_scaling": null})", "c").not_executed, "");
  const ModelSpec scaled =
      modelFromHfConfig(start + R"(, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})", "c");
  EXPECT_EQ(scaled.not_executed, "rope_scaling");
  EXPECT_EQ(modelFromJson(modelToJson(scaled), "m"), scaled);
  const std::string mistral = R"({"model_type": "mistral", "hidden_size": 64, "num_attention_heads": 8)";
  EXPECT_NE(modelFromHfConfig(mistral + R"(, "sliding_window": 512})", "c").not_executed.find("512"),
            std::string::npos);
  EXPECT_EQ(modelFromHfConfig(mistral + R"(, "sliding_window": null})", "c").not_executed, "");
}

}  // namespace
}  // namespace bmt
