// Token files: what is written is read, foreign formats, and damage of every kind is one clear error.
#include "executor/token_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>

#include "core/error.h"
#include "core/json.h"
#include "tests/support/run_program.h"

namespace bmt::exec {
namespace {

template <typename T>
std::string bytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string errorOf(const std::string& path) {
  try {
    readTokenFile(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.exitCode(), 2);
    return error.what();
  }
  return "accepted";
}

#define EXPECT_MENTIONS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(TokenFile, TwoAndFourByteTokensRoundTrip) {
  const test::TemporaryFolder folder;
  const std::string path = folder.path("t.bin");
  const std::vector<std::int32_t> tokens{0, 1, 65535, 7};
  writeTokenFile(path, tokens, 65536);
  EXPECT_EQ(readFile(path).size(), 64u + 4 * 2);
  EXPECT_EQ(readTokenFile(path).tokens, tokens);
  EXPECT_EQ(readTokenFile(path).vocab, 65536);
  const std::vector<std::int32_t> wide{0, 65536, 128255};
  writeTokenFile(path, wide, 128256);
  EXPECT_EQ(readFile(path).size(), 64u + 3 * 4);
  EXPECT_EQ(readTokenFile(path).tokens, wide);
}

TEST(TokenFile, LayoutIsTheDocumentedOne) {
  const test::TemporaryFolder folder;
  writeTokenFile(folder.path("t.bin"), {0x0201, 0x0003}, 1000);
  const std::string data = readFile(folder.path("t.bin"));
  std::string expected("BMTTOKEN\1\0\0\0\2\0\0\0\xe8\3\0\0\0\0\0\0\2\0\0\0\0\0\0\0", 32);
  // h = 14695981039346656037; for c in b"\x01\x02\x03\x00": h = (h ^ c) * 1099511628211 % 2**64
  const std::uint64_t checksum = 0xbe7a5a7751657191ULL;
  expected += bytesOf(std::vector<std::uint64_t>{checksum, 0, 0, 0}) + std::string("\1\2\3\0", 4);
  EXPECT_EQ(data, expected);
}

TEST(TokenFile, TruncationNamesBothFigures) {
  const test::TemporaryFolder folder;
  writeTokenFile(folder.path("t.bin"), std::vector<std::int32_t>(100, 5), 256);
  const std::string data = readFile(folder.path("t.bin"));
  const std::string error = errorOf(folder.write("cut.bin", data.substr(0, data.size() - 3)));
  EXPECT_MENTIONS(error, "cut.bin");
  EXPECT_MENTIONS(error, "197 bytes");
  EXPECT_MENTIONS(error, "100 tokens of 2 bytes");
  EXPECT_MENTIONS(errorOf(folder.write("head.bin", data.substr(0, 20))), "20 bytes");
  EXPECT_MENTIONS(errorOf(folder.write("empty.bin", "")), "not a token file");
  EXPECT_MENTIONS(errorOf(folder.write("text.bin", "In the beginning")), "not a token file");
  EXPECT_MENTIONS(errorOf(folder.path("none.bin")), "none.bin");
}

TEST(TokenFile, TokenOutsideTheVocabularyIsNeverWritten) {
  const test::TemporaryFolder folder;
  EXPECT_THROW(writeTokenFile(folder.path("t.bin"), {1, 256}, 256), Error);
  EXPECT_THROW(writeTokenFile(folder.path("t.bin"), {-1}, 256), Error);
  EXPECT_THROW(readFile(folder.path("t.bin")), Error);  // nothing was left behind
}

TEST(TokenFile, AnyFlippedByteOrCutIsAnErrorOrChangesNoToken) {
  const test::TemporaryFolder folder;
  std::mt19937 random(20241201);
  std::vector<std::int32_t> tokens(300);
  for (auto& t : tokens) t = static_cast<std::int32_t>(random() % 256);
  writeTokenFile(folder.path("t.bin"), tokens, 256);
  const std::string data = readFile(folder.path("t.bin"));
  const std::string path = folder.path("bad.bin");
  for (int trial = 0; trial < 1000; ++trial) {
    std::string damaged = data;
    const std::size_t at = trial < 64 ? static_cast<std::size_t>(trial) : random() % data.size();
    damaged[at] = static_cast<char>(damaged[at] ^ static_cast<char>(1 + random() % 255));
    if (trial % 4 == 3) damaged.resize(random() % data.size());
    folder.write("bad.bin", damaged);
    try {
      const TokenFile file = readTokenFile(path);
      EXPECT_EQ(file.tokens, tokens) << "seed 20241201, trial " << trial << ", byte " << at;
      EXPECT_TRUE((at >= 16 && at < 24) || (at >= 40 && at < 64)) << at;  // the vocabulary, larger; the zeros
    } catch (const Error& error) {
      EXPECT_EQ(error.exitCode(), 2) << error.what();
    }
  }
}

TEST(TokenFile, ReadsLlmc) {
  const test::TemporaryFolder folder;
  std::vector<std::int32_t> header(256, 0);
  header[0] = 20240520, header[1] = 1, header[2] = 3;
  const std::string tokens = bytesOf(std::vector<std::uint16_t>{50256, 1, 2});
  const TokenFile file = readTokenFile(folder.write("l.bin", bytesOf(header) + tokens));
  EXPECT_EQ(file.tokens, (std::vector<std::int32_t>{50256, 1, 2}));
  EXPECT_EQ(file.vocab, 0);
  const std::string error = errorOf(folder.write("cut.bin", bytesOf(header) + tokens.substr(1)));
  EXPECT_MENTIONS(error, "1029 bytes");
  EXPECT_MENTIONS(error, "1030");
  EXPECT_MENTIONS(errorOf(folder.write("head.bin", bytesOf(header).substr(0, 500))), "llm.c");
  header[1] = 2;
  EXPECT_MENTIONS(errorOf(folder.write("v2.bin", bytesOf(header) + tokens)), "version 2");
}

std::string megatronIndex(std::uint8_t code, const std::vector<std::int32_t>& lengths) {
  std::string index("MMIDIDX\0\0", 9);
  index += bytesOf(std::vector<std::uint64_t>{1}) + static_cast<char>(code);
  index += bytesOf(std::vector<std::uint64_t>{lengths.size(), lengths.size() + 1}) + bytesOf(lengths);
  index += std::string(lengths.size() * 8 + (lengths.size() + 1) * 8, '\0');  // pointers, document ends
  return index;
}

TEST(TokenFile, ReadsMegatronPairs) {
  const test::TemporaryFolder folder;
  folder.write("a.idx", megatronIndex(8, {2, 1}));
  EXPECT_EQ(readTokenFile(folder.write("a.bin", bytesOf(std::vector<std::uint16_t>{7, 65535, 9}))).tokens,
            (std::vector<std::int32_t>{7, 65535, 9}));
  folder.write("b.idx", megatronIndex(4, {1, 1}));
  EXPECT_EQ(readTokenFile(folder.write("b.bin", bytesOf(std::vector<std::int32_t>{7, 100000}))).tokens,
            (std::vector<std::int32_t>{7, 100000}));
  EXPECT_MENTIONS(errorOf(folder.write("b.bin", bytesOf(std::vector<std::int32_t>{7, -2}))), "token -2");
  EXPECT_MENTIONS(errorOf(folder.write("b.bin", "1234567")), "7 bytes");
  folder.write("b.idx", megatronIndex(6, {1, 1}));
  EXPECT_MENTIONS(errorOf(folder.path("b.bin")), "dtype code 6");
  folder.write("b.idx", megatronIndex(4, {1, 1}).substr(0, 50));
  EXPECT_MENTIONS(errorOf(folder.path("b.bin")), "50 bytes");
}

TEST(TokenFile, DamagedMegatronIndexIsNeverACrash) {
  const test::TemporaryFolder folder;
  const std::string index = megatronIndex(8, {2, 1}), tokens = bytesOf(std::vector<std::uint16_t>{7, 8, 9});
  const std::string path = folder.write("a.bin", tokens);
  std::mt19937 random(7);
  for (int trial = 0; trial < 500; ++trial) {
    std::string damaged = index;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    if (trial % 3 == 0) damaged.resize(random() % damaged.size());
    folder.write("a.idx", damaged);
    try {
      EXPECT_EQ(readTokenFile(path).tokens.size(), 3u);
    } catch (const Error& error) {
      EXPECT_EQ(error.exitCode(), 2) << error.what();
    }
  }
}

}  // namespace
}  // namespace bmt::exec
