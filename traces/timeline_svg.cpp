// Layout and drawing of timeline_svg.h. A lane becomes boxes: neighbours of one kind and slot are joined;
// what is thinner than a pixel column is summed per column and drawn in the colour of the kind with the
// largest share, as strong as the column is busy. Boxes of one colour are one SVG path, which bounds the size
// by (columns x lanes).
#include "traces/timeline_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <set>

#include "core/error.h"
#include "core/units.h"
#include "traces/shares.h"

namespace bmt::trace {
namespace {

constexpr double kLeft = 128, kRight = 28;              // margins [px]
constexpr double kComputeHeight = 26, kThinHeight = 7;  // lanes
constexpr double kLaneGap = 2, kRankGap = 9;
constexpr double kMinLabelWidth = 17;                      // a box this wide gets its letter
constexpr double kBytesPerBox = 17, kMaxBoxBytes = 1.2e6;  // of the file

struct KindStyle {
  const char* fill;
  const char* ink;  // text on it
  char letter;
  const char* legend;
};
constexpr std::array<KindStyle, kNumTaskKinds> kKinds{{{"#56B4E9", "#000", 'F', "forward"},
                                                       {"#0072B2", "#fff", 'B', "backward"},
                                                       {"#332288", "#fff", 'W', "weight gradient"},
                                                       {"#009E73", "#fff", 'R', "recompute"},
                                                       {"#F0E442", "#000", 'H', "head and loss"},
                                                       {"#CC79A7", "#000", 'O', "optimizer"},
                                                       {"#E69F00", "#000", 'T', "tensor comm."},
                                                       {"#D55E00", "#fff", 'D', "data comm."},
                                                       {"#4D4D4D", "#fff", 'P', "pipeline comm."},
                                                       {"#882255", "#fff", 'C', "context comm."},
                                                       {"#AA4499", "#fff", 'E', "expert comm."}}};

enum Row { kCompute, kTensor, kData, kSend, kReceive, kCopy, kNumRows };
constexpr std::array<const char*, kNumRows> kRowNames{"compute", "tensor", "data", "send", "receive", "copy"};

Row rowOf(Lane lane) {
  switch (lane) {
    case Lane::Compute:
      return kCompute;
    case Lane::Tensor:
      return kTensor;
    case Lane::Data:
      return kData;
    case Lane::SendF:
    case Lane::SendB:
      return kSend;
    case Lane::RecvF:
    case Lane::RecvB:
      return kReceive;
    case Lane::Copy:
      return kCopy;
  }
  return kCopy;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

// A step of 1, 2 or 5 times a power of ten that gives at most `most` ticks.
double tickStep(double range, double most) {
  const double power = std::pow(10, std::floor(std::log10(range / most)));
  for (const double step : {1.0, 2.0, 5.0}) {
    if (range / (step * power) <= most) return step * power;
  }
  return 10 * power;
}

struct Box {
  double x0 = 0, x1 = 0;  // pixels
  const Span* first = nullptr;
  Ns end = 0;
};

class Drawing {
 public:
  Drawing(const std::vector<const Trace*>& traces, const TimelineStyle& style)
      : traces_(traces), style_(style) {
    for (const Trace* trace : traces) {
      Ns begin = std::numeric_limits<Ns>::max(), end = std::numeric_limits<Ns>::min();
      for (const Span& span : trace->spans) {
        begin = std::min({begin, span.start, span.posted});
        end = std::max(end, span.end);
      }
      if (begin > end) begin = end = 0;
      begins_.push_back(begin);
      range_ = std::max(range_, end - begin);
    }
    plot_width_ = style.width - kLeft - kRight;
    per_pixel_ =
        static_cast<double>(std::max<Ns>(1, range_)) / plot_width_;  // an empty trace is an empty picture
  }

  std::string draw() {
    title();
    for (std::size_t i = 0; i < traces_.size(); ++i) section(i);
    axis();
    const double height = y_ + 8;
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1:.0f}\" viewBox=\"0 0 {0} "
               "{1:.0f}\" "
               "font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"11\" fill=\"#222\">\n"
               "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
               style_.width, height) +
           grid_ + out_ + "</svg>\n";
  }

 private:
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }
  void text(double x, double y, const std::string& content, const char* attributes = "") {
    add("<text x=\"{:.1f}\" y=\"{:.1f}\"{}{}>{}</text>\n", x, y, *attributes != '\0' ? " " : "", attributes,
        escaped(content));
  }

  void title() {
    const Trace& trace = *traces_.front();
    text(16, 26, trace.model + "  on  " + trace.cluster, "font-size=\"17\" font-weight=\"bold\"");
    text(16, 45, "plan " + trace.plan, "fill=\"#555\"");
    y_ = 56;
    std::array<bool, kNumTaskKinds> used{};
    for (const Trace* each : traces_) {
      for (const Span& span : each->spans) used[static_cast<std::size_t>(span.kind)] = true;
    }
    double x = 16;
    for (std::size_t kind = 0; kind < used.size(); ++kind) {
      if (!used[kind]) continue;
      const KindStyle& style = kKinds[kind];
      add("<rect x=\"{0:.1f}\" y=\"{1}\" width=\"17\" height=\"15\" rx=\"2\" fill=\"{2}\"/><text "
          "x=\"{3:.1f}\" y=\"{4}\" "
          "text-anchor=\"middle\" fill=\"{5}\" font-size=\"10\">{6}</text>\n",
          x, y_, style.fill, x + 8.5, y_ + 11, style.ink, style.letter);
      text(x + 22, y_ + 11.5, style.legend);
      x += 36 + 6.7 * static_cast<double>(std::string(style.legend).size());
    }
    for (const auto& [fill, name] :
         {std::pair{"#EDEDED", "idle (bubble)"}, std::pair{"#C9C9C9", "waiting for the other rank"}}) {
      add("<rect x=\"{:.1f}\" y=\"{}\" width=\"17\" height=\"15\" rx=\"2\" fill=\"{}\"/>\n", x, y_, fill);
      text(x + 22, y_ + 11.5, name);
      x += 36 + 6.7 * static_cast<double>(std::string(name).size());
    }
    y_ += 26;
  }

  void section(std::size_t index) {
    const Trace& trace = *traces_[index];
    const Shares shares = stepShares(trace);
    y_ += 16;
    const char* const source = trace.source == Source::Predicted ? "predicted" : "measured";
    text(16, y_, source, "font-size=\"14\" font-weight=\"bold\"");
    text(kLeft, y_,
         fmt::format("step {}  ·  compute {:.1f} %  ·  bubble {:.1f} %  ·  exposed communication {:.1f} %",
                     formatDuration(toSeconds(trace.step_time)), 100 * shares.compute, 100 * shares.bubble,
                     100 * shares.exposed),
         "font-size=\"12\"");
    y_ += 9;
    if (grid_top_ == 0) grid_top_ = y_;

    std::map<RankId, std::array<std::vector<const Span*>, kNumRows>> ranks;
    std::array<bool, kNumRows> used{};
    for (const Span& span : trace.spans) {
      const Row row = rowOf(span.lane);
      ranks[span.rank][row].push_back(&span);
      used[row] = true;
    }
    std::size_t lanes = 0;
    for (const bool row : used) lanes += row ? 1 : 0;
    const auto shown = std::min(ranks.size(), static_cast<std::size_t>(std::max(1, style_.max_ranks)));
    const double lane_count = static_cast<double>(lanes * shown * traces_.size());
    column_ = std::max(1.0, std::ceil(lane_count * plot_width_ * kBytesPerBox / kMaxBoxBytes));

    const double step_end = kLeft + static_cast<double>(trace.step_time) / per_pixel_;
    const double top = y_;
    std::size_t drawn = 0;
    for (auto& [rank, rows] : ranks) {
      if (drawn++ == shown) break;
      text(kLeft - 62, y_ + 17, fmt::format("rank {}", rank), "text-anchor=\"end\" font-size=\"12\"");
      for (int row = 0; row < kNumRows; ++row) {
        if (!used[static_cast<std::size_t>(row)]) continue;
        const double height = row == kCompute ? kComputeHeight : kThinHeight;
        add("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.0f}\" fill=\"{}\"/>\n", kLeft, y_,
            std::max(0.0, step_end - kLeft), height, row == kCompute ? "#EDEDED" : "#F7F7F7");
        text(kLeft - 6, y_ + height / 2 + 3, kRowNames[static_cast<std::size_t>(row)],
             "text-anchor=\"end\" font-size=\"8\" fill=\"#777\"");
        lane(index, rows[static_cast<std::size_t>(row)], y_, height);
        y_ += height + kLaneGap;
      }
      y_ += kRankGap;
    }
    add("<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"#222\" "
        "stroke-width=\"1.2\"/>\n",
        step_end, top, y_ - kRankGap);
    if (ranks.size() > shown) {
      text(kLeft, y_ + 4, fmt::format("{} more ranks are not drawn", ranks.size() - shown), "fill=\"#777\"");
      y_ += 14;
    }
  }

  double pixel(std::size_t index, Ns time) const {
    return kLeft + static_cast<double>(time - begins_[index]) / per_pixel_;
  }

  static bool sameWork(const Span& a, const Span& b) { return a.kind == b.kind && a.slot == b.slot; }

  void lane(std::size_t index, std::vector<const Span*>& spans, double y, double height) {
    std::stable_sort(spans.begin(), spans.end(),
                     [](const Span* a, const Span* b) { return a->start < b->start; });
    // Waiting first, so that work lies on top of it.
    std::string waits;
    double waited_to = 0;
    for (const Span* span : spans) {
      const double x0 = std::max(waited_to, pixel(index, span->posted)), x1 = pixel(index, span->start);
      if (span->posted >= span->start || x1 - x0 < column_) continue;
      appendBox(waits, x0, x1, y + height * 0.3, height * 0.4);
      waited_to = x1;
    }
    if (!waits.empty()) add("<path fill=\"#C9C9C9\" d=\"{}\"/>\n", waits);

    std::vector<Box> boxes;
    for (const Span* span : spans) {
      const double x0 = pixel(index, span->start), x1 = pixel(index, span->end);
      if (!boxes.empty() && sameWork(*boxes.back().first, *span) && x0 - boxes.back().x1 < 0.4) {
        boxes.back().x1 = std::max(boxes.back().x1, x1);
        boxes.back().end = std::max(boxes.back().end, span->end);
      } else {
        boxes.push_back({x0, x1, span, span->end});
      }
    }
    std::array<std::string, kNumTaskKinds> paths;
    thinBoxes(boxes, y, height);
    std::string labels;
    for (const Box& box : boxes) {
      if (box.x1 - box.x0 < column_) continue;
      // A hair of background between neighbours, so that equal colours stay apart.
      const double width = box.x1 - box.x0 > 3 ? box.x1 - box.x0 - 0.5 : box.x1 - box.x0;
      appendBox(paths[static_cast<std::size_t>(box.first->kind)], box.x0, box.x0 + width, y, height);
    }
    if (height == kComputeHeight) labels = labelsOf(boxes, y + height / 2 + 4);
    for (std::size_t kind = 0; kind < paths.size(); ++kind) {
      if (!paths[kind].empty()) add("<path fill=\"{}\" d=\"{}\"/>\n", kKinds[kind].fill, paths[kind]);
    }
    out_ += labels;
  }

  // Letter and micro-batch on every slot that is wide enough; thin collectives inside a slot do not split it.
  static std::string labelsOf(const std::vector<Box>& boxes, double baseline) {
    constexpr double kThin = 6;
    std::string labels;
    for (std::size_t i = 0; i < boxes.size();) {
      const Span& first = *boxes[i].first;
      Ns work = boxes[i].end - first.start;
      std::size_t last = i;
      double previous = boxes[i].x1;
      for (std::size_t next = i + 1; next < boxes.size() && boxes[next].x0 - previous < kThin; ++next) {
        previous = boxes[next].x1;
        if (sameWork(first, *boxes[next].first)) {
          work += boxes[next].end - boxes[next].first->start;
          last = next;
        } else if (boxes[next].first->kind != TaskKind::TensorComm ||
                   boxes[next].x1 - boxes[next].x0 > kThin) {
          break;
        }
      }
      const KindStyle& style = kKinds[static_cast<std::size_t>(first.kind)];
      const std::string label = first.slot.phase == Phase::Step
                                    ? std::string(1, style.letter)
                                    : fmt::format("{}{}", style.letter, first.slot.microbatch);
      const double width = boxes[last].x1 - boxes[i].x0;
      if (width >= std::max(kMinLabelWidth, 7.5 * static_cast<double>(label.size()) + 3))
        fmt::format_to(std::back_inserter(labels),
                       "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\" fill=\"{}\">{}<title>{} "
                       "{}</title></text>\n",
                       boxes[i].x0 + width / 2, baseline, style.ink, label, style.legend,
                       formatDuration(toSeconds(work)));
      i = last + 1;
    }
    return labels;
  }

  // Everything thinner than a column, summed per column.
  void thinBoxes(const std::vector<Box>& boxes, double y, double height) {
    constexpr int kLevels = 4;  // of opacity
    std::map<std::int64_t, std::array<double, kNumTaskKinds>> columns;
    for (const Box& box : boxes) {
      if (box.x1 - box.x0 >= column_) continue;
      const auto at = static_cast<std::int64_t>((box.x0 - kLeft) / column_);
      columns[at][static_cast<std::size_t>(box.first->kind)] += box.x1 - box.x0;
    }
    std::map<std::pair<std::size_t, int>, std::string> paths;
    std::int64_t run_begin = 0, run_end = 0;
    std::pair<std::size_t, int> run{0, 0};
    const auto flush = [&] {
      if (run_end > run_begin)
        appendBox(paths[run], kLeft + static_cast<double>(run_begin) * column_,
                  kLeft + static_cast<double>(run_end) * column_, y, height);
    };
    for (const auto& [at, shares] : columns) {
      const auto largest =
          static_cast<std::size_t>(std::max_element(shares.begin(), shares.end()) - shares.begin());
      double sum = 0;
      for (const double share : shares) sum += share;
      const int level = std::clamp(static_cast<int>(std::ceil(kLevels * sum / column_)), 1, kLevels);
      if (at != run_end || run != std::pair{largest, level}) {
        flush();
        run_begin = at;
        run = {largest, level};
      }
      run_end = at + 1;
    }
    flush();
    for (const auto& [key, path] : paths)
      add("<path fill=\"{}\" fill-opacity=\"{:.2f}\" d=\"{}\"/>\n", kKinds[key.first].fill,
          static_cast<double>(key.second) / kLevels, path);
  }

  static void appendBox(std::string& path, double x0, double x1, double y, double height) {
    fmt::format_to(std::back_inserter(path), "M{:.1f} {:.1f}h{:.1f}v{:.0f}h-{:.1f}z", x0, y, x1 - x0, height,
                   x1 - x0);
  }

  void axis() {
    if (range_ <= 0) return;
    const double bottom = y_ - kRankGap + 4;
    const double range_ms = static_cast<double>(range_) / 1e6;
    const double step = tickStep(range_ms, plot_width_ / 90);
    const int decimals = std::max(0, static_cast<int>(std::ceil(-std::log10(step) - 1e-9)));
    add("<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#222\"/>\n", kLeft,
        kLeft + plot_width_, bottom, bottom);
    for (int i = 0; i * step <= range_ms * (1 + 1e-9); ++i) {
      const double x = kLeft + i * step * 1e6 / per_pixel_;
      fmt::format_to(
          std::back_inserter(grid_),
          "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"#E3E3E3\"/>\n", x,
          grid_top_, bottom);
      add("<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"#222\"/>\n", x, bottom,
          bottom + 4);
      text(x, bottom + 16, fmt::format("{:.{}f}", i * step, decimals), "text-anchor=\"middle\"");
    }
    text(kLeft - 10, bottom + 16, "time [ms]", "text-anchor=\"end\"");
    y_ = bottom + 22;
  }

  const std::vector<const Trace*>& traces_;
  TimelineStyle style_;
  std::vector<Ns> begins_;
  Ns range_ = 0;
  double plot_width_ = 0, per_pixel_ = 1, column_ = 1;
  double y_ = 0, grid_top_ = 0;
  std::string out_, grid_;
};

}  // namespace

std::string timelineSvg(const std::vector<const Trace*>& traces, const TimelineStyle& style) {
  BMT_CHECK(!traces.empty(), "a timeline needs at least one trace");
  return Drawing(traces, style).draw();
}

}  // namespace bmt::trace
