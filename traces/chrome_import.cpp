// The reading half of chrome_trace.h: events are taken out while the file is parsed, and everything is
// checked.
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <unordered_map>

#include "core/error.h"
#include "core/json.h"
#include "traces/chrome_trace.h"

namespace bmt::trace {
namespace {

constexpr const char* kSchema = "bmtrain.trace/1";
constexpr const char* kHint = "; expected a trace written by bmtrain (schema bmtrain.trace/1)";
constexpr double kMaxMicroseconds =
    4e12;  // 46 days: microseconds with three decimals are still exact in a double
constexpr std::int64_t kMaxUnpacked = std::int64_t{8} << 30;

template <typename Kind>
std::optional<Kind> kindFromText(const std::string& text, int count) {
  for (int i = 0; i < count; ++i) {
    if (toString(static_cast<Kind>(i)) == text) return static_cast<Kind>(i);
  }
  return std::nullopt;
}

class Reader {
 public:
  explicit Reader(const std::string& source) : source_(source) {}

  // Events are taken out while the file is parsed, so that the document never holds more than one of them.
  Trace read(const std::string& text) {
    std::string section;
    const auto callback = [&](int depth, Json::parse_event_t event, Json& value) {
      if (event == Json::parse_event_t::key && depth == 1) section = value.get<std::string>();
      if (event != Json::parse_event_t::object_end || depth != 2 || section != "traceEvents") return true;
      addEvent(value);
      return false;
    };
    Json json;
    try {
      json = Json::parse(text, callback);
    } catch (const Json::parse_error& error) {
      throw Error(ErrorKind::BadInput,
                  fmt::format("not valid JSON at byte {} of {}{}", error.byte, text.size(), kHint), source_);
    } catch (const Json::exception& error) {
      throw Error(ErrorKind::BadInput, fmt::format("not a trace: {}{}", error.what(), kHint), source_);
    }
    header(json);
    checkCounts(json.at("otherData"));
    return std::move(trace_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw Error(ErrorKind::BadInput, what, source_); }
  [[noreturn]] void failEvent(const std::string& what) const {
    fail(fmt::format("trace event {}: {}", num_events_, what));
  }

  std::int64_t integer(const Json& object, const char* key, std::int64_t lowest, std::int64_t highest) const {
    if (!object.is_object() || !object.contains(key))
      failEvent(fmt::format("field '{}' is missing{}", key, kHint));
    const std::int64_t value = jsonInt(object, key, 0, source_);
    if (value < lowest || value > highest)
      failEvent(fmt::format("field '{}': {} is not between {} and {}", key, value, lowest, highest));
    return value;
  }
  std::int32_t integer32(const Json& object, const char* key, std::int64_t lowest) const {
    return static_cast<std::int32_t>(integer(object, key, lowest, std::numeric_limits<std::int32_t>::max()));
  }
  Ns time(const Json& object, const char* key) const {
    if (!object.is_object() || !object.contains(key) || !object.at(key).is_number())
      failEvent(fmt::format("field '{}': expected microseconds", key));
    const double us = object.at(key).get<double>();
    if (!(std::abs(us) <= kMaxMicroseconds))
      failEvent(fmt::format("field '{}': {} microseconds is not within {}", key, us, kMaxMicroseconds));
    return std::llround(us * 1000);
  }

  void addEvent(const Json& event) {
    const std::string phase = jsonString(event, "ph", "", source_);
    if (phase == "X") addSpan(event);
    if (phase == "C") addMemory(event);
    ++num_events_;
  }

  Slot slotFromText(const std::string& text) const {
    Slot slot;
    const std::size_t dot = text.find('.');
    const std::size_t phase = text.empty() ? std::string::npos : std::string("FBWS").find(text[0]);
    const auto number = [&](std::size_t from, std::size_t to, auto& value) {
      const auto [end, code] = std::from_chars(text.data() + from, text.data() + to, value);
      return code == std::errc() && end == text.data() + to;
    };
    if (phase == std::string::npos || dot == std::string::npos || !number(1, dot, slot.chunk) ||
        !number(dot + 1, text.size(), slot.microbatch))
      failEvent(fmt::format("field 'slot': '{}' is not of the form F0.3", text));
    slot.phase = static_cast<Phase>(phase);
    return slot;
  }

  void addSpan(const Json& event) {
    if (!event.contains("args") || !event.at("args").is_object())
      failEvent(fmt::format("field 'args' is missing{}", kHint));
    const Json& args = event.at("args");
    Span span;
    span.rank = integer32(event, "pid", 0);
    span.lane = static_cast<Lane>(integer(event, "tid", 0, kNumLanes - 1));
    span.task = integer32(args, "task", 0);
    const std::string category = jsonString(event, "cat", "", source_);
    const auto kind = kindFromText<TaskKind>(category, kNumTaskKinds);
    if (!kind) failEvent(fmt::format("field 'cat': '{}' is not a kind of task", category));
    span.kind = *kind;
    span.slot = slotFromText(jsonString(args, "slot", "", source_));
    span.layer = integer32(args, "layer", -1);
    span.start = time(event, "ts");
    const Ns duration = time(event, "dur");
    if (duration < 0) failEvent(fmt::format("field 'dur': {} ns is negative", duration));
    span.end = span.start + duration;
    span.posted = time(args, "posted");
    span.name =
        static_cast<std::uint32_t>(integer(args, "name", 0, std::numeric_limits<std::uint32_t>::max()));
    if (args.contains("bytes"))
      span.bytes = integer(args, "bytes", 0, std::numeric_limits<std::int64_t>::max());
    if (args.contains("cause")) {
      const Json& cause = args.at("cause");
      if (!cause.is_array() || cause.size() != 2 || !cause[0].is_number_integer() ||
          !cause[1].is_number_integer())
        failEvent("field 'cause': expected [rank, task]");
      span.cause = {cause[0].get<RankId>(), cause[1].get<TaskId>()};
    }
    trace_.spans.push_back(span);
  }

  void addMemory(const Json& event) {
    MemorySample sample;
    sample.rank = integer32(event, "pid", 0);
    sample.time = time(event, "ts");
    if (!event.contains("args")) failEvent("field 'args' is missing");
    for (int kind = 0; kind < kNumBufferKinds; ++kind) {
      const std::string name(toString(static_cast<BufferKind>(kind)));
      sample.live[static_cast<std::size_t>(kind)] =
          integer(event.at("args"), name.c_str(), 0, std::numeric_limits<std::int64_t>::max());
    }
    trace_.memory.push_back(sample);
  }

  void header(const Json& json) {
    if (!json.is_object() || !json.contains("traceEvents") || !json.at("traceEvents").is_array())
      fail(fmt::format("no list 'traceEvents'{}", kHint));
    if (!json.contains("otherData") || !json.at("otherData").is_object())
      fail(fmt::format("no object 'otherData'{}", kHint));
    const Json& other = json.at("otherData");
    const std::string schema = jsonString(other, "schema", "", source_);
    if (schema != kSchema) fail(fmt::format("schema is '{}', expected '{}'", schema, kSchema));
    const std::string kind = jsonString(other, "source", "", source_);
    if (kind != "predicted" && kind != "measured")
      fail(fmt::format("field 'source': '{}' is neither 'predicted' nor 'measured'", kind));
    trace_.source = kind == "predicted" ? Source::Predicted : Source::Measured;
    trace_.model = jsonString(other, "model", "", source_);
    trace_.cluster = jsonString(other, "cluster", "", source_);
    trace_.plan = jsonString(other, "plan", "", source_);
    trace_.profile = jsonString(other, "profile", "", source_);
    num_events_ = 0;
    trace_.num_ranks = integer32(other, "num_ranks", 0);
    trace_.stages = integer32(other, "stages", 1);
    trace_.step_time = integer(other, "step_time_ns", 0, std::numeric_limits<std::int64_t>::max());
    trace_.peak_memory = integer(other, "peak_memory_bytes", 0, std::numeric_limits<std::int64_t>::max());
    if (!other.contains("names") || !other.at("names").is_array())
      fail("field 'names': expected a list of texts");
    for (const Json& name : other.at("names")) {
      if (!name.is_string()) fail("field 'names': expected a list of texts");
      trace_.names.push_back(name.get<std::string>());
    }
  }

  // A file that lost events (edited, merged, cut) would compare as if the tasks had not run.
  void checkCounts(const Json& other) {
    const auto check = [&](const char* key, std::size_t have) {
      const std::int64_t expected = jsonInt(other, key, -1, source_);
      if (expected != static_cast<std::int64_t>(have))
        fail(fmt::format("field '{}' says {}, but the file has {}: events were added or lost", key, expected,
                         have));
    };
    check("num_spans", trace_.spans.size());
    check("num_memory_samples", trace_.memory.size());
    for (const Span& span : trace_.spans) {
      if (span.rank >= trace_.num_ranks)
        fail(fmt::format("task {} is on rank {}, but 'num_ranks' is {}", span.task, span.rank,
                         trace_.num_ranks));
      if (span.name >= trace_.names.size() && !(span.name == 0 && trace_.names.empty()))
        fail(fmt::format("task {} of rank {} has name {} of {}", span.task, span.rank, span.name,
                         trace_.names.size()));
    }
    for (const MemorySample& sample : trace_.memory) {
      if (sample.rank >= trace_.num_ranks)
        fail(fmt::format("a memory sample is of rank {}, but 'num_ranks' is {}", sample.rank,
                         trace_.num_ranks));
    }
  }

  std::string source_;
  Trace trace_;
  std::int64_t num_events_ = 0;
};

std::string gunzip(const std::string& packed, const std::string& source) {
  z_stream stream{};
  if (inflateInit2(&stream, 15 + 16) != Z_OK) throw Error(ErrorKind::Runtime, "zlib does not start", source);
  std::string out;
  std::string piece(std::size_t{1} << 20, '\0');
  constexpr std::size_t kPiece = std::size_t{1} << 30;
  std::size_t read = 0;
  int code = Z_OK;
  while (code == Z_OK) {
    if (stream.avail_in == 0 && read < packed.size()) {
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data() + read));
      stream.avail_in = static_cast<uInt>(std::min(kPiece, packed.size() - read));
      read += stream.avail_in;
    }
    stream.next_out = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_out = static_cast<uInt>(piece.size());
    code = inflate(&stream, Z_NO_FLUSH);
    out.append(piece, 0, piece.size() - stream.avail_out);
    if (static_cast<std::int64_t>(out.size()) > kMaxUnpacked) break;
  }
  inflateEnd(&stream);
  if (static_cast<std::int64_t>(out.size()) > kMaxUnpacked)
    throw Error(ErrorKind::BadInput, fmt::format("unpacks to more than {}", formatBytes(kMaxUnpacked)),
                source);
  if (code != Z_STREAM_END)
    throw Error(ErrorKind::BadInput,
                fmt::format("gzip data is damaged or cut off after {} of {} bytes",
                            packed.size() - stream.avail_in, packed.size()),
                source);
  return out;
}

}  // namespace

Trace traceFromJson(const std::string& text, const std::string& source) {
  return Reader(source).read(text);
}

Trace readTrace(const std::string& path) {
  std::string content = readFile(path);
  if (content.starts_with("\x1f\x8b")) content = gunzip(content, path);
  return traceFromJson(content, path);
}

}  // namespace bmt::trace
