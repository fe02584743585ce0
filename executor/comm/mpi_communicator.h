// MPI communicator: every rank is a process. All MPI calls of a process are made under one lock
// (MPI_THREAD_SERIALIZED: Open MPI's multi-threaded mode is slower and less proven); lanes post non-blocking
// messages and sleep, one progress thread tests them. It yields at first and then sleeps between tests,
// because ranks exceed cores.
//
// Collectives are direct exchanges: every member sends slice j to member j, sums what it gets in member
// order, and sends the sum to all. That moves 2 (n - 1) / n of the buffer per rank, as a ring does, in two
// message rounds instead of 2 (n - 1), and gives bit for bit the results of the in-process communicator.
// (Debian's MPI_Reduce_scatter_block is slow for large buffers.) No MPI header is seen outside this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/ids.h"
#include "executor/backend.h"
#include "executor/communicator.h"

namespace bmt::exec {

// Place of this process in a job started by mpirun or srun, from the environment (before MPI is initialised).
struct LauncherPlace {
  RankId rank = 0;
  std::int32_t size = 1;
};
bool startedByMpiLauncher(LauncherPlace& place);
bool builtWithMpi();

// The job; one per process. Initialises MPI; the destructor finalises it.
class MpiWorld {
 public:
  MpiWorld();  // throws Error{Runtime}
  ~MpiWorld();
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  RankId rank() const;
  std::int32_t size() const;
  bool oneHost() const;  // all ranks run on one machine, so their clocks agree
  std::unique_ptr<Communicator> communicator(Backend& backend);

  // Between steps only, on all ranks: the bytes of every rank, on rank 0 (elsewhere empty); rank 0's value,
  // everywhere.
  std::vector<std::string> gather(const std::string& bytes);
  std::uint64_t broadcast(std::uint64_t value);
  // Ends all processes of the job with that exit code.
  [[noreturn]] void abortJob(int exit_code);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace bmt::exec
