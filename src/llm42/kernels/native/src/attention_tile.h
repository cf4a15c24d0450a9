// A block of queries of one head over one tile of keys and values: scores, softmax weights, weighted values.
//
// Invariant: a query's result follows from its own numbers and those of the positions it sees. A score is one
// accumulator over the head's dimensions, in order; a tile's weights and values are added in order of position; the
// online softmax (arXiv 2205.14135, algorithm 1) rescales once a tile. How many queries a block holds changes nothing:
// what one sees and another does not has the weight 0 for the other, and adding 0 times a finite number changes no bit
// but the sign of a zero, which the results do not keep.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "simd.h"

namespace llm42 {

constexpr int kKeyTile = 32;
constexpr int kKeyVectors = kKeyTile / kLanes;
constexpr int kValueVectors = 4;  // of a query's result that are worked on at a time
// Queries whose accumulators fill the registers: 32 of AVX-512, 16 elsewhere.
#if defined(__AVX512F__)
constexpr int kRegisters = 24;
#else
constexpr int kRegisters = 12;
#endif
constexpr int kScoreQueries = std::max(1, kRegisters / kKeyVectors), kValueQueries = kRegisters / kValueVectors;
constexpr int kBlockQueries = 12;

INLINE int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Keys and values that will be needed next. They are asked for a few lines at a time between other work, since a
// processor forgets what it is asked for in great numbers, and into the second-level cache, since the first has fewer
// requests to memory at once.
struct Upcoming {
  const char* keys;
  const char* values;
  const int64_t* places;  // [count], in bytes
  int64_t count, bytes;   // of one key
  int64_t row = 0, byte = 0;

  INLINE void fetch(int lines) {
    for (; lines > 0 && row < count; --lines) {
      __builtin_prefetch(keys + places[row] + byte, 0, 2);
      __builtin_prefetch(values + places[row] + byte, 0, 2);
      byte += 64;
      if (byte >= bytes) byte = 0, ++row;
    }
  }
};

// Queries of one head that are next to one another, in order of position.
template <class T>
struct Queries {
  const Factor<T>* q;  // [count][q_size]
  const int64_t* positions;
  float* highest;  // score so far
  float* totals;  // [count][kLanes] of the weights so far, by lane
  float* results;  // [count][dim]
  int64_t q_size, dim;  // factors and fp32 numbers of one query, both padded

  Queries from(int64_t i) const {
    return {q + i * q_size, positions + i, highest + i, totals + i * kLanes, results + i * dim, q_size, dim};
  }
};

// Keys of a tile, factor by factor: to[f][kKeyTile]. They begin `places[j]` bytes from `keys`.
template <class T>
INLINE void pack_keys(const char* keys, const int64_t* places, int64_t count, int64_t head_dim, int64_t q_size,
                      Factor<T>* to, Upcoming& upcoming) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = reinterpret_cast<const T*>(keys + places[std::min(j + i, count - 1)]);
    for (int64_t f = 0; f < q_size; f += kLanes) {
      upcoming.fetch(8);
      Vec x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = load_factors(rows[i], f, head_dim);
      transpose(x);
      for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(to) + (f + i) * kKeyTile + j, x[i]);
    }
  }
}

// Values of a tile in fp32: to[j][dim].
template <class T>
INLINE void widen_values(const char* values, const int64_t* places, int64_t count, int64_t head_dim, int64_t dim,
                         float* to, Upcoming& upcoming) {
  for (int64_t j = 0; j < count; ++j, to += dim) {
    upcoming.fetch(1);
    const T* from = reinterpret_cast<const T*>(values + places[j]);
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(from + d));
    if (d < head_dim) store(to + d, load_first(from + d, int(head_dim - d)));
  }
}

// scores[i][j] = scale * q[i] . keys[j]
template <int kCount, class T>
INLINE void score(const Queries<T>& queries, const Factor<T>* keys, float scale, float* scores) {
  Vec sum[kCount][kKeyVectors];
  for (auto& of : sum)
    for (Vec& x : of) x = zero();
  for (int64_t f = 0; f < queries.q_size; ++f) {
    decltype(load(keys)) k[kKeyVectors];
    for (int v = 0; v < kKeyVectors; ++v) k[v] = load(keys + f * kKeyTile + v * kLanes);
    for (int i = 0; i < kCount; ++i) {
      const auto q = set1(queries.q[i * queries.q_size + f]);
      for (int v = 0; v < kKeyVectors; ++v) sum[i][v] = add_products(q, k[v], sum[i][v]);
    }
  }
  for (int i = 0; i < kCount; ++i)
    for (int v = 0; v < kKeyVectors; ++v) store(scores + i * kKeyTile + v * kLanes, sum[i][v] * set1(scale));
}

// Scores become weights, in place; the totals and the highest scores move on. decays[i] is what the results so far are
// to be multiplied by.
template <class T>
INLINE void weigh(const Queries<T>& queries, int64_t count, float* scores, float* decays) {
  alignas(64) float before[round_up(kBlockQueries, kLanes)];
  for (int64_t i = 0; i < count; ++i) {
    Vec most = load(scores + i * kKeyTile);
    for (int v = 1; v < kKeyVectors; ++v) most = max(most, load(scores + i * kKeyTile + v * kLanes));
    before[i] = queries.highest[i];
    queries.highest[i] = std::max(before[i], max_lanes(most));
    before[i] -= queries.highest[i];
  }
  for (int64_t i = 0; i < count; i += kLanes) store(decays + i, exp(load(before + i)));
  for (int64_t i = 0; i < count; ++i) {
    const Vec highest = set1(queries.highest[i]);
    Vec total = load(queries.totals + i * kLanes) * set1(decays[i]);
    for (int v = 0; v < kKeyVectors; ++v) {
      const Vec weight = exp(load(scores + i * kKeyTile + v * kLanes) - highest);
      store(scores + i * kKeyTile + v * kLanes, weight);
      total = total + weight;
    }
    store(queries.totals + i * kLanes, total);
  }
}

// The values of a tile as they are stored: for a few queries ...
template <class T>
struct StoredValues {
  const char* values;
  const int64_t* places;  // in bytes
  INLINE const T* row(int64_t j) const { return reinterpret_cast<const T*>(values + places[j]); }
};
// ... and as `widen_values` leaves them, for many.
struct WideValues {
  const float* values;
  int64_t dim;
  INLINE const float* row(int64_t j) const { return values + j * dim; }
};

// results[i] = results[i] * decays[i] + sum over begin <= j < end of weights[i][j] * values[j], for the kVectors vectors
// from the d-th dimension on.
template <int kCount, int kVectors, class Values>
INLINE void accumulate(const float* weights, const float* decays, const Values& values, int64_t d, int64_t dim,
                       int64_t begin, int64_t end, float* results, Upcoming& upcoming) {
  Vec sum[kCount][kVectors];
  for (int i = 0; i < kCount; ++i)
    for (int v = 0; v < kVectors; ++v) sum[i][v] = load(results + i * dim + d + v * kLanes) * set1(decays[i]);
  for (int64_t j = begin; j < end; ++j) {
    upcoming.fetch(1);
    const auto* row = values.row(j) + d;
    Vec value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = load(row + v * kLanes);
    for (int i = 0; i < kCount; ++i) {
      const Vec weight = set1(weights[i * kKeyTile + j]);
      for (int v = 0; v < kVectors; ++v) sum[i][v] = fma(weight, value[v], sum[i][v]);
    }
  }
  for (int i = 0; i < kCount; ++i)
    for (int v = 0; v < kVectors; ++v) store(results + i * dim + d + v * kLanes, sum[i][v]);
}
template <int kCount, class Values>
void accumulate(const float* weights, const float* decays, const Values& values, int64_t dim, int64_t begin,
                int64_t end, float* results, Upcoming& upcoming) {
  int64_t d = 0;
  for (; d + kValueVectors * kLanes <= dim; d += kValueVectors * kLanes)
    accumulate<kCount, kValueVectors>(weights, decays, values, d, dim, begin, end, results, upcoming);
  for (; d < dim; d += kLanes) accumulate<kCount, 1>(weights, decays, values, d, dim, begin, end, results, upcoming);
}

// function(std::integral_constant<int, n>, first) for consecutive parts of 0..count, each of n <= kMost.
template <int kMost, class Function>
INLINE void in_parts(int64_t count, int64_t first, Function& function) {
  for (; first + kMost <= count; first += kMost) function(std::integral_constant<int, kMost>{}, first);
  if constexpr (kMost > 1)
    if (first < count) in_parts<kMost - 1>(count, first, function);
}

// What a tile adds to a block of at most kBlockQueries queries, which see its positions begin..end at most.
// `first_visible(position)` is the first position that a query sees; `keys` are packed.
template <class T, class Values, class Visible>
INLINE void add_tile(const Queries<T>& queries, int64_t count, Visible first_visible, int64_t start, float scale,
                     const Factor<T>* keys, const Values& values, Upcoming& upcoming) {
  const int64_t first = queries.positions[0], last = queries.positions[count - 1];
  const int64_t begin = std::max<int64_t>(0, first_visible(first) - start);
  const int64_t end = std::min<int64_t>(kKeyTile, last + 1 - start);
  if (begin >= end) return;
  alignas(64) float weights[kBlockQueries * kKeyTile];
  alignas(64) float decays[round_up(kBlockQueries, kLanes)];
  auto score_part = [&](auto part, int64_t i) {
    score<part.value>(queries.from(i), keys, scale, weights + i * kKeyTile);
  };
  in_parts<kScoreQueries>(count, 0, score_part);
  if (first_visible(last) > start || first + 1 - start < kKeyTile)
    for (int64_t i = 0; i < count; ++i) {
      constexpr float kHidden = -std::numeric_limits<float>::infinity();
      float* row = weights + i * kKeyTile;
      const int64_t position = queries.positions[i];
      std::fill(row, row + std::clamp<int64_t>(first_visible(position) - start, 0, kKeyTile), kHidden);
      std::fill(row + std::clamp<int64_t>(position + 1 - start, 0, kKeyTile), row + kKeyTile, kHidden);
    }
  weigh(queries, count, weights, decays);
  auto accumulate_part = [&](auto part, int64_t i) {
    accumulate<part.value>(weights + i * kKeyTile, decays + i, values, queries.dim, begin, end,
                           queries.results + i * queries.dim, upcoming);
  };
  in_parts<kValueQueries>(count, 0, accumulate_part);
}

}  // namespace llm42
