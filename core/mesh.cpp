#include "core/mesh.h"

#include "core/error.h"

namespace bmt {

std::string_view toString(GroupKind kind) {
  switch (kind) {
    case GroupKind::World:
      return "world";
    case GroupKind::Tensor:
      return "tensor";
    case GroupKind::Data:
      return "data";
    case GroupKind::Context:
      return "context";
    case GroupKind::Expert:
      return "expert";
    case GroupKind::ExpertData:
      return "expert data";
    case GroupKind::Shard:
      return "shard";
    case GroupKind::Replica:
      return "replica";
    case GroupKind::Embedding:
      return "embedding";
    case GroupKind::ForwardPair:
      return "forward pair";
    case GroupKind::BackwardPair:
      return "backward pair";
  }
  return "unknown";
}

Mesh::Mesh(const Plan& plan)
    : dp_(plan.dp),
      pp_(plan.pp),
      cp_(plan.cp),
      tp_(plan.tp),
      ep_(plan.ep),
      shard_(plan.shard > 0 ? plan.shard : plan.dataRanks()),
      num_ranks_(plan.numRanks()) {
  BMT_CHECK(num_ranks_ < (1 << kGroupAnchorBits), "more ranks than group ids can name");
  std::int32_t stride = 1;
  for (std::size_t at = 0; at < plan.order.size(); at += 3) {
    const std::string axis = plan.order.substr(at, 2);
    const std::size_t slot = axis == "dp" ? 0 : axis == "pp" ? 1 : axis == "cp" ? 2 : 3;
    stride_[slot] = stride;
    stride *= slot == 0 ? dp_ : slot == 1 ? pp_ : slot == 2 ? cp_ : tp_;
  }
}

Coord Mesh::coordOf(RankId rank) const {
  return {rank / stride_[0] % dp_, rank / stride_[1] % pp_, rank / stride_[2] % cp_, rank / stride_[3] % tp_};
}

RankId Mesh::rankOf(const Coord& c) const {
  return c.dp * stride_[0] + c.pp * stride_[1] + c.cp * stride_[2] + c.tp * stride_[3];
}

void Mesh::setDataIndex(Coord& c, std::int32_t index) const {
  c.dp = index / cp_;
  c.cp = index % cp_;
}

GroupId Mesh::groupOf(GroupKind kind, RankId rank) const {
  Coord c = coordOf(rank);
  switch (kind) {
    case GroupKind::World:
      return packGroup(kind, 0);
    case GroupKind::Tensor:
      c.tp = 0;
      break;
    case GroupKind::Data:
      c.dp = c.cp = 0;
      break;
    case GroupKind::Context:
      c.cp = 0;
      break;
    case GroupKind::Expert:
      setDataIndex(c, dataIndex(c) / ep_ * ep_);
      break;
    case GroupKind::ExpertData:
      setDataIndex(c, dataIndex(c) % ep_);
      break;
    case GroupKind::Shard:
      setDataIndex(c, dataIndex(c) / shard_ * shard_);
      break;
    case GroupKind::Replica:
      setDataIndex(c, dataIndex(c) % shard_);
      break;
    case GroupKind::Embedding:
      c.pp = 0;
      break;
    case GroupKind::ForwardPair:
    case GroupKind::BackwardPair:
      break;
  }
  return packGroup(kind, rankOf(c));
}

std::vector<RankId> Mesh::members(GroupId group) const {
  const GroupKind kind = groupKind(group);
  const RankId anchor = groupAnchor(group);
  Coord c = coordOf(anchor);
  std::vector<RankId> ranks;
  switch (kind) {
    case GroupKind::World:
      for (RankId rank = 0; rank < num_ranks_; ++rank) ranks.push_back(rank);
      break;
    case GroupKind::Tensor:
      for (c.tp = 0; c.tp < tp_; ++c.tp) ranks.push_back(rankOf(c));
      break;
    case GroupKind::Data:
    case GroupKind::Expert:
    case GroupKind::ExpertData:
    case GroupKind::Shard:
    case GroupKind::Replica: {
      const std::int32_t step = kind == GroupKind::ExpertData ? ep_ : kind == GroupKind::Replica ? shard_ : 1;
      const std::int32_t begin = dataIndex(c);
      for (std::int32_t i = 0; i < groupSize(kind); ++i) {
        setDataIndex(c, begin + i * step);
        ranks.push_back(rankOf(c));
      }
      break;
    }
    case GroupKind::Context:
      for (c.cp = 0; c.cp < cp_; ++c.cp) ranks.push_back(rankOf(c));
      break;
    case GroupKind::Embedding:
      ranks.push_back(anchor);
      c.pp = pp_ - 1;
      if (pp_ > 1) ranks.push_back(rankOf(c));
      break;
    case GroupKind::ForwardPair:
    case GroupKind::BackwardPair:
      ranks.push_back(anchor);
      c.pp = (c.pp + (kind == GroupKind::ForwardPair ? 1 : pp_ - 1)) % pp_;
      ranks.push_back(rankOf(c));
      break;
  }
  return ranks;
}

std::int32_t Mesh::groupSize(GroupKind kind) const {
  switch (kind) {
    case GroupKind::World:
      return num_ranks_;
    case GroupKind::Tensor:
      return tp_;
    case GroupKind::Data:
      return dp_ * cp_;
    case GroupKind::Context:
      return cp_;
    case GroupKind::Expert:
      return ep_;
    case GroupKind::ExpertData:
      return dp_ * cp_ / ep_;
    case GroupKind::Shard:
      return shard_;
    case GroupKind::Replica:
      return dp_ * cp_ / shard_;
    case GroupKind::Embedding:
      return pp_ > 1 ? 2 : 1;
    case GroupKind::ForwardPair:
    case GroupKind::BackwardPair:
      return 2;
  }
  return 1;
}

}  // namespace bmt
