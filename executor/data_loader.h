// DataLoader: which tokens every step trains on, independent of the parallel layout. The file is cut into
// non-overlapping windows of T + 1 tokens (the last token of a window is the first of the next); every epoch
// visits all windows once in a seeded order. The state is (seed, step), so resuming is exact.
#pragma once

#include <cstdint>

#include "executor/token_file.h"

namespace bmt::exec {

class DataLoader {
 public:
  // Throws Error{BadInput} when the file has fewer than T + 1 tokens.
  DataLoader(TokenFile file, std::int64_t seq_len, std::int64_t global_batch, std::uint64_t seed);

  // Sequences [begin, end) of the step's global batch: tokens and targets, [end - begin, T] each.
  void read(std::int64_t step, std::int64_t begin, std::int64_t end, std::int32_t* tokens,
            std::int32_t* targets) const;
  std::int64_t numWindows() const { return num_windows_; }
  // Window of the n-th sequence of the whole run.
  std::int64_t windowOf(std::int64_t sequence) const;

 private:
  TokenFile file_;
  std::int64_t seq_len_, global_batch_, num_windows_;
  std::uint64_t seed_;
};

}  // namespace bmt::exec
