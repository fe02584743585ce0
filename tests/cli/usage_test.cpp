// Wrong use and bad files: one clear message on stderr, nothing on stdout, exit code 2 (DESIGN.md section 8).
#include <gtest/gtest.h>

#include "tests/support/run_program.h"

namespace bmt {
namespace {

struct BadUse {
  const char* name;
  std::vector<std::string> arguments;
  std::vector<std::string> expected;  // all of these are in the message
};

class Usage : public testing::TestWithParam<BadUse> {};

TEST_P(Usage, IsOneMessageAndExitCodeTwo) {
  const test::ProgramResult result = test::runBmtrain(GetParam().arguments);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_TRUE(result.err.starts_with("bmtrain: error: ")) << result.err;
  for (const std::string& part : GetParam().expected) {
    EXPECT_NE(result.err.find(part), std::string::npos) << "no '" << part << "' in: " << result.err;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Usage,
    testing::Values(BadUse{"NoCommand", {}, {"subcommand"}},                             //
                    BadUse{"UnknownCommand", {"simulat"}, {"'simulat'", "'simulate'"}},  //
                    BadUse{"UnknownFlag", {"models", "--jsn"}, {"'--jsn'", "'--json'"}},
                    BadUse{"UnknownModel", {"models", "gpt2-124x"}, {"gpt2-124x"}},
                    BadUse{"MissingModelFile", {"models", "/no/such/model.json"}, {"/no/such/model.json"}}),
    [](const testing::TestParamInfo<BadUse>& test) { return test.param.name; });

TEST(Usage, CorruptModelFileNamesFileAndPlace) {
  const test::TemporaryFolder folder;
  const std::string path = folder.write("model.json", "{\"schema\": \"bmtrain.model/1\", \"layers\": ");
  const test::ProgramResult result = test::runBmtrain({"models", path});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find(path), std::string::npos) << result.err;
}

TEST(Usage, HelpListsEveryCommand) {
  const test::ProgramResult result = test::runBmtrain({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  for (const char* command : {"simulate", "tune", "train", "prepare", "calibrate", "compare", "models",
                              "clusters", "schedules", "doctor"}) {
    EXPECT_NE(result.out.find(command), std::string::npos) << command;
    EXPECT_EQ(test::runBmtrain({command, "--help"}).exit_code, 0) << command;
  }
}

TEST(Usage, VersionIsThatOfTheProject) {
  EXPECT_EQ(test::runBmtrain({"--version"}).out, "0.1.0\n");
}

}  // namespace
}  // namespace bmt
