#include "executor/comm/mpi_communicator.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace bmt::exec {
namespace {

bool readNumber(const char* name, std::int32_t& number) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return false;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), number);
  return error == std::errc{} && *end == '\0';
}

}  // namespace

bool startedByMpiLauncher(LauncherPlace& place) {
  // Open MPI, then what MPICH's Hydra and Slurm's PMI plug-ins set.
  return (readNumber("OMPI_COMM_WORLD_RANK", place.rank) && readNumber("OMPI_COMM_WORLD_SIZE", place.size)) ||
         (readNumber("PMI_RANK", place.rank) && readNumber("PMI_SIZE", place.size)) ||
         (readNumber("SLURM_PROCID", place.rank) && readNumber("SLURM_STEP_NUM_TASKS", place.size));
}

}  // namespace bmt::exec

#if defined(BMT_HAVE_MPI)

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "executor/comm/reduce.h"
#include "executor/wait.h"

namespace bmt::exec {
namespace {

constexpr int kWakeUpMs = 50;  // how often a sleeping lane looks for an abort or its deadline
constexpr std::int64_t kLargestMessage = std::int64_t{1} << 30;  // MPI counts are int
constexpr Bytes kSmallReduction = 16 * kKiB;  // below: everyone sends everything, one round
constexpr int kYields = 50;                   // fruitless tests before the progress thread sleeps
constexpr auto kShortestSleep = std::chrono::microseconds(20);
constexpr auto kLongestSleep = std::chrono::microseconds(320);

std::atomic<bool> terminated{false};
void onTerminate(int) {
  terminated = true;
}

// Messages of one lane that are on their way; reused call after call.
struct Transfer {
  std::vector<MPI_Request> requests;
  std::vector<RankId> peers;  // who must act for requests[i] to complete
  Word pending{0};            // 1 while any request is open
};

}  // namespace

struct MpiWorld::Impl {
  std::mutex mutex;  // around every MPI call
  std::vector<Transfer*> active;
  Word wake{0};  // changes when `active` grows or stop is set
  std::atomic<bool> stop{false}, failed{false};
  std::string failure;
  std::thread progress;
  int rank = 0, size = 1;
  bool one_host = true;

  void progressLoop() {
    int idle = 0;
    auto pause = kShortestSleep;
    while (!stop.load()) {
      const std::uint32_t seen = wake.load(std::memory_order_acquire);
      bool empty = false, advanced = false;
      {
        const std::lock_guard lock(mutex);
        for (std::size_t i = 0; i < active.size();) {
          Transfer& transfer = *active[i];
          int done = 0;
          const int status = MPI_Testall(static_cast<int>(transfer.requests.size()), transfer.requests.data(),
                                         &done, MPI_STATUSES_IGNORE);
          if (status != MPI_SUCCESS) setFailure(status);
          if (done == 0 && status == MPI_SUCCESS) {
            ++i;
            continue;
          }
          active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
          transfer.pending.store(0, std::memory_order_release);
          wakeAll(transfer.pending);
          advanced = true;
        }
        empty = active.empty();
      }
      if (empty) {
        idle = 0;
        sleepOn(wake, seen, kWakeUpMs);
      } else if (advanced) {
        idle = 0;
        pause = kShortestSleep;
      } else if (++idle < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, kLongestSleep);
      }
    }
  }

  void setFailure(int status) {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(status, text, &length);
    failure = text;
    failed = true;
  }
};

namespace {

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MpiWorld::Impl& world, Backend& backend) : world_(world), backend_(backend) {}

  void run(Lane lane, const CommCall& call) override {
    auto state = std::make_unique<State>();
    state->call = call;
    BMT_CHECK(static_cast<std::size_t>(call.order) == states_.size(), "communications are captured in order");
    const auto n = static_cast<std::int64_t>(call.members.size());
    const Bytes element = sizeOf(call.dtype);
    Bytes& scratch = scratch_bytes_[static_cast<std::size_t>(lane)];
    if (call.kind == CommKind::AllReduce)
      scratch =
          std::max(scratch, small(call) ? n * call.count * element : n * (call.count / n + n) * element);
    if (call.kind == CommKind::ReduceScatter) scratch = std::max(scratch, call.count * element);
    State* const raw = state.get();
    states_.push_back(std::move(state));
    backend_.enqueue(lane, [this, raw, lane] { execute(*raw, static_cast<std::size_t>(lane)); });
  }

  void beginStep(double deadline_s) override {
    if (!prepared_) prepare();
    deadline_s_ = deadline_s;
    posted_.store(0, std::memory_order_release);
  }
  void abort(const std::string& reason) override {
    const std::lock_guard lock(reason_mutex_);
    if (reason_.empty()) reason_ = reason;
    aborted_.store(true);
  }
  Ns postedAt(std::int32_t order) const override { return states_[static_cast<std::size_t>(order)]->posted; }
  Ns startedAt(std::int32_t order) const override { return states_[static_cast<std::size_t>(order)]->posted; }

 private:
  struct State {
    CommCall call;
    int tag = 0;
    Ns posted = 0;
  };

  static bool small(const CommCall& call) {
    return call.count * sizeOf(call.dtype) <= kSmallReduction ||
           call.count < static_cast<std::int64_t>(call.members.size());
  }

  // Tags: the position of seq among all of its group, which every member computes alike, and the kind of
  // group; two ranks share at most one group of a kind in each direction.
  void prepare() {
    std::map<GroupId, std::set<std::uint64_t>> seqs;
    for (const auto& state : states_) seqs[state->call.group].insert(state->call.seq);
    for (const auto& state : states_) {
      const auto& all = seqs[state->call.group];
      const auto position = std::distance(all.begin(), all.find(state->call.seq));
      BMT_CHECK(position < (1 << 24), "too many communications for MPI tags");
      state->tag = static_cast<int>(position) * 8 + static_cast<int>(groupKind(state->call.group));
    }
    for (std::size_t lane = 0; lane < kNumLanes; ++lane)
      scratch_[lane].resize(static_cast<std::size_t>(scratch_bytes_[lane]));
    prepared_ = true;
  }

  [[noreturn]] void fail(const CommCall& call, const std::string& what) const {
    throw Error(ErrorKind::Runtime, what, fmt::format("rank {} {}", world_.rank, call.name));
  }

  void waitForTurn(const CommCall& call) {
    const auto turn = static_cast<std::uint32_t>(call.order);
    for (;;) {
      const std::uint32_t now = posted_.load(std::memory_order_acquire);
      if (now == turn) return;
      checkAlive(call, nullptr);
      sleepOn(posted_, now, kWakeUpMs);
    }
  }

  // Ranks whose messages are still missing. Takes the lock.
  std::string missing(Transfer& transfer) {
    const std::lock_guard lock(world_.mutex);
    std::set<RankId> ranks;
    for (std::size_t i = 0; i < transfer.requests.size(); ++i) {
      int done = 0;
      if (transfer.requests[i] == MPI_REQUEST_NULL) continue;
      MPI_Request_get_status(transfer.requests[i], &done, MPI_STATUS_IGNORE);
      if (done == 0) ranks.insert(transfer.peers[i]);
    }
    return fmt::format("{}", fmt::join(ranks, ", "));
  }

  void checkAlive(const CommCall& call, Transfer* transfer) {
    const auto waiting = [&] {
      return transfer == nullptr ? std::string() : " while waiting for rank(s) " + missing(*transfer);
    };
    if (terminated.load()) fail(call, "the launcher ends the job because a rank died" + waiting());
    if (world_.failed.load()) fail(call, fmt::format("MPI: {}{}", world_.failure, waiting()));
    if (aborted_.load()) {
      const std::lock_guard lock(reason_mutex_);
      fail(call, "stopped: " + reason_);
    }
  }

  void receive(Transfer& t, const State& s, std::size_t from, void* to, Bytes bytes) {
    for (Bytes at = 0; at < bytes; at += kLargestMessage) {
      const auto size = static_cast<int>(std::min(kLargestMessage, bytes - at));
      t.peers.push_back(s.call.members[from]);
      t.requests.push_back(MPI_REQUEST_NULL);
      check(s.call, MPI_Irecv(static_cast<char*>(to) + at, size, MPI_BYTE, s.call.members[from], s.tag,
                              MPI_COMM_WORLD, &t.requests.back()));
    }
  }
  void send(Transfer& t, const State& s, std::size_t to, const void* from, Bytes bytes) {
    for (Bytes at = 0; at < bytes; at += kLargestMessage) {
      const auto size = static_cast<int>(std::min(kLargestMessage, bytes - at));
      t.peers.push_back(s.call.members[to]);
      t.requests.push_back(MPI_REQUEST_NULL);
      check(s.call, MPI_Isend(static_cast<const char*>(from) + at, size, MPI_BYTE, s.call.members[to], s.tag,
                              MPI_COMM_WORLD, &t.requests.back()));
    }
  }
  void check(const CommCall& call, int status) {
    if (status == MPI_SUCCESS) return;
    world_.setFailure(status);
    fail(call, "MPI: " + world_.failure);
  }

  // Posts what `fill` adds to the lane's transfer and sleeps until all of it has arrived.
  template <typename Fill>
  void exchange(const State& s, std::size_t lane, bool posts, const Fill& fill) {
    Transfer& t = transfers_[lane];
    t.requests.clear();
    t.peers.clear();
    {
      const std::lock_guard lock(world_.mutex);
      fill(t);
      if (!t.requests.empty()) {
        t.pending.store(1, std::memory_order_release);
        world_.active.push_back(&t);
        world_.wake.fetch_add(1);
      }
    }
    wakeAll(world_.wake);
    if (posts) {
      posted_.fetch_add(1, std::memory_order_acq_rel);
      wakeAll(posted_);
    }
    const auto start = std::chrono::steady_clock::now();
    while (t.pending.load(std::memory_order_acquire) != 0) {
      checkAlive(s.call, &t);
      const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (waited > deadline_s_.load())
        fail(s.call, fmt::format("waited {:.1f} s (limit {} s) for rank(s) {}", waited, deadline_s_.load(),
                                 missing(t)));
      sleepOn(t.pending, 1, kWakeUpMs);
    }
    if (world_.failed.load()) checkAlive(s.call, nullptr);
  }

  void execute(State& s, std::size_t lane) {
    const CommCall& call = s.call;
    waitForTurn(call);
    s.posted = backend_.now();
    const auto self = static_cast<std::size_t>(call.index);
    const std::size_t n = call.members.size();
    const Bytes element = sizeOf(call.dtype);
    const std::int64_t shard = call.count / static_cast<std::int64_t>(n);
    const auto to = [&](std::int64_t offset) { return static_cast<char*>(call.dst) + offset * element; };
    const auto from = [&](std::int64_t offset) {
      return static_cast<const char*>(call.src) + offset * element;
    };
    const auto begin = [&](std::size_t member) { return static_cast<std::int64_t>(member) * shard; };
    switch (call.kind) {
      case CommKind::Send:
        exchange(s, lane, true, [&](Transfer& t) { send(t, s, 1, call.src, call.count * element); });
        break;
      case CommKind::Recv:
        exchange(s, lane, true, [&](Transfer& t) { receive(t, s, 0, call.dst, call.count * element); });
        break;
      case CommKind::AllGather:
        exchange(s, lane, true, [&](Transfer& t) {
          for (std::size_t m = 0; m < n; ++m) {
            if (m != self) receive(t, s, m, to(begin(m)), shard * element);
          }
          for (std::size_t m = 0; m < n; ++m) {
            if (m != self) send(t, s, m, call.src, shard * element);
          }
        });
        if (to(begin(self)) != call.src)
          std::memmove(to(begin(self)), call.src, static_cast<std::size_t>(shard * element));
        break;
      case CommKind::AllToAll:
      case CommKind::Shift:
        BMT_CHECK(false, "refused by notExecutable");
        break;
      case CommKind::ReduceScatter:
        scatterSums(
            s, lane, shard, [&](std::size_t m) { return std::pair(begin(m), shard); }, call.dst);
        break;
      case CommKind::AllReduce: {
        if (small(call)) {
          // To everyone everything: each sums the whole.
          scatterSums(
              s, lane, call.count, [&](std::size_t) { return std::pair(std::int64_t{0}, call.count); },
              call.dst);
          break;
        }
        const auto slice = [&](std::size_t m) {
          return std::pair(begin(m), m + 1 == n ? call.count - begin(m) : shard);
        };
        const auto [mine, size] = slice(self);
        scatterSums(s, lane, size, slice, to(mine));
        exchange(s, lane, false, [&, first = mine, bytes = size * element](Transfer& t) {
          for (std::size_t m = 0; m < n; ++m) {
            if (m != self) receive(t, s, m, to(slice(m).first), slice(m).second * element);
          }
          for (std::size_t m = 0; m < n; ++m) {
            if (m != self) send(t, s, m, to(first), bytes);
          }
        });
        break;
      }
    }
    (void)from;
  }

  // Sends slice(m) of src to every member m; `out` = the sum of everyone's slice of this rank (`size`
  // elements), in order.
  template <typename Slice>
  void scatterSums(const State& s, std::size_t lane, std::int64_t size, const Slice& slice, void* out) {
    const CommCall& call = s.call;
    const auto self = static_cast<std::size_t>(call.index);
    const std::size_t n = call.members.size();
    const Bytes element = sizeOf(call.dtype);
    const auto at = [&](std::size_t m) {
      return scratch_[lane].data() + static_cast<std::int64_t>(m) * size * element;
    };
    exchange(s, lane, true, [&](Transfer& t) {
      for (std::size_t m = 0; m < n; ++m) {
        if (m != self) receive(t, s, m, at(m), size * element);
      }
      for (std::size_t m = 0; m < n; ++m) {
        const auto [first, count] = slice(m);
        if (m != self) send(t, s, m, static_cast<const char*>(call.src) + first * element, count * element);
      }
    });
    std::vector<const void*>& sources = sources_[lane];
    sources.assign(n, nullptr);
    for (std::size_t m = 0; m < n; ++m)
      sources[m] = m == self ? static_cast<const char*>(call.src) + slice(self).first * element : at(m);
    sumInOrder(sources, 0, size, call.dtype, out);
  }

  MpiWorld::Impl& world_;
  Backend& backend_;
  std::vector<std::unique_ptr<State>> states_;
  std::array<Bytes, kNumLanes> scratch_bytes_{};
  std::array<std::vector<char>, kNumLanes> scratch_;
  std::array<std::vector<const void*>, kNumLanes> sources_;
  std::array<Transfer, kNumLanes> transfers_;
  Word posted_{0};  // communications that this rank has posted in this step (rule R4)
  std::atomic<double> deadline_s_{30};
  std::atomic<bool> aborted_{false};
  std::mutex reason_mutex_;
  std::string reason_;
  bool prepared_ = false;
};

}  // namespace

bool builtWithMpi() {
  return true;
}

MpiWorld::MpiWorld() : impl_(std::make_unique<Impl>()) {
  int provided = 0;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS)
    throw Error(ErrorKind::Runtime, "MPI could not be initialised");
  if (provided < MPI_THREAD_SERIALIZED)
    throw Error(ErrorKind::Runtime,
                "this MPI library does not support calls from several threads "
                "(MPI_THREAD_SERIALIZED); use --comm threads or another MPI");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(MPI_COMM_WORLD, &impl_->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &impl_->size);
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  int on_host = 1;
  MPI_Comm_size(host, &on_host);
  MPI_Comm_free(&host);
  impl_->one_host = on_host == impl_->size;
  // The launcher sends SIGTERM to the others when a rank dies; they then say what they were waiting for.
  std::signal(SIGTERM, onTerminate);
  impl_->progress = std::thread([impl = impl_.get()] { impl->progressLoop(); });
}

MpiWorld::~MpiWorld() {
  impl_->stop = true;
  impl_->wake.fetch_add(1);
  wakeAll(impl_->wake);
  impl_->progress.join();
  MPI_Finalize();
}

RankId MpiWorld::rank() const {
  return impl_->rank;
}
std::int32_t MpiWorld::size() const {
  return impl_->size;
}
bool MpiWorld::oneHost() const {
  return impl_->one_host;
}

std::unique_ptr<Communicator> MpiWorld::communicator(Backend& backend) {
  return std::make_unique<MpiCommunicator>(*impl_, backend);
}

std::vector<std::string> MpiWorld::gather(const std::string& bytes) {
  const std::lock_guard lock(impl_->mutex);
  const auto size = static_cast<int>(bytes.size());
  std::vector<int> sizes(static_cast<std::size_t>(impl_->size)), offsets(sizes.size() + 1, 0);
  MPI_Gather(&size, 1, MPI_INT, sizes.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
  for (std::size_t i = 0; i < sizes.size(); ++i)
    offsets[i + 1] = offsets[i] + (impl_->rank == 0 ? sizes[i] : 0);
  std::string all(static_cast<std::size_t>(offsets.back()), '\0');
  MPI_Gatherv(bytes.data(), size, MPI_BYTE, all.data(), sizes.data(), offsets.data(), MPI_BYTE, 0,
              MPI_COMM_WORLD);
  std::vector<std::string> result;
  for (std::size_t i = 0; impl_->rank == 0 && i < sizes.size(); ++i)
    result.push_back(all.substr(static_cast<std::size_t>(offsets[i]), static_cast<std::size_t>(sizes[i])));
  return result;
}

std::uint64_t MpiWorld::broadcast(std::uint64_t value) {
  const std::lock_guard lock(impl_->mutex);
  MPI_Bcast(&value, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
  return value;
}

void MpiWorld::abortJob(int exit_code) {
  // Not under the lock: whoever holds it may be stuck.
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);
}

}  // namespace bmt::exec

#else

namespace bmt::exec {

struct MpiWorld::Impl {};
bool builtWithMpi() {
  return false;
}
MpiWorld::MpiWorld() {
  throw Error(ErrorKind::Runtime,
              "this build has no MPI (CMake did not find it, or BMT_WITH_MPI=OFF); use --comm threads");
}
MpiWorld::~MpiWorld() = default;
RankId MpiWorld::rank() const {
  return 0;
}
std::int32_t MpiWorld::size() const {
  return 1;
}
bool MpiWorld::oneHost() const {
  return true;
}
std::unique_ptr<Communicator> MpiWorld::communicator(Backend&) {
  return nullptr;
}
std::vector<std::string> MpiWorld::gather(const std::string& bytes) {
  return {bytes};
}
std::uint64_t MpiWorld::broadcast(std::uint64_t value) {
  return value;
}
void MpiWorld::abortJob(int exit_code) {
  std::_Exit(exit_code);
}

}  // namespace bmt::exec

#endif
