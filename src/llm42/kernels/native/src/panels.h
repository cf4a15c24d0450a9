// Panels: how numbers are laid out that vectors of lanes are multiplied by, k by k: [k][lane].
//
// 16-bit brain floats lie in pairs of k, so that a 32-bit word holds two: what AVX512-BF16 multiplies, and what one
// shift or mask widens elsewhere.
#pragma once

#include <type_traits>

#include "simd.h"

namespace llm42 {

constexpr int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

template <class T>
struct Panel {  // [k][lane]
  static constexpr int64_t kStep = 1;
};
template <>
struct Panel<BFloat16> {  // [k / 2][lane][2]
  static constexpr int64_t kStep = 2;
};

// Where a number stands in a panel of `lanes`.
template <class T>
INLINE int64_t place(int64_t k, int64_t lane, int64_t lanes) {
  constexpr int64_t kStep = Panel<T>::kStep;
  return (k / kStep * lanes + lane) * kStep + k % kStep;
}

// kLanes numbers in fp32, from p on: those of the part-th of the kStep k that lie together.
template <class T>
INLINE Vec load_part(const T* p, int) { return load(p); }
INLINE Vec load_part(const BFloat16* p, int part) {
  const Word pair = load_words(reinterpret_cast<const uint32_t*>(p));
  return part == 0 ? low_half(pair) : high_half(pair);
}

// kLanes factors, from p on: floats, or words that are multiplied as they are.
template <class T>
INLINE auto load_factor(const T* p, int part) {
  if constexpr (std::is_same_v<Factor<T>, float>) {
    return load_part(p, part);
  } else {
    return load_words(reinterpret_cast<const uint32_t*>(p));
  }
}

}  // namespace llm42
