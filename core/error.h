// The four error classes of DESIGN.md section 8.
//   illegal input      -> std::vector<Issue>, all problems at once
//   environment fails  -> throw Error
//   programmer error   -> BMT_CHECK, always on
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace bmt {

// One problem in something the user gave us: where ("plan.tp"), what ("8 does not divide num_heads 12;
// nearest legal value: 6"). The text names the two figures that disagree and, when there is one, the nearest
// legal value.
struct Issue {
  std::string where;
  std::string what;
  bool operator==(const Issue&) const = default;
};

// One line per issue: "where: what".
std::string formatIssues(const std::vector<Issue>& issues);

enum class ErrorKind {
  BadInput,    // a file, flag or plan is wrong            -> exit code 2
  Infeasible,  // nothing legal or nothing that fits       -> exit code 3
  Runtime,     // the environment failed (I/O, a dead rank) -> exit code 1
  Interrupted  // the user asked to stop                   -> exit code 130
};

// `location` is where it happened in the user's terms: a file and offset, a rank and task. May be empty.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, std::string location = {});
  ErrorKind kind() const { return kind_; }
  const std::string& location() const { return location_; }
  int exitCode() const;

 private:
  ErrorKind kind_;
  std::string location_;
};

// Throws Error{BadInput} listing all issues, if there is any.
void throwIfAny(const std::vector<Issue>& issues, const std::string& what_was_checked);

[[noreturn]] void checkFailed(const char* expression, const char* file, int line, const std::string& message);

}  // namespace bmt

// Programmer errors: prints and aborts. `message` is evaluated only on failure.
#define BMT_CHECK(expression, message)                                               \
  do {                                                                               \
    if (!(expression)) ::bmt::checkFailed(#expression, __FILE__, __LINE__, message); \
  } while (false)
