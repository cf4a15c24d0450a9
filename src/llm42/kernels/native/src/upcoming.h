// Memory that will be needed next.
//
// It is asked for a few lines at a time between other work, since a processor forgets what it is asked for in great
// numbers, and into the second-level cache, since the first has fewer requests to memory at once.
#pragma once

#include <cstdint>

#include "simd.h"

namespace llm42 {

struct Upcoming {
  static constexpr int kMost = 2;
  const char* runs[kMost];
  int64_t count, bytes;  // runs, and bytes of each
  int64_t run = 0, byte = 0;

  INLINE bool is_empty() const { return run >= count; }

  template <int kLines>
  INLINE void fetch() {
    if (is_empty()) return;
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(runs[run] + byte + 64 * i, 0, 2);
    byte += 64 * kLines;
    if (byte >= bytes) byte = 0, ++run;
  }
};

}  // namespace llm42
