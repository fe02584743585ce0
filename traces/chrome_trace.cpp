#include "traces/chrome_trace.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/json.h"

namespace bmt::trace {
namespace {

constexpr const char* kSchema = "bmtrain.trace/1";

std::string quoted(const std::string& text) { return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace); }

// Microseconds with three decimals: exact nanoseconds.
std::string us(Ns t) { return fmt::format("{}.{:03}", t / 1000, t % 1000); }

std::string gzip(const std::string& text) {
  z_stream stream{};
  if (deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK)
    throw Error(ErrorKind::Runtime, "zlib could not start");
  std::string out(deflateBound(&stream, static_cast<uLong>(text.size())), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const int status = deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  if (status != Z_STREAM_END) throw Error(ErrorKind::Runtime, "zlib could not compress the trace");
  return out;
}

std::string gunzip(const std::string& data, const std::string& source) {
  constexpr std::size_t kLimit = std::size_t{4} << 30;
  z_stream stream{};
  if (inflateInit2(&stream, 15 + 16) != Z_OK) throw Error(ErrorKind::Runtime, "zlib could not start");
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
  stream.avail_in = static_cast<uInt>(data.size());
  std::string out;
  int status = Z_OK;
  while (status == Z_OK && out.size() < kLimit) {
    const std::size_t done = out.size();
    out.resize(done + (std::size_t{1} << 20));
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + done);
    stream.avail_out = 1U << 20;
    status = inflate(&stream, Z_NO_FLUSH);
    out.resize(out.size() - stream.avail_out);
  }
  inflateEnd(&stream);
  if (status != Z_STREAM_END)
    throw Error(ErrorKind::BadInput, fmt::format("is not a complete gzip file ({} bytes unpacked)", out.size()), source);
  return out;
}

template <typename T>
T enumFromInt(const Json& json, const char* key, int count, const std::string& source) {
  const std::int64_t value = jsonInt(json, key, 0, source);
  if (value < 0 || value >= count)
    throw Error(ErrorKind::BadInput, fmt::format("field '{}': {} is not between 0 and {}", key, value, count - 1), source);
  return static_cast<T>(value);
}

template <typename T>
T small(const Json& json, const char* key, std::int64_t fallback, const std::string& source) {
  const std::int64_t value = jsonInt(json, key, fallback, source);
  if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max())
    throw Error(ErrorKind::BadInput, fmt::format("field '{}': {} is out of range", key, value), source);
  return static_cast<T>(value);
}

}  // namespace

std::string traceToJson(const Trace& t) {
  std::string out = "{\"displayTimeUnit\":\"ms\",\"otherData\":{";
  out += fmt::format("\"schema\":\"{}\",\"source\":\"{}\",\"model\":{},\"cluster\":{},\"plan\":{},\"profile\":{},", kSchema,
                     t.source == Source::Predicted ? "predicted" : "measured", quoted(t.model), quoted(t.cluster),
                     quoted(t.plan), quoted(t.profile));
  out += fmt::format("\"num_ranks\":{},\"stages\":{},\"step_time_ns\":{}}},\n\"traceEvents\":[\n", t.num_ranks, t.stages,
                     t.step_time);
  std::set<std::pair<RankId, Lane>> lanes;
  for (const Span& span : t.spans) lanes.insert({span.rank, span.lane});
  const char* const source = t.source == Source::Predicted ? "predicted" : "measured";
  RankId named = -1;
  std::string separator;
  const auto event = [&](const std::string& text) {
    out += separator + text;
    separator = ",\n";
  };
  for (const auto& [rank, lane] : lanes) {
    if (rank != named) {
      event(fmt::format(R"x({{"ph":"M","name":"process_name","pid":{},"args":{{"name":"rank {} ({})"}}}})x", rank, rank, source));
      event(fmt::format(R"({{"ph":"M","name":"process_sort_index","pid":{},"args":{{"sort_index":{}}}}})", rank, rank));
      named = rank;
    }
    const int tid = static_cast<int>(lane);
    event(fmt::format(R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":"{}"}}}})", rank, tid, toString(lane)));
    event(fmt::format(R"({{"ph":"M","name":"thread_sort_index","pid":{},"tid":{},"args":{{"sort_index":{}}}}})", rank, tid, tid));
  }
  for (const Span& s : t.spans) {
    event(fmt::format(
        R"({{"ph":"X","name":{},"cat":"{}","pid":{},"tid":{},"ts":{},"dur":{},"args":{{"task":{},"kind":{},"phase":{},"chunk":{},"microbatch":{},"layer":{},"posted_ns":{},"start_ns":{},"end_ns":{},"bytes":{},"cause_rank":{},"cause_task":{}}}}})",
        quoted(s.name < t.names.size() ? t.names[s.name] : std::string("task")), toString(s.kind), s.rank,
        static_cast<int>(s.lane), us(s.start), us(s.end - s.start), s.task, static_cast<int>(s.kind),
        static_cast<int>(s.slot.phase), s.slot.chunk, s.slot.microbatch, s.layer, s.posted, s.start, s.end, s.bytes,
        s.cause.rank, s.cause.task));
  }
  for (const MemorySample& m : t.memory) {
    std::string kinds;
    for (std::size_t kind = 0; kind < m.live.size(); ++kind)
      kinds += fmt::format("{}\"{}\":{}", kind == 0 ? "" : ",", toString(static_cast<BufferKind>(kind)), m.live[kind]);
    event(fmt::format(R"({{"ph":"C","name":"memory","pid":{},"ts":{},"args":{{{}}}}})", m.rank, us(m.time), kinds));
  }
  out += "\n]}\n";
  return out;
}

Trace traceFromJson(const std::string& text, const std::string& source) {
  const Json json = parseJson(text, source);
  if (!json.is_object() || !json.contains("otherData") || !json.at("otherData").is_object() ||
      !json.contains("traceEvents") || !json.at("traceEvents").is_array())
    throw Error(ErrorKind::BadInput, "is not a BMTrain trace: otherData or traceEvents are missing", source);
  const Json& other = json.at("otherData");
  const std::string schema = jsonString(other, "schema", "", source);
  if (schema != kSchema)
    throw Error(ErrorKind::BadInput, fmt::format("schema is '{}', expected '{}'", schema, kSchema), source);
  Trace t;
  t.source = jsonString(other, "source", "", source) == "measured" ? Source::Measured : Source::Predicted;
  t.model = jsonString(other, "model", "", source);
  t.cluster = jsonString(other, "cluster", "", source);
  t.plan = jsonString(other, "plan", "", source);
  t.profile = jsonString(other, "profile", "", source);
  t.num_ranks = small<std::int32_t>(other, "num_ranks", 0, source);
  t.stages = small<std::int32_t>(other, "stages", 1, source);
  t.step_time = jsonInt(other, "step_time_ns", 0, source);
  std::map<std::string, std::uint32_t> names;
  for (const Json& event : json.at("traceEvents")) {
    if (!event.is_object()) throw Error(ErrorKind::BadInput, "traceEvents holds something that is not an object", source);
    const std::string phase = jsonString(event, "ph", "", source);
    if (phase != "X" && phase != "C") continue;
    if (!event.contains("args") || !event.at("args").is_object())
      throw Error(ErrorKind::BadInput, "an event has no args", source);
    const Json& args = event.at("args");
    if (phase == "C") {
      MemorySample sample;
      sample.rank = small<RankId>(event, "pid", 0, source);
      sample.time = static_cast<Ns>(jsonNumber(event, "ts", 0, source) * 1000 + 0.5);
      for (std::size_t kind = 0; kind < sample.live.size(); ++kind)
        sample.live[kind] = jsonInt(args, std::string(toString(static_cast<BufferKind>(kind))), 0, source);
      t.memory.push_back(sample);
      continue;
    }
    Span s;
    s.rank = small<RankId>(event, "pid", 0, source);
    s.lane = enumFromInt<Lane>(event, "tid", kNumLanes, source);
    s.task = small<TaskId>(args, "task", 0, source);
    s.kind = enumFromInt<TaskKind>(args, "kind", kNumTaskKinds, source);
    s.slot.phase = enumFromInt<Phase>(args, "phase", 4, source);
    s.slot.chunk = small<std::int16_t>(args, "chunk", 0, source);
    s.slot.microbatch = small<std::int32_t>(args, "microbatch", 0, source);
    s.layer = small<std::int32_t>(args, "layer", -1, source);
    s.posted = jsonInt(args, "posted_ns", 0, source);
    s.start = jsonInt(args, "start_ns", 0, source);
    s.end = jsonInt(args, "end_ns", 0, source);
    s.bytes = jsonInt(args, "bytes", 0, source);
    s.cause.rank = small<RankId>(args, "cause_rank", -1, source);
    s.cause.task = small<TaskId>(args, "cause_task", -1, source);
    if (s.start < 0 || s.end < s.start)
      throw Error(ErrorKind::BadInput, fmt::format("task {} of rank {} runs from {} ns to {} ns", s.task, s.rank, s.start, s.end), source);
    const std::string name = jsonString(event, "name", "", source);
    const auto [entry, inserted] = names.try_emplace(name, static_cast<std::uint32_t>(t.names.size()));
    if (inserted) t.names.push_back(name);
    s.name = entry->second;
    t.spans.push_back(s);
  }
  return t;
}

void writeTrace(const Trace& trace, const std::string& path) {
  const std::string text = traceToJson(trace);
  writeFileAtomically(path, path.ends_with(".gz") ? gzip(text) : text);
}

Trace readTrace(const std::string& path) {
  std::string text = readFile(path);
  if (text.size() >= 2 && static_cast<unsigned char>(text[0]) == 0x1f && static_cast<unsigned char>(text[1]) == 0x8b)
    text = gunzip(text, path);
  return traceFromJson(text, path);
}

}  // namespace bmt::trace
