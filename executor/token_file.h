// Token files. Ours: a 64-byte header, then uint16 or uint32 tokens, little endian:
//   0 magic "BMTTOKEN"   8 u32 version (1)   12 u32 bytes per token (2 or 4)   16 u64 vocabulary   24 u64
//   tokens 32 u64 FNV-1a 64 of the token bytes   40 zeros
// Also read: llm.c's .bin (256 int32 header: 20240520, version 1, count; then uint16) and Megatron's
// .bin/.idx pair.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bmt::exec {

struct TokenFile {
  std::string path;
  std::int64_t vocab = 0;  // 0 = the format does not say
  std::vector<std::int32_t> tokens;
};

// Throws Error{BadInput}: what is wrong, where, and the two figures that disagree.
TokenFile readTokenFile(const std::string& path);
// Atomic: a failure leaves the previous file. Throws Error{Runtime}.
void writeTokenFile(const std::string& path, const std::vector<std::int32_t>& tokens, std::int64_t vocab);

}  // namespace bmt::exec
