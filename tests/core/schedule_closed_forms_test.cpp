// Makespans, idle time and activations of every schedule against the closed forms of FACTS.md sections 1.1
// and 1.2 (Huang 2019; Narayanan 2021; Lamy-Poirier 2022; Qi 2023, 2024; the DualPipe README's table), by
// playing the slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/schedule.h"
#include "tests/support/run_program.h"

namespace bmt {
namespace {

std::int32_t peak(const SchedulePlay& play) {
  return *std::max_element(play.peak_chunks.begin(), play.peak_chunks.end());
}

void expectValid(const Schedule& s) {
  EXPECT_EQ(formatIssues(validateSchedule(s)), "") << scheduleToText(s);
}

TEST(ClosedForms, GPipeAndOneFOneB) {
  for (const std::int32_t p : {1, 2, 4, 8}) {
    for (const std::int32_t m : {1, 2, 4, 8, 32}) {
      for (const ScheduleKind kind : {ScheduleKind::GPipe, ScheduleKind::OneFOneB}) {
        const Schedule s = makeSchedule(kind, p, 1, m);
        expectValid(s);
        EXPECT_EQ(playSchedule(s, {}).makespan, (m + p - 1) * 3) << p << " " << m;
      }
    }
  }
  EXPECT_EQ(playSchedule(makeSchedule(ScheduleKind::OneFOneB, 8, 1, 32), {}).makespan, 117);
}

TEST(ClosedForms, InterleavedAndBreadthFirst) {
  const std::int32_t p = 8, m = 32;
  for (const std::int32_t v : {2, 3, 4}) {
    // Whole-stage times F = v, B = 2 v, so that a chunk takes 1 and 2: m (F+B) + (p-1)(F+B) / v.
    for (const ScheduleKind kind : {ScheduleKind::Interleaved, ScheduleKind::BreadthFirst}) {
      const Schedule s = makeSchedule(kind, p, v, m);
      expectValid(s);
      EXPECT_EQ(playSchedule(s, {}).makespan, m * 3 * v + (p - 1) * 3);
    }
    EXPECT_EQ(peak(playSchedule(makeSchedule(ScheduleKind::BreadthFirst, p, v, m), {})), m * v);
    EXPECT_EQ(peak(playSchedule(makeSchedule(ScheduleKind::Interleaved, p, v, m), {})), p * v + p - 1);
    // As few micro-batches as there may be.
    const SchedulePlay few = playSchedule(makeSchedule(ScheduleKind::Interleaved, p, v, p), {});
    EXPECT_EQ(few.makespan, p * 3 * v + (p - 1) * 3);
    for (std::int32_t r = 0; r < p; ++r)
      EXPECT_EQ(few.peak_chunks[static_cast<std::size_t>(r)],
                std::min(p * v, 2 * (p - 1 - r) + (v - 1) * p + 1));
  }
  EXPECT_EQ(makeSchedule(ScheduleKind::Interleaved, p, 1, m).stages,
            makeSchedule(ScheduleKind::OneFOneB, p, 1, m).stages);
}

TEST(ClosedForms, ZeroBubbleH1) {
  struct Row {
    std::int64_t f, b, w, makespan;
  };
  const std::int32_t p = 8, m = 32;
  for (const Row& row : {Row{1, 1, 1, 103}, Row{10, 12, 8, 1058}, Row{10, 11, 9, 1044}}) {
    const Schedule s = makeSchedule(ScheduleKind::ZbH1, p, 1, m);
    expectValid(s);
    const SchedulePlay play = playSchedule(s, {row.f, row.b + row.w, row.w, 0});
    EXPECT_EQ(play.makespan, row.makespan);
    EXPECT_EQ(play.makespan, m * (row.f + row.b + row.w) + (p - 1) * (row.f + row.b - row.w));
    EXPECT_EQ(play.peak_chunks, std::vector<std::int32_t>(8, p));  // as much on every rank
  }
  // W = 0: 1F1B with B (invariant of FACTS 1.8).
  for (const std::int32_t micro : {8, 16}) {
    EXPECT_EQ(playSchedule(makeSchedule(ScheduleKind::ZbH1, 4, 1, micro), {1, 2, 0, 0}).makespan,
              playSchedule(makeSchedule(ScheduleKind::OneFOneB, 4, 1, micro), {1, 2, 0, 0}).makespan);
  }
}

TEST(ClosedForms, ZeroBubbleH2HasNoIdleTimeWithinARank) {
  for (const std::int32_t p : {2, 4, 8}) {
    const std::int32_t m = 3 * p;
    const Schedule s = makeSchedule(ScheduleKind::ZbH2, p, 1, m);
    expectValid(s);
    const SchedulePlay play = playSchedule(s, {10, 20, 10, 0});
    EXPECT_EQ(play.span, std::vector<std::int64_t>(static_cast<std::size_t>(p), m * 30));
    EXPECT_EQ(play.makespan, m * 30 + (p - 1) * 10);
    EXPECT_EQ(peak(play), 2 * p - 1);  // within the 2 p of the closed form
  }
}

TEST(ClosedForms, ZeroBubbleV) {
  for (const auto& [p, m, end] : {std::tuple(8, 24, 1510), std::tuple(4, 12, 750)}) {
    const Schedule s = makeSchedule(ScheduleKind::ZbV, p, 2, m);
    expectValid(s);
    const SchedulePlay play = playSchedule(s, {10, 20, 10, 0});
    EXPECT_EQ(play.busy, std::vector<std::int64_t>(static_cast<std::size_t>(p), m * 60));
    EXPECT_EQ(play.makespan, end);
    EXPECT_LE(peak(play), 2 * p);
  }
}

TEST(ClosedForms, AutomaticZeroBubbleReachesTheHandMadeOnes) {
  const SlotTimes unit{1, 2, 1, 0};
  for (const std::int32_t p : {4, 8}) {
    const std::int32_t m = 4 * p;
    // FACTS section 2: with 1F1B's memory the heuristic is exact, m (F+B+W) + (p-1)(F+B-W).
    EXPECT_LE(playSchedule(zeroBubbleSchedule(p, 1, m, p, unit), unit).makespan, 3 * m + p - 1);
    EXPECT_LE(peak(playSchedule(zeroBubbleSchedule(p, 1, m, p, unit), unit)), p);
    // More memory is never worse, less still runs.
    std::int64_t last = INT64_MAX;
    for (const std::int32_t limit : {1, 2, p / 2, p, 2 * p - 1}) {
      const Schedule s = zeroBubbleSchedule(p, 1, m, limit, unit);
      expectValid(s);
      EXPECT_LE(peak(playSchedule(s, unit)), limit);
      EXPECT_LE(playSchedule(s, unit).makespan, last) << "limit " << limit;
      last = playSchedule(s, unit).makespan;
    }
    EXPECT_EQ(last, 3 * m + p - 1);
  }
}

TEST(ClosedForms, DualPipeV) {
  // Idle time of a rank (p/2 - 1)(FB + Bf - 3 W) for p stages on p/2 devices; Bf = full backward, FB =
  // overlapped pair.
  struct Row {
    std::int64_t f, bf, w, fb;
  };
  for (const std::int32_t devices : {2, 4, 8}) {
    const std::int32_t m = 2 * devices + 6;
    const Schedule s = makeSchedule(ScheduleKind::DualPipeV, devices, 2, m);
    expectValid(s);
    for (const Row& row : {Row{10, 20, 10, 30}, Row{10, 20, 10, 24}}) {
      const SchedulePlay play = playSchedule(s, {row.f, row.bf, row.w, 0, row.fb});
      // Ranks have different numbers of pairs; where a pair is shorter than its parts, the formula is the
      // worst rank's.
      const std::int64_t idle = play.makespan - *std::min_element(play.busy.begin(), play.busy.end());
      const std::int64_t least = play.makespan - *std::max_element(play.busy.begin(), play.busy.end());
      const std::int64_t worst = (devices - 1) * (row.fb + row.bf - 3 * row.w);
      EXPECT_EQ(idle, worst) << devices << " " << row.fb;
      if (row.fb == row.f + row.bf) {
        EXPECT_EQ(least, worst);
      }
    }
    // Slots one after the other, each result handed on as soon as it is there: less.
    const SchedulePlay apart = playSchedule(s, {10, 20, 10, 0});
    EXPECT_LE(apart.makespan - apart.busy.front(), (devices - 1) * 20);
    EXPECT_LE(peak(apart), 2 * devices + 1);  // p + 1
  }
}

TEST(ClosedForms, BlockingHopsAddWhatTheyShould) {
  const std::int64_t c = 1, scale = 100;  // a hop is short against a slot
  const SlotTimes none{scale, 2 * scale, scale, 0}, hops{scale, 2 * scale, scale, c};
  const auto added = [&](ScheduleKind kind, std::int32_t p, std::int32_t v, std::int32_t m) {
    const Schedule s = makeSchedule(kind, p, v, m);
    return playSchedule(s, hops).makespan - playSchedule(s, none).makespan;
  };
  EXPECT_EQ(added(ScheduleKind::GPipe, 8, 1, 32), 2 * 7 * c);
  for (const auto& [p, m] : {std::pair(8, 32), std::pair(4, 64), std::pair(2, 16)})
    EXPECT_EQ(added(ScheduleKind::OneFOneB, p, 1, m), c * (2 * (p - 1) * m / p + 2 * (p - 2)))
        << p << " " << m;
  EXPECT_EQ(added(ScheduleKind::OneFOneB, 8, 1, 32), 68 * c);
  for (const std::int32_t v : {2, 4})
    EXPECT_EQ(added(ScheduleKind::Interleaved, 8, v, 32), 2 * (8 * v - 1) * c);
}

TEST(ClosedForms, InvariantsHoldForEverySchedule) {
  for (int k = 0; k < kNumScheduleKinds; ++k) {
    const auto kind = static_cast<ScheduleKind>(k);
    const bool loop = kind == ScheduleKind::Interleaved || kind == ScheduleKind::BreadthFirst;
    const std::int32_t v = loop                                                                   ? 3
                           : placementOf(kind, 2) == Placement::V && kind != ScheduleKind::ZbAuto ? 2
                                                                                                  : 1;
    const std::int32_t p = 4, m = 16;
    const Schedule s = makeSchedule(kind, p, v, m);
    expectValid(s);
    EXPECT_EQ(makeSchedule(kind, p, v, m), s);
    std::int64_t last = 0;
    for (const SlotTimes& times : {SlotTimes{1, 2, 1, 0}, SlotTimes{2, 2, 1, 0}, SlotTimes{2, 5, 2, 1}}) {
      const SchedulePlay play = playSchedule(s, times);
      for (std::size_t stage = 0; stage < 4; ++stage) {
        EXPECT_EQ(play.busy[stage], m * v * (times.forward + times.backward));
        EXPECT_GE(play.makespan, play.busy[stage]);
      }
      EXPECT_GT(play.makespan, last);  // monotone in every duration
      last = play.makespan;
    }
    // Every phase of a chunk runs in ascending micro-batch order, so sums have one order.
    for (const auto& slots : s.stages) {
      std::vector<std::int32_t> next(static_cast<std::size_t>(3 * v), 0);
      for (const Slot& slot : slots)
        EXPECT_EQ(slot.microbatch, next[static_cast<std::size_t>(slot.phase) * static_cast<std::size_t>(v) +
                                        static_cast<std::size_t>(slot.chunk)]++)
            << toString(kind);
    }
    EXPECT_EQ(scheduleFromText(scheduleToText(s), "s"), s) << toString(kind);
    EXPECT_EQ(scheduleFromCsv(scheduleToCsv(s), "s"), s) << toString(kind) << "\n" << scheduleToCsv(s);
  }
}

TEST(ScheduleCsv, ReadsWhatPyTorchWrites) {
  // Two ranks, two micro-batches, 1F1B, with the idle cells of the grid.
  const Schedule s = scheduleFromCsv("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n", "s.csv");
  EXPECT_EQ(s, makeSchedule(ScheduleKind::OneFOneB, 2, 1, 2));
  // A full backward among split ones.
  EXPECT_EQ(scheduleToText(scheduleFromCsv("0F0,0I0,0F1,0W0,0B1\n", "s.csv")),
            "0: F0.0 B0.0 F0.1 W0.0 B0.1 W0.1\n");
  for (const char* wrong : {"0F0,0X0\n", "", ",,\n", "F0\n", "0F0\n0F0\n", "0F0,3F0\n", "0F99999999999\n"})
    EXPECT_THROW(scheduleFromCsv(wrong, "s.csv"), Error) << wrong;
}

TEST(ScheduleCsv, APlanRunsItAndMustAgreeWithIt) {
  const test::TemporaryFolder folder;
  const std::string path = folder.write("mine.csv", scheduleToCsv(makeSchedule(ScheduleKind::ZbH1, 2, 1, 4)));
  const Plan plan = planFromText("pp=2,mb=1,gb=4,schedule=" + path);
  EXPECT_EQ(makeSchedule(plan), makeSchedule(ScheduleKind::ZbH1, 2, 1, 4));
  EXPECT_EQ(planFromText(planToText(plan)), plan);
  EXPECT_EQ(planFromJson(planToJson(plan), "p"), plan);
  const ModelSpec model = loadModel("gpt2-124m");
  EXPECT_EQ(formatIssues(validatePlan(model, localCluster(2), plan)), "");
  const std::string wrong =
      formatIssues(validatePlan(model, localCluster(3), planFromText("pp=3,gb=6,schedule=" + path)));
  EXPECT_NE(wrong.find("3, but " + path + " has 2 stages"), std::string::npos) << wrong;
  EXPECT_NE(wrong.find("has 4; nearest legal value: 4"), std::string::npos) << wrong;
  EXPECT_THROW(planFromText("schedule=/no/such.csv"), Error);
  EXPECT_THROW(planFromText("pp=1,schedule=" + folder.write("order.csv", "0F1,0F0,0B0,0B1\n")), Error);
}

}  // namespace
}  // namespace bmt
