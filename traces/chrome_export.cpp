// The writing half of chrome_trace.h.
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <tuple>

#include "core/error.h"
#include "core/json.h"
#include "core/plan.h"
#include "traces/chrome_trace.h"

namespace bmt::trace {
namespace {

constexpr const char* kPhaseNames[] = {"F", "B", "W", "S"};

std::string quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Integer nanoseconds as microseconds with three decimals.
void appendMicroseconds(std::string& out, Ns ns) {
  const auto magnitude = static_cast<std::uint64_t>(ns < 0 ? -ns : ns);
  fmt::format_to(std::back_inserter(out), "{}{}.{:03}", ns < 0 ? "-" : "", magnitude / 1000,
                 magnitude % 1000);
}

// The mesh, when the plan's text is one of ours and names as many ranks as the trace has.
std::optional<Mesh> meshOf(const Trace& trace) {
  try {
    const Plan plan = planFromText(trace.plan);
    if (plan.numRanks() != trace.num_ranks) return std::nullopt;
    return Mesh(plan);
  } catch (const Error&) {
    return std::nullopt;  // only the names of processes and the arrows need it
  }
}

class Writer {
 public:
  explicit Writer(const Trace& trace) : trace_(trace), mesh_(meshOf(trace)) {
    for (const std::string& name : trace.names) quoted_names_.push_back(quoted(name));
  }

  std::string write() {
    out_.reserve(1024 + trace_.spans.size() * 260 + trace_.memory.size() * 180);
    header();
    metadata();
    for (const Span& span : trace_.spans) spanEvent(span);
    flows();
    for (const MemorySample& sample : trace_.memory) memoryEvent(sample);
    out_ += "\n]}\n";
    return std::move(out_);
  }

 private:
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }
  void begin() {
    out_ += first_ ? "\n" : ",\n";
    first_ = false;
  }

  void header() {
    Json other;
    other["schema"] = "bmtrain.trace/1";
    other["source"] = trace_.source == Source::Predicted ? "predicted" : "measured";
    other["model"] = trace_.model;
    other["cluster"] = trace_.cluster;
    other["plan"] = trace_.plan;
    other["profile"] = trace_.profile;
    other["num_ranks"] = trace_.num_ranks;
    other["stages"] = trace_.stages;
    other["step_time_ns"] = trace_.step_time;
    other["peak_memory_bytes"] = trace_.peak_memory;
    other["num_spans"] = trace_.spans.size();
    other["num_memory_samples"] = trace_.memory.size();
    other["names"] = trace_.names;
    add("{{\"displayTimeUnit\":\"ms\",\n\"otherData\":{},\n\"traceEvents\":[",
        other.dump(-1, ' ', false, Json::error_handler_t::replace));
  }

  void metadata() {
    std::map<RankId, std::array<bool, kNumLanes>> lanes;
    for (const Span& span : trace_.spans) lanes[span.rank][static_cast<std::size_t>(span.lane)] = true;
    for (const MemorySample& sample : trace_.memory) lanes[sample.rank];
    for (const auto& [rank, used] : lanes) {
      std::string name = fmt::format("rank {}", rank);
      if (mesh_ && rank >= 0 && rank < trace_.num_ranks) {
        const Coord at = mesh_->coordOf(rank);
        name += fmt::format(" (dp {}, stage {}, tp {})", at.dp, at.pp, at.tp);
      }
      begin();
      add(R"({{"ph":"M","pid":{},"name":"process_name","args":{{"name":"{}"}}}})", rank, name);
      begin();
      add(R"({{"ph":"M","pid":{0},"name":"process_sort_index","args":{{"sort_index":{0}}}}})", rank);
      for (int lane = 0; lane < kNumLanes; ++lane) {
        if (!used[static_cast<std::size_t>(lane)]) continue;
        begin();
        add(R"({{"ph":"M","pid":{},"tid":{},"name":"thread_name","args":{{"name":"{}"}}}})", rank, lane,
            toString(static_cast<Lane>(lane)));
        begin();
        add(R"({{"ph":"M","pid":{0},"tid":{1},"name":"thread_sort_index","args":{{"sort_index":{1}}}}})",
            rank, lane);
      }
    }
  }

  void spanEvent(const Span& span) {
    begin();
    add(R"({{"ph":"X","pid":{},"tid":{},"name":)", span.rank, static_cast<int>(span.lane));
    if (span.name < quoted_names_.size()) {
      out_ += quoted_names_[span.name];
    } else {
      add(R"("{} {}")", toString(span.kind), toString(span.slot));
    }
    add(R"(,"cat":"{}","ts":)", toString(span.kind));
    appendMicroseconds(out_, span.start);
    out_ += ",\"dur\":";
    appendMicroseconds(out_, span.end - span.start);
    add(R"(,"args":{{"task":{},"name":{},"slot":"{}{}.{}","layer":{},"posted":)", span.task, span.name,
        kPhaseNames[static_cast<std::size_t>(span.slot.phase)], span.slot.chunk, span.slot.microbatch,
        span.layer);
    appendMicroseconds(out_, span.posted);
    if (span.bytes != 0) add(R"(,"bytes":{})", span.bytes);
    if (span.cause != TaskRef{}) add(R"(,"cause":[{},{}])", span.cause.rank, span.cause.task);
    out_ += "}}";
  }

  // An arrow from the start of a send to the end of the receive of the next (forward) or previous (backward)
  // virtual stage.
  void flows() {
    if (!mesh_) return;
    const std::int32_t stages =
        mesh_->coordOf(trace_.num_ranks - 1).pp + 1;                    // the last rank is last on every axis
    using Key = std::tuple<RankId, Phase, std::int16_t, std::int32_t>;  // receiver, slot of the receiver
    std::map<Key, const Span*> receives;
    for (const Span& span : trace_.spans) {
      if (span.lane == Lane::RecvF || span.lane == Lane::RecvB)
        receives[{span.rank, span.slot.phase, span.slot.chunk, span.slot.microbatch}] = &span;
    }
    std::int64_t id = 0;
    for (const Span& send : trace_.spans) {
      if ((send.lane != Lane::SendF && send.lane != Lane::SendB) || send.rank >= trace_.num_ranks) continue;
      Coord at = mesh_->coordOf(send.rank);
      const std::int32_t virtual_stage =
          send.slot.chunk * stages + at.pp + (send.lane == Lane::SendF ? 1 : -1);
      if (virtual_stage < 0) continue;
      at.pp = virtual_stage % stages;
      const auto chunk = static_cast<std::int16_t>(virtual_stage / stages);
      const auto found = receives.find({mesh_->rankOf(at), send.slot.phase, chunk, send.slot.microbatch});
      if (found == receives.end()) continue;
      const Span& receive = *found->second;
      ++id;
      begin();
      add(R"({{"ph":"s","id":{},"pid":{},"tid":{},"name":"transfer","cat":"flow","ts":)", id, send.rank,
          static_cast<int>(send.lane));
      appendMicroseconds(out_, send.start);
      out_ += "}";
      begin();
      add(R"({{"ph":"f","bp":"e","id":{},"pid":{},"tid":{},"name":"transfer","cat":"flow","ts":)", id,
          receive.rank, static_cast<int>(receive.lane));
      // Inside the receive, and never before the start of the arrow.
      appendMicroseconds(out_, std::max(send.start, receive.start));
      out_ += "}";
    }
  }

  void memoryEvent(const MemorySample& sample) {
    begin();
    add(R"({{"ph":"C","pid":{},"name":"memory","ts":)", sample.rank);
    appendMicroseconds(out_, sample.time);
    out_ += ",\"args\":{";
    for (int kind = 0; kind < kNumBufferKinds; ++kind) {
      add(R"({}"{}":{})", kind == 0 ? "" : ",", toString(static_cast<BufferKind>(kind)),
          sample.live[static_cast<std::size_t>(kind)]);
    }
    out_ += "}}";
  }

  const Trace& trace_;
  std::optional<Mesh> mesh_;
  std::vector<std::string> quoted_names_;
  std::string out_;
  bool first_ = true;
};

std::string gzip(const std::string& text, const std::string& path) {
  z_stream stream{};
  constexpr int kGzipWindow = 15 + 16;  // the largest window, gzip header
  if (deflateInit2(&stream, 4, Z_DEFLATED, kGzipWindow, 8, Z_DEFAULT_STRATEGY) != Z_OK)
    throw Error(ErrorKind::Runtime, "zlib does not start", path);
  std::string out(deflateBound(&stream, static_cast<uLong>(text.size())), '\0');
  // In pieces: zlib counts in 32 bits.
  constexpr std::size_t kPiece = std::size_t{1} << 30;
  std::size_t read = 0;
  int code = Z_OK;
  while (code == Z_OK) {
    if (stream.avail_in == 0) {
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data() + read));
      stream.avail_in = static_cast<uInt>(std::min(kPiece, text.size() - read));
      read += stream.avail_in;
    }
    const std::size_t room = out.size() - stream.total_out;
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + stream.total_out);
    stream.avail_out = static_cast<uInt>(std::min(kPiece, room));
    code = deflate(&stream, read == text.size() ? Z_FINISH : Z_NO_FLUSH);
  }
  out.resize(stream.total_out);
  deflateEnd(&stream);
  if (code != Z_STREAM_END)
    throw Error(ErrorKind::Runtime, fmt::format("zlib failed with code {}", code), path);
  return out;
}

}  // namespace

std::string traceToJson(const Trace& trace) {
  return Writer(trace).write();
}

void writeTrace(const Trace& trace, const std::string& path) {
  const std::string text = traceToJson(trace);
  writeFileAtomically(path, path.ends_with(".gz") ? gzip(text, path) : text);
}

}  // namespace bmt::trace
