// A layer: its halves (attention, cross attention in a T5 decoder, MLP or experts) with the norms and
// residual additions between them. Pre-norm: each addition is fused into the next half's norm. Post-norm
// (BERT): each half is followed by the norm of its sum.
#include "core/block_builder.h"

namespace bmt {
namespace {

// The rows of the residual stream that a layer works on. T5 keeps the decoder's behind the encoder's.
BlockShape stackShape(const BlockShape& s, LayerKind kind) {
  BlockShape stack = s;
  if (kind == LayerKind::Decoder) {
    stack.seq = s.decoder_seq;
    stack.tokens = s.decoder_tokens;
    stack.rows = s.decoder_rows;
  }
  return stack;
}

class LayerBuilder {
 public:
  LayerBuilder(const BlockShape& shape, LayerKind kind)
      : whole_(shape), s_(stackShape(shape, kind)), m_(*shape.model), kind_(kind), params_(s_, block_) {
    const Bytes before = kind == LayerKind::Decoder ? whole_.rows * m_.d_model * sizeOf(s_.dtype) : 0;
    x_ = {Region::In, before};
    out_ = {Region::Out, before};
    stream_ = {Region::Stream, before};
  }

  Block build() {
    makeHalves();
    declare();
    layout();
    forward();
    again();
    for (const bool first : {true, false}) backward(first);
    return std::move(block_);
  }

 private:
  enum class Role : std::uint8_t { Attention, Cross, Mlp };
  struct Part {
    Role role;
    Half half;
  };

  void makeHalves() {
    const auto add = [&](Role role, const char* name) {
      Part part{role, {}};
      part.half.name = name;
      part.half.norm_name = "norm" + std::to_string(parts_.size() + 1);
      parts_.push_back(part);
    };
    add(Role::Attention, "attn");
    parts_.back().half.full = encoder() || !(causal(m_) || kind_ == LayerKind::Decoder);
    if (kind_ == LayerKind::Decoder) {
      add(Role::Cross, "cross");
      Half& half = parts_.back().half;
      half.full = true;
      half.memory = {Region::In, 0};
      half.memory_stream = {Region::Stream, 0};
      half.memory_seq = whole_.seq;
    }
    add(Role::Mlp, "mlp");
    parts_.back().half.inner = m_.d_ff;
    if (experts()) {
      shared_.name = "mlp.shared";
      shared_.inner = m_.shared_experts * m_.moe_d_ff;
    }
  }

  bool encoder() const { return kind_ == LayerKind::Encoder || kind_ == LayerKind::LastEncoder; }
  bool endsStack() const { return kind_ == LayerKind::LastEncoder; }
  bool experts() const { return kind_ == LayerKind::Experts; }

  void declare() {
    for (const ParamGroup group : {ParamGroup::Matrices, ParamGroup::ShardedBiases,
                                   ParamGroup::ReplicatedMatrices, ParamGroup::Replicated}) {
      if (group == ParamGroup::ReplicatedMatrices) params_.beginReplicated();
      if (group == ParamGroup::Replicated)
        for (const Part& part : parts_) params_.norm(part.half.norm_name);
      if (group == ParamGroup::Replicated && endsStack()) params_.norm("encoder_norm");
      for (const Part& part : parts_) {
        if (part.role != Role::Mlp) {
          declareAttention(params_, s_, part.half.name, group);
        } else if (experts()) {
          declareExperts(params_, s_, group);
        } else {
          declareMlp(params_, s_, part.half.name, m_.d_ff, group);
        }
      }
    }
  }

  // What an RMSNorm made of plain ops keeps beyond a fused one (simulated only): its input in fp32 and the
  // normalised rows before the weight.
  Bytes plainNormBytes() const {
    if (s_.pointwise != Pointwise::Eager || m_.norm != NormKind::RmsNorm) return 0;
    return s_.rows * m_.d_model * (sizeOf(DType::F32) + sizeOf(s_.dtype));
  }

  void layout() {
    SavedLayout saved;
    const std::int64_t elements = s_.rows * m_.d_model;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      Half& half = parts_[i].half;
      half.stats = saveNormStats(saved, s_, s_.rows);
      // Pre-norm: the first half's norm reads the layer's input. Post-norm: the first half does.
      half.input = i == 0 && !m_.post_norm ? x_ : saved.add(elements, s_.dtype);
      half.norm = i == 0 && m_.post_norm ? x_ : saved.add(elements, s_.dtype);
      saved.add(plainNormBytes(), DType::I8);
      if (parts_[i].role != Role::Mlp) {
        layoutAttention(half, saved, s_);
      } else if (experts()) {
        layoutExperts(half, shared_, saved, s_);
      } else {
        layoutMlp(half, saved, s_);
      }
    }
    shared_.norm = parts_.back().half.norm;
    if (endsStack()) {
      end_input_ = saved.add(elements, s_.dtype);
      end_stats_ = saveNormStats(saved, s_, s_.rows);
    }
    // Simulated only: masks of the residual branches.
    if (m_.dropout) saved.add(static_cast<std::int64_t>(parts_.size()) * elements, DType::I8);
    for (const Part& part : parts_) block_.score_bytes += aligned(part.half.score_bytes);
    saved.add(block_.score_bytes, DType::I8);
    block_.saved_bytes = saved.bytes();
  }

  std::string biasName(const Part& part) const {
    if (part.role == Role::Mlp)
      return m_.mlp_bias && !experts() ? part.half.name + ".down.bias" : std::string();
    return m_.attn_out_bias ? part.half.name + ".out.bias" : std::string();
  }
  Operand bias(const Part& part) const {
    const std::string name = biasName(part);
    return name.empty() ? Operand{} : params_.weight(name);
  }

  Operand halfForward(Builder& f, const Part& part) {
    if (part.role != Role::Mlp) return attentionForward(f, s_, params_, part.half);
    return experts() ? expertsForward(f, s_, params_, part.half, shared_)
                     : mlpForward(f, s_, params_, part.half);
  }

  void forward() {
    Builder f(s_, block_.forward);
    Operand x = x_, delta, pending;  // the stream is x + delta + pending bias
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      const Half& half = part.half;
      if (m_.post_norm) {
        delta = halfForward(f, part);
        const Operand out = i + 1 < parts_.size() ? parts_[i + 1].half.norm : out_;
        normForward(f, s_, params_, half.norm_name, out, half.input, half.stats, half.norm, delta,
                    bias(part));
        f.release(0);
        continue;
      }
      normForward(f, s_, params_, half.norm_name, half.norm, i == 0 ? Operand{} : half.input, half.stats, x,
                  delta, pending);
      f.release(0);
      x = half.input;
      delta = halfForward(f, part);
      pending = bias(part);
    }
    if (endsStack()) {
      normForward(f, s_, params_, "encoder_norm", out_, end_input_, end_stats_, x, delta, pending);
    } else if (!m_.post_norm) {
      f.op(OpKind::ResidualAdd, {s_.rows, m_.d_model}, {out_, x, delta, pending});
    }
    // The rows of T5's other stack pass through.
    if (encoder())
      f.op(OpKind::Copy, {whole_.decoder_rows * m_.d_model}, {behindEncoder(out_), behindEncoder(x_)});
    if (kind_ == LayerKind::Decoder)
      f.op(OpKind::Copy, {whole_.rows * m_.d_model}, {Operand{Region::Out, 0}, Operand{Region::In, 0}});
    block_.forward_work = f.highWater();
  }

  // The attention cores, for selective recompute.
  void again() {
    Builder f(s_, block_.core);
    for (const Part& part : parts_) {
      if (part.role != Role::Mlp) attentionCoreAgain(f, s_, part.half);
    }
    block_.core_work = f.highWater();
  }

  Operand behindEncoder(Operand operand) const { return behind(operand, whole_.rows * m_.d_model, s_.dtype); }

  void backward(bool first) {
    BackwardBuilder back(s_, block_, first);
    Builder& b = back.input;
    if (endsStack())
      normBackward(b, s_, params_, "encoder_norm", stream_, stream_, end_input_, end_stats_, {}, back.acc);
    Operand dout =
        stream_;  // of the stream after the half; the one before it replaces it, or follows it in W
    for (std::size_t i = parts_.size(); i-- > 0;) {
      const Part& part = parts_[i];
      const Half& half = part.half;
      const Operand din = !s_.split_backward ? stream_
                          : i == 0           ? Operand{Region::InGrad, 0}
                                             : back.kept(s_.rows * m_.d_model);
      if (m_.post_norm)
        normBackward(b, s_, params_, half.norm_name, stream_, stream_, half.input, half.stats, {}, back.acc);
      const std::string bias_name = biasName(part);
      if (!bias_name.empty())
        back.weight().op(OpKind::BiasBackward, {s_.rows, m_.d_model, back.acc},
                         {params_.grad(bias_name), dout});
      const Operand dnorm = part.role != Role::Mlp ? attentionBackward(back, s_, params_, half, dout)
                            : experts()            ? expertsBackward(back, s_, params_, half, shared_, dout)
                                                   : mlpBackward(back, s_, params_, half, dout);
      if (m_.post_norm) {
        addRows(b, s_.rows * m_.d_model, stream_, dnorm);
      } else {
        normBackward(b, s_, params_, half.norm_name, din, dnorm, half.input, half.stats, dout, back.acc);
      }
      back.endHalf();
      dout = din;
    }
    back.finish();
  }

  const BlockShape whole_, s_;
  const ModelSpec& m_;
  const LayerKind kind_;
  Block block_;
  Params params_;
  std::vector<Part> parts_;
  Half shared_;  // inner 0: none
  Operand x_, out_, stream_, end_input_;
  NormStats end_stats_;
};

}  // namespace

Block buildLayerBlock(const BlockShape& s, LayerKind kind) {
  return LayerBuilder(s, kind).build();
}

}  // namespace bmt
