#include "executor/tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <sstream>
#include <unordered_map>

#include "core/error.h"
#include "core/json.h"

namespace bmt::exec {
namespace {

class Bytewise final : public Tokenizer {
 public:
  std::vector<std::int32_t> encode(const std::string& text) const override {
    std::vector<std::int32_t> ids;
    ids.reserve(text.size());
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  std::string decode(const std::vector<std::int32_t>& ids) const override {
    std::string text;
    for (const std::int32_t id : ids) text += static_cast<char>(id);
    return text;
  }
  std::int64_t vocab() const override { return 256; }
};

// SentencePiece works on lines; newlines are a symbol of their own here, which keeps the text exact.
class SentencePiece final : public Tokenizer {
 public:
  explicit SentencePiece(const std::string& path) {
    const std::string model = readFile(path);
    const auto status = processor_.LoadFromSerializedProto(model);
    if (!status.ok())
      throw Error(ErrorKind::BadInput, "is not a SentencePiece model: " + status.ToString(), path);
    newline_ = processor_.PieceToId("\n");
    if (processor_.IsUnknown(newline_)) newline_ = processor_.PieceToId("<0x0A>");
    if (processor_.IsUnknown(newline_))
      throw Error(ErrorKind::BadInput,
                  "has neither a newline piece nor byte fallback, so line ends would be lost", path);
  }

  std::vector<std::int32_t> encode(const std::string& text) const override {
    std::vector<std::int32_t> ids;
    std::size_t at = 0;
    while (at < text.size()) {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      std::vector<int> line;
      const auto status = processor_.Encode(text.substr(at, end - at), &line);
      if (!status.ok()) throw Error(ErrorKind::Runtime, "SentencePiece: " + status.ToString());
      ids.insert(ids.end(), line.begin(), line.end());
      if (end < text.size()) ids.push_back(newline_);
      at = end + 1;
    }
    return ids;
  }

  std::string decode(const std::vector<std::int32_t>& ids) const override {
    std::string text;
    std::vector<int> line;
    const auto flush = [&] {
      std::string part;
      const auto status = processor_.Decode(line, &part);
      if (!status.ok()) throw Error(ErrorKind::Runtime, "SentencePiece: " + status.ToString());
      text += part;
      line.clear();
    };
    for (const std::int32_t id : ids) {
      if (id == newline_) {
        flush();
        text += '\n';
      } else {
        line.push_back(id);
      }
    }
    flush();
    return text;
  }

  std::int64_t vocab() const override { return processor_.GetPieceSize(); }

 private:
  sentencepiece::SentencePieceProcessor processor_;
  int newline_ = 0;
};

// Hands lines to the trainer: Debian's SentencePiece 0.1.97 takes an iterator, later versions a vector as
// well.
class Lines final : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const std::vector<std::string>& lines) : lines_(lines) {}
  bool done() const override { return next_ == lines_.size(); }
  void Next() override { ++next_; }
  const std::string& value() const override { return lines_[next_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::vector<std::string>& lines_;
  std::size_t next_ = 0;
};

}  // namespace

std::unique_ptr<Tokenizer> bytesTokenizer() {
  return std::make_unique<Bytewise>();
}

std::unique_ptr<Tokenizer> loadSentencePiece(const std::string& model_path) {
  return std::make_unique<SentencePiece>(model_path);
}

void trainSentencePiece(const std::string& text, std::int64_t vocab, const std::string& model_path) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (!line.empty()) lines.push_back(line);
  }
  const std::unordered_map<std::string, std::string> options{
      {"model_type", "bpe"},
      {"vocab_size", fmt::format("{}", vocab)},
      {"character_coverage", "1.0"},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"num_threads", "1"},
      {"minloglevel", "2"},
  };
  std::string model;
  Lines iterator(lines);
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &iterator, &model);
  if (!status.ok())
    throw Error(ErrorKind::BadInput, fmt::format("training a vocabulary of {} on {} lines failed: {}", vocab,
                                                 lines.size(), status.ToString()));
  writeFileAtomically(model_path, model);
}

}  // namespace bmt::exec
