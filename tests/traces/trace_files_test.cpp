// Traces on disk and what is computed from two of them: the round trip is exact, damage is one clear error,
// shares and errors are those of hand-made traces.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <random>

#include "core/json.h"
#include "traces/chrome_trace.h"
#include "traces/compare.h"
#include "traces/shares.h"
#include "traces/timeline_svg.h"

namespace bmt::trace {

// Only the tests compare whole traces.
bool operator==(const Span& a, const Span& b) {
  return std::tie(a.rank, a.task, a.lane, a.kind, a.slot.phase, a.slot.chunk, a.slot.microbatch, a.layer,
                  a.start, a.end, a.posted, a.cause.rank, a.cause.task, a.name, a.bytes) ==
         std::tie(b.rank, b.task, b.lane, b.kind, b.slot.phase, b.slot.chunk, b.slot.microbatch, b.layer,
                  b.start, b.end, b.posted, b.cause.rank, b.cause.task, b.name, b.bytes);
}
bool operator==(const MemorySample& a, const MemorySample& b) {
  return a.rank == b.rank && a.time == b.time && a.live == b.live;
}

namespace {

Span makeSpan(RankId rank, TaskId task, Lane lane, TaskKind kind, Slot slot, Ns start, Ns end) {
  Span span;
  span.rank = rank;
  span.task = task;
  span.lane = lane;
  span.kind = kind;
  span.slot = slot;
  span.start = span.posted = start;
  span.end = end;
  return span;
}

// Two pipeline stages: rank 0 sends the forward of micro-batch 0 to rank 1.
Trace smallTrace(Source source = Source::Predicted) {
  Trace trace;
  trace.source = source;
  trace.model = "tiny \"quoted\" \\ model";
  trace.cluster = "local:2";
  trace.plan = "dp=1,tp=1,pp=2,mb=1,gb=1,schedule=1f1b";
  trace.profile = "made up";
  trace.num_ranks = trace.stages = 2;
  trace.names = {"forward F0.0 L0", "send", "recv", "unused name"};
  const Slot f{Phase::F, 0, 0};
  trace.spans.push_back(makeSpan(0, 0, Lane::Compute, TaskKind::Forward, f, 0, 1001));
  Span send = makeSpan(0, 1, Lane::SendF, TaskKind::PipeComm, f, 1002, 1502);
  send.name = 1;
  send.bytes = 4096;
  send.cause = {0, 0};
  trace.spans.push_back(send);
  Span recv = makeSpan(1, 0, Lane::RecvF, TaskKind::PipeComm, f, 1002, 1502);
  recv.posted = 3;
  recv.name = 2;
  recv.bytes = 4096;
  trace.spans.push_back(recv);
  trace.spans.push_back(makeSpan(1, 1, Lane::Compute, TaskKind::Head, f, 1502, 4000));
  MemorySample sample;
  sample.rank = 1;
  sample.time = 1502;
  sample.live = {1, 2, 3, 4, 5, 6, 7};
  trace.memory.push_back(sample);
  trace.step_time = 4000;
  trace.peak_memory = 28;
  return trace;
}

void expectEqual(const Trace& a, const Trace& b) {
  EXPECT_EQ(a.source, b.source);
  EXPECT_EQ(a.peak_memory, b.peak_memory);
  EXPECT_EQ(std::tie(a.model, a.cluster, a.plan, a.profile), std::tie(b.model, b.cluster, b.plan, b.profile));
  EXPECT_EQ(std::tie(a.num_ranks, a.stages, a.step_time), std::tie(b.num_ranks, b.stages, b.step_time));
  EXPECT_EQ(a.names, b.names);
  EXPECT_TRUE(a.spans == b.spans);
  EXPECT_TRUE(a.memory == b.memory);
}

std::string refusal(const std::string& text) {
  try {
    traceFromJson(text, "file.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::BadInput);
    EXPECT_NE(std::string(error.what()).find("file.json"), std::string::npos) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text.substr(0, 200);
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ChromeTrace, RoundTripIsExact) {
  expectEqual(traceFromJson(traceToJson(smallTrace()), "x"), smallTrace());
}

TEST(ChromeTrace, RandomTracesRoundTrip) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 20; ++round) {
    Trace trace;
    trace.source = random() % 2 == 0 ? Source::Predicted : Source::Measured;
    trace.plan = "not a plan";
    trace.num_ranks = 5;
    trace.names = {"a", "b\n\xC3\xA9", "c"};
    for (TaskId task = 0; task < 200; ++task) {
      Span span = makeSpan(static_cast<RankId>(random() % 5), task, static_cast<Lane>(random() % kNumLanes),
                           static_cast<TaskKind>(random() % kNumTaskKinds), {}, 0, 0);
      span.slot = {static_cast<Phase>(random() % 4), static_cast<std::int16_t>(random() % 8),
                   static_cast<std::int32_t>(random() % 99)};
      span.start = static_cast<Ns>(random() % 1'000'000'000'000'000);  // 11 days, to the nanosecond
      span.end = span.start + static_cast<Ns>(random() % 1'000'000'000'000);
      span.posted = span.start - static_cast<Ns>(random() % 1000);
      span.layer = static_cast<std::int32_t>(random() % 100) - 1;
      span.name = static_cast<std::uint32_t>(random() % 3);
      span.bytes = static_cast<Bytes>(random() % 1'000'000'000'000);
      trace.spans.push_back(span);
    }
    expectEqual(traceFromJson(traceToJson(trace), "x"), trace);
  }
}

TEST(ChromeTrace, GzipIsChosenByNameAndSeenByContent) {
  const std::string folder = ::testing::TempDir();
  const std::string packed = folder + "/bmt_trace.json.gz", renamed = folder + "/bmt_trace_renamed.json";
  writeTrace(smallTrace(), packed);
  EXPECT_TRUE(readFile(packed).starts_with("\x1f\x8b"));
  expectEqual(readTrace(packed), smallTrace());
  std::filesystem::rename(packed, renamed);
  expectEqual(readTrace(renamed), smallTrace());
  const std::string whole = readFile(renamed);
  writeFileAtomically(renamed, whole.substr(0, whole.size() / 2));
  EXPECT_THROW(readTrace(renamed), Error);
  std::filesystem::remove(renamed);
}

TEST(ChromeTrace, SaysWhoIsWhoAndConnectsSendWithReceive) {
  const std::string text = traceToJson(smallTrace());
  EXPECT_TRUE(contains(text, "rank 1 (dp 0, stage 1, tp 0)"));
  const Json json = parseJson(text, "x");
  EXPECT_EQ(json["otherData"]["schema"], "bmtrain.trace/1");
  EXPECT_EQ(json["otherData"]["source"], "predicted");
  int starts = 0, ends = 0, counters = 0;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] == "s") {
      ++starts;
      EXPECT_EQ(event["pid"], 0);
      EXPECT_EQ(event["tid"], static_cast<int>(Lane::SendF));
    }
    if (event["ph"] == "f") {
      ++ends;
      EXPECT_EQ(event["pid"], 1);
      EXPECT_EQ(event["tid"], static_cast<int>(Lane::RecvF));
    }
    if (event["ph"] == "C") {
      ++counters;
      EXPECT_EQ(event["args"]["weights"], 1);
    }
  }
  EXPECT_EQ(starts, 1);
  EXPECT_EQ(ends, 1);
  EXPECT_EQ(counters, 1);
}

TEST(ChromeTrace, RefusesWhatItDidNotWrite) {
  EXPECT_TRUE(contains(refusal(""), "not valid JSON"));
  EXPECT_TRUE(contains(refusal("[]"), "traceEvents"));
  EXPECT_TRUE(contains(refusal(R"({"traceEvents":[]})"), "otherData"));
  EXPECT_TRUE(contains(
      refusal(
          R"({"traceEvents":[{"ph":"X","pid":1,"tid":2,"name":"kernel","ts":1,"dur":2}],"schemaVersion":1})"),
      "args"));
  EXPECT_TRUE(contains(refusal(R"({"traceEvents":[],"otherData":{"schema":"bmtrain.trace/9"}})"),
                       "'bmtrain.trace/9'"));
  const std::string good = traceToJson(smallTrace());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  EXPECT_TRUE(contains(refusal(with("\"num_spans\":4", "\"num_spans\":5")), "says 5, but the file has 4"));
  EXPECT_TRUE(contains(refusal(with("\"num_ranks\":2", "\"num_ranks\":1")), "'num_ranks' is 1"));
  EXPECT_TRUE(
      contains(refusal(with("\"slot\":\"F0.0\"", "\"slot\":\"F0\"")), "'F0' is not of the form F0.3"));
  EXPECT_TRUE(
      contains(refusal(with("\"cat\":\"forward\"", "\"cat\":\"kernel\"")), "'kernel' is not a kind of task"));
  EXPECT_TRUE(contains(refusal(with("\"dur\":1.001", "\"dur\":-1.001")), "-1001 ns is negative"));
  EXPECT_TRUE(contains(refusal(with("\"source\":\"predicted\"", "\"source\":\"guessed\"")), "'guessed'"));
}

// Every damaged file is read to some trace or refused as bad input: nothing else escapes.
TEST(ChromeTrace, SurvivesRandomDamage) {
  const std::string good = traceToJson(smallTrace());
  std::mt19937 random(11);
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    if (round % 3 == 0) text.resize(random() % text.size());
    for (unsigned edits = random() % 4; edits > 0 && !text.empty(); --edits) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          text.erase(at, 1 + random() % 5);
          break;
        default:
          text.insert(at, "99999999999999999999");
          break;
      }
    }
    try {
      traceFromJson(text, "damaged");
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::BadInput) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 1500);
}

TEST(Shares, AddUpToOneAndCountByDefinition) {
  // Rank 0 computes 1001 of 4000 ns, rank 1 2498 of 4000; receives are no collectives.
  const Shares shares = stepShares(smallTrace());
  EXPECT_DOUBLE_EQ(shares.compute, (1001.0 + 2498.0) / 8000);
  EXPECT_DOUBLE_EQ(shares.exposed, 0);
  EXPECT_DOUBLE_EQ(shares.compute + shares.exposed + shares.bubble, 1);

  Trace one;
  one.num_ranks = 1;
  one.step_time = 100;
  one.spans.push_back(makeSpan(0, 0, Lane::Compute, TaskKind::Forward, {}, 0, 40));
  one.spans.push_back(makeSpan(0, 1, Lane::Compute, TaskKind::TensorComm, {}, 40, 50));  // blocking: 10
  one.spans.push_back(
      makeSpan(0, 2, Lane::Data, TaskKind::DataComm, {}, 30, 70));  // of it beside compute: 10 + blocking 10
  one.spans.push_back(makeSpan(0, 3, Lane::Compute, TaskKind::Optimizer, {}, 80, 100));
  const Shares s = stepShares(one);
  EXPECT_DOUBLE_EQ(s.compute, 0.6);
  EXPECT_DOUBLE_EQ(s.exposed, 0.3);
  EXPECT_DOUBLE_EQ(s.bubble, 0.1);
}

TEST(Compare, JoinsTasksAndReportsErrors) {
  const Trace predicted = smallTrace();
  Trace measured = smallTrace(Source::Measured);
  measured.spans[0].end = 2002;         // forward: 1001 predicted, 2002 measured
  measured.spans[3].end = 1502 + 1249;  // head: 2498 predicted, 1249 measured
  measured.step_time = 5000;
  measured.spans.push_back(makeSpan(1, 7, Lane::Compute, TaskKind::Optimizer, {}, 4000, 4100));
  measured.peak_memory = 56;
  const Comparison c = compareTraces(predicted, measured, 2);
  EXPECT_DOUBLE_EQ(c.errorPct(), -20);
  EXPECT_EQ(c.joined, 4);
  EXPECT_EQ(c.only_measured, 1);
  EXPECT_EQ(c.only_predicted, 0);
  EXPECT_EQ(c.predicted_peak, 28);
  EXPECT_EQ(c.measured_peak, 56);
  std::map<std::string, CompareRow> kinds;
  for (const CompareRow& row : c.by_kind) kinds[row.name] = row;
  ASSERT_EQ(kinds.size(), 3u);
  EXPECT_EQ(kinds["pipe_comm"].count, 2);
  EXPECT_NEAR(kinds["forward"].errorPct(), -50, 1e-9);
  EXPECT_NEAR(kinds["head"].errorPct(), 100, 1e-9);
  EXPECT_DOUBLE_EQ(kinds["head"].predicted_s, 2498e-9);
  ASSERT_EQ(c.worst.size(), 2u);
  EXPECT_EQ(c.worst[0].task, (TaskRef{1, 1}));  // off by 1249 ns
  EXPECT_EQ(c.worst[1].task, (TaskRef{0, 0}));  // off by 1001 ns
  const Json json = parseJson(comparisonToJson(c), "x");
  EXPECT_EQ(json["schema"], "bmtrain.compare/1");
  EXPECT_DOUBLE_EQ(json["predicted_step_s"], 4000e-9);
  EXPECT_DOUBLE_EQ(json["measured_step_s"], 5000e-9);
  EXPECT_EQ(json["by_lane"].size(), 3u);
  EXPECT_EQ(json["worst"][0]["rank"], 1);
  const std::string text = comparisonToText(c);
  EXPECT_TRUE(contains(text, "predicted") && contains(text, "measured") && contains(text, "-20.0 %")) << text;
}

TEST(Compare, RefusesWhatIsNotComparable) {
  const auto message = [](const Trace& a, const Trace& b) {
    try {
      compareTraces(a, b);
    } catch (const Error& error) {
      EXPECT_EQ(error.exitCode(), 2);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const Trace predicted = smallTrace(), measured = smallTrace(Source::Measured);
  EXPECT_TRUE(contains(message(measured, predicted), "the predicted one first"));
  Trace other = measured;
  other.plan = "dp=2";
  EXPECT_TRUE(contains(message(predicted, other), "measured 'dp=2'"));
  other = measured;
  other.model = "gpt2";
  EXPECT_TRUE(contains(message(predicted, other), "measured 'gpt2'"));
  other = measured;
  other.spans[3].kind = TaskKind::Optimizer;
  EXPECT_TRUE(contains(message(predicted, other), "task 1 of rank 1"));
  other = measured;
  other.spans.clear();
  EXPECT_TRUE(contains(message(predicted, other), "no task is in both"));
}

TEST(TimelineSvg, DrawsBothTracesAndStaysSmall) {
  const Trace predicted = smallTrace(), measured = smallTrace(Source::Measured);
  const std::string both = timelineSvg({&predicted, &measured});
  EXPECT_TRUE(both.starts_with("<svg") && both.ends_with("</svg>\n"));
  EXPECT_TRUE(contains(both, ">predicted<") && contains(both, ">measured<"));
  EXPECT_TRUE(contains(both, "tiny &quot;quoted&quot;"));
  EXPECT_TRUE(contains(both, ">F0<") && contains(both, ">H0<"));
  EXPECT_FALSE(contains(both, "nan"));

  Trace large;
  large.num_ranks = 64;
  std::mt19937 random(5);
  for (RankId rank = 0; rank < 64; ++rank) {
    for (int lane = 0; lane < kNumLanes; ++lane) {
      Ns now = 0;
      for (TaskId task = 0; task < 600; ++task) {
        now += static_cast<Ns>(random() % 1000);
        large.spans.push_back(makeSpan(rank, task, static_cast<Lane>(lane),
                                       static_cast<TaskKind>(random() % kNumTaskKinds), {Phase::F, 0, task},
                                       now, now + 500));
        now += 500;
      }
      large.step_time = std::max(large.step_time, now);
    }
  }
  const std::string svg = timelineSvg({&large});
  EXPECT_LT(svg.size(), 2u << 20);
  EXPECT_TRUE(contains(svg, "48 more ranks are not drawn"));
}

TEST(TimelineSvg, AnEmptyTraceIsAnEmptyPicture) {
  const Trace empty;
  const std::string svg = timelineSvg({&empty});
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_FALSE(contains(svg, "nan") || contains(svg, "inf")) << svg;
}

}  // namespace
}  // namespace bmt::trace
