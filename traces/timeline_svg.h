// Timelines as SVG, without a graphics library: one trace, or several (predicted above measured) on one time
// axis. Every rank is a row: its Compute lane high, the lanes that only communicate thin below. Gaps stay
// white, so bubbles can be seen. Spans thinner than a pixel are merged, so a file stays small however long
// the trace is. Colours: M. Okabe and K. Ito, "Color Universal Design", 2008 (told apart with every kind of
// colour vision), plus letters.
#pragma once

#include <string>
#include <vector>

#include "traces/trace.h"

namespace bmt::trace {

struct TimelineStyle {
  int width = 1600;    // pixels
  int max_ranks = 16;  // of each trace; a note says how many were left out
};

std::string timelineSvg(const std::vector<const Trace*>& traces, const TimelineStyle& style = {});

}  // namespace bmt::trace
