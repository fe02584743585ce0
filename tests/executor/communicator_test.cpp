// Both communicators carry out the same cases with the same bits, and a rank that does not come is named
// within the deadline.
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "core/error.h"
#include "core/json.h"
#include "executor/comm/in_process.h"
#include "tests/executor/communicator_cases.h"
#include "tests/support/run_program.h"

namespace bmt::exec {
namespace {

// What each rank found wrong, or the error it ended with.
std::vector<std::string> runThreads(double deadline_s, bool silent) {
  InProcessWorld world(deadline_s);
  std::vector<std::string> outcome(test::kRanks);
  std::vector<std::thread> threads;
  for (RankId rank = 0; rank < test::kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      CpuBackend backend;
      InProcessCommunicator communicator(world, backend, rank);
      backend.onFailure([&](const std::string& reason) { communicator.abort(reason); });
      try {
        outcome[static_cast<std::size_t>(rank)] =
            test::runCommCases(backend, communicator, rank, deadline_s, silent && rank == 3);
      } catch (const Error& error) {
        outcome[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcome;
}

TEST(InProcessCommunicator, CarriesOutEveryCase) {
  for (const std::string& wrong : runThreads(60, false)) EXPECT_EQ(wrong, "");
}

TEST(InProcessCommunicator, ARankThatDoesNotComeIsNamedWithinTheDeadline) {
  const std::vector<std::string> outcome = runThreads(0.5, true);
  EXPECT_NE(outcome[1].find("rank 1 recv"), std::string::npos) << outcome[1];
  EXPECT_NE(outcome[1].find("(limit 0.5 s) for rank(s) 3"), std::string::npos) << outcome[1];
}

// Runs mpi_conformance under mpirun; its exit code and what it said.
bmt::test::ProgramResult runMpi(const std::string& argument) {
  const bmt::test::TemporaryFolder folder;
  const std::string command = fmt::format(
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 120 mpirun --oversubscribe "
      "--bind-to none "
      "-n {} {}/bin/mpi_conformance {} > {} 2>&1 < /dev/null",
      test::kRanks, BMT_BINARY_DIR, argument, folder.path("out"));
  bmt::test::ProgramResult result;
  result.exit_code = WEXITSTATUS(std::system(command.c_str()));
  result.out = readFile(folder.path("out"));
  return result;
}

TEST(MpiCommunicator, CarriesOutEveryCase) {
#if !defined(BMT_HAVE_MPI)
  GTEST_SKIP() << "no MPI in this build";
#endif
  const bmt::test::ProgramResult result = runMpi("");
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_EQ(result.out.find("instead of"), std::string::npos) << result.out;
}

TEST(MpiCommunicator, ARankThatDoesNotComeIsNamedWithinTheDeadline) {
#if !defined(BMT_HAVE_MPI)
  GTEST_SKIP() << "no MPI in this build";
#endif
  const bmt::test::ProgramResult result = runMpi("silent");
  EXPECT_EQ(result.exit_code, 1) << result.out;
  EXPECT_NE(result.out.find("rank 1 recv"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("(limit 1 s) for rank(s) 3"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace bmt::exec
