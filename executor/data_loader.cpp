#include "executor/data_loader.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

#include "core/error.h"

namespace bmt::exec {
namespace {

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// A permutation of [0, size) without a table: a four-round Feistel network on the next even number of bits,
// walked until the value is in range (cycle walking, Black and Rogaway 2002).
std::uint64_t permute(std::uint64_t value, std::uint64_t size, std::uint64_t key) {
  if (size <= 1) return 0;
  const unsigned half = (static_cast<unsigned>(std::bit_width(size - 1)) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  do {
    std::uint64_t left = value >> half, right = value & mask;
    for (std::uint64_t round = 0; round < 4; ++round) {
      const std::uint64_t next = left ^ (mix(right + mix(key + round)) & mask);
      left = right;
      right = next;
    }
    value = left << half | right;
  } while (value >= size);
  return value;
}

}  // namespace

DataLoader::DataLoader(TokenFile file, std::int64_t seq_len, std::int64_t global_batch, std::uint64_t seed)
    : file_(std::move(file)), seq_len_(seq_len), global_batch_(global_batch), seed_(seed) {
  BMT_CHECK(seq_len > 0 && global_batch > 0,
            fmt::format("seq_len {}, global_batch {}", seq_len, global_batch));
  const auto count = static_cast<std::int64_t>(file_.tokens.size());
  num_windows_ = (count - 1) / seq_len;
  if (count < seq_len + 1)
    throw Error(
        ErrorKind::BadInput,
        fmt::format("holds {} tokens, but a sequence of {} needs {}; use more text or a shorter --seq", count,
                    seq_len, seq_len + 1),
        file_.path);
}

std::int64_t DataLoader::windowOf(std::int64_t sequence) const {
  const std::int64_t epoch = sequence / num_windows_;
  const auto key = mix(seed_ ^ mix(static_cast<std::uint64_t>(epoch)));
  return static_cast<std::int64_t>(permute(static_cast<std::uint64_t>(sequence % num_windows_),
                                           static_cast<std::uint64_t>(num_windows_), key));
}

void DataLoader::read(std::int64_t step, std::int64_t begin, std::int64_t end, std::int32_t* tokens,
                      std::int32_t* targets) const {
  const auto bytes = static_cast<std::size_t>(seq_len_) * sizeof(std::int32_t);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int32_t* const window = file_.tokens.data() + windowOf(step * global_batch_ + i) * seq_len_;
    const std::int64_t row = (i - begin) * seq_len_;
    if (tokens != nullptr) std::memcpy(tokens + row, window, bytes);
    if (targets != nullptr) std::memcpy(targets + row, window + 1, bytes);
  }
}

}  // namespace bmt::exec
