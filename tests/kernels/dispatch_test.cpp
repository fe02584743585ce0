// Which instruction set is used: the best by default, a weaker one on request, an error for one that is not
// there.
#include <cstdlib>
#include <cstring>

#include "tests/kernels/check.h"

namespace bmt::test {
namespace {

using kernels::cpu::availableTables;

// The choice is made once per process, so each case is a process of its own.
class Dispatch : public testing::Test {
 protected:
  void SetUp() override { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }
};

[[noreturn]] void exitWithMatch(const char* isa, const char* name) {
  if (isa != nullptr) {
    setenv("BMT_ISA", isa, 1);
  } else {
    unsetenv("BMT_ISA");
  }
  const char* const chosen = kernels::cpu::kernels().name;
  std::fprintf(stderr, "chosen %s\n", chosen);
  std::exit(std::strcmp(chosen, name) == 0 ? 0 : 1);
}

TEST_F(Dispatch, bestByDefaultAndEachOnRequest) {
  const auto tables = availableTables();
  ASSERT_GE(tables.count, 1);
  const char* const best = tables.table[tables.count - 1]->name;
  EXPECT_EXIT(exitWithMatch(nullptr, best), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(exitWithMatch("", best), testing::ExitedWithCode(0), "");
  for (int i = 0; i < tables.count; ++i) {
    const char* const name = tables.table[i]->name;
    const char* const dash = std::strrchr(name, '-');
    EXPECT_EXIT(exitWithMatch(name, name), testing::ExitedWithCode(0), "");
    EXPECT_EXIT(exitWithMatch(dash != nullptr ? dash + 1 : name, name), testing::ExitedWithCode(0), "");
  }
}

TEST_F(Dispatch, unknownNamesAreRefused) {
  for (const char* const isa : {"v9", "3", "4-v2", "avx2"}) {
    EXPECT_EXIT(exitWithMatch(isa, ""), testing::ExitedWithCode(2), std::string("BMT_ISA=") + isa);
  }
}

TEST_F(Dispatch, everyKernelOfEveryTableIsThere) {
  forEachTable([](const Table& table) {
    const auto* const entries = reinterpret_cast<void* const*>(&table);
    for (std::size_t i = 0; i < sizeof(Table) / sizeof(void*); ++i) EXPECT_NE(entries[i], nullptr) << i;
  });
}

}  // namespace
}  // namespace bmt::test
