// Places a rank's buffers in one arena by their lifetimes and adds the dependencies that make reuse safe when
// lanes run asynchronously (a buffer may take over memory only after every user of the previous one is done).
#pragma once

#include <array>
#include <vector>

#include "core/task_graph.h"

namespace bmt {

// Sets Buffer::offset and RankProgram::arena; may append deps to tasks. Best-fit in program order, O(n log
// n).
void planMemory(RankProgram& program);

struct MemoryUse {
  std::array<Bytes, kNumBufferKinds> at_peak{};  // by BufferKind, at the moment of the peak of live bytes
  Bytes peak_live = 0;                           // sum of at_peak
  Bytes arena = 0;  // placed high-water mark, >= peak_live (alignment, fragmentation)
};
MemoryUse memoryUse(const RankProgram& program);

// Live bytes after each task of the program, [tasks.size()], by kind.
std::vector<std::array<Bytes, kNumBufferKinds>> liveBytesByTask(const RankProgram& program);

}  // namespace bmt
