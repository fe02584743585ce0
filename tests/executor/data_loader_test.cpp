// The data loader: every window once per epoch, the same sequences for any split, known orders, too few
// tokens.
#include "executor/data_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace bmt::exec {
namespace {

// Token k of the file is k, so a sequence tells where it came from.
TokenFile counting(std::int64_t count) {
  TokenFile file{"counting.bin", count, std::vector<std::int32_t>(static_cast<std::size_t>(count))};
  std::iota(file.tokens.begin(), file.tokens.end(), 0);
  return file;
}

std::vector<std::int64_t> order(const DataLoader& loader, std::int64_t epoch) {
  std::vector<std::int64_t> windows;
  for (std::int64_t i = 0; i < loader.numWindows(); ++i)
    windows.push_back(loader.windowOf(epoch * loader.numWindows() + i));
  return windows;
}

TEST(DataLoader, EveryWindowOncePerEpoch) {
  for (const std::int64_t windows : {1, 2, 3, 5, 16, 17, 100, 1000}) {
    const DataLoader loader(counting(windows * 4 + 1), 4, 3, 5);
    ASSERT_EQ(loader.numWindows(), windows);
    std::vector<std::int64_t> expected(static_cast<std::size_t>(windows));
    std::iota(expected.begin(), expected.end(), 0);
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<std::int64_t> seen = order(loader, epoch);
      std::sort(seen.begin(), seen.end());
      EXPECT_EQ(seen, expected) << windows << " windows, epoch " << epoch;
    }
  }
}

// Python: half = ((n - 1).bit_length() + 1) // 2; four rounds l, r = r, l ^ (sm(r + sm(key + k)) & mask),
// again until below n; key = sm(seed ^ sm(epoch)), sm = splitmix64.
TEST(DataLoader, KnownOrders) {
  const DataLoader loader(counting(41), 4, 2, 1), other(counting(41), 4, 2, 7);
  EXPECT_EQ(order(loader, 0), (std::vector<std::int64_t>{8, 6, 7, 9, 1, 4, 2, 5, 3, 0}));
  EXPECT_EQ(order(loader, 1), (std::vector<std::int64_t>{5, 1, 6, 3, 4, 0, 8, 7, 2, 9}));
  EXPECT_EQ(order(other, 0), (std::vector<std::int64_t>{8, 7, 6, 1, 4, 2, 9, 5, 3, 0}));
}

TEST(DataLoader, AnySplitOfTheBatchGivesTheSameSequences) {
  constexpr std::int64_t kSeq = 8, kBatch = 12;
  const DataLoader loader(counting(500), kSeq, kBatch, 3);
  for (std::int64_t step = 0; step < 12; ++step) {  // more than two epochs of 62 windows
    std::vector<std::int32_t> whole(kSeq * kBatch), targets(kSeq * kBatch);
    loader.read(step, 0, kBatch, whole.data(), targets.data());
    for (const std::int64_t parts : {2, 3, 4, 12}) {
      std::vector<std::int32_t> joined(kSeq * kBatch), joined_targets(kSeq * kBatch);
      for (std::int64_t part = 0; part < parts; ++part) {
        const std::int64_t begin = kBatch / parts * part, end = kBatch / parts * (part + 1);
        loader.read(step, begin, end, joined.data() + begin * kSeq, joined_targets.data() + begin * kSeq);
      }
      EXPECT_EQ(joined, whole);
      EXPECT_EQ(joined_targets, targets);
    }
    for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(targets[i], whole[i] + 1);
    for (std::size_t i = 0; i < whole.size(); i += kSeq) EXPECT_EQ(whole[i] % kSeq, 0);
  }
}

TEST(DataLoader, TooFewTokensNamesBothFigures) {
  EXPECT_NO_THROW(DataLoader(counting(129), 128, 1, 1));
  for (const std::int64_t count : {0, 1, 128}) {
    try {
      const DataLoader loader(counting(count), 128, 1, 1);
      FAIL() << count;
    } catch (const Error& error) {
      EXPECT_EQ(error.exitCode(), 2);
      const std::string message = error.what();
      for (const std::string& part :
           {std::to_string(count) + " tokens", std::string("129"), std::string("--seq")})
        EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace bmt::exec
