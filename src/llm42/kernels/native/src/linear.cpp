// Linear layers over packed weights.
//
// Invariant: y[m][n] is one fp32 accumulator that takes x[m][k] * w[n][k] for k = 0, 1, ... in this order, by fused
// multiply-adds or, for brain floats with AVX512-BF16, by that instruction for two k at a time; then the bias. How many
// rows there are, how they are tiled and which thread does it changes the order of different outputs' work and never of
// one: all row counts are one shape class, at any number of threads.
//
// Weights are packed once, into panels of kLanes outputs (panels.h).
#include <algorithm>
#include <vector>

#include "common.h"
#include "panels.h"
#include "shares.h"
#include "upcoming.h"

namespace llm42 {
namespace {

constexpr int64_t kDepth = 640;     // k per block: two panels and a tile of rows stay near the first-level cache
constexpr int64_t kRowBlock = 128;  // rows whose inputs of a block stay in the second-level cache
constexpr int64_t kPanelsTogether = 8;
#if defined(__AVX512F__)
constexpr int kMaxTile = 14, kFewRows = 6;  // x 2 or 4 vectors: accumulators of 32 registers
#else
constexpr int kMaxTile = 6, kFewRows = 3;  // of 16 registers
#endif

// Numbers of a panel of weights with so many k, in whole steps.
template <class T>
int64_t panel_size(int64_t k) {
  return round_up(k, Panel<T>::kStep) * kLanes;
}

// acc += x * panels, for the kStep k from k on and x [depth][kRows] ...
template <class T, int kRows, int kPanels>
INLINE void multiply_step(const float* x, const T* w, int64_t stride, int64_t k, Vec (&acc)[kRows][kPanels]) {
  for (int part = 0; part < Panel<T>::kStep; ++part) {
    Vec b[kPanels];
    for (int p = 0; p < kPanels; ++p) b[p] = load_part(w + p * stride + k * kLanes, part);
    for (int r = 0; r < kRows; ++r) {
      const Vec a = set1(x[(k + part) * kRows + r]);
      for (int p = 0; p < kPanels; ++p) acc[r][p] = fma(a, b[p], acc[r][p]);
    }
  }
}
// ... and for all k ...
template <class T, int kRows, int kPanels>
INLINE void multiply(const float* x, int64_t, const T* w, int64_t stride, int64_t depth, Vec (&acc)[kRows][kPanels],
                     Upcoming& upcoming) {
  constexpr int64_t kBetweenFetches = 4;
  int64_t k = 0;
  for (; k + kBetweenFetches <= depth && !upcoming.is_empty(); k += kBetweenFetches) {
    upcoming.fetch<1>();
    for (int64_t i = 0; i < kBetweenFetches; i += Panel<T>::kStep) multiply_step(x, w, stride, k + i, acc);
  }
  for (; k < depth; k += Panel<T>::kStep) multiply_step(x, w, stride, k, acc);
}
#if defined(__AVX512BF16__)
// ... or multiplied as they are, for x [kRows][depth] at stride ldx.
template <int kRows, int kPanels>
INLINE void multiply(const BFloat16* x, int64_t ldx, const BFloat16* w, int64_t stride, int64_t depth,
                     Vec (&acc)[kRows][kPanels], Upcoming&) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(w);
  const BFloat16* rows[(kRows + 2) / 3];  // every third, since an address is one of them plus 0, 1 or 2 strides
  for (int r = 0; r < kRows; r += 3) rows[r / 3] = x + r * ldx;
  for (int64_t k = 0; k < depth; k += 2) {
    Word b[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      b[p] = load(words + (p * stride + k * kLanes) / 2);
      // The next panels come from memory while these are worked on.
      __builtin_prefetch(words + ((kPanels + p) * stride + k * kLanes) / 2, 0, 2);
    }
    for (int r = 0; r < kRows; ++r) {
      uint32_t pair;
      std::memcpy(&pair, rows[r / 3] + r % 3 * ldx + k, sizeof(pair));
      const Word a = set1(pair);
      for (int p = 0; p < kPanels; ++p) acc[r][p] = add_products(a, b[p], acc[r][p]);
    }
  }
}
#endif

template <class X>
struct Tile {
  const X* x;
  int64_t ldx, stride, depth;  // stride: of a panel
  float* acc;  // [rows][panels][kLanes]
  bool is_first;
  Upcoming* upcoming;
};

// A function of its own, so that the accumulators have all registers to themselves.
template <int kRows, int kPanels, class X, class T>
__attribute__((noinline)) void run_tile(const Tile<X>& tile, const T* w) {
  Vec acc[kRows][kPanels];
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p)
      acc[r][p] = tile.is_first ? zero() : load(tile.acc + (r * kPanels + p) * kLanes);
  multiply(tile.x, tile.ldx, w, tile.stride, tile.depth, acc, *tile.upcoming);
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
};

// Few rows have few accumulators: more panels side by side hide the latency of each.
inline bool is_few(int64_t rows) { return rows <= kFewRows; }

// Rows in blocks, and a block's rows in tiles: even ones, since small tiles do not fill the pipelines.
inline Split blocks_of(int64_t rows) { return {rows, (rows + kRowBlock - 1) / kRowBlock}; }
inline Split tiles_of(int64_t rows) {
  const int64_t most = is_few(rows) ? kFewRows : kMaxTile;
  return {rows, (rows + most - 1) / most};
}

// function(std::integral_constant<int, n>, first) for groups of n of `count` panels, which are multiplied side by side.
template <class Function>
void in_groups(int64_t count, int64_t num_rows, Function function) {
  int64_t i = 0;
  if (num_rows == 1)
    for (; i + 8 <= count; i += 8) function(std::integral_constant<int, 8>{}, i);
  if (is_few(num_rows))
    for (; i + 4 <= count; i += 4) function(std::integral_constant<int, 4>{}, i);
  for (; i + 2 <= count; i += 2) function(std::integral_constant<int, 2>{}, i);
  for (; i < count; ++i) function(std::integral_constant<int, 1>{}, i);
}

// Inputs as they are multiplied. Packed in fp32: tile after tile, each [k][rows of the tile] ...
struct PackedInputs {
  float* x;
  int64_t ldx;
  const float* tile(int64_t row, int64_t height, int64_t k) const { return x + row * ldx + k * height; }
};
// ... or where they are: [rows][k].
template <class T>
struct PlainInputs {
  const T* x;
  int64_t ldx;
  const T* tile(int64_t row, int64_t, int64_t k) const { return x + row * ldx + k; }
};
template <class T>
constexpr bool kIsPacked = std::is_same_v<Factor<T>, float>;

template <class T>
struct Linear {
  std::conditional_t<kIsPacked<T>, PackedInputs, PlainInputs<T>> inputs;
  int64_t k, padded_k, n;
  const T* packed;
  const float* bias;
  T* out;

  int64_t num_blocks() const { return (padded_k + kDepth - 1) / kDepth; }
  int64_t depth() const { return round_up((padded_k + num_blocks() - 1) / num_blocks(), 2); }

  // Adds to acc [rows][kPanels][kLanes] what the k from `start` on give to `kPanels` panels from `panel` on.
  template <int kPanels>
  void multiply_group(int64_t panel, int64_t start, int64_t first_row, int64_t num_rows, float* acc) const {
    const int64_t stride = panel_size<T>(k), block = std::min(depth(), padded_k - start);
    const Split tiles = tiles_of(num_rows);
    const T* w = packed + panel * stride + start * kLanes;
    // The next panels; for few rows, where many are read side by side, the processor does better by itself.
    Upcoming upcoming{{}, is_few(num_rows) ? 0 : std::min(kPanels, Upcoming::kMost), block * kLanes * int64_t{sizeof(T)}};
    for (int64_t p = 0; p < upcoming.count; ++p)
      upcoming.runs[p] = reinterpret_cast<const char*>(w + (kPanels + p) * stride);
    for (int64_t t = 0; t < tiles.pieces; ++t) {
      const int64_t first = tiles.begin(t), height = tiles.size(t);
      const auto* from = inputs.tile(first_row + first, height, start);
      const Tile<std::decay_t<decltype(*from)>> tile{
          from, inputs.ldx, stride, block, acc + first * kPanels * kLanes, start == 0, &upcoming};
      run_rows<kPanels>(int(height), tile, w);
    }
  }

  template <int kPanels>
  void store_group(int64_t panel, int64_t first_row, int64_t num_rows, const float* acc) const {
    for (int64_t r = 0; r < num_rows; ++r)
      for (int p = 0; p < kPanels; ++p) {
        const int64_t column = (panel + p) * kLanes;
        const int width = int(std::min<int64_t>(kLanes, n - column));
        Vec y = load(acc + (r * kPanels + p) * kLanes);
        if (bias != nullptr) y = y + load_first(bias + column, width);
        store_products(out + (first_row + r) * n + column, y, width);
      }
  }

  // Outputs of the panels begin..end for `num_rows` rows. The rows' inputs of a block of k are used for some panels
  // before those of the next one, since all of them may be more than the second-level cache holds.
  void panels(int64_t begin, int64_t end, int64_t row, int64_t num_rows) const {
    alignas(64) float acc[kPanelsTogether * kRowBlock * kLanes];
    for (int64_t first = begin; first < end; first += kPanelsTogether) {
      const int64_t count = std::min<int64_t>(kPanelsTogether, end - first);
      for (int64_t start = 0; start < padded_k; start += depth())
        in_groups(count, num_rows, [&](auto size, int64_t i) {
          multiply_group<size.value>(first + i, start, row, num_rows, acc + i * num_rows * kLanes);
        });
      in_groups(count, num_rows, [&](auto size, int64_t i) {
        store_group<size.value>(first + i, row, num_rows, acc + i * num_rows * kLanes);
      });
    }
  }
};

// Numbers begin..end of a tile's rows, into their columns.
template <class T>
void pack_tile(const T* x, int64_t ldx, int64_t k, int64_t height, int64_t begin, int64_t end, float* to) {
  auto load_row = [&](int64_t row, int64_t i) {
    return load_first(x + row * ldx + i, int(std::min<int64_t>(kLanes, k - i)));
  };
  if (height == 1) {  // nothing to transpose
    for (int64_t i = begin; i < end; i += kLanes)
      store_first(to + i, load_row(0, i), int(std::min<int64_t>(kLanes, end - i)));
    return;
  }
  for (int64_t row = 0; row < height; row += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, height - row));
    for (int64_t i = begin; i < end; i += kLanes) {
      Vec columns[kLanes];
      for (int r = 0; r < kLanes; ++r) columns[r] = r < count ? load_row(row + r, i) : zero();
      transpose(columns);
      for (int64_t c = 0; c < std::min<int64_t>(kLanes, end - i); ++c) {
        // What a whole vector writes too much, the next ones overwrite.
        const bool is_overwritten = height <= kLanes && (i + c) * height + kLanes <= end * height;
        store_first(to + (i + c) * height + row, columns[c], is_overwritten ? kLanes : count);
      }
    }
  }
}

// Packs rows in fp32, with the threads of a parallel region.
template <class T>
void pack_inputs(const T* x, int64_t ldx, int64_t k, const Split& blocks, const PackedInputs& inputs) {
  constexpr int64_t kWidth = 64;
  const int64_t num_pieces = (k + kWidth - 1) / kWidth;  // of a tile
  for (int64_t block = 0; block < blocks.pieces; ++block) {
    const Split tiles = tiles_of(blocks.size(block));
#pragma omp for schedule(static) nowait
    for (int64_t piece = 0; piece < tiles.pieces * num_pieces; ++piece) {
      const int64_t tile = piece / num_pieces, begin = piece % num_pieces * kWidth;
      const int64_t first = blocks.begin(block) + tiles.begin(tile);
      pack_tile(x + first * ldx, ldx, k, tiles.size(tile), begin, std::min(begin + kWidth, inputs.ldx),
                inputs.x + first * inputs.ldx);
    }
  }
#pragma omp barrier
}

template <class T>
void linear(const T* x, int64_t rows, int64_t ldx, const T* packed, int64_t n, int64_t k, const float* bias, T* out) {
  const int64_t padded_k = round_up(k, Panel<T>::kStep);
  const int64_t num_panels = (n + kLanes - 1) / kLanes;
  Linear<T> work{{}, k, padded_k, n, packed, bias, out};
  if constexpr (kIsPacked<T>) {
    work.inputs = {scratch(rows * padded_k), padded_k};
  } else if (k == padded_k) {
    work.inputs = {x, ldx};
  } else {  // the partner of the last number has to be zero
    T* padded = reinterpret_cast<T*>(scratch(rows * padded_k / 2 + 1));
    std::memset(static_cast<void*>(padded), 0, rows * padded_k * sizeof(T));
    for (int64_t row = 0; row < rows; ++row) std::memcpy(padded + row * padded_k, x + row * ldx, k * sizeof(T));
    work.inputs = {padded, padded_k};
  }
  const Split blocks = blocks_of(rows);
  const int64_t chunk = std::max<int64_t>((is_few(rows) ? 64 : 32) / kLanes, num_panels / 256 / 8 * 8);
  const int64_t num_chunks = (num_panels + chunk - 1) / chunk;
  Shares shares(blocks.pieces * num_chunks, omp_get_max_threads());
#pragma omp parallel
  {
    if constexpr (kIsPacked<T>) pack_inputs(x, ldx, k, blocks, work.inputs);
    for (int64_t piece; (piece = shares.take(int(thread_index()))) >= 0;) {
      const int64_t block = piece / num_chunks, begin = piece % num_chunks * chunk;
      work.panels(begin, std::min(begin + chunk, num_panels), blocks.begin(block), blocks.size(block));
    }
  }
}

template <class T>
void pack(const T* weight, int64_t n, int64_t k, T* packed) {
  const int64_t stride = panel_size<T>(k), num_panels = (n + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    T* to = packed + panel * stride;
    std::memset(static_cast<void*>(to), 0, stride * sizeof(T));
    for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, n - panel * kLanes); ++lane)
      for (int64_t i = 0; i < k; ++i) to[place<T>(i, lane, kLanes)] = weight[(panel * kLanes + lane) * k + i];
  }
}

template <class T>
void embedding(const int64_t* ids, int64_t rows, const T* packed, int64_t k, T* out) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = packed + ids[row] / kLanes * panel_size<T>(k);
    for (int64_t i = 0; i < k; ++i) out[row * k + i] = from[place<T>(i, ids[row] % kLanes, kLanes)];
  }
}

}  // namespace
}  // namespace llm42

using namespace llm42;

extern "C" int64_t llm42_packed_size(int dtype, int64_t n, int64_t k) {
  const int64_t num_panels = (n + kLanes - 1) / kLanes;
  return num_panels * dispatch(dtype, [&](auto type) { return panel_size<decltype(type)>(k); });
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
