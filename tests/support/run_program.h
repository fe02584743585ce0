// Runs the built `bmtrain` as a user would, for tests of its output, its messages and its exit codes.
#pragma once

#include <string>
#include <vector>

namespace bmt::test {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal when it was killed
  std::string out, err;
};

// No shell in between: arguments arrive as given. Standard input is empty.
ProgramResult runBmtrain(const std::vector<std::string>& arguments);

// A folder for the files of one test, removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string path(const std::string& name) const { return root_ + "/" + name; }
  std::string write(const std::string& name, const std::string& content) const;  // returns its path

 private:
  std::string root_;
};

}  // namespace bmt::test
