#include "executor/token_file.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/json.h"

namespace bmt::exec {
namespace {

constexpr std::size_t kHeaderBytes = 64;
constexpr const char* kMagic = "BMTTOKEN";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kLlmcHeader = 1024;
constexpr std::int32_t kLlmcMagic = 20240520;

template <typename T>
T readAt(const std::string& data, std::size_t offset) {
  T value{};
  std::memcpy(&value, data.data() + offset, sizeof(T));
  return value;
}

std::uint64_t fnv1a64(const char* data, std::size_t size) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (std::size_t i = 0; i < size; ++i)
    hash = (hash ^ static_cast<unsigned char>(data[i])) * 1099511628211ULL;
  return hash;
}

[[noreturn]] void bad(const std::string& path, const std::string& what) {
  throw Error(ErrorKind::BadInput, what + "; make a token file with bmtrain prepare", path);
}

template <typename T>
std::vector<std::int32_t> widen(const std::string& data, std::size_t offset, std::size_t count) {
  std::vector<std::int32_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i)
    tokens[i] = static_cast<std::int32_t>(readAt<T>(data, offset + i * sizeof(T)));
  return tokens;
}

TokenFile readOurs(const std::string& path, const std::string& data) {
  if (data.size() < kHeaderBytes)
    bad(path, fmt::format("has {} bytes, but the header alone takes {}", data.size(), kHeaderBytes));
  const auto version = readAt<std::uint32_t>(data, 8), width = readAt<std::uint32_t>(data, 12);
  const auto vocab = readAt<std::uint64_t>(data, 16), count = readAt<std::uint64_t>(data, 24);
  if (version != kVersion)
    bad(path, fmt::format("is version {}, this program reads version {}", version, kVersion));
  if (width != 2 && width != 4) bad(path, fmt::format("has {} bytes per token, expected 2 or 4", width));
  const std::uint64_t payload = data.size() - kHeaderBytes;
  if (count > payload || payload != count * width)
    bad(path,
        fmt::format("holds {} bytes of tokens, but its header promises {} tokens of {} bytes (truncated?)",
                    payload, count, width));
  const std::uint64_t checksum = fnv1a64(data.data() + kHeaderBytes, payload);
  if (checksum != readAt<std::uint64_t>(data, 32))
    bad(path, fmt::format("is corrupt: checksum {:016x}, its header says {:016x}", checksum,
                          readAt<std::uint64_t>(data, 32)));
  if (vocab > INT32_MAX) bad(path, fmt::format("states a vocabulary of {}", vocab));
  TokenFile file{path, static_cast<std::int64_t>(vocab), {}};
  file.tokens = width == 2 ? widen<std::uint16_t>(data, kHeaderBytes, count)
                           : widen<std::uint32_t>(data, kHeaderBytes, count);
  const auto largest = std::max_element(file.tokens.begin(), file.tokens.end());
  const auto smallest = std::min_element(file.tokens.begin(), file.tokens.end());
  if (!file.tokens.empty() && (*largest >= file.vocab || *smallest < 0))
    bad(path, fmt::format("holds token {}, outside its vocabulary of {}",
                          *largest >= file.vocab ? *largest : *smallest, file.vocab));
  return file;
}

TokenFile readLlmc(const std::string& path, const std::string& data) {
  if (data.size() < kLlmcHeader)
    bad(path, fmt::format("has {} bytes, but the header of an llm.c token file takes {}", data.size(),
                          kLlmcHeader));
  const auto version = readAt<std::int32_t>(data, 4), count = readAt<std::int32_t>(data, 8);
  if (version != 1) bad(path, fmt::format("is an llm.c token file of version {}, expected 1", version));
  if (count < 0 || data.size() != kLlmcHeader + static_cast<std::size_t>(count) * 2)
    bad(path, fmt::format("has {} bytes, but {} tokens need {}", data.size(), count,
                          kLlmcHeader + static_cast<std::size_t>(std::max(count, 0)) * 2));
  return {path, 0, widen<std::uint16_t>(data, kLlmcHeader, static_cast<std::size_t>(count))};
}

// Megatron: .idx = "MMIDIDX\0\0", u64 version 1, u8 dtype code (4 = int32, 8 = uint16), u64 sequences, u64
// documents, int32 lengths[sequences], ...; .bin = the tokens one after the other.
TokenFile readMegatron(const std::string& path, const std::string& data, const std::string& index_path) {
  const std::string index = readFile(index_path);
  if (index.size() < 34 || std::memcmp(index.data(), "MMIDIDX\0\0", 9) != 0)
    bad(index_path, "is not a Megatron index");
  const auto version = readAt<std::uint64_t>(index, 9);
  const auto code = readAt<std::uint8_t>(index, 17);
  const auto sequences = readAt<std::uint64_t>(index, 18);
  if (version != 1) bad(index_path, fmt::format("is version {}, expected 1", version));
  if (code != 4 && code != 8)
    bad(index_path, fmt::format("has dtype code {}, expected 4 (int32) or 8 (uint16)", code));
  const auto documents = readAt<std::uint64_t>(index, 26);
  // Per sequence: a length (int32), a pointer (int64) and, in some, a mode (int8); per document: its end
  // (int64).
  const std::uint64_t body = index.size() - 34;
  if (sequences > body / 12 || documents > body / 8 || sequences * 12 + documents * 8 > body)
    bad(index_path, fmt::format("promises {} sequences and {} documents, but has {} bytes", sequences,
                                documents, index.size()));
  std::uint64_t count = 0;
  for (std::uint64_t i = 0; i < sequences; ++i) count += readAt<std::uint32_t>(index, 34 + i * 4);
  const std::uint64_t width = code == 4 ? 4 : 2;
  if (data.size() != count * width)
    bad(path,
        fmt::format("has {} bytes, but its index counts {} tokens of {} bytes", data.size(), count, width));
  TokenFile file{path, 0,
                 width == 4 ? widen<std::int32_t>(data, 0, count) : widen<std::uint16_t>(data, 0, count)};
  const auto smallest = std::min_element(file.tokens.begin(), file.tokens.end());
  if (!file.tokens.empty() && *smallest < 0) bad(path, fmt::format("holds token {}, below 0", *smallest));
  return file;
}

}  // namespace

TokenFile readTokenFile(const std::string& path) {
  const std::string data = readFile(path);
  if (data.size() >= 8 && std::memcmp(data.data(), kMagic, 8) == 0) return readOurs(path, data);
  if (data.size() >= 4 && readAt<std::int32_t>(data, 0) == kLlmcMagic) return readLlmc(path, data);
  if (path.ends_with(".bin")) {
    const std::string index = path.substr(0, path.size() - 4) + ".idx";
    struct stat info {};
    if (::stat(index.c_str(), &info) == 0) return readMegatron(path, data, index);
  }
  bad(path, "is not a token file (neither ours, llm.c's, nor Megatron's with its .idx)");
}

void writeTokenFile(const std::string& path, const std::vector<std::int32_t>& tokens, std::int64_t vocab) {
  for (const std::int32_t token : tokens) {
    if (token < 0 || token >= vocab)
      throw Error(ErrorKind::BadInput, fmt::format("token {} is outside the vocabulary of {}", token, vocab),
                  path);
  }
  const std::uint32_t width = vocab <= 65536 ? 2 : 4;
  std::string data(kHeaderBytes + tokens.size() * width, '\0');
  for (std::size_t i = 0; i < tokens.size(); ++i)
    std::memcpy(data.data() + kHeaderBytes + i * width, &tokens[i], width);  // little endian
  const std::uint64_t checksum = fnv1a64(data.data() + kHeaderBytes, tokens.size() * width);
  const std::uint64_t size = static_cast<std::uint64_t>(vocab), count = tokens.size();
  std::memcpy(data.data(), kMagic, 8);
  std::memcpy(data.data() + 8, &kVersion, 4);
  std::memcpy(data.data() + 12, &width, 4);
  std::memcpy(data.data() + 16, &size, 8);
  std::memcpy(data.data() + 24, &count, 8);
  std::memcpy(data.data() + 32, &checksum, 8);
  writeFileAtomically(path, data);
}

}  // namespace bmt::exec
