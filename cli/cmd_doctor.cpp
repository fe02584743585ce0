// bmtrain doctor: what this machine has and what this program can use of it. Everything missing is one clear
// line, never a failure: planning and simulation need none of it.
//   copy bandwidth = bytes read + bytes written / second, all usable cores copying at once (as STREAM's Copy
//   counts it, J. D. McCalpin, https://www.cs.virginia.edu/stream/ref.html), best of several rounds.
#include <dlfcn.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/measure_cpu.h"
#include "core/json.h"
#include "core/units.h"
#include "executor/cpu/core_speed.h"

namespace bmt::cli {
namespace {

struct Machine {
  std::string cpu = "unknown";
  int cores_usable = 1;  // this process may run on so many
  int cores_online = 1;
  std::string instruction_set;  // of the kernels in use
  Bytes memory_total = 0, memory_available = 0;
  double copy_bandwidth = 0;  // B/s, read + write
};

// Value of "KEY : value" or "KEY: value" in a /proc file; empty when absent.
std::string procField(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const std::size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

Bytes procKib(const char* path, const std::string& key) {
  const std::string value = procField(path, key);
  return value.empty() ? 0 : Bytes{1024} * std::stoll(value);
}

Machine inspectMachine() {
  Machine machine;
  if (const std::string name = procField("/proc/cpuinfo", "model name"); !name.empty()) machine.cpu = name;
  cpu_set_t set;
  CPU_ZERO(&set);
  machine.cores_online = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  machine.cores_usable = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : machine.cores_online;
  machine.instruction_set = exec::instructionSet();
  machine.memory_total = procKib("/proc/meminfo", "MemTotal");
  machine.memory_available = procKib("/proc/meminfo", "MemAvailable");
  machine.copy_bandwidth = measureCopyBandwidth(machine.cores_usable);
  return machine;
}

// First line that a command prints; empty when there is no such command or it fails.
std::string firstLine(const std::string& command) {
  FILE* const pipe = popen(("{ " + command + "; } 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "";
  std::array<char, 256> line{};
  const bool got = std::fgets(line.data(), line.size(), pipe) != nullptr;
  while (std::fgetc(pipe) != EOF) {
  }
  if (pclose(pipe) != 0 || !got) return "";
  std::string text = line.data();
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

struct Cuda {
  bool driver = false;
  int driver_version = 0;  // 1000 * major + 10 * minor, as cuDriverGetVersion
  int num_devices = 0;
  std::string toolkit;  // version of nvcc; empty = none found
  std::string problem;  // why there is no usable driver
};

// The driver is opened at run time, so that one program runs with and without it.
Cuda inspectCuda() {
  Cuda cuda;
  for (const char* nvcc : {"nvcc", "/usr/local/cuda/bin/nvcc"}) {
    const std::string line = firstLine(fmt::format("{} --version | grep -o 'release [0-9.]*'", nvcc));
    if (cuda.toolkit.empty() && line.starts_with("release ")) cuda.toolkit = line.substr(8);
  }
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    cuda.problem = "no driver: libcuda.so.1 is not on this machine";
    return cuda;
  }
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  const auto version = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  if (init == nullptr || version == nullptr || count == nullptr) {
    cuda.problem = "libcuda.so.1 lacks cuInit, cuDriverGetVersion or cuDeviceGetCount";
    return cuda;
  }
  version(&cuda.driver_version);
  if (const int code = init(0); code != 0) {
    cuda.problem = fmt::format("the driver does not start: cuInit returned {}", code);
    return cuda;
  }
  cuda.driver = count(&cuda.num_devices) == 0;
  if (!cuda.driver) cuda.problem = "the driver does not list its devices";
  return cuda;
}

#if defined(BMT_HAVE_MPI)
constexpr bool kBuiltWithMpi = true;
#else
constexpr bool kBuiltWithMpi = false;
#endif

std::string mpiLine(const std::string& launcher) {
  const std::string built = kBuiltWithMpi ? "built in" : "not built in: ranks are threads of one process";
  return built + "; launcher: " + (launcher.empty() ? "mpirun not found" : launcher);
}

std::string cudaLine(const Cuda& cuda) {
  const std::string driver =
      cuda.driver ? fmt::format("driver for CUDA {}.{}, {} devices", cuda.driver_version / 1000,
                                cuda.driver_version % 1000 / 10, cuda.num_devices)
                  : cuda.problem;
  return fmt::format("{}; toolkit: {}; this version has no CUDA backend, training runs on the CPU", driver,
                     cuda.toolkit.empty() ? "nvcc not found" : cuda.toolkit);
}

int runDoctor(const Globals& globals) {
  const Machine machine = inspectMachine();
  const Cuda cuda = inspectCuda();
  const std::string launcher = firstLine("mpirun --version");
  if (globals.json) {
    Json json;
    json["schema"] = "bmtrain.doctor/1";
    json["version"] = BMT_VERSION;
    json["cpu"] = machine.cpu;
    json["cores_usable"] = machine.cores_usable;
    json["cores_online"] = machine.cores_online;
    json["instruction_set"] = machine.instruction_set;
    json["memory_total_bytes"] = machine.memory_total;
    json["memory_available_bytes"] = machine.memory_available;
    json["copy_bandwidth_bytes_per_s"] = machine.copy_bandwidth;
    json["mpi"] = {{"built_in", kBuiltWithMpi}, {"launcher", launcher}};
    json["cuda"] = {{"driver", cuda.driver},
                    {"driver_version", cuda.driver_version},
                    {"devices", cuda.num_devices},
                    {"toolkit", cuda.toolkit},
                    {"backend", false},
                    {"problem", cuda.problem}};
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  fmt::print("bmtrain   {}\n", BMT_VERSION);
  fmt::print("CPU       {}; {} of {} cores usable\n", machine.cpu, machine.cores_usable,
             machine.cores_online);
  fmt::print("kernels   {}\n", machine.instruction_set);
  fmt::print("memory    {} total, {} available\n", formatBytes(machine.memory_total),
             formatBytes(machine.memory_available));
  fmt::print("copy      {:.1f} GB/s read + write, {} threads\n", machine.copy_bandwidth / 1e9,
             machine.cores_usable);
  fmt::print("MPI       {}\n", mpiLine(launcher));
  fmt::print("CUDA      {}\n", cudaLine(cuda));
  return 0;
}

}  // namespace

void addDoctor(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand(
      "doctor", "What this machine has: cores, memory bandwidth, MPI, CUDA, and what is missing");
  command->callback([&globals, &action] { action = [&globals] { return runDoctor(globals); }; });
}

}  // namespace bmt::cli
