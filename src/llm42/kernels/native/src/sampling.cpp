// The sampler's work over whole rows of logits: greedy choice, seeded draws, log-probabilities.
//
// Definitions are those of `llm42.sampling`: ids are ordered by (value descending, id ascending), filters keep a prefix
// of that order, and a draw is the kept id with the largest z + noise, the lowest one of equals. The result is exact;
// only the way to it is short: maxima of blocks of ids tell which blocks can matter at all.
//
// Invariant: a row is worked on alone, by one thread, with sums in one order; the threads share out rows.
#include <algorithm>
#include <functional>

#include "common.h"
#include "simd.h"

namespace llm42 {
namespace {

// Ids that share a maximum: a multiple of the lanes, and of the ids that share a hash.
constexpr int64_t kBlock = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Below this many elements a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 16384;

INLINE int64_t count_blocks(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }
// The maxima of the blocks, filled up to a whole vector.
INLINE int64_t padded_blocks(int64_t vocab) { return (count_blocks(vocab) + kLanes - 1) / kLanes * kLanes; }

// A row of logits x as values (x - shift) / scale, in fp32.
template <class T>
struct Row {
  const T* x;
  int64_t vocab;
  float shift = 0.0f;
  float scale = 1.0f;

  INLINE float map(float logit) const { return (logit - shift) / scale; }
  INLINE float value(int64_t id) const { return map(widen(x[id])); }

  INLINE int64_t end_of(int64_t block) const { return std::min(vocab, (block + 1) * kBlock); }

  // Calls `function(id, logits of the kLanes ids from there on)` through a block; logits are -inf past the vocabulary.
  template <class Function>
  INLINE void for_logits(int64_t block, Function function) const {
    const int64_t first = block * kBlock;
    if (first + kBlock <= vocab) {
      for (int i = 0; i < kBlock; i += kLanes) function(first + i, load(x + first + i));
      return;
    }
    for (int64_t id = first; id < vocab; id += kLanes) {
      float buffer[kLanes];
      for (int i = 0; i < kLanes; ++i) buffer[i] = id + i < vocab ? widen(x[id + i]) : -kInfinity;
      function(id, load(buffer));
    }
  }
  template <class Function>
  INLINE void for_values(int64_t block, Function function) const {
    for_logits(block, [&](int64_t id, Vec logits) { function(id, (logits - set1(shift)) / set1(scale)); });
  }
};

// A place in the order of ids. An id is before it if its value is larger, or equal and the id smaller.
struct Place {
  float value;
  int64_t id;
};

INLINE bool is_before(float value, int64_t id, const Place& place) {
  return value > place.value || (value == place.value && id < place.id);
}

// The largest logit of each block (before any shift); returns that of the row, or NaN if it has one.
template <class T>
float find_maxima(const Row<T>& row, float* maxima) {
  const int64_t blocks = count_blocks(row.vocab), padded = padded_blocks(row.vocab);
  auto unordered = zero() != zero();
  float best = -kInfinity;
  for (int64_t block = 0; block < blocks; ++block) {
    Vec most = set1(-kInfinity);
    row.for_logits(block, [&](int64_t, Vec x) {
      unordered |= x != x;
      most = max(most, x);
    });
    maxima[block] = max_lanes(most);
    best = std::max(best, maxima[block]);
  }
  for (int64_t block = blocks; block < padded; ++block) maxima[block] = -kInfinity;
  for (int i = 0; i < kLanes; ++i)
    if (unordered[i]) return std::numeric_limits<float>::quiet_NaN();
  return best;
}

// The lowest id with the value `best`, the largest there is.
template <class T>
int64_t find_first(const Row<T>& row, const float* maxima, float best) {
  int64_t block = 0;
  while (maxima[block] != best) ++block;
  int64_t id = block * kBlock;
  while (row.value(id) != best) ++id;
  return id;
}

// Room that `place_after` needs for values.
INLINE int64_t room_for_values(int64_t vocab) { return vocab + kLanes; }

// The place that has exactly the first k ids before it (1 <= k <= vocab).
template <class T>
Place place_after(const Row<T>& row, const float* maxima, int64_t k, float* values) {
  const int64_t blocks = count_blocks(row.vocab);
  float least = -kInfinity;
  if (k <= blocks) {  // k blocks whose maxima reach a value have k ids that do
    std::copy(maxima, maxima + blocks, values);
    std::nth_element(values, values + k - 1, values + blocks, std::greater<float>());
    least = values[k - 1];
  }
  int64_t count = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    if (maxima[block] < least) continue;
    row.for_values(block, [&](int64_t, Vec block_values) {
      float lanes[kLanes];
      store(lanes, block_values);
      for (int i = 0; i < kLanes; ++i) {
        values[count] = lanes[i];
        count += lanes[i] >= least;
      }
    });
  }
  std::nth_element(values, values + k - 1, values + count, std::greater<float>());
  const float kth = values[k - 1];
  int64_t ties = k - std::count_if(values, values + k - 1, [kth](float value) { return value > kth; });
  for (int64_t block = 0;; ++block) {
    if (maxima[block] < kth) continue;
    for (int64_t id = block * kBlock; id < row.end_of(block); ++id)
      if (row.value(id) == kth && --ties == 0) return {kth, id + 1};
  }
}

// The first k ids, in order.
template <class T>
void list_first(const Row<T>& row, const float* maxima, int64_t k, float* values, int64_t* ids) {
  const Place end = place_after(row, maxima, k, values);
  int64_t count = 0;
  for (int64_t block = 0; block < count_blocks(row.vocab); ++block) {
    if (maxima[block] < end.value) continue;
    for (int64_t id = block * kBlock; id < row.end_of(block); ++id)
      if (is_before(row.value(id), id, end)) ids[count++] = id;
  }
  std::sort(ids, ids + k, [&row](int64_t a, int64_t b) { return is_before(row.value(a), a, {row.value(b), b}); });
}

// Adds up `term(z)` over the ids before `place`, lane by lane through a block and in the order of ids; `add(sums)` gets
// what each block adds up to. Terms of other ids count as zero.
template <class T, class Term, class Add>
INLINE void for_ids_before(const Row<T>& row, const float* maxima, const Place& place, Term term, Add add) {
  const Vec at = set1(place.value), above = set1(std::nextafter(place.value, kInfinity));
  float mixed[kLanes];  // least values to count, for the vector that `place` splits
  for (int i = 0; i < kLanes; ++i) mixed[i] = i < place.id % kLanes ? at[0] : above[0];
  for (int64_t block = 0; block < count_blocks(row.vocab); ++block) {
    if (maxima[block] < place.value) continue;
    Vec sums = zero();
    if ((block + 1) * kBlock <= place.id || block * kBlock >= place.id) {
      const Vec least = block * kBlock >= place.id ? above : at;
      row.for_values(block, [&](int64_t, Vec z) { sums += z >= least ? term(z) : zero(); });
    } else {
      row.for_values(block, [&](int64_t id, Vec z) {
        const Vec least = id + kLanes <= place.id ? at : id >= place.id ? above : load(mixed);
        sums += z >= least ? term(z) : zero();
      });
    }
    add(sums);
  }
}

template <class T>
int64_t count_before(const Row<T>& row, const float* maxima, const Place& place) {
  int64_t count = 0;
  for_ids_before(
      row, maxima, place, [](Vec) { return set1(1.0f); }, [&](Vec sums) { count += int64_t(sum_lanes(sums)); });
  return count;
}

// Sum of exp(z) over the ids before `place`: in fp32 through a block, in fp64 from block to block. The order of terms
// is the same for all places, so a place further on never has a smaller sum.
template <class T>
double mass_before(const Row<T>& row, const float* maxima, const Place& place) {
  double mass = 0.0;
  for_ids_before(
      row, maxima, place, [](Vec z) { return exp(z); }, [&](Vec sums) { mass += double(sum_lanes(sums)); });
  return mass;
}

// Gumbel noise keyed by seed, position and token id: `llm42.sampling.noise` in C++, where it is explained.
class Noise {
 public:
  static constexpr int kShare = 4;  // ids that share a hash, with 16 bits each
  static constexpr float kMost = 34.0f;  // above any noise

  Noise(uint64_t seed, uint64_t position) {
    const uint64_t key = mix((mix(seed + kGolden) ^ position) + kGolden);
    coarse_ = mix((key ^ 1) + kGolden);
    fine_ = mix((key ^ 2) + kGolden);
  }

  INLINE uint64_t coarse(int64_t word) const { return mix(coarse_ + uint64_t(word) * kGolden); }

  INLINE float of(int64_t id, uint64_t coarse_bits) const {
    const uint64_t fine_bits = mix(fine_ + uint64_t(id) * kGolden) >> 32;
    const double uniform = (double(int64_t(coarse_bits << 32 | fine_bits)) + 0.5) * 0x1p-48;
    return float(-std::log(-std::log(uniform)));
  }
  INLINE float of(int64_t id) const { return of(id, coarse(id / kShare) >> (16 * (id % kShare)) & 0xffff); }

 private:
  static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
  uint64_t coarse_, fine_;

  // The finalizer of splitmix64.
  INLINE static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }
};

// The id with the largest value + noise among those before a place, found by letting it be beaten.
template <class T>
class Winner {
 public:
  Winner(const Row<T>& row, const Noise& noise, const Place& end, int64_t id)
      : row_(row), noise_(noise), end_(end), id_(id), score_(row.value(id) + noise.of(id)) {}

  int64_t id() const { return id_; }
  float score() const { return score_; }

  // Let the ids of a block compete, of which only those can win that have one of the `most` largest coarse values.
  INLINE void meet(int64_t block, int64_t most) {
    constexpr int kWords = kBlock / Noise::kShare;
    constexpr uint64_t kOnes = 0x0001000100010001, kTops = 0x8000800080008000;
    const int64_t first = block * kWords;
    uint64_t words[kWords], hits = 0;
    // A word with a lane among the `most` largest has its inverse less than `most` in a lane, so a top bit is set below
    // (Anderson, Bit Twiddling Hacks, "determine if a word has a byte less than n"); that holds up to half the range.
    const uint64_t inverse = kOnes * uint64_t(most);
    for (int i = 0; i < kWords; ++i) {
      words[i] = noise_.coarse(first + i);
      hits |= (~words[i] - inverse) & words[i] & kTops;
    }
    if (hits == 0 && most <= 0x8000) return;
    for (int i = 0; i < kWords; ++i)
      for (int lane = 0; lane < Noise::kShare; ++lane) {
        const int64_t coarse = int64_t(words[i] >> (16 * lane) & 0xffff);
        if (coarse + most >= 0x10000) meet_id((first + i) * Noise::kShare + lane, uint64_t(coarse));
      }
  }

 private:
  const Row<T>& row_;
  const Noise& noise_;
  const Place end_;
  int64_t id_;
  float score_;

  void meet_id(int64_t id, uint64_t coarse) {
    if (id >= row_.vocab) return;
    const float value = row_.value(id);
    if (!is_before(value, id, end_)) return;
    const float score = value + noise_.of(id, coarse);
    if (score > score_ || (score == score_ && id < id_)) {
      score_ = score;
      id_ = id;
    }
  }
};

// Gumbel-max (Gumbel 1954) over the ids before `end`, of which `first` is one. Noise of at least t needs a uniform of
// at least exp(-exp(-t)) >= 1 - exp(-t), so one of the 65536 exp(-t) largest coarse values: few, for most blocks.
template <class T>
int64_t draw_before(const Row<T>& row, const float* maxima, const Noise& noise, const Place& end, int64_t first) {
  constexpr float kRounding = 1e-3f;  // far more than fp32 sums of logits and noise can be off
  Winner<T> winner(row, noise, end, first);
  for (int64_t chunk = 0; chunk < count_blocks(row.vocab); chunk += kLanes) {
    float counts[kLanes];
    store(counts, set1(65536.0f) * exp(load(maxima + chunk) - set1(winner.score() - kRounding)));
    for (int i = 0; i < kLanes; ++i) {
      const float best = maxima[chunk + i];
      if (best == -kInfinity || best < end.value || best + Noise::kMost < winner.score()) continue;
      winner.meet(chunk + i, std::min<int64_t>(int64_t(std::min(counts[i], 65535.0f)) + 1, 65536));
    }
  }
  return winner.id();
}

// How to draw a row's token; `NativeSampler` fills it in.
struct Draw {
  double temperature, top_p, min_p;
  int64_t top_k;  // 0 keeps all
  uint64_t seed, position;
};

template <class T>
int64_t draw(Row<T> row, const Draw& how) {
  const int64_t padded = padded_blocks(row.vocab);
  float* maxima = scratch(padded + room_for_values(row.vocab));
  const float best = find_maxima(row, maxima);
  if (!std::isfinite(best)) return -1;
  // The maximum is subtracted first so that no temperature, however low, makes an infinity of the best ids. Within the
  // bounds neither the temperature nor its reciprocal is zero, infinite or subnormal.
  row.shift = best;
  row.scale = float(std::min(std::max(how.temperature, 0x1p-126), 0x1p126));
  for (int64_t block = 0; block < padded; ++block) maxima[block] = row.map(maxima[block]);

  Place end{-kInfinity, row.vocab};
  if (how.top_k > 0) end = place_after(row, maxima, how.top_k, maxima + padded);
  const Place end_of_top_k = end;
  if (how.min_p > 0.0) {
    const float least = float(std::log(how.min_p));
    if (least > end.value) end = {least, row.vocab};
  }
  const Noise noise(how.seed, how.position);
  const int64_t first = find_first(row, maxima, 0.0f);
  double goal = -1.0;  // probability that top_p keeps, once it is known
  for (;;) {
    const int64_t id = draw_before(row, maxima, noise, end, first);
    if (how.top_p >= 1.0 || id == first) return id;
    // top_p keeps an id if those before it do not reach the goal. If they do, it keeps none from this id on.
    if (goal < 0.0) goal = how.top_p * mass_before(row, maxima, end_of_top_k);
    const Place place{row.value(id), id};
    if (mass_before(row, maxima, place) < goal) return id;
    end = place;
  }
}

// Where to put the log-probabilities of a row.
struct Scores {
  int64_t* rank;  // 0 if the row is unusable
  float* logprob;
  int64_t* top_ids;
  float* top_logprobs;
};

template <class T>
void score(Row<T> row, int64_t token, int64_t k, const Scores& out) {
  const int64_t padded = padded_blocks(row.vocab);
  float* maxima = scratch(padded + room_for_values(row.vocab));
  const float best = find_maxima(row, maxima);
  *out.rank = 0;
  if (!std::isfinite(best)) return;
  *out.rank = 1 + count_before(row, maxima, {row.value(token), token});
  if (k > 0) list_first(row, maxima, k, maxima + padded, out.top_ids);

  row.shift = best;
  for (int64_t block = 0; block < padded; ++block) maxima[block] = row.map(maxima[block]);
  const double log_total = double(best) + std::log(mass_before(row, maxima, {-kInfinity, row.vocab}));
  const auto logprob = [&](int64_t id) { return float(double(widen(row.x[id])) - log_total); };
  *out.logprob = logprob(token);
  for (int64_t i = 0; i < k; ++i) out.top_logprobs[i] = logprob(out.top_ids[i]);
}

// Calls `function(i, row)` for each of the `count` rows of logits whose indices are in `rows`.
template <class Function>
void for_rows(int dtype, const void* logits, int64_t stride, int64_t vocab, const int64_t* rows, int64_t count,
              Function function) {
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(dynamic) if (count > 1 && count * vocab >= kWorthThreads)
    for (int64_t i = 0; i < count; ++i) function(i, Row<T>{static_cast<const T*>(logits) + rows[i] * stride, vocab});
  });
}

}  // namespace
}  // namespace llm42

using namespace llm42;

// Of the logits [any][vocab], with `stride` elements from one row to the next, the rows [count] are worked on.
extern "C" EXPORT void llm42_greedy(int dtype, const void* logits, int64_t stride, int64_t vocab, const int64_t* rows,
                                    int64_t count, int64_t* tokens) {
  for_rows(dtype, logits, stride, vocab, rows, count, [&](int64_t i, auto row) {
    float* maxima = scratch(padded_blocks(vocab));
    const float best = find_maxima(row, maxima);
    tokens[i] = std::isfinite(best) ? find_first(row, maxima, best) : -1;
  });
}

// `draws` is [count] of the struct Draw.
extern "C" EXPORT void llm42_draw(int dtype, const void* logits, int64_t stride, int64_t vocab, const int64_t* rows,
                                  int64_t count, const void* draws, int64_t* tokens) {
  for_rows(dtype, logits, stride, vocab, rows, count,
           [&](int64_t i, auto row) { tokens[i] = draw(row, static_cast<const Draw*>(draws)[i]); });
}

// Scores `token_ids` [count] with lists of the `ks` [count] best ids; the lists are [count][width].
extern "C" EXPORT void llm42_token_logprobs(int dtype, const void* logits, int64_t stride, int64_t vocab,
                                            const int64_t* rows, int64_t count, const int64_t* token_ids,
                                            const int64_t* ks, int64_t width, int64_t* ranks, float* logprobs,
                                            int64_t* top_ids, float* top_logprobs) {
  for_rows(dtype, logits, stride, vocab, rows, count, [&](int64_t i, auto row) {
    score(row, token_ids[i], ks[i], {ranks + i, logprobs + i, top_ids + i * width, top_logprobs + i * width});
  });
}
