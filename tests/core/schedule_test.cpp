// Schedules: text form, order rules, and activations in flight against the closed forms (FACTS section 1.2;
// Huang et al. 2019, Narayanan et al. 2021). Makespans are checked by the engine's tests.
#include "core/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace bmt {
namespace {

// Chunks whose forward has run and whose backward has not, at most.
std::int64_t peakInFlight(const std::vector<Slot>& slots) {
  std::int64_t now = 0, peak = 0;
  for (const Slot& slot : slots) {
    now += slot.phase == Phase::F ? 1 : -1;
    peak = std::max(peak, now);
  }
  return peak;
}

TEST(Schedule, ActivationsInFlightMatchTheClosedForms) {
  for (const std::int32_t m : {4, 8, 32}) {
    const std::int32_t p = 8;
    const Schedule gpipe = makeSchedule(ScheduleKind::GPipe, p, 1, m);
    const Schedule one = makeSchedule(ScheduleKind::OneFOneB, p, 1, m);
    for (std::int32_t r = 0; r < p; ++r) {
      EXPECT_EQ(peakInFlight(gpipe.stages[static_cast<std::size_t>(r)]), m);
      EXPECT_EQ(peakInFlight(one.stages[static_cast<std::size_t>(r)]), std::min(m, p - r));
    }
  }
  for (const std::int32_t v : {2, 4}) {
    const std::int32_t p = 8, m = 32;
    const Schedule interleaved = makeSchedule(ScheduleKind::Interleaved, p, v, m);
    for (std::int32_t r = 0; r < p; ++r)
      EXPECT_EQ(peakInFlight(interleaved.stages[static_cast<std::size_t>(r)]),
                std::min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1));
  }
}

TEST(Schedule, BackwardsOfAChunkRunInAscendingOrder) {
  for (const Schedule& s :
       {makeSchedule(ScheduleKind::GPipe, 4, 1, 6), makeSchedule(ScheduleKind::OneFOneB, 4, 1, 6),
        makeSchedule(ScheduleKind::Interleaved, 4, 3, 8)}) {
    EXPECT_TRUE(validateSchedule(s).empty()) << formatIssues(validateSchedule(s));
    for (const auto& slots : s.stages) {
      std::vector<std::int32_t> next(static_cast<std::size_t>(s.num_chunks), 0);
      for (const Slot& slot : slots) {
        if (slot.phase != Phase::B) continue;
        EXPECT_EQ(slot.microbatch, next[static_cast<std::size_t>(slot.chunk)]++);
      }
    }
  }
}

TEST(Schedule, TextRoundTrips) {
  const Schedule s = makeSchedule(ScheduleKind::Interleaved, 2, 2, 4);
  EXPECT_EQ(scheduleFromText(scheduleToText(s), "s"), s);
  EXPECT_EQ(scheduleToText(makeSchedule(ScheduleKind::OneFOneB, 2, 1, 2)),
            "0: F0.0 F0.1 B0.0 B0.1\n1: F0.0 B0.0 F0.1 B0.1\n");
}

TEST(Schedule, BadTextNamesLineAndToken) {
  for (const auto& [text, expected] : {std::pair("0: F0.0 X\n", "'X'"),
                                       {"1: F0.0\n", "'0:'"},
                                       {"", "no stage lines"},
                                       {"0: F0.0 B0.-1\n", "B0.-1"},
                                       {"0: F0.99999999999\n", "F0.99999999999"}}) {
    try {
      scheduleFromText(text, "file");
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.exitCode(), 2);
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
}

TEST(Schedule, FindsDeadlocksAndMissingSlots) {
  // Stage 1 wants both forwards before any backward, stage 0 waits for backward 0 before it sends forward 1.
  const Schedule deadlock = scheduleFromText("0: F0.0 B0.0 F0.1 B0.1\n1: F0.0 F0.1 B0.0 B0.1\n", "s");
  EXPECT_NE(formatIssues(validateSchedule(deadlock)).find("deadlocks"), std::string::npos);
  const Schedule missing = scheduleFromText("0: F0.0 B0.0 F0.1\n", "s");
  EXPECT_NE(formatIssues(validateSchedule(missing)).find("has 3 slots"), std::string::npos);
  const Schedule order = scheduleFromText("0: F0.1 F0.0 B0.0 B0.1\n", "s");
  EXPECT_NE(formatIssues(validateSchedule(order)).find("F0.1 comes where F0.0 is expected"),
            std::string::npos);
  const Schedule twice = scheduleFromText("0: F0.0 F0.0 B0.0 F0.1\n", "s");
  EXPECT_NE(formatIssues(validateSchedule(twice)).find("twice"), std::string::npos);
}

TEST(Schedule, DrawingHasOneRowPerStageAndTheIdleShare) {
  // (p-1)/(m+p-1) = 3/11.
  const std::string text = drawSchedule(makeSchedule(ScheduleKind::OneFOneB, 4, 1, 8));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5);
  EXPECT_NE(text.find("33 time units"), std::string::npos);
  EXPECT_NE(text.find("idle 27.3 %"), std::string::npos);
}

}  // namespace
}  // namespace bmt
