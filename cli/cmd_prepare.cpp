// bmtrain prepare: text -> tokens.
#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <iostream>
#include <iterator>

#include "cli/command.h"
#include "core/json.h"
#include "core/suggest.h"
#include "core/units.h"
#include "executor/token_file.h"
#include "executor/tokenizer.h"

namespace bmt::cli {
namespace {

struct Options {
  std::string tokenizer = "bytes", out;
  std::vector<std::string> inputs;
};

std::string withoutExtension(const std::string& path) {
  return path.ends_with(".bin") ? path.substr(0, path.size() - 4) : path;
}

std::unique_ptr<exec::Tokenizer> makeTokenizer(const Options& o, const std::string& text) {
  constexpr const char* kTrain = "sentencepiece:";
  if (o.tokenizer == "bytes") return exec::bytesTokenizer();
  if (o.tokenizer.ends_with(".model")) return exec::loadSentencePiece(o.tokenizer);
  if (!o.tokenizer.starts_with(kTrain))
    throw Error(
        ErrorKind::BadInput,
        fmt::format("--tokenizer '{}': expected bytes, sentencepiece:VOCAB or FILE.model", o.tokenizer));
  const std::string size = o.tokenizer.substr(std::string(kTrain).size());
  std::int64_t vocab = 0;
  const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), vocab);
  if (error != std::errc{} || end != size.data() + size.size() || vocab < 300 || vocab > 1000000)
    throw Error(ErrorKind::BadInput,
                fmt::format("--tokenizer: vocabulary '{}' is not between 300 and 1000000", size));
  const std::string model = withoutExtension(o.out) + ".model";
  exec::trainSentencePiece(text, vocab, model);
  return exec::loadSentencePiece(model);
}

int run(const Globals& globals, const Options& o) {
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  for (const std::string& input : o.inputs) {
    text += input == "-" ? std::string(std::istreambuf_iterator<char>(std::cin), {}) : readFile(input);
  }
  if (text.empty())
    throw Error(ErrorKind::BadInput, "the input holds no text", fmt::format("{}", fmt::join(o.inputs, ", ")));
  const auto tokenizer = makeTokenizer(o, text);
  const std::vector<std::int32_t> tokens = tokenizer->encode(text);
  if (tokenizer->decode(tokens) != text)
    throw Error(ErrorKind::Runtime,
                "the tokenizer does not give back the same text; use --tokenizer bytes, or a model "
                "without normalisation");
  exec::writeTokenFile(o.out, tokens, tokenizer->vocab());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double ratio = static_cast<double>(text.size()) / static_cast<double>(tokens.size());
  if (globals.json) {
    const Json json{{"schema", "bmtrain.prepare/1"},
                    {"out", o.out},
                    {"tokens", tokens.size()},
                    {"vocab", tokenizer->vocab()},
                    {"bytes", text.size()},
                    {"bytes_per_token", ratio},
                    {"wall_s", seconds}};
    fmt::print("{}\n", json.dump(2));
  } else if (!globals.quiet) {
    fmt::print("{}: {} tokens from {} ({:.2f} bytes per token), vocabulary {}, {:.1f} s\n", o.out,
               tokens.size(), formatBytes(static_cast<Bytes>(text.size())), ratio, tokenizer->vocab(),
               seconds);
  }
  return 0;
}

}  // namespace

void addPrepare(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand("prepare", "Turn text into a token file");
  const auto o = std::make_shared<Options>();
  command->add_option("INPUT", o->inputs, "Text files; - reads standard input")->required();
  command
      ->add_option("--tokenizer", o->tokenizer,
                   "bytes, sentencepiece:VOCAB (trains on the input) or FILE.model")
      ->capture_default_str();
  command->add_option("--out", o->out, "Token file to write")->required();
  command->callback([&globals, &action, o] { action = [&globals, o] { return run(globals, *o); }; });
}

}  // namespace bmt::cli
