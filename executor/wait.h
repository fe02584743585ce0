// Sleeping until an atomic counter changes, with a time limit: std::atomic::wait has none, and a rank that
// waits for a dead one must wake up. Linux futex.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace bmt::exec {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4);

// Returns when `word` no longer holds `old`, when woken, or after `milliseconds`; the caller checks again.
inline void sleepOn(Word& word, std::uint32_t old, int milliseconds) {
  timespec limit{milliseconds / 1000, (milliseconds % 1000) * 1000000L};
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, &limit, nullptr, 0);
}
inline void wakeAll(Word& word) {
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr,
            0);
}

}  // namespace bmt::exec
