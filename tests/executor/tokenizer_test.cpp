// Tokenizers give back exactly the text they were given, whatever is in it.
#include "executor/tokenizer.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "tests/support/run_program.h"

namespace bmt::exec {
namespace {

std::string sampleText() {
  std::string text = "  leading blanks, a tab\tand  two blanks\n\n\ntrailing blank \n";
  for (int i = 0; i < 400; ++i)
    text += "In the beginning was line " + std::to_string(i * 7919 % 1000) + ", and the line was text.\n";
  return text + "gr\xc3\xbc\xc3\x9f dich, \xe4\xbd\xa0\xe5\xa5\xbd; no newline at the end";
}

TEST(Tokenizer, BytesAreTheBytes) {
  const auto tokenizer = bytesTokenizer();
  EXPECT_EQ(tokenizer->vocab(), 256);
  EXPECT_EQ(tokenizer->encode("A\n\xff"), (std::vector<std::int32_t>{65, 10, 255}));
  EXPECT_EQ(tokenizer->decode({65, 10, 255}), "A\n\xff");
}

TEST(Tokenizer, SentencePieceRoundTripsTextItHasNotSeen) {
  const test::TemporaryFolder folder;
  const std::string path = folder.path("m.model");
  trainSentencePiece(sampleText(), 400, path);
  const auto tokenizer = loadSentencePiece(path);
  EXPECT_EQ(tokenizer->vocab(), 400);
  for (const std::string& text : {sampleText(), std::string("\n"), std::string(" "), std::string(),
                                  std::string("quite other words: \xf0\x9f\x99\x82 {}[]\n  x")}) {
    const std::vector<std::int32_t> ids = tokenizer->encode(text);
    EXPECT_EQ(tokenizer->decode(ids), text);
    for (const std::int32_t id : ids) {
      EXPECT_GE(id, 0);
      EXPECT_LT(id, 400);
    }
  }
  EXPECT_LT(tokenizer->encode(sampleText()).size(), sampleText().size() / 2);
}

TEST(Tokenizer, RefusesWhatIsNoModelAndTooLittleText) {
  const test::TemporaryFolder folder;
  EXPECT_THROW(loadSentencePiece(folder.write("x.model", "not a model")), Error);
  EXPECT_THROW(loadSentencePiece(folder.path("missing.model")), Error);
  EXPECT_THROW(trainSentencePiece("too short", 4000, folder.path("t.model")), Error);
}

}  // namespace
}  // namespace bmt::exec
