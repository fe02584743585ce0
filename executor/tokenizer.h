// Tokenizers: raw bytes, or a SentencePiece model (BPE with byte fallback, no normalisation, so that decoding
// is exact).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace bmt::exec {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::vector<std::int32_t> encode(const std::string& text) const = 0;
  virtual std::string decode(const std::vector<std::int32_t>& ids) const = 0;
  virtual std::int64_t vocab() const = 0;
};

std::unique_ptr<Tokenizer> bytesTokenizer();
std::unique_ptr<Tokenizer> loadSentencePiece(const std::string& model_path);
// Trains on the text and writes the model file. Deterministic. Throws Error{BadInput} when the text is too
// small for it.
void trainSentencePiece(const std::string& text, std::int64_t vocab, const std::string& model_path);

}  // namespace bmt::exec
