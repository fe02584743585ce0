// Starts this same command again, once per rank, under mpirun.
#pragma once

#include <cstdint>

namespace bmt::cli {

// Runs `mpirun -n ranks` with the command line of this process and returns its exit code. SIGINT stops the
// job after its current step (mpirun hands SIGUSR1 on to all ranks). Throws Error{Runtime} when mpirun cannot
// be started.
int runUnderMpirun(std::int32_t ranks);

// In a process that runUnderMpirun started. A stopped run then ends with exit code 0, which mpirun does not
// comment on, and the launcher reports 130.
bool launchedByUs();

}  // namespace bmt::cli
