#include "core/json.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

namespace bmt {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void wrongType(const Json& object, const std::string& key, const char* expected,
                            const std::string& source) {
  std::string got = object.at(key).dump(-1, ' ', false, Json::error_handler_t::replace);
  if (got.size() > 60) got = got.substr(0, 57) + "...";
  throw Error(ErrorKind::BadInput, fmt::format("field '{}': expected {}, got {}", key, expected, got),
              source);
}

// The library's reason without its own name, error number and position.
std::string reasonOf(const Json::exception& error) {
  const std::string text = error.what();
  for (const char* mark : {"syntax error while ", "[json.exception."}) {
    const std::size_t at = text.find(mark);
    if (at == std::string::npos) continue;
    return mark[0] == '[' ? text.substr(std::min(text.find("] ") + 2, text.size())) : text.substr(at + 19);
  }
  return text;
}

// Every field is looked up in an object; a document such as [1, 2] must not pass for one whose fields are
// absent.
bool has(const Json& object, const std::string& key, const std::string& source) {
  if (!object.is_object())
    throw Error(ErrorKind::BadInput,
                fmt::format("expected an object with the field '{}', got {}", key, object.type_name()),
                source);
  return object.contains(key);
}

std::string systemError() {
  return std::strerror(errno);
}

// Makes a rename last through a power cut. Some file systems cannot sync a folder; the file itself is safe by
// then.
void syncFolderOf(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  const int handle = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (handle < 0) return;
  ::fsync(handle);
  ::close(handle);
}

}  // namespace

Json parseJson(const std::string& text, const std::string& source) {
  // Of two equal keys the library keeps the last without a word; for a plan that is a wrong run.
  std::vector<std::set<std::string>> keys;  // of every open object
  const auto check = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw Error(ErrorKind::BadInput,
                  fmt::format("field '{}' is given twice in one object", parsed.get<std::string>()), source);
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::parse_error& error) {
    const std::size_t at = std::min(error.byte == 0 ? 0 : error.byte - 1, text.size());
    const auto line = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n') + 1;
    const std::size_t newline = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
    const std::size_t column = at - (newline == std::string::npos ? 0 : newline + 1) + 1;
    throw Error(ErrorKind::BadInput,
                fmt::format("not valid JSON at line {}, column {}: {}", line, column, reasonOf(error)),
                source);
  } catch (const Json::exception& error) {  // a number that no double holds, such as 1e999
    throw Error(ErrorKind::BadInput, "not valid JSON: " + reasonOf(error), source);
  }
}

std::string readFile(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) throw Error(ErrorKind::BadInput, systemError(), path);
  if (S_ISDIR(info.st_mode)) throw Error(ErrorKind::BadInput, "is a directory, expected a file", path);
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error(ErrorKind::BadInput, systemError(), path);
  std::ostringstream content;
  content << in.rdbuf();
  if (in.bad()) throw Error(ErrorKind::BadInput, "read failed: " + systemError(), path);
  return std::move(content).str();
}

void writeFileAtomically(const std::string& path, const std::string& content) {
  // A link stays a link; a device or pipe (--out /dev/null, /dev/stdout) is written to, never replaced.
  std::error_code ignored;
  const std::string target =
      fs::is_symlink(path, ignored) ? fs::weakly_canonical(path, ignored).string() : path;
  const fs::file_status status = fs::status(target, ignored);
  const bool special = fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
  const std::string aside = special ? target : fmt::format("{}.tmp.{}", target, ::getpid());
  const int file = ::open(aside.c_str(), O_WRONLY | (special ? 0 : O_CREAT | O_TRUNC) | O_CLOEXEC, 0644);
  if (file < 0) throw Error(ErrorKind::Runtime, "cannot create: " + systemError(), path);
  std::size_t written = 0;
  bool failed = false;
  while (!failed && written < content.size()) {
    const ssize_t n = ::write(file, content.data() + written, content.size() - written);
    if (n < 0 && errno == EINTR) continue;
    failed = n < 0;
    if (!failed) written += static_cast<std::size_t>(n);
  }
  failed = failed || (!special && ::fsync(file) != 0);
  const std::string reason = failed ? systemError() : std::string();
  ::close(file);
  if (failed || (!special && ::rename(aside.c_str(), target.c_str()) != 0)) {
    const std::string why = failed ? reason : systemError();
    if (!special) ::unlink(aside.c_str());
    throw Error(ErrorKind::Runtime,
                fmt::format("wrote {} of {} bytes: {}{}", written, content.size(), why,
                            special ? "" : "; the previous file is unchanged"),
                path);
  }
  if (!special) syncFolderOf(target);
}

std::int64_t jsonInt(const Json& object, const std::string& key, std::int64_t fallback,
                     const std::string& source) {
  if (!has(object, key, source)) return fallback;
  const Json& value = object.at(key);
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX)
    wrongType(object, key, "an integer", source);
  if (!value.is_number_integer()) wrongType(object, key, "an integer", source);
  return value.get<std::int64_t>();
}

double jsonNumber(const Json& object, const std::string& key, double fallback, const std::string& source) {
  if (!has(object, key, source)) return fallback;
  if (!object.at(key).is_number()) wrongType(object, key, "a number", source);
  return object.at(key).get<double>();
}

bool jsonBool(const Json& object, const std::string& key, bool fallback, const std::string& source) {
  if (!has(object, key, source)) return fallback;
  if (!object.at(key).is_boolean()) wrongType(object, key, "true or false", source);
  return object.at(key).get<bool>();
}

std::string jsonString(const Json& object, const std::string& key, const std::string& fallback,
                       const std::string& source) {
  if (!has(object, key, source)) return fallback;
  if (!object.at(key).is_string()) wrongType(object, key, "a string", source);
  return object.at(key).get<std::string>();
}

}  // namespace bmt
