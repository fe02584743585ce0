// JSON and files: the place of a syntax error, typed access, and writing whole files or none.
#include "core/json.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>

#include "core/suggest.h"
#include "tests/support/run_program.h"

namespace bmt {
namespace {

namespace fs = std::filesystem;

std::string messageOf(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    EXPECT_EQ(error.exitCode(), error.kind() == ErrorKind::BadInput ? 2 : 1);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Json, SyntaxErrorSaysSourceLineAndColumn) {
  const auto message = [](const std::string& text) {
    return messageOf([&] { parseJson(text, "plan.json"); });
  };
  EXPECT_NE(message("{\n  \"tp\": 2,\n  \"pp\" 4\n}").find("line 3, column 8"), std::string::npos)
      << message("{\n  \"tp\": 2,\n  \"pp\" 4\n}");
  EXPECT_NE(message("").find("line 1, column 1"), std::string::npos) << message("");
  EXPECT_NE(message("x").find("line 1, column 1"), std::string::npos) << message("x");
  EXPECT_NE(message("[1,\n").find("unexpected end of input"), std::string::npos) << message("[1,\n");
  EXPECT_NE(message("[1,\n").find("plan.json"), std::string::npos);
}

TEST(Json, NumberThatNoDoubleHoldsIsBadInput) {
  const std::string message = messageOf([] { parseJson("{\"lr\": 1e999}", "plan.json"); });
  EXPECT_NE(message.find("plan.json"), std::string::npos) << message;
  EXPECT_NE(message.find("1e999"), std::string::npos) << message;
}

TEST(Json, DeepNestingIsParsedOrRefusedButNeverOverflowsTheStack) {
  const std::string deep(200000, '[');
  EXPECT_THROW(parseJson(deep, "deep"), Error);
  EXPECT_NO_THROW(parseJson(deep + std::string(200000, ']'), "deep"));
}

TEST(Json, FieldsAreTypedAndTheFallbackIsForAbsentOnes) {
  const Json json =
      parseJson(R"({"tp": 8, "lr": 0.5, "sp": true, "name": "x", "big": 18446744073709551615})", "p");
  EXPECT_EQ(jsonInt(json, "tp", 1, "p"), 8);
  EXPECT_EQ(jsonInt(json, "pp", 3, "p"), 3);
  EXPECT_EQ(jsonNumber(json, "lr", 0, "p"), 0.5);
  EXPECT_EQ(jsonNumber(json, "tp", 0, "p"), 8.0);
  EXPECT_TRUE(jsonBool(json, "sp", false, "p"));
  EXPECT_EQ(jsonString(json, "name", "", "p"), "x");
  const std::string message = messageOf([&] { jsonInt(json, "name", 0, "plan.json"); });
  for (const char* part : {"plan.json", "'name'", "an integer", "\"x\""})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_THROW(jsonInt(json, "lr", 0, "p"), Error);   // 0.5 is not silently 0
  EXPECT_THROW(jsonInt(json, "big", 0, "p"), Error);  // above INT64_MAX
  EXPECT_THROW(jsonBool(json, "tp", false, "p"), Error);
  EXPECT_THROW(jsonString(json, "tp", "", "p"), Error);
  EXPECT_THROW(jsonNumber(json, "name", 0, "p"), Error);
}

TEST(Json, AListDoesNotPassForAnObjectWithoutFields) {
  for (const char* text : {"[1, 2]", "3", "null", "\"tp\""}) {
    const Json json = parseJson(text, "p");
    EXPECT_THROW(jsonInt(json, "tp", 1, "p"), Error) << text;
    EXPECT_THROW(jsonString(json, "tp", "", "p"), Error) << text;
  }
}

TEST(Files, AreReadAsTheyAreWritten) {
  const test::TemporaryFolder folder;
  const std::string path = folder.path("a.bin"), content("a\0b\r\n\xff", 6);
  writeFileAtomically(path, content);
  EXPECT_EQ(readFile(path), content);
  writeFileAtomically(path, "");
  EXPECT_EQ(readFile(path), "");
  for (const auto& entry : fs::directory_iterator(folder.path("")))
    EXPECT_EQ(entry.path().filename(), "a.bin");
}

TEST(Files, MissingFolderAndDirectoryAreNamed) {
  const test::TemporaryFolder folder;
  EXPECT_NE(messageOf([] { readFile("/no/such/file"); }).find("/no/such/file"), std::string::npos);
  EXPECT_NE(messageOf([&] { readFile(folder.path("")); }).find("directory"), std::string::npos);
  const std::string message = messageOf([] { writeFileAtomically("/no/such/folder/x", "text"); });
  EXPECT_NE(message.find("/no/such/folder/x"), std::string::npos) << message;
  EXPECT_NE(messageOf([&] { writeFileAtomically(folder.path(""), "text"); }), "nothing was thrown");
}

TEST(Files, AFullDeviceIsAnErrorAndDevicesAreNotReplaced) {
  const std::string message = messageOf([] { writeFileAtomically("/dev/full", "text"); });
  EXPECT_NE(message.find("No space left"), std::string::npos) << message;
  EXPECT_NE(message.find("0 of 4 bytes"), std::string::npos) << message;
  writeFileAtomically("/dev/null", "text");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST(Files, AWriteThroughALinkKeepsTheLink) {
  const test::TemporaryFolder folder;
  const std::string target = folder.write("target", "old"), link = folder.path("link");
  fs::create_symlink(target, link);
  writeFileAtomically(link, "new");
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(readFile(target), "new");
}

TEST(Suggest, FewestEditsWins) {
  const std::vector<std::string> names{"simulate", "tune", "train", "compare"};
  EXPECT_EQ(nearestName("simulat", names), "simulate");
  EXPECT_EQ(nearestName("trian", names), "train");  // two edits from train, three from tune
  EXPECT_EQ(nearestName("train", names), "train");
  EXPECT_EQ(nearestName("x", {}), "");
  EXPECT_EQ(nearestName("ab", {"aa", "bb"}), "aa");  // one edit each: the first
}

}  // namespace
}  // namespace bmt
