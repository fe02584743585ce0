// Traces as Chrome JSON ("Trace Event Format", Google), which Perfetto and chrome://tracing open. A file name
// that ends in .gz is compressed. Reading gives back the same Trace.
//   pid = rank, tid = lane; ts and dur in microseconds with three decimals (exact nanoseconds). One "X" event
//   per span; spans of a lane never overlap because a lane is an in-order queue. args.task joins predicted
//   with measured. Arrows ("s", "f") connect sends with receives, counters ("C") show live bytes.
//   otherData.schema is "bmtrain.trace/1".
#pragma once

#include <string>

#include "traces/trace.h"

namespace bmt::trace {

std::string traceToJson(const Trace& trace);
// Refuses, with one Error{BadInput} that says where: what is not JSON, cut off, another program's trace, out
// of range.
Trace traceFromJson(const std::string& text, const std::string& source);

void writeTrace(const Trace& trace, const std::string& path);  // throws Error{Runtime}
Trace readTrace(const std::string& path);  // throws Error{BadInput}; gzip is seen by its content

}  // namespace bmt::trace
