// JSON, for the .cpp files that read or write our documents. The only file that sees the JSON library;
// including it costs seconds of compile time, so headers never do.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "core/error.h"

namespace bmt {

using Json = nlohmann::ordered_json;  // keeps field order, so written files are stable

// Throws Error{BadInput}: names the source ("plan.json") with line and column of a syntax error.
Json parseJson(const std::string& text, const std::string& source);

// Reads a whole file; Error{BadInput} when it is missing or unreadable. `.gz` is not unpacked here.
std::string readFile(const std::string& path);
// Writes aside and renames, so that a full disk or a kill never leaves half a file. Error{Runtime} on
// failure.
void writeFileAtomically(const std::string& path, const std::string& content);

// Field access with errors that say where: "plan.json: field 'tp': expected an integer, got \"x\"".
std::int64_t jsonInt(const Json& object, const std::string& key, std::int64_t fallback,
                     const std::string& source);
double jsonNumber(const Json& object, const std::string& key, double fallback, const std::string& source);
bool jsonBool(const Json& object, const std::string& key, bool fallback, const std::string& source);
std::string jsonString(const Json& object, const std::string& key, const std::string& fallback,
                       const std::string& source);

}  // namespace bmt
