// Traces as Chrome JSON, which Perfetto opens: pid = rank, tid = lane, args.task joins predicted with measured. A file name
// that ends in .gz is compressed. Reading gives back the same Trace.
#pragma once

#include <string>

#include "traces/trace.h"

namespace bmt::trace {

std::string traceToJson(const Trace& trace);
Trace traceFromJson(const std::string& text, const std::string& source);  // throws Error{BadInput}

void writeTrace(const Trace& trace, const std::string& path);  // throws Error{Runtime}
Trace readTrace(const std::string& path);                      // throws Error{BadInput}

}  // namespace bmt::trace
