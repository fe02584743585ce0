// Mesh: where a rank sits on the parallel axes, and the communication group of every axis.
// Groups are named by a packed id (kind, anchor rank) and their members are computed, so that ranks which are
// lowered separately agree without a shared table.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/ids.h"
#include "core/plan.h"

namespace bmt {

struct Coord {
  std::int32_t dp = 0, pp = 0, cp = 0, tp = 0;
  bool operator==(const Coord&) const = default;
};

enum class GroupKind : std::uint8_t {
  World,         // all ranks
  Tensor,        // equal dp, pp, cp
  Data,          // equal pp, tp: dp and cp, cp fastest; gradients are summed over it
  Context,       // equal dp, pp, tp
  Expert,        // ep ranks that follow each other in Data: tokens are exchanged between their experts
  ExpertData,    // every ep-th rank of Data: they hold the same experts
  Shard,         // `shard` dp ranks that follow each other in Data: ZeRO shards over them
  Replica,       // every shard-th rank of Data: they hold the same shard
  Embedding,     // first and last pipeline stage of equal dp, cp, tp: tied embedding gradients
  ForwardPair,   // {sender on stage s, receiver on stage (s + 1) mod pp}; anchor = sender
  BackwardPair,  // {sender on stage s, receiver on stage (s - 1) mod pp}; anchor = sender
};
std::string_view toString(GroupKind kind);

inline constexpr int kGroupAnchorBits = 24;  // up to 16.7 M ranks
constexpr GroupId packGroup(GroupKind kind, RankId anchor) {
  return (static_cast<GroupId>(kind) << kGroupAnchorBits) | anchor;
}
constexpr GroupKind groupKind(GroupId id) {
  return static_cast<GroupKind>(id >> kGroupAnchorBits);
}
constexpr RankId groupAnchor(GroupId id) {
  return id & ((1 << kGroupAnchorBits) - 1);
}

class Mesh {
 public:
  Mesh() = default;
  // plan.order must be a permutation of tp, cp, pp, dp joined by '-', fastest-varying first (validatePlan
  // checks).
  explicit Mesh(const Plan& plan);

  std::int32_t numRanks() const { return num_ranks_; }
  Coord coordOf(RankId rank) const;
  RankId rankOf(const Coord& coord) const;

  // The group of `kind` that `rank` belongs to (for pairs: the one in which `rank` sends).
  GroupId groupOf(GroupKind kind, RankId rank) const;
  // Members in ascending axis coordinate; a pair lists {sender, receiver}. The position in this list is the
  // member's index in collectives.
  std::vector<RankId> members(GroupId group) const;
  std::int32_t groupSize(GroupKind kind) const;
  // Position of `coord` in its Data, Expert and ExpertData group.
  std::int32_t dataIndex(const Coord& c) const { return c.dp * cp_ + c.cp; }
  std::int32_t expertIndex(const Coord& c) const { return dataIndex(c) % ep_; }
  std::int32_t expertDataIndex(const Coord& c) const { return dataIndex(c) / ep_; }

 private:
  void setDataIndex(Coord& c, std::int32_t index) const;

  std::int32_t dp_ = 1, pp_ = 1, cp_ = 1, tp_ = 1, ep_ = 1, shard_ = 1, num_ranks_ = 1;
  std::array<std::int32_t, 4> stride_{1, 1, 1, 1};  // dp, pp, cp, tp
};

}  // namespace bmt
