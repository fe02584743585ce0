#include "core/plan.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <sstream>

#include "core/json.h"
#include "core/schedule.h"
#include "core/suggest.h"

namespace bmt {
namespace {

constexpr const char* kSchema = "bmtrain.plan/1";

const std::vector<std::string> kKeys{"dp",
                                     "tp",
                                     "pp",
                                     "cp",
                                     "ep",
                                     "cp-kind",
                                     "tp-overlap",
                                     "mb",
                                     "gb",
                                     "schedule",
                                     "chunks",
                                     "layers",
                                     "shares",
                                     "zero",
                                     "shard",
                                     "prefetch",
                                     "sp",
                                     "recompute",
                                     "precision",
                                     "bucket",
                                     "overlap-grad",
                                     "no-overlap-grad",
                                     "overlap-param",
                                     "offload",
                                     "compress",
                                     "loss-chunk",
                                     "attention",
                                     "pointwise",
                                     "gather-logits",
                                     "grads",
                                     "order"};

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw Error(ErrorKind::BadInput, what, where);
}

std::int64_t parseInt(const std::string& key, const std::string& value) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size())
    fail("plan." + key, fmt::format("expected a whole number, got '{}'", value));
  return number;
}

std::int32_t degree(const std::string& key, std::int64_t value) {
  constexpr std::int64_t kMax = 1 << 24;
  if (value < 1 || value > kMax) fail("plan." + key, fmt::format("{} is not between 1 and {}", value, kMax));
  return static_cast<std::int32_t>(value);
}

bool parseBool(const std::string& key, const std::string& value) {
  if (value.empty() || value == "1" || value == "true") return true;
  if (value == "0" || value == "false") return false;
  fail("plan." + key, fmt::format("expected true or false, got '{}'", value));
}

template <typename T, std::size_t N>
T oneOf(const std::string& key, const std::string& value,
        const std::array<std::pair<const char*, T>, N>& choices) {
  std::vector<std::string> names;
  for (const auto& [name, choice] : choices) {
    if (value == name) return choice;
    names.emplace_back(name);
  }
  fail("plan." + key, fmt::format("'{}' is not supported by this version; nearest of {}: {}", value,
                                  fmt::join(names, ", "), nearestName(value, names)));
}

constexpr std::array<std::pair<const char*, ScheduleKind>, kNumScheduleKinds> kSchedules{
    {{"gpipe", ScheduleKind::GPipe},
     {"1f1b", ScheduleKind::OneFOneB},
     {"interleaved", ScheduleKind::Interleaved},
     {"bfs", ScheduleKind::BreadthFirst},
     {"zb-h1", ScheduleKind::ZbH1},
     {"zb-h2", ScheduleKind::ZbH2},
     {"zb-v", ScheduleKind::ZbV},
     {"zb-auto", ScheduleKind::ZbAuto},
     {"dualpipev", ScheduleKind::DualPipeV}}};
// In the order of the enumeration; the last two carry figures and are parsed apart.
constexpr std::array<std::pair<const char*, Recompute>, 6> kRecomputes{{{"none", Recompute::None},
                                                                        {"selective", Recompute::Selective},
                                                                        {"full", Recompute::Full},
                                                                        {"every", Recompute::Every},
                                                                        {"sqrt", Recompute::Sqrt},
                                                                        {"list", Recompute::List}}};
constexpr std::array<std::pair<const char*, Recompute>, 4> kPlainRecomputes{
    {{"none", Recompute::None},
     {"selective", Recompute::Selective},
     {"full", Recompute::Full},
     {"sqrt", Recompute::Sqrt}}};
constexpr std::array<std::pair<const char*, Recompute>, 3> kLayerRecomputes{
    {{"none", Recompute::None}, {"selective", Recompute::Selective}, {"full", Recompute::Full}}};
constexpr std::array<std::pair<const char*, Compress>, 2> kPlainCompress{
    {{"none", Compress::None}, {"int8", Compress::Int8}}};
constexpr std::array<std::pair<const char*, DType>, 3> kGrads{
    {{"fp32", DType::F32}, {"bf16", DType::BF16}, {"fp16", DType::F16}}};
constexpr std::array<std::pair<const char*, bool>, 2> kOffloads{{{"none", false}, {"optimizer", true}}};
constexpr std::array<std::pair<const char*, AttentionKernel>, 5> kAttentions{
    {{"flash", AttentionKernel::Flash},
     {"flash2", AttentionKernel::Flash2},
     {"flash1", AttentionKernel::Flash1},
     {"softmax", AttentionKernel::Softmax},
     {"unfused", AttentionKernel::Unfused}}};
constexpr std::array<std::pair<const char*, Pointwise>, 3> kPointwise{
    {{"fused", Pointwise::Fused}, {"norms", Pointwise::Norms}, {"eager", Pointwise::Eager}}};
constexpr std::array<std::pair<const char*, ContextKind>, 2> kContexts{
    {{"ring", ContextKind::Ring}, {"a2a", ContextKind::AllToAll}}};
constexpr std::array<std::pair<const char*, DType>, 5> kPrecisions{{{"fp32", DType::F32},
                                                                    {"tf32", DType::TF32},
                                                                    {"bf16", DType::BF16},
                                                                    {"fp16", DType::F16},
                                                                    {"fp8", DType::F8}}};

double parseReal(const std::string& key, const std::string& value) {
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size())
    fail("plan." + key, fmt::format("expected a number, got '{}'", value));
  return number;
}

std::vector<std::string> parts(const std::string& value, char separator) {
  std::vector<std::string> list;
  for (std::size_t begin = 0; begin <= value.size();) {  // a trailing separator leaves an empty part
    const std::size_t end = std::min(value.find(separator, begin), value.size());
    list.push_back(value.substr(begin, end - begin));
    begin = end + 1;
  }
  return list;
}

void setRecompute(Plan& plan, const std::string& value) {
  const std::string key = "recompute";
  plan.recompute_every = 0;
  plan.recompute_layers.clear();
  if (value.starts_with("every:")) {
    plan.recompute = Recompute::Every;
    plan.recompute_every = degree(key, parseInt(key, value.substr(6)));
    return;
  }
  if (value.find('/') == std::string::npos && value.find('*') == std::string::npos) {
    plan.recompute = oneOf(key, value, kPlainRecomputes);
    return;
  }
  constexpr std::int64_t kMaxLayers = 1 << 16;
  plan.recompute = Recompute::List;
  for (const std::string& part : parts(value, '/')) {
    const std::size_t star = part.find('*');
    const std::int64_t count = star == std::string::npos ? 1 : parseInt(key, part.substr(star + 1));
    if (count < 1 || count + static_cast<std::int64_t>(plan.recompute_layers.size()) > kMaxLayers)
      fail("plan." + key, fmt::format("'{}' is not between 1 and {} layers", part, kMaxLayers));
    plan.recompute_layers.insert(plan.recompute_layers.end(), static_cast<std::size_t>(count),
                                 oneOf(key, part.substr(0, star), kLayerRecomputes));
  }
}

void setCompress(Plan& plan, const std::string& value) {
  const std::string key = "compress";
  plan.compress_value = 0;
  const bool topk = value.starts_with("topk:"), threshold = value.starts_with("threshold:");
  if (!topk && !threshold) {
    plan.compress = oneOf(key, value, kPlainCompress);
    return;
  }
  plan.compress = topk ? Compress::TopK : Compress::Threshold;
  plan.compress_value = parseReal(key, value.substr(value.find(':') + 1));
  if (topk && !(plan.compress_value > 0 && plan.compress_value <= 1))
    fail("plan." + key,
         fmt::format("topk:{} is no share of the entries, above 0 and at most 1", value.substr(5)));
  if (threshold && !(plan.compress_value >= 0 && plan.compress_value < 1e30))
    fail("plan." + key, fmt::format("threshold:{} is no absolute value of at least 0", value.substr(10)));
}

// "12/12/11/13"; a trailing '/' leaves an empty part, which is no number.
std::vector<std::int64_t> parseList(const std::string& key, const std::string& value) {
  std::vector<std::int64_t> list;
  for (const std::string& part : parts(value, '/')) list.push_back(degree(key, parseInt(key, part)));
  return list;
}

void set(Plan& plan, const std::string& key, const std::string& value) {
  const bool flag = key == "sp" || key == "overlap-grad" || key == "no-overlap-grad" ||
                    key == "overlap-param" || key == "tp-overlap" || key == "gather-logits";
  if (!flag && value.empty()) fail("plan." + key, "needs a value: " + key + "=...");
  if (key == "dp") plan.dp = degree(key, parseInt(key, value));
  if (key == "tp") plan.tp = degree(key, parseInt(key, value));
  if (key == "pp") plan.pp = degree(key, parseInt(key, value));
  if (key == "cp") plan.cp = degree(key, parseInt(key, value));
  if (key == "ep") plan.ep = degree(key, parseInt(key, value));
  if (key == "chunks") plan.chunks = degree(key, parseInt(key, value));
  if (key == "mb") plan.micro_batch = degree(key, parseInt(key, value));
  if (key == "gb") plan.global_batch = degree(key, parseInt(key, value));
  if (key == "zero") {
    const std::int64_t zero = parseInt(key, value);
    if (zero < 0 || zero > 3) fail("plan.zero", fmt::format("{} is not one of 0, 1, 2, 3", zero));
    plan.zero = static_cast<std::int32_t>(zero);
  }
  if (key == "cp-kind") plan.context = oneOf(key, value, kContexts);
  if (key == "tp-overlap") plan.tp_overlap = parseBool(key, value);
  if (key == "shard") plan.shard = degree(key, parseInt(key, value));
  if (key == "prefetch") {
    const std::int64_t layers = parseInt(key, value);
    if (layers < 0 || layers > 1024)
      fail("plan.prefetch", fmt::format("{} is not between 0 and 1024 layers", layers));
    plan.prefetch = static_cast<std::int32_t>(layers);
  }
  if (key == "overlap-param") plan.overlap_param = parseBool(key, value);
  if (key == "offload") plan.offload_optimizer = oneOf(key, value, kOffloads);
  if (key == "compress") setCompress(plan, value);
  if (key == "sp") plan.sequence_parallel = parseBool(key, value);
  if (key == "overlap-grad") plan.overlap_grad = parseBool(key, value);
  if (key == "no-overlap-grad") plan.overlap_grad = !parseBool(key, value);
  if (key == "schedule") {
    if (value.ends_with(".csv") || value.ends_with(".txt")) {
      plan.schedule = ScheduleKind::File;
      plan.schedule_file = {value, std::make_shared<const Schedule>(loadSchedule(value))};
    } else {
      plan.schedule = oneOf(key, value, kSchedules);
    }
  }
  if (key == "recompute") setRecompute(plan, value);
  if (key == "precision") plan.precision = oneOf(key, value, kPrecisions);
  if (key == "bucket") {
    plan.bucket = parseBytes(value);
    if (plan.bucket <= 0) fail("plan.bucket", fmt::format("expected a size such as 25MiB, got '{}'", value));
  }
  if (key == "loss-chunk") {
    plan.loss_chunk = parseInt(key, value);
    if (plan.loss_chunk < 0)
      fail("plan.loss-chunk", fmt::format("{} is negative; 0 = whole micro-batch", value));
  }
  if (key == "attention") plan.attention = oneOf(key, value, kAttentions);
  if (key == "pointwise") plan.pointwise = oneOf(key, value, kPointwise);
  if (key == "gather-logits") plan.gather_logits = parseBool(key, value);
  if (key == "grads") plan.grads = oneOf(key, value, kGrads);
  if (key == "order") plan.order = value;
  if (key == "layers") plan.layers_per_stage = parseList(key, value);
  if (key == "shares") plan.batch_shares = parseList(key, value);
}

void checkKey(const std::string& key) {
  for (const std::string& known : kKeys) {
    if (key == known) return;
  }
  fail("plan." + key, fmt::format("unknown key; the nearest is '{}'", nearestName(key, kKeys)));
}

}  // namespace

std::string_view toString(ScheduleKind kind) {
  if (kind == ScheduleKind::File) return "file";
  return kSchedules[static_cast<std::size_t>(kind)].first;
}
std::string scheduleName(const Plan& plan) {
  return plan.schedule == ScheduleKind::File ? plan.schedule_file.path : std::string(toString(plan.schedule));
}
std::string_view toString(Recompute policy) {
  return kRecomputes[static_cast<std::size_t>(policy)].first;
}
std::string recomputeText(const Plan& plan) {
  if (plan.recompute == Recompute::Every) return fmt::format("every:{}", plan.recompute_every);
  if (plan.recompute != Recompute::List) return std::string(toString(plan.recompute));
  std::string text;
  for (std::size_t i = 0; i < plan.recompute_layers.size();) {
    std::size_t end = i;
    while (end < plan.recompute_layers.size() && plan.recompute_layers[end] == plan.recompute_layers[i])
      ++end;
    text += fmt::format("{}{}*{}", text.empty() ? "" : "/", toString(plan.recompute_layers[i]), end - i);
    i = end;
  }
  return text;
}
std::string compressText(const Plan& plan) {
  switch (plan.compress) {
    case Compress::None:
      return "none";
    case Compress::Int8:
      return "int8";
    case Compress::TopK:
      return fmt::format("topk:{}", plan.compress_value);
    case Compress::Threshold:
      return fmt::format("threshold:{}", plan.compress_value);
  }
  return "none";
}
std::string_view toString(AttentionKernel kernel) {
  return kAttentions[static_cast<std::size_t>(kernel)].first;
}
std::string_view toString(Pointwise fusion) {
  return kPointwise[static_cast<std::size_t>(fusion)].first;
}
std::string_view toString(ContextKind kind) {
  return kContexts[static_cast<std::size_t>(kind)].first;
}

Plan planFromText(const std::string& text) {
  Plan plan;
  std::set<std::string> seen;
  std::istringstream parts(text);
  std::string part;
  while (std::getline(parts, part, ',')) {
    const std::size_t first = part.find_first_not_of(" \t\n");
    if (first == std::string::npos) continue;
    part = part.substr(first, part.find_last_not_of(" \t\n") - first + 1);
    const std::size_t equals = part.find('=');
    const std::string key = part.substr(0, equals);
    checkKey(key);
    if (!seen.insert(key == "no-overlap-grad" ? "overlap-grad" : key).second)
      fail("plan." + key, "is given twice");
    set(plan, key, equals == std::string::npos ? std::string() : part.substr(equals + 1));
  }
  return plan;
}

std::string planToText(const Plan& plan) {
  const Plan defaults;
  std::string text = fmt::format("dp={},tp={},pp={},mb={},gb={},schedule={}", plan.dp, plan.tp, plan.pp,
                                 plan.micro_batch, plan.global_batch, scheduleName(plan));
  const auto add = [&text](bool differs, const std::string& item) {
    if (differs) text += "," + item;
  };
  add(plan.chunks != defaults.chunks, fmt::format("chunks={}", plan.chunks));
  add(plan.cp != defaults.cp, fmt::format("cp={}", plan.cp));
  add(plan.ep != defaults.ep, fmt::format("ep={}", plan.ep));
  add(plan.context != defaults.context, fmt::format("cp-kind={}", toString(plan.context)));
  add(!plan.layers_per_stage.empty(), fmt::format("layers={}", fmt::join(plan.layers_per_stage, "/")));
  add(!plan.batch_shares.empty(), fmt::format("shares={}", fmt::join(plan.batch_shares, "/")));
  add(plan.zero != defaults.zero, fmt::format("zero={}", plan.zero));
  add(plan.shard != defaults.shard, fmt::format("shard={}", plan.shard));
  add(plan.prefetch != defaults.prefetch, fmt::format("prefetch={}", plan.prefetch));
  add(plan.sequence_parallel, "sp");
  add(plan.tp_overlap, "tp-overlap");
  add(plan.recompute != defaults.recompute, "recompute=" + recomputeText(plan));
  add(plan.precision != defaults.precision, fmt::format("precision={}", toString(plan.precision)));
  add(plan.bucket != defaults.bucket, fmt::format("bucket={}", plan.bucket));
  add(plan.overlap_grad != defaults.overlap_grad, "no-overlap-grad");
  add(plan.overlap_param, "overlap-param");
  add(plan.offload_optimizer, "offload=optimizer");
  add(plan.compress != defaults.compress, "compress=" + compressText(plan));
  add(plan.loss_chunk != defaults.loss_chunk, fmt::format("loss-chunk={}", plan.loss_chunk));
  add(plan.attention != defaults.attention, fmt::format("attention={}", toString(plan.attention)));
  add(plan.pointwise != defaults.pointwise, fmt::format("pointwise={}", toString(plan.pointwise)));
  add(plan.gather_logits, "gather-logits");
  add(plan.grads != defaults.grads, fmt::format("grads={}", toString(plan.grads)));
  add(plan.order != defaults.order, fmt::format("order={}", plan.order));
  return text;
}

std::string planToJson(const Plan& plan) {
  Json json;
  json["schema"] = kSchema;
  json["dp"] = plan.dp;
  json["tp"] = plan.tp;
  json["pp"] = plan.pp;
  json["cp"] = plan.cp;
  json["ep"] = plan.ep;
  json["mb"] = plan.micro_batch;
  json["gb"] = plan.global_batch;
  json["schedule"] = scheduleName(plan);
  json["chunks"] = plan.chunks;
  if (!plan.layers_per_stage.empty()) json["layers"] = plan.layers_per_stage;
  if (!plan.batch_shares.empty()) json["shares"] = plan.batch_shares;
  json["zero"] = plan.zero;
  if (plan.shard != 0) json["shard"] = plan.shard;
  if (plan.prefetch != 1) json["prefetch"] = plan.prefetch;
  json["sp"] = plan.sequence_parallel;
  json["recompute"] = recomputeText(plan);
  json["precision"] = std::string(toString(plan.precision));
  json["bucket"] = plan.bucket;
  json["overlap-grad"] = plan.overlap_grad;
  if (plan.overlap_param) json["overlap-param"] = true;
  if (plan.offload_optimizer) json["offload"] = "optimizer";
  if (plan.compress != Compress::None) json["compress"] = compressText(plan);
  json["loss-chunk"] = plan.loss_chunk;
  if (plan.attention != AttentionKernel::Flash) json["attention"] = std::string(toString(plan.attention));
  if (plan.pointwise != Pointwise::Fused) json["pointwise"] = std::string(toString(plan.pointwise));
  if (plan.gather_logits) json["gather-logits"] = true;
  if (plan.grads != DType::F32) json["grads"] = std::string(toString(plan.grads));
  if (plan.context != ContextKind::Ring) json["cp-kind"] = std::string(toString(plan.context));
  if (plan.tp_overlap) json["tp-overlap"] = true;
  json["order"] = plan.order;
  return json.dump(2) + "\n";
}

Plan planFromJson(const std::string& text, const std::string& source) {
  const Json json = parseJson(text, source);
  if (!json.is_object()) throw Error(ErrorKind::BadInput, "expected a JSON object", source);
  const std::string schema = jsonString(json, "schema", kSchema, source);
  if (schema != kSchema) fail(source, fmt::format("schema is '{}', expected '{}'", schema, kSchema));
  Plan plan;
  if (json.contains("overlap-grad") && json.contains("no-overlap-grad"))
    fail(source, "has both 'overlap-grad' and 'no-overlap-grad'; keep one");
  for (const auto& [key, value] : json.items()) {
    if (key == "schema") continue;
    checkKey(key);
    if (key == "layers" || key == "shares") {
      if (!value.is_array()) fail(source, fmt::format("field '{}': expected a list of whole numbers", key));
      std::vector<std::int64_t>& list = key == "layers" ? plan.layers_per_stage : plan.batch_shares;
      for (const Json& count : value) list.push_back(degree(key, parseInt(key, count.dump())));
      continue;
    }
    if (value.is_boolean()) {
      set(plan, key, value.get<bool>() ? "true" : "false");
    } else if (value.is_number_integer()) {
      set(plan, key, value.dump());
    } else {
      set(plan, key, jsonString(json, key, "", source));
    }
  }
  return plan;
}

Plan loadPlan(const std::string& text_or_path) {
  struct stat info {};
  const bool file = ::stat(text_or_path.c_str(), &info) == 0;
  if (!file && text_or_path.ends_with(".json")) return planFromJson(readFile(text_or_path), text_or_path);
  if (!file) return planFromText(text_or_path);
  return planFromJson(readFile(text_or_path), text_or_path);
}

std::int64_t Plan::numMicrobatches() const {
  return batch_shares.empty() ? global_batch / (micro_batch * dp)
                              : *std::max_element(batch_shares.begin(), batch_shares.end());
}

std::int64_t Plan::microbatchesOf(std::int32_t replica) const {
  return batch_shares.empty() ? numMicrobatches() : batch_shares[static_cast<std::size_t>(replica)];
}

std::int64_t Plan::firstSequenceOf(std::int32_t replica) const {
  std::int64_t before = 0;
  for (std::int32_t d = 0; d < replica; ++d) before += microbatchesOf(d);
  return before * micro_batch;
}

std::vector<std::int64_t> layersOfStages(const ModelSpec& model, const Plan& plan) {
  if (!plan.layers_per_stage.empty()) return plan.layers_per_stage;
  const std::int64_t stages = plan.numVirtualStages();
  std::vector<std::int64_t> layers(static_cast<std::size_t>(stages), model.layers / stages);
  std::int64_t rest = model.layers % stages;
  // Middle stages first: the first stage also holds the embedding, the last the head.
  for (std::int64_t v = 1; rest > 0; v = (v + 1) % stages, --rest)
    ++layers[static_cast<std::size_t>(v % stages)];
  return layers;
}

DType storageType(const Plan& plan) {
  return plan.precision == DType::F8 ? DType::BF16 : plan.precision;
}

std::vector<RecomputeSegment> recomputeSegments(const Plan& plan, std::int64_t first, std::int64_t layers) {
  std::vector<RecomputeSegment> segments;
  const bool grouped = plan.recompute == Recompute::Every || plan.recompute == Recompute::Sqrt;
  std::int64_t length = 1;
  if (plan.recompute == Recompute::Every) length = plan.recompute_every;
  if (plan.recompute == Recompute::Sqrt) {
    while (length * length < layers) ++length;
  }
  for (std::int64_t begin = 0; begin < layers; begin += length) {
    Recompute policy = grouped ? Recompute::Full : plan.recompute;
    if (plan.recompute == Recompute::List)
      policy = plan.recompute_layers[static_cast<std::size_t>(first + begin)];
    segments.push_back({begin, std::min(begin + length, layers), policy});
  }
  return segments;
}

}  // namespace bmt
