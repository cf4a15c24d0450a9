// Linear layers over packed weights, for CPUs whose libraries have no kernels for the model's dtype, and for fp32.
//
// Invariant: y[m][n] is one fp32 accumulator that takes x[m][k] * w[n][k] for k = 0, 1, ... in this order, by fused
// multiply-adds or, for brain floats with AVX512-BF16, by that instruction for two k at a time; then the bias. How many
// rows there are, how they are tiled and which thread does it changes the order of different outputs' work and never of
// one: all row counts are one shape class, at any number of threads.
//
// Weights are packed once, into panels of kLanes outputs: [panel][k][lane]. 16-bit brain floats lie in pairs of k, so
// that a 32-bit lane holds two: what AVX512-BF16 multiplies, and what one shift or mask widens elsewhere.
#include <algorithm>
#include <vector>

#include "common.h"
#include "simd.h"

namespace llm42 {
namespace {

constexpr int64_t kDepth = 640;     // k per block: two panels and a tile of rows stay near the first-level cache
constexpr int64_t kRowBlock = 128;          // rows whose inputs stay in the second-level cache
// From so many tiles of rows on, two panels of weights are widened before the tiles and not in their inner loop, which
// has no registers to spare: twice as fast for many rows.
constexpr int64_t kWidenTiles = 3;
#if defined(__AVX512F__)
constexpr int kMaxTile = 12;
#else
constexpr int kMaxTile = 6;  // x 2 vectors: twelve accumulators of sixteen registers
#endif

template <class T>
struct Panel {  // [k][lane]
  static constexpr int64_t kStep = 1;
  static int64_t size(int64_t k) { return k * kLanes; }  // in units of T
};
template <>
struct Panel<BFloat16> {  // [k / 2][lane][2]
  static constexpr int64_t kStep = 2;
  static int64_t size(int64_t k) { return (k + 1) / 2 * 2 * kLanes; }
};

// Panels of floats from k = 0 on, in the layout of Panel<float>.
INLINE void widen_panel(const float* w, int64_t depth, float* to) { std::memcpy(to, w, depth * kLanes * sizeof(float)); }
INLINE void widen_panel(const Float16* w, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; ++k) store(to + k * kLanes, load(w + k * kLanes));
}
INLINE void widen_panel(const BFloat16* w, int64_t depth, float* to) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(w);
  for (int64_t k = 0; k < depth; k += 2) {
    const Word pair = load_words(words + k / 2 * kLanes);
    store(to + k * kLanes, low_half(pair));
    store(to + (k + 1) * kLanes, high_half(pair));
  }
}

template <class T>
INLINE int64_t place(int64_t k, int64_t lane) {
  constexpr int64_t step = Panel<T>::kStep;
  return (k / step * kLanes + lane) * step + k % step;
}

// acc += x * panels, for x [depth][kRows] and panels of floats or halves ...
template <class T, int kRows, int kPanels>
INLINE void multiply(const float* x, const T* w, int64_t stride, int64_t depth, Vec (&acc)[kRows][kPanels]) {
  for (int64_t k = 0; k < depth; ++k) {
    Vec b[kPanels];
    for (int p = 0; p < kPanels; ++p) b[p] = load(w + p * stride + k * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec a = set1(x[k * kRows + r]);
      for (int p = 0; p < kPanels; ++p) acc[r][p] = fma(a, b[p], acc[r][p]);
    }
  }
}
// ... or of brain floats, which are widened ...
template <int kRows, int kPanels>
INLINE void multiply(const float* x, const BFloat16* w, int64_t stride, int64_t depth, Vec (&acc)[kRows][kPanels]) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(w);
  for (int64_t k = 0; k < depth; k += 2) {
    Word pair[kPanels];
    for (int p = 0; p < kPanels; ++p) pair[p] = load_words(words + (p * stride + k * kLanes) / 2);
    Vec b[kPanels];
    for (int p = 0; p < kPanels; ++p) b[p] = low_half(pair[p]);
    for (int r = 0; r < kRows; ++r) {
      const Vec a = set1(x[k * kRows + r]);
      for (int p = 0; p < kPanels; ++p) acc[r][p] = fma(a, b[p], acc[r][p]);
    }
    for (int p = 0; p < kPanels; ++p) b[p] = high_half(pair[p]);
    for (int r = 0; r < kRows; ++r) {
      const Vec a = set1(x[(k + 1) * kRows + r]);
      for (int p = 0; p < kPanels; ++p) acc[r][p] = fma(a, b[p], acc[r][p]);
    }
  }
}
#if defined(__AVX512BF16__)
// ... or multiplied as they are, for x [depth / 2][kRows] of pairs.
template <int kRows, int kPanels>
INLINE void multiply(const uint32_t* x, const BFloat16* w, int64_t stride, int64_t depth, Vec (&acc)[kRows][kPanels]) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(w);
  for (int64_t k = 0; k < depth / 2; ++k) {
    Word b[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      b[p] = load(words + p * stride / 2 + k * kLanes);
      // The next panels come from memory while these are worked on.
      __builtin_prefetch(words + (kPanels + p) * stride / 2 + k * kLanes, 0, 2);
    }
    for (int r = 0; r < kRows; ++r) {
      const Word a = set1(x[k * kRows + r]);
      for (int p = 0; p < kPanels; ++p) acc[r][p] = add_products(a, b[p], acc[r][p]);
    }
  }
}
#endif

template <class X>
struct Tile {
  const X* x;  // [depth][rows]
  int64_t stride;  // of a panel
  int64_t depth;
  float* acc;  // [rows][panels][kLanes]
  bool is_first;
};

template <int kRows, int kPanels, class X, class T>
void run_tile(const Tile<X>& tile, const T* w) {
  Vec acc[kRows][kPanels];
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p)
      acc[r][p] = tile.is_first ? zero() : load(tile.acc + (r * kPanels + p) * kLanes);
  multiply(tile.x, w, tile.stride, tile.depth, acc);
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p) store(tile.acc + (r * kPanels + p) * kLanes, acc[r][p]);
}

template <int kPanels, int kRows = 1, class X, class T>
INLINE void run_rows(int rows, const Tile<X>& tile, const T* w) {
  if constexpr (kRows * kPanels <= 2 * kMaxTile && kRows <= kMaxTile) {
    if (rows == kRows) return run_tile<kRows, kPanels>(tile, w);
    run_rows<kPanels, kRows + 1>(rows, tile, w);
  }
}

// `count` things in `pieces` parts as even as can be.
struct Split {
  int64_t count, pieces;
  int64_t begin(int64_t piece) const { return count * piece / pieces; }
  int64_t size(int64_t piece) const { return begin(piece + 1) - begin(piece); }
  int64_t piece_of(int64_t index) const { return ((index + 1) * pieces - 1) / count; }
};

// Few rows have few accumulators: more panels side by side hide the latency of each.
inline bool is_few(int64_t rows) { return rows <= kMaxTile / 2; }

// Rows in blocks, and a block's rows in tiles: even ones, since small tiles do not fill the pipelines.
inline Split blocks_of(int64_t rows) { return {rows, (rows + kRowBlock - 1) / kRowBlock}; }
inline Split tiles_of(int64_t rows) {
  const int64_t most = is_few(rows) ? kMaxTile / 2 : kMaxTile;
  return {rows, (rows + most - 1) / most};
}

template <class T>
struct Linear {
  const Factor<T>* x;  // the tiles one after another, each [padded k / kStep][rows of the tile]
  int64_t rows, k, padded_k, n;
  const T* packed;
  const float* bias;
  T* out;
  static constexpr bool kMayWiden = sizeof(T) < sizeof(float) && std::is_same_v<Factor<T>, float>;

  // Rows first_row.. of `rows`, outputs of `kPanels` panels from `panel` on.
  template <int kPanels>
  void group(int64_t panel, int64_t first_row, int64_t num_rows, float* acc, float* wide) const {
    const int64_t stride = Panel<T>::size(k);
    const Split tiles = tiles_of(num_rows);
    const int64_t num_blocks = (padded_k + kDepth - 1) / kDepth;
    const int64_t depth = ((padded_k + num_blocks - 1) / num_blocks + 1) / 2 * 2;
    for (int64_t start = 0; start < padded_k; start += depth) {
      const T* w = packed + panel * stride + start * kLanes;
      const int64_t block = std::min(depth, padded_k - start);
      const bool is_widened = kMayWiden && kPanels <= 2 && tiles.pieces >= kWidenTiles;
      if (is_widened)
        for (int p = 0; p < kPanels; ++p) widen_panel(w + p * stride, block, wide + p * block * kLanes);
      const Split next{is_widened ? kPanels * block * kLanes * int64_t{sizeof(T)} : 0, tiles.pieces};  // bytes
      for (int64_t t = 0; t < tiles.pieces; ++t) {
        // The next panels come from memory while these are worked on.
        for (int64_t byte = next.begin(t) / 64 * 64; byte < next.begin(t + 1); byte += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(w + kPanels * stride) + byte, 0, 2);
        const int64_t first = tiles.begin(t), height = tiles.size(t);
        const Factor<T>* from = x + ((first_row + first) * padded_k + start * height) / Factors<T>::kStep;
        float* to = acc + first * kPanels * kLanes;
        if constexpr (kMayWiden)
          if (is_widened) {
            run_rows<kPanels>(int(height), Tile<float>{from, block * kLanes, block, to, start == 0}, wide);
            continue;
          }
        run_rows<kPanels>(int(height), Tile<Factor<T>>{from, stride, block, to, start == 0}, w);
      }
    }
    for (int64_t r = 0; r < num_rows; ++r)
      for (int p = 0; p < kPanels; ++p) {
        const int64_t column = (panel + p) * kLanes;
        const int width = int(std::min<int64_t>(kLanes, n - column));
        Vec y = load(acc + (r * kPanels + p) * kLanes);
        if (bias != nullptr) y = y + load_first(bias + column, width);
        store_first(out + (first_row + r) * n + column, y, width);
      }
  }

  // Outputs of the panels begin..end for `num_rows` rows.
  void panels(int64_t begin, int64_t end, int64_t row, int64_t num_rows) const {
    alignas(64) float acc[2 * kRowBlock * kLanes];
    alignas(64) float wide[kMayWiden ? 2 * (kDepth + 2) * kLanes : 1];
    int64_t panel = begin;
    if (num_rows == 1)
      for (; panel + 8 <= end; panel += 8) group<8>(panel, row, num_rows, acc, wide);
    if (is_few(num_rows))
      for (; panel + 4 <= end; panel += 4) group<4>(panel, row, num_rows, acc, wide);
    for (; panel + 2 <= end; panel += 2) group<2>(panel, row, num_rows, acc, wide);
    for (; panel < end; ++panel) group<1>(panel, row, num_rows, acc, wide);
  }
};

// Factors f.. of a tile's rows, a vector of them, into to[f][height].
template <class T>
void pack_rows(const T* x, int64_t ldx, int64_t k, int64_t height, int64_t f, int64_t num_factors, float* to) {
  for (int64_t row = 0; row < height; row += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, height - row));
    Vec of[kLanes];
    for (int i = 0; i < kLanes; ++i) of[i] = i < count ? load_factors(x + (row + i) * ldx, f, k) : zero();
    transpose(of);
    for (int i = 0; i < std::min<int64_t>(kLanes, num_factors - f); ++i)
      store_first(to + (f + i) * height + row, of[i], count);
  }
}

template <class T>
void linear(const T* x, int64_t rows, int64_t ldx, const T* packed, int64_t n, int64_t k, const float* bias, T* out) {
  const int64_t padded_k = (k + Panel<T>::kStep - 1) / Panel<T>::kStep * Panel<T>::kStep;
  const int64_t num_factors = padded_k / Factors<T>::kStep, num_vectors = (num_factors + kLanes - 1) / kLanes;
  static_assert(sizeof(Factor<T>) == sizeof(float));
  float* inputs = scratch(rows * num_factors);
  const int64_t num_panels = (n + kLanes - 1) / kLanes;
  const Linear<T> work{reinterpret_cast<const Factor<T>*>(inputs), rows, k, padded_k, n, packed, bias, out};
  const Split blocks = blocks_of(rows);
  const int64_t chunk = std::max<int64_t>((is_few(rows) ? 64 : 32) / kLanes, num_panels / 256 / 8 * 8);
  const int64_t num_chunks = (num_panels + chunk - 1) / chunk;
#pragma omp parallel
  {
    for (int64_t i = 0; i < blocks.pieces; ++i) {
      const Split tiles = tiles_of(blocks.size(i));
#pragma omp for schedule(static) nowait
      for (int64_t piece = 0; piece < tiles.pieces * num_vectors; ++piece) {
        const int64_t tile = piece / num_vectors, first = blocks.begin(i) + tiles.begin(tile);
        pack_rows(x + first * ldx, ldx, k, tiles.size(tile), piece % num_vectors * kLanes, num_factors,
                  inputs + first * num_factors);
      }
    }
#pragma omp barrier
    // Small pieces, taken as they come: a thread that the system holds up does not hold up the others.
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t piece = 0; piece < blocks.pieces * num_chunks; ++piece) {
      const int64_t block = piece / num_chunks, begin = piece % num_chunks * chunk;
      work.panels(begin, std::min(begin + chunk, num_panels), blocks.begin(block), blocks.size(block));
    }
  }
}

template <class T>
void pack(const T* weight, int64_t n, int64_t k, T* packed) {
  const int64_t stride = Panel<T>::size(k), num_panels = (n + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    T* to = packed + panel * stride;
    std::memset(static_cast<void*>(to), 0, stride * sizeof(T));
    for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, n - panel * kLanes); ++lane)
      for (int64_t i = 0; i < k; ++i) to[place<T>(i, lane)] = weight[(panel * kLanes + lane) * k + i];
  }
}

template <class T>
void embedding(const int64_t* ids, int64_t rows, const T* packed, int64_t k, T* out) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = packed + ids[row] / kLanes * Panel<T>::size(k);
    for (int64_t i = 0; i < k; ++i) out[row * k + i] = from[place<T>(i, ids[row] % kLanes)];
  }
}

}  // namespace
}  // namespace llm42

using namespace llm42;

extern "C" int64_t llm42_packed_size(int dtype, int64_t n, int64_t k) {
  const int64_t num_panels = (n + kLanes - 1) / kLanes;
  return num_panels * dispatch(dtype, [&](auto type) { return Panel<decltype(type)>::size(k); });
}

extern "C" void llm42_pack(int dtype, const void* weight, int64_t n, int64_t k, void* packed) {
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    pack(static_cast<const T*>(weight), n, k, static_cast<T*>(packed));
  });
}

extern "C" void llm42_linear(int dtype, const void* x, int64_t rows, int64_t ldx, const void* packed, int64_t n,
                             int64_t k, const float* bias, void* out) {
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    linear(static_cast<const T*>(x), rows, ldx, static_cast<const T*>(packed), n, k, bias, static_cast<T*>(out));
  });
}

extern "C" void llm42_embedding(int dtype, const int64_t* ids, int64_t rows, const void* packed, int64_t k, void* out) {
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    embedding(ids, rows, static_cast<const T*>(packed), k, static_cast<T*>(out));
  });
}
