#include "tests/support/random_plan.h"

#include <random>

namespace bmt::test {

ModelSpec tinyModel(Family family) {
  ModelSpec m;
  m.name = family == Family::Gpt2 ? "tiny-gpt2" : "tiny-llama";
  m.family = family;
  m.layers = 4;
  m.d_model = 32;
  m.heads = m.kv_heads = 8;
  m.d_head = 4;
  m.d_ff = 64;
  m.vocab = 67;  // not divisible by any tp: the last vocabulary shard is padded
  m.seq_len = 16;
  if (family == Family::Gpt2) {
    m.max_positions = 20;
    return m;
  }
  m.kv_heads = 4;
  m.norm = NormKind::RmsNorm;
  m.activation = ActivationKind::Silu;
  m.position = PositionKind::Rope;
  m.gated_mlp = true;
  m.tied_embedding = m.qkv_bias = m.attn_out_bias = m.mlp_bias = false;
  return m;
}

namespace {

void addExperts(ModelSpec& m) {
  m.experts = 8;
  m.top_k = 2;
  m.moe_d_ff = 16;
}

void makeLatent(ModelSpec& m) {
  m.kv_heads = m.heads;
  m.qkv_bias = m.attn_out_bias = false;
  m.d_head = 12;
  m.rope_dim = 4;
  m.v_dim = 8;
  m.q_rank = 24;
  m.kv_rank = 16;
}

// One of the models that are not executed.
template <typename Pick>
ModelSpec simulatedModel(const Pick& pick) {
  const int kind = pick(0, 6);
  ModelSpec m = tinyModel(kind <= 3 ? Family::Llama : Family::Gpt2);
  m.layers = pick(4, 6);
  if (kind == 1) addExperts(m);
  if (kind == 2 || kind == 3) makeLatent(m);
  if (kind == 3) {
    addExperts(m);
    m.shared_experts = pick(0, 2);
    m.dense_first_layers = 1;
    m.moe_every = pick(1, 2);
    m.router_bias = pick(0, 1) == 1;
    m.capacity_factor = 1.25;
    if (pick(0, 1) == 0) m.q_rank = 0;
  }
  if (kind == 0) {
    m.qk_norm = true;
    m.activation = ActivationKind::Gelu;
  }
  if (kind == 4) {
    m.family = Family::Bert;
    m.post_norm = m.embedding_norm = true;
    m.token_types = 2;
  }
  if (kind == 5) {
    m.family = Family::Vit;
    m.patch_dim = 12;
    m.tied_embedding = false;
  }
  if (kind == 6) {
    m.family = Family::T5;
    m.encoder_layers = pick(1, 3);
    m.decoder_seq_len = 8;
    m.relative_buckets = 4;
    m.max_positions = 0;
    m.position = PositionKind::Relative;
    m.norm = NormKind::RmsNorm;
  }
  return m;
}

Case drawCase(std::uint32_t seed, int max_ranks, bool simulated) {
  std::mt19937 random(seed * 2654435761U + 17);
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  for (;;) {
    Case c;
    c.model = tinyModel(pick(0, 1) == 0 ? Family::Gpt2 : Family::Llama);
    c.model.layers = pick(2, 6);
    if (pick(0, 3) == 0) c.model.tied_embedding = !c.model.tied_embedding;
    if (pick(0, 3) == 0) c.model.qkv_bias = !c.model.qkv_bias;
    if (simulated) {
      c.model = simulatedModel(pick);
      c.plan.cp = 1 << pick(0, 2);
      if (c.plan.cp > 1 && pick(0, 1) == 1) c.plan.context = ContextKind::AllToAll;
      if (c.model.experts > 0) c.plan.ep = 1 << pick(0, 3);
    }
    Plan& p = c.plan;
    p.dp = 1 << pick(0, 2);
    p.tp = 1 << pick(0, 2);
    p.pp = pick(1, 4);
    p.micro_batch = pick(1, 2);
    p.global_batch = p.micro_batch * p.dp * pick(1, 6);
    p.schedule = static_cast<ScheduleKind>(pick(0, kNumScheduleKinds - 1));
    if (p.schedule == ScheduleKind::Interleaved || p.schedule == ScheduleKind::BreadthFirst)
      p.chunks = pick(2, 3);
    if (p.schedule == ScheduleKind::ZbV || p.schedule == ScheduleKind::DualPipeV) p.chunks = 2;
    if (p.schedule == ScheduleKind::ZbAuto) p.chunks = pick(1, 2);
    p.zero = pick(0, simulated ? 3 : 1);
    if (p.zero > 0 && pick(0, 2) == 0) p.shard = 1 << pick(0, 1);
    if (simulated) {
      p.prefetch = pick(0, 2);
      p.overlap_param = p.zero > 0 && p.zero < 3 && pick(0, 1) == 1;
      constexpr DType kPrecision[] = {DType::F32, DType::TF32, DType::BF16, DType::F16, DType::F8};
      p.precision = kPrecision[pick(0, 4)];
      if (sizeOf(storageType(p)) == 2 && pick(0, 1) == 1) p.grads = storageType(p);
    }
    p.sequence_parallel = pick(0, 1) == 1;
    if (p.tp > 1 && pick(0, 2) == 0) p.tp_overlap = simulated || !p.sequence_parallel;
    constexpr const char* kRecompute[] = {"none", "none",      "none",    "none", "full",
                                          "full", "selective", "every:2", "sqrt"};
    const Plan policy = planFromText(std::string("recompute=") + kRecompute[pick(0, 8)]);
    p.recompute = policy.recompute;
    p.recompute_every = policy.recompute_every;
    if (pick(0, 9) == 0) {
      p.recompute = Recompute::List;
      p.recompute_every = 0;
      for (std::int64_t layer = 0; layer < c.model.layers; ++layer)
        p.recompute_layers.push_back(static_cast<Recompute>(pick(0, 2)));
    }
    p.bucket = pick(0, 1) == 0 ? 8 * kKiB : 25 * kMiB;
    p.overlap_grad = pick(0, 3) != 0;
    p.loss_chunk = pick(0, 2) == 0 ? 7 : 0;
    if (p.dp > 1 && p.schedule != ScheduleKind::Interleaved && pick(0, 3) == 0) {
      p.global_batch = 0;
      for (int d = 0; d < p.dp; ++d) {
        p.batch_shares.push_back(pick(1, 4));
        p.global_batch += p.batch_shares.back() * p.micro_batch;
      }
    }
    if (p.numRanks() > max_ranks) continue;
    c.cluster = localCluster(p.numRanks());
    if (validatePlan(c.model, c.cluster, p).empty()) return c;
  }
}

}  // namespace

Case randomCase(std::uint32_t seed, int max_ranks) {
  return drawCase(seed, max_ranks, false);
}

Case randomSimulatedCase(std::uint32_t seed, int max_ranks) {
  return drawCase(seed, max_ranks, true);
}

}  // namespace bmt::test
