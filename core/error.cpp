#include "core/error.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

namespace bmt {

std::string formatIssues(const std::vector<Issue>& issues) {
  std::string text;
  for (const Issue& issue : issues) {
    if (!text.empty()) text += '\n';
    text += issue.where.empty() ? issue.what : fmt::format("{}: {}", issue.where, issue.what);
  }
  return text;
}

Error::Error(ErrorKind kind, const std::string& message, std::string location)
    : std::runtime_error(location.empty() ? message : fmt::format("{}: {}", location, message)),
      kind_(kind),
      location_(std::move(location)) {}

int Error::exitCode() const {
  switch (kind_) {
    case ErrorKind::BadInput:
      return 2;
    case ErrorKind::Infeasible:
      return 3;
    case ErrorKind::Runtime:
      return 1;
    case ErrorKind::Interrupted:
      return 130;
  }
  return 1;
}

void throwIfAny(const std::vector<Issue>& issues, const std::string& what_was_checked) {
  if (issues.empty()) return;
  const char* const noun = issues.size() == 1 ? "problem" : "problems";
  throw Error(ErrorKind::BadInput,
              fmt::format("{}: {} {}\n{}", what_was_checked, issues.size(), noun, formatIssues(issues)));
}

void checkFailed(const char* expression, const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "%s:%d: check failed: %s: %s\n", file, line, expression, message.c_str());
  std::abort();
}

}  // namespace bmt
