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

#include "kv.h"
#include "upcoming.h"

namespace llm42 {

constexpr int kKeyTile = 32;
constexpr int kKeyVectors = kKeyTile / kLanes;
constexpr int kTileStripes = kKeyTile / kStripe;
static_assert(kTileStripes <= Upcoming::kMost, "a tile is fetched at once");
// Accumulators that fill the registers, 32 of AVX-512 and 16 elsewhere: of the scores of some queries with two vectors
// of keys, and of the results of some queries in some vectors.
#if defined(__AVX512F__)
constexpr int kScoreQueries = 12, kValueQueries = 6, kValueVectors = 4;
#else
constexpr int kScoreQueries = 6, kValueQueries = 6, kValueVectors = 2;
#endif
constexpr int kScoreVectors = 2;
constexpr int kBlockQueries = 12;

// A head's keys and values of a tile, by stripe.
template <class T>
struct HeadTile {
  const T* keys[kTileStripes];
  const T* values[kTileStripes];
};

// Queries of one head that are next to one another, in order of position.
template <class T>
struct Queries {
  const Factor<T>* q;  // [count][q_size]
  const int64_t* positions;
  float* highest;  // score so far
  float* totals;  // [count][kLanes] of the weights so far, by lane
  float* results;  // [count][dim]
  int64_t dim;
  int64_t q_size() const { return dim / Factors<T>::kStep; }

  Queries from(int64_t i) const {
    return {q + i * q_size(), positions + i, highest + i, totals + i * kLanes, results + i * dim, dim};
  }
};

// sum[i][j] += a(i) * b(j)
template <int kCount, int kVectors, class A, class B>
INLINE void multiply_add(Vec (&sum)[kCount][kVectors], A a, B b) {
  decltype(b(0)) held[kVectors];
  for (int j = 0; j < kVectors; ++j) held[j] = b(j);
  for (int i = 0; i < kCount; ++i) {
    const auto x = a(i);
    for (int j = 0; j < kVectors; ++j) sum[i][j] = add_products(x, held[j], sum[i][j]);
  }
}

// scores[i][j] = scale * q[i] . keys[j]
template <int kCount, class T>
INLINE void score(const Queries<T>& queries, const HeadTile<T>& tile, float scale, float* scores, Upcoming& upcoming) {
  constexpr int kParts = Panel<T>::kStep / Factors<T>::kStep;  // factors that lie together
  const int64_t q_size = queries.q_size();
  for (int first = 0; first < kKeyTile; first += kScoreVectors * kLanes) {
    const T* keys[kScoreVectors];
    for (int v = 0; v < kScoreVectors; ++v) {
      const int slot = first + v * kLanes;
      keys[v] = tile.keys[slot / kStripe] + slot % kStripe * Panel<T>::kStep;
    }
    Vec sum[kCount][kScoreVectors];
    for (auto& of : sum)
      for (Vec& x : of) x = zero();
    for (int64_t f = 0, at = 0; f < q_size; f += kParts, at += kStripe * Panel<T>::kStep) {
      upcoming.fetch<std::max(1, kScoreVectors * kLanes / 16)>();
      for (int part = 0; part < kParts; ++part)
        multiply_add(sum, [&](int i) { return set1(queries.q[i * q_size + f + part]); },
                     [&](int v) { return load_factor(keys[v] + at, part); });
    }
    for (int i = 0; i < kCount; ++i)
      for (int v = 0; v < kScoreVectors; ++v) store(scores + i * kKeyTile + first + v * kLanes, sum[i][v] * set1(scale));
  }
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

// results[i] = results[i] * decays[i] + sum over begin <= j < end of weights[i][j] * values[j], for the kVectors vectors
// from the d-th dimension on.
template <int kCount, int kVectors, class T>
INLINE void accumulate(const float* weights, const float* decays, const HeadTile<T>& tile, int64_t d, int64_t dim,
                       int64_t begin, int64_t end, float* results, Upcoming& upcoming) {
  constexpr int kStep = Panel<T>::kStep;
  Vec sum[kCount][kVectors];
  for (int i = 0; i < kCount; ++i)
    for (int v = 0; v < kVectors; ++v) sum[i][v] = load(results + i * dim + d + v * kLanes) * set1(decays[i]);
  auto add = [&](uint64_t pair, int part) {  // one position
    const T* values = tile.values[pair / kStripe] + (pair % kStripe / kStep * dim + d) * kStep;
    multiply_add(sum, [&](int i) { return set1(weights[i * kKeyTile + pair + part]); },
                 [&](int v) { return load_part(values + v * kLanes * kStep, part); });
  };
  int64_t j = begin;
  if (j % kStep != 0 && j < end) add(j - 1, 1), ++j;
  for (; j + kStep <= end; j += kStep) {
    upcoming.fetch<kVectors>();
    for (int part = 0; part < kStep; ++part) add(j, part);
  }
  if (j < end) add(j, 0);
  for (int i = 0; i < kCount; ++i)
    for (int v = 0; v < kVectors; ++v) store(results + i * dim + d + v * kLanes, sum[i][v]);
}
template <int kCount, class T>
void accumulate(const float* weights, const float* decays, const HeadTile<T>& tile, int64_t dim, int64_t begin,
                int64_t end, float* results, Upcoming& upcoming) {
  int64_t d = 0;
  for (; d + kValueVectors * kLanes <= dim; d += kValueVectors * kLanes)
    accumulate<kCount, kValueVectors>(weights, decays, tile, d, dim, begin, end, results, upcoming);
  for (; d < dim; d += kLanes) accumulate<kCount, 1>(weights, decays, tile, d, dim, begin, end, results, upcoming);
}

// function(std::integral_constant<int, n>, first) for consecutive parts of 0..count, each of n <= kMost.
template <int kMost, class Function>
INLINE void in_parts(int64_t count, int64_t first, Function& function) {
  for (; first + kMost <= count; first += kMost) function(std::integral_constant<int, kMost>{}, first);
  if constexpr (kMost > 1)
    if (first < count) in_parts<kMost - 1>(count, first, function);
}

// What a tile adds to a block of at most kBlockQueries queries, which see its positions begin..end at most.
// `first_visible(position)` is the first position that a query sees.
template <class T, class Visible>
INLINE void add_tile(const Queries<T>& queries, int64_t count, Visible first_visible, int64_t start, float scale,
                     const HeadTile<T>& tile, Upcoming& upcoming) {
  const int64_t first = queries.positions[0], last = queries.positions[count - 1];
  const int64_t begin = std::max<int64_t>(0, first_visible(first) - start);
  const int64_t end = std::min<int64_t>(kKeyTile, last + 1 - start);
  if (begin >= end) return;
  alignas(64) float weights[kBlockQueries * kKeyTile];
  alignas(64) float decays[round_up(kBlockQueries, kLanes)];
  auto score_part = [&](auto part, int64_t i) {
    score<part.value>(queries.from(i), tile, scale, weights + i * kKeyTile, upcoming);
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
    accumulate<part.value>(weights + i * kKeyTile, decays + i, tile, queries.dim, begin, end,
                           queries.results + i * queries.dim, upcoming);
  };
  in_parts<kValueQueries>(count, 0, accumulate_part);
}

}  // namespace llm42
