#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/cpu/kernels.h"

namespace bmt::kernels::cpu {

// Defined by kernels/cpu/isa/*.cpp, once per instruction set.
#if defined(__x86_64__)
namespace v2 {
const Table& table();
}
namespace v3 {
const Table& table();
}
namespace v4 {
const Table& table();
}
#else
namespace generic {
const Table& table();
}
#endif

Tables availableTables() {
  Tables tables{};
#if defined(__x86_64__)
  tables.table[tables.count++] = &v2::table();
  if (__builtin_cpu_supports("x86-64-v3")) tables.table[tables.count++] = &v3::table();
  if (__builtin_cpu_supports("x86-64-v4")) tables.table[tables.count++] = &v4::table();
#else
  tables.table[tables.count++] = &generic::table();
#endif
  return tables;
}

namespace {

const Table& choose() {
  const Tables tables = availableTables();
  const char* const wanted = std::getenv("BMT_ISA");
  if (wanted == nullptr || *wanted == '\0') return *tables.table[tables.count - 1];
  for (int i = 0; i < tables.count; ++i) {
    const char* const name = tables.table[i]->name;
    const char* const dash = std::strrchr(name, '-');
    if (std::strcmp(name, wanted) == 0 || (dash != nullptr && std::strcmp(dash + 1, wanted) == 0))
      return *tables.table[i];
  }
  std::fprintf(stderr, "BMT_ISA=%s: this CPU runs up to %s; use v2, v3 or v4, or unset it\n", wanted,
               tables.table[tables.count - 1]->name);
  std::exit(2);
}

}  // namespace

const Table& kernels() {
  static const Table& table = choose();
  return table;
}

}  // namespace bmt::kernels::cpu
