// DualPipeV (DeepSeek-AI 2025, the "cut in half" form of DualPipe): two chunks per rank in V placement,
// forwards of one chunk paired with backwards of the other so that one's communication hides behind the
// other's computation. A pair is two slots back to back; what the pair gains by overlapping is up to the
// lanes of their communication.
#include "core/schedule_makers.h"

namespace bmt {
namespace {

class DualPipe {
 public:
  std::vector<Slot> slots;

  void forward(int chunk) { slots.push_back(makeSlot(Phase::F, chunk, next_f_[chunk]++)); }
  // `later`: the weight gradient is put off; otherwise it follows at once.
  void backward(int chunk, bool later) {
    const Slot slot = makeSlot(Phase::B, chunk, next_b_[chunk]++);
    slots.push_back(slot);
    waiting_.push_back(makeSlot(Phase::W, chunk, slot.microbatch));
    if (later) return;
    slots.push_back(waiting_.back());
    waiting_.pop_back();
  }
  void weight() { slots.push_back(waiting_[next_w_++]); }
  void pair(int forward_chunk, int backward_chunk) {
    forward(forward_chunk);
    backward(backward_chunk, false);
  }

 private:
  std::int32_t next_f_[2] = {0, 0}, next_b_[2] = {0, 0};
  std::vector<Slot> waiting_;
  std::size_t next_w_ = 0;
};

}  // namespace

std::vector<Slot> dualPipeVStage(std::int32_t pp, std::int32_t stage, std::int32_t m) {
  DualPipe d;
  const std::int32_t after = pp - stage - 1;  // ranks below this one
  // Warm-up: forwards of the first chunk, then of both, then the returning micro-batches' backwards join.
  for (std::int32_t i = 0; i < 2 * after; ++i) d.forward(0);
  for (std::int32_t i = 0; i <= stage; ++i) {
    d.forward(0);
    d.forward(1);
  }
  for (std::int32_t i = 0; i < after; ++i) {
    d.backward(1, true);
    d.weight();
    d.forward(1);
  }
  // Steady state: pairs in both directions.
  for (std::int32_t i = 0; i < m - 2 * pp + stage + 1; ++i) {
    d.pair(0, 1);
    d.pair(1, 0);
  }
  // Drain: the first chunk's forwards are done; then only backwards, from the middle on with their weight
  // gradients put off; those come last.
  for (std::int32_t i = 0; i < after; ++i) {
    d.backward(1, false);
    d.pair(1, 0);
  }
  const std::int32_t backwards = stage + 1;
  bool later = false;
  for (std::int32_t i = 0; i < backwards; ++i) {
    if (i == backwards / 2 && stage % 2 == 1) later = true;
    d.backward(1, later);
    if (i == backwards / 2 && stage % 2 == 0) later = true;
    d.backward(0, later);
  }
  for (std::int32_t i = 0; i < after; ++i) {
    d.weight();
    d.backward(0, true);
  }
  for (std::int32_t i = 0; i < backwards; ++i) d.weight();
  return d.slots;
}

}  // namespace bmt
