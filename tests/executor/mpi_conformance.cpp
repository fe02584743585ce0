// The cases of communicator_cases.h over MPI: one process per rank, started by mpirun. Exit code 0 = all as
// expected on this rank; a failure is printed. With the argument `silent`, the last rank leaves out a call.
#include <fmt/format.h>

#include "core/error.h"
#include "executor/comm/mpi_communicator.h"
#include "tests/executor/communicator_cases.h"

int main(int argc, char** argv) {
  using namespace bmt;
  const bool silent = argc > 1 && std::string(argv[1]) == "silent";
  exec::MpiWorld world;
  if (world.size() != exec::test::kRanks) {
    fmt::print(stderr, "started with {} processes, needs {}\n", world.size(), exec::test::kRanks);
    return 2;
  }
  exec::CpuBackend backend;
  const auto communicator = world.communicator(backend);
  try {
    // commCases() ends with a message from rank 3 to rank 1; the receiver is the one that waits in vain.
    const std::string wrong = exec::test::runCommCases(backend, *communicator, world.rank(), silent ? 1 : 60,
                                                       silent && world.rank() == 3);
    if (wrong.empty()) return 0;
    fmt::print(stderr, "{}\n", wrong);
  } catch (const Error& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    std::fflush(nullptr);
    world.abortJob(1);
  }
  return 1;
}
