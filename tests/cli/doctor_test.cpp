// bmtrain doctor agrees with what the system itself says.
#include <gtest/gtest.h>
#include <unistd.h>

#include "core/json.h"
#include "tests/support/run_program.h"

namespace bmt {
namespace {

TEST(Doctor, JsonAgreesWithTheSystem) {
  const test::ProgramResult result = test::runBmtrain({"doctor", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json json = parseJson(result.out, "doctor --json");
  EXPECT_EQ(json.at("schema"), "bmtrain.doctor/1");
  EXPECT_EQ(json.at("cores_online"), sysconf(_SC_NPROCESSORS_ONLN));
  EXPECT_GE(json.at("cores_usable"), 1);
  EXPECT_LE(json.at("cores_usable"), json.at("cores_online"));
  const auto pages = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES));
  EXPECT_EQ(json.at("memory_total_bytes"), pages * sysconf(_SC_PAGESIZE));
  EXPECT_LE(json.at("memory_available_bytes"), json.at("memory_total_bytes"));
  EXPECT_GT(json.at("copy_bandwidth_bytes_per_s"), 0.0);
  EXPECT_EQ(json.at("cuda").at("backend"), false);
}

TEST(Doctor, SaysOneLineOnEachThing) {
  const test::ProgramResult result = test::runBmtrain({"doctor"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* line : {"CPU  ", "kernels  ", "memory  ", "copy  ", "MPI  ", "CUDA  "}) {
    EXPECT_NE(result.out.find(std::string("\n") + line), std::string::npos) << line << " missing in\n"
                                                                            << result.out;
  }
  EXPECT_EQ(result.err, "");
}

}  // namespace
}  // namespace bmt
