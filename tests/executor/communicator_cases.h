// One list of communications that every communicator must carry out, and what each must leave behind: run by
// communicator_test.cpp with ranks as threads and by mpi_conformance.cpp with ranks as processes. Expected
// sums are plain loops in member order, so a communicator that passes is bit-equal to any other that does.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/mesh.h"
#include "executor/communicator.h"
#include "executor/cpu/cpu_backend.h"

namespace bmt::exec::test {

inline constexpr RankId kRanks = 4;

struct CommCase {
  CommKind kind = CommKind::AllReduce;
  DType dtype = DType::F32;
  std::int64_t count = 0;
  GroupId group = -1;
  std::uint64_t seq = 0;
  std::vector<RankId> members;
  bool in_place = false;
  Lane lane = Lane::Data;
};

// All kinds, types and sizes (one element, fewer than members, odd, beyond every short-message limit) over
// the whole world, two disjoint groups at the same time, and three of four ranks in another order than their
// ids.
inline std::vector<CommCase> commCases() {
  struct Group {
    GroupId id;
    std::vector<RankId> members;
  };
  const std::vector<Group> groups{{packGroup(GroupKind::World, 0), {0, 1, 2, 3}},
                                  {packGroup(GroupKind::Data, 0), {0, 2}},
                                  {packGroup(GroupKind::Data, 1), {1, 3}},
                                  {packGroup(GroupKind::Tensor, 3), {3, 0, 2}}};
  std::vector<CommCase> cases;
  std::uint64_t seq = 0;
  for (const DType dtype : {DType::F32, DType::F64, DType::I32}) {
    for (const Group& group : groups) {
      const auto n = static_cast<std::int64_t>(group.members.size());
      const Lane lane = seq % 2 == 0 ? Lane::Data : Lane::Tensor;
      for (const std::int64_t count :
           {std::int64_t{1}, std::int64_t{7}, std::int64_t{1001}, std::int64_t{100003}})
        cases.push_back({CommKind::AllReduce, dtype, count, group.id, ++seq, group.members, true, lane});
      for (const std::int64_t shard : {1, 333, 40000}) {
        for (const CommKind kind : {CommKind::AllGather, CommKind::ReduceScatter}) {
          for (const bool in_place : {false, true})
            cases.push_back({kind, dtype, shard * n, group.id, ++seq, group.members, in_place, lane});
        }
      }
    }
  }
  for (const std::int64_t count : {1, 1000, 300000}) {
    for (const auto& [from, to] : {std::pair<RankId, RankId>{0, 1}, {1, 0}, {2, 3}, {3, 1}}) {
      const GroupId pair =
          packGroup(to == (from + 1) % kRanks ? GroupKind::ForwardPair : GroupKind::BackwardPair, from);
      cases.push_back({CommKind::Send, DType::F32, count, pair, ++seq, {from, to}, false, Lane::SendF});
    }
  }
  return cases;
}

// What rank `rank` contributes: values that do not add up exactly in floating point.
template <typename T>
T contribution(std::uint64_t seq, RankId rank, std::int64_t i) {
  const std::uint64_t h = (seq * 1000003 + static_cast<std::uint64_t>(rank)) * 0x9E3779B97F4A7C15ULL +
                          static_cast<std::uint64_t>(i) * 0xD1B54A32D192ED03ULL;
  const auto small = static_cast<std::int32_t>(h >> 44) - (1 << 19);
  return static_cast<T>(small) / static_cast<T>(3);
}

template <typename T>
bool sameBits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// The rank's buffers of one case; `check` says what is wrong, or nothing.
template <typename T>
struct Exchange {
  const CommCase& c;
  std::size_t index;
  std::vector<T> src, dst;

  Exchange(const CommCase& comm_case, std::size_t at) : c(comm_case), index(at) {}
  std::int64_t shard() const { return c.count / static_cast<std::int64_t>(c.members.size()); }
  RankId rank() const { return c.members[index]; }

  void fill() {
    src.assign(static_cast<std::size_t>(c.count), T{});
    dst.assign(static_cast<std::size_t>(c.count), T{-1});
    const std::int64_t own = c.kind == CommKind::AllGather ? shard() : c.count;
    // An all-gather in place finds the shard at its position in the result.
    T* const to = c.kind == CommKind::AllGather && c.in_place
                      ? dst.data() + shard() * static_cast<std::int64_t>(index)
                      : src.data();
    for (std::int64_t i = 0; i < own; ++i) to[i] = contribution<T>(c.seq, rank(), i);
  }

  void bind(CommCall& call) {
    const auto at = static_cast<std::ptrdiff_t>(shard() * static_cast<std::int64_t>(index));
    call.src = src.data();
    call.dst = dst.data();
    if (c.kind == CommKind::AllReduce) call.dst = src.data();
    if (c.kind == CommKind::ReduceScatter && c.in_place) call.dst = src.data() + at;
    if (c.kind == CommKind::AllGather && c.in_place) call.src = dst.data() + at;
  }

  std::string check() const {
    const auto differs = [&](const T* got, std::int64_t count, auto expected) -> std::string {
      for (std::int64_t i = 0; i < count; ++i) {
        const T want = expected(i);
        if (!sameBits(want, got[i]))
          return fmt::format("rank {} {} seq {} element {}: {} instead of {}", rank(), toString(c.kind),
                             c.seq, i, got[i], want);
      }
      return {};
    };
    const auto sum = [&](std::int64_t i) {
      T total = contribution<T>(c.seq, c.members[0], i);
      for (std::size_t m = 1; m < c.members.size(); ++m) total += contribution<T>(c.seq, c.members[m], i);
      return total;
    };
    const std::int64_t own = shard() * static_cast<std::int64_t>(index);
    switch (c.kind) {
      case CommKind::AllReduce:
        return differs(src.data(), c.count, sum);
      case CommKind::ReduceScatter:
        return differs(c.in_place ? src.data() + own : dst.data(), shard(),
                       [&](std::int64_t i) { return sum(own + i); });
      case CommKind::AllGather:
        return differs(dst.data(), c.count, [&](std::int64_t i) {
          return contribution<T>(c.seq, c.members[static_cast<std::size_t>(i / shard())], i % shard());
        });
      default:
        if (index == 0) return {};
        return differs(dst.data(), c.count,
                       [&](std::int64_t i) { return contribution<T>(c.seq, c.members[0], i); });
    }
  }
};

struct AnyExchange {
  std::function<void()> fill;
  std::function<void(CommCall&)> bind;
  std::function<std::string()> check;
};

template <typename T>
AnyExchange makeExchange(const CommCase& c, std::size_t index) {
  const auto exchange = std::make_shared<Exchange<T>>(c, index);
  return {[exchange] { exchange->fill(); }, [exchange](CommCall& call) { exchange->bind(call); },
          [exchange] { return exchange->check(); }};
}

inline CommCall callOf(const CommCase& c, std::size_t index, std::int32_t order) {
  CommCall call;
  call.kind = c.kind == CommKind::Send && index == 1 ? CommKind::Recv : c.kind;
  call.group = c.group;
  call.seq = c.seq;
  call.members = c.members;
  call.index = static_cast<std::int32_t>(index);
  call.count = c.count;
  call.dtype = c.dtype;
  call.order = order;
  call.name = fmt::format("{} {}", toString(call.kind), c.seq);
  return call;
}

// Carries out all cases that `rank` is in, three times over. Returns the first difference, or nothing. Throws
// what the communicator throws. `silent`: the rank leaves out the last case (a fault).
inline std::string runCommCases(CpuBackend& backend, Communicator& communicator, RankId rank,
                                double deadline_s, bool silent = false) {
  const std::vector<CommCase> cases = commCases();
  std::vector<AnyExchange> exchanges;
  backend.beginCapture(0);
  std::int32_t order = 0;
  for (const CommCase& c : cases) {
    const auto at = std::find(c.members.begin(), c.members.end(), rank);
    if (at == c.members.end() || (silent && &c == &cases.back())) continue;
    const auto index = static_cast<std::size_t>(at - c.members.begin());
    exchanges.push_back(c.dtype == DType::F32   ? makeExchange<float>(c, index)
                        : c.dtype == DType::F64 ? makeExchange<double>(c, index)
                                                : makeExchange<std::int32_t>(c, index));
    exchanges.back().fill();
    CommCall call = callOf(c, index, order++);
    exchanges.back().bind(call);
    communicator.run(c.kind == CommKind::Send && index == 1 ? Lane::RecvF : c.lane, call);
  }
  backend.endCapture();
  for (int round = 0; round < 3; ++round) {
    for (const AnyExchange& exchange : exchanges) exchange.fill();
    communicator.beginStep(deadline_s);
    backend.replay();
    for (const AnyExchange& exchange : exchanges) {
      if (std::string wrong = exchange.check(); !wrong.empty()) return wrong;
    }
  }
  return {};
}

}  // namespace bmt::exec::test
