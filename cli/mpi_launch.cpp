#include "cli/mpi_launch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/json.h"

namespace bmt::cli {
namespace {

volatile std::sig_atomic_t launcher_pid = 0, interrupted = 0;
void forwardInterrupt(int) {
  interrupted = 1;
  if (launcher_pid > 0) ::kill(static_cast<pid_t>(launcher_pid), SIGUSR1);
}
void forwardTerminate(int) {
  if (launcher_pid > 0) ::kill(static_cast<pid_t>(launcher_pid), SIGTERM);
}

std::vector<std::string> ownCommandLine() {
  const std::string text = readFile("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::size_t at = 0; at < text.size(); at = text.find('\0', at) + 1)
    words.emplace_back(text.c_str() + at);
  char path[4096] = {};
  if (::readlink("/proc/self/exe", path, sizeof(path) - 1) > 0) words.front() = path;
  return words;
}

constexpr const char* kLaunchedByUs = "BMT_LAUNCHED";

}  // namespace

bool launchedByUs() {
  return std::getenv(kLaunchedByUs) != nullptr;
}

int runUnderMpirun(std::int32_t ranks) {
  // More ranks than cores is the normal case here; Open MPI then lets idle ranks yield.
  std::vector<std::string> words{"mpirun",          "-n",        fmt::format("{}", ranks),
                                 "--oversubscribe", "--bind-to", "none"};
  for (std::string& word : ownCommandLine()) words.push_back(std::move(word));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::setenv(kLaunchedByUs, "1", 1);
  // Open MPI refuses to run as root without both.
  ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
  ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);

  const pid_t child = ::fork();
  if (child < 0)
    throw Error(ErrorKind::Runtime, fmt::format("cannot start mpirun: {}", std::strerror(errno)));
  if (child == 0) {
    ::setpgid(0, 0);  // a terminal's Ctrl-C reaches only this launcher, which hands it on
    const int nothing = ::open("/dev/null", O_RDONLY);
    if (nothing >= 0) ::dup2(nothing, STDIN_FILENO);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  launcher_pid = child;
  std::signal(SIGINT, forwardInterrupt);
  std::signal(SIGTERM, forwardTerminate);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) throw Error(ErrorKind::Runtime, fmt::format("lost mpirun: {}", std::strerror(errno)));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
    throw Error(ErrorKind::Runtime,
                "--comm mpi: mpirun was not found on PATH; install openmpi-bin or use --comm threads");
  if (WIFEXITED(status)) {
    // A rank that a signal ended (137 = SIGKILL) is a run-time failure.
    const int code = WEXITSTATUS(status);
    if (code == 0 && interrupted != 0) return 130;
    return code > 3 && code != 130 ? 1 : code;
  }
  return 1;
}

}  // namespace bmt::cli
