// TaskGraph: the static program of every rank. The simulator plays all programs, the executor plays one; both
// obey the contract R1-R4 of DESIGN.md section 2:
//   R1 a lane is an in-order queue of its rank          R2 deps: earlier tasks of the same rank on other
//   lanes R3 communication with equal (group, seq) begins together, when the last member has posted R4 a
//   communication posts when it heads its lane, its deps are done, and every communication issued earlier by
//   its rank
//      has posted
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/ids.h"
#include "core/mesh.h"
#include "core/model_spec.h"
#include "core/op.h"
#include "core/plan.h"
#include "core/schedule.h"
#include "core/units.h"

namespace bmt {

enum class Lane : std::uint8_t { Compute, Tensor, Data, SendF, RecvF, SendB, RecvB, Copy };
inline constexpr int kNumLanes = 8;
std::string_view toString(Lane lane);

enum class CommKind : std::uint8_t { AllReduce, AllGather, ReduceScatter, Send, Recv, AllToAll, Shift };
std::string_view toString(CommKind kind);

// What a task does, for reports and for comparing predicted with measured.
enum class TaskKind : std::uint8_t {
  Forward,      // a block's forward (or a piece of it between two communications)
  Backward,     // whole, or the input gradients where backward is split
  WeightGrad,   // the weight gradients where it is
  Recompute,    // forward again, inside the backward slot
  Head,         // final norm, logits, loss and their gradients
  Optimizer,    // norms and AdamW
  TensorComm,   // collectives over the tensor axis
  DataComm,     // gradient reduction and parameter gather over the data axis, tied embeddings, scalars
  PipeComm,     // sends and receives between stages
  ContextComm,  // keys and values, or heads, over the context axis
  ExpertComm    // tokens to and from their experts
};
inline constexpr int kNumTaskKinds = 11;
std::string_view toString(TaskKind kind);

enum class BufferKind : std::uint8_t {
  Weights,
  Gradients,
  Optimizer,
  Activations,
  Workspace,
  Communication,
  Input
};
inline constexpr int kNumBufferKinds = 7;
std::string_view toString(BufferKind kind);

// Live from the start of `first_task` to the end of `last_task` (program order); persistent buffers span the
// step.
struct Buffer {
  BufferKind kind = BufferKind::Activations;
  Bytes bytes = 0;
  TaskId first_task = -1, last_task = -1;
  bool persistent = false;
  Bytes offset = -1;  // in the rank's arena; set by planMemory, multiple of kArenaAlignment
};
inline constexpr Bytes kArenaAlignment = 256;

struct Arg {
  BufferId buffer = -1;  // -1 = not bound
  Bytes offset = 0;      // within the buffer
  bool operator==(const Arg&) const = default;
};

// `count` elements of the full buffer S.  AllReduce: dst in place (src == dst) [count].  AllGather: src
// [count/n] -> dst [count].  ReduceScatter (sum): src [count] -> dst [count/n].  Send: src.  Recv: dst.
// AllToAll: src [count] -> dst [count], n equal parts; part i goes to member i.  Shift: src [count] of every
// member goes to the next member's dst, of the last to the first's.
// AllGather and ReduceScatter may be in place: the shard then lies at index * count/n of the full buffer.
struct Comm {
  CommKind kind = CommKind::AllReduce;
  GroupId group = -1;
  std::uint64_t seq = 0;  // equal (group, seq) on all members; derived from slot and layer, never counted
  std::int64_t count = 0;
  DType dtype = DType::F32;
  RankId peer = -1;  // Send, Recv: the other rank
  Arg src, dst;
  Bytes bytes() const { return count * sizeOf(dtype); }
};

struct Task {
  TaskKind kind = TaskKind::Forward;
  Lane lane = Lane::Compute;
  Slot slot;
  std::int32_t layer = -1;  // global layer index; -1: embedding, head, optimizer or a whole chunk
  SegmentId segment = -1;   // ops of a compute task; -1 for communication
  std::int32_t comm = -1;   // index in RankProgram::comms; -1 for compute
  std::int32_t first_binding =
      -1;  // kNumRegions entries of RankProgram::bindings; -1 when not executable (Stage)
  std::int32_t first_dep = 0, num_deps = 0;  // slice of RankProgram::deps
};

// Ops that run back to back on one lane. At Stage granularity a segment also holds the blocking collectives
// that were merged into it (costed alone, in sequence with the ops).
struct MergedComm {
  CommKind kind = CommKind::AllReduce;
  GroupKind group = GroupKind::Tensor;
  std::int64_t count = 0;
  DType dtype = DType::F32;
  std::int64_t times = 1;
  // Not -1: runs on its own lane beside the ops [beside, beside_end) of the segment, once each; only what is
  // longer than those counts.
  std::int32_t beside = -1, beside_end = -1;
};
struct Segment {
  std::vector<OpCall> ops;
  std::vector<std::int64_t> repeat;  // empty, or ops[i] runs repeat[i] times (Stage granularity)
  std::vector<MergedComm> comms;
};

// One parameter (or this rank's shard of it) in the rank's flat weight buffer. Offsets are in elements and
// are the same in the weight and gradient buffers. The shard is rows [row_begin, +rows) x columns [col_begin,
// +cols) of the global [global_rows, global_cols] tensor, stored densely.
struct ParamShard {
  std::string name;  // "layers.3.attn.q.weight"
  std::int64_t global_rows = 1, global_cols = 1;
  std::int64_t row_begin = 0, rows = 1, col_begin = 0, cols = 1;
  std::int64_t offset = 0;
  std::int32_t block = 0;   // 0 = embedding, 1 + layer, 1 + layers = head
  bool decay = true;        // weight decay applies (2-D tensors)
  bool replicated = false;  // the same on every tensor rank
  bool expert = false;      // the experts of this rank's ep index; every tensor rank has its part
  bool tied_copy =
      false;  // second copy of the token table, on the last stage; not counted in the gradient norm
};

// A contiguous range of the flat buffers that is reduced together: elements [begin, begin + count), count %
// members of the group == 0.
struct GradBucket {
  std::int64_t begin = 0, count = 0;
  bool expert = false;           // reduced over ExpertData instead of Data
  std::int64_t state_begin = 0;  // elements, in each of the optimizer's moments (owned part)
};

// The scalars buffer, f64: slots [0, num_slots) are summed over all ranks once per step, then hyper and
// results.
//   slot 0: sum of token losses;  slot 1 + b: sum of squared gradients of block b (0 = embedding, 1 + layer,
//   head last)
struct ScalarLayout {
  std::int64_t num_slots = 0;
  enum Hyper {
    kLr,
    kBeta1,
    kBeta2,
    kEps,
    kWeightDecay,
    kCorrection1,
    kCorrection2,
    kClip,
    kLossScale,
    kNumHyper
  };
  enum Result {
    kLoss,
    kGradNorm,
    kGradScale,
    kNumResults
  };  // kLoss = slot 0 * kLossScale (1 / global tokens)
  std::int64_t hyper(Hyper h) const { return num_slots + h; }
  std::int64_t result(Result r) const { return num_slots + kNumHyper + r; }
  std::int64_t size() const { return num_slots + kNumHyper + kNumResults; }
};

struct RankProgram {
  RankId rank = 0;
  Coord coord;
  std::vector<Task> tasks;
  std::vector<TaskId> deps;
  std::vector<Comm> comms;
  std::vector<Arg> bindings;
  std::vector<Buffer> buffers;
  std::vector<ParamShard> params;
  std::vector<GradBucket> buckets;
  std::int64_t flat_elements = 0;   // of the weight and gradient buffers, padding included
  std::int64_t state_elements = 0;  // of one optimizer moment: the owned parts of all buckets
  // Well-known buffers; -1 when the rank has none (tokens: first stage; targets: last stage).
  BufferId weights = -1, gradients = -1, optimizer = -1, tokens = -1, targets = -1, scalars = -1;
  Bytes arena = 0;  // bytes of the arena; set by planMemory

  std::span<const TaskId> depsOf(const Task& t) const {
    return {deps.data() + t.first_dep, static_cast<std::size_t>(t.num_deps)};
  }
  std::span<const Arg> bindingsOf(const Task& t) const {
    return {bindings.data() + t.first_binding, static_cast<std::size_t>(kNumRegions)};
  }
};

enum class Granularity : std::uint8_t { Stage, Layer };
enum class RankSelection : std::uint8_t {
  All,
  Folded  // one representative per pipeline stage (dp = tp = cp = 0); enough on a symmetric cluster
};

struct TaskGraph {
  ModelSpec model;
  Plan plan;
  Mesh mesh;
  Granularity granularity = Granularity::Layer;
  RankSelection selection = RankSelection::All;
  std::vector<Segment> segments;   // shared by all ranks
  std::vector<RankProgram> ranks;  // ascending rank id
  ScalarLayout scalars;
};

// "F0.3 L5", "AllReduce data bucket 2", "Recv F0.3 from stage 1": for traces, errors and people.
std::string taskName(const TaskGraph& graph, const RankProgram& program, TaskId task);
// Hash of everything that must agree between ranks before step 0 (FNV-1a 64 over model, plan and structure).
std::uint64_t graphHash(const TaskGraph& graph);

}  // namespace bmt
