// Attention of flat rows over paged KV: decode rows, verification windows and prompt chunks in one call.
//
// Invariant: what makes up a row's result, and in which order, follows from its position and the window alone. Keys
// come in tiles of kKeyTile positions, counted from position 0; scores add the lanes of one fixed tree; a tile's
// weights and values are added in order of position; the online softmax (arXiv 2205.14135, algorithm 1) rescales once
// a tile. Positions past the row, or outside its window, are neither scored nor added. Rows of a segment share nothing
// but the tile's keys and values, widened to fp32 once for all of them.
#include <algorithm>
#include <vector>

#include "common.h"
#include "simd.h"

namespace llm42 {
namespace {

constexpr int kKeyTile = 32;
constexpr int kRowTile = 16;     // rows of a segment that share a widened tile of keys and values
constexpr int kMergedQueries = 48;  // an item takes all heads together up to so many queries

struct Segment {
  int64_t row, start, length;
  const int32_t* blocks;
};

struct Shape {
  int64_t heads, kv_heads, head_dim, block_size, window;  // window 0: none
  int64_t kv_stride;  // elements between two slots
  float scale;
  int64_t group() const { return heads / kv_heads; }
  int64_t padded_dim() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t first_visible(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// One row of one head on its way over the tiles.
struct Query {
  int64_t position;
  float* q;  // [padded_dim], scaled
  float* result;  // [padded_dim]
  float highest;
  float total[kLanes];
};

template <class T>
void widen_row(const T* from, int64_t count, int64_t padded, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < padded; ++i) to[i] = i < count ? widen(from[i]) : 0.0f;
}

// scores[j] = q . keys[j] for the first `count` keys, rounded up to eight.
void score(const float* q, const float* keys, int64_t dim, int64_t count, float* scores) {
  for (int64_t j = 0; j < count; j += 8) {
    Vec sum[8];
    for (int i = 0; i < 8; ++i) sum[i] = zero();
    const float* k = keys + j * dim;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec a = load(q + d);
      for (int i = 0; i < 8; ++i) sum[i] = fma(a, load(k + i * dim + d), sum[i]);
    }
    sum_lanes_of_8(sum, scores + j);
  }
}

// result[d] = result[d] * decay + sum over j of weights[j] * values[j][d], for kVectors vectors of d.
template <int kVectors>
INLINE void accumulate(const float* weights, const float* values, int64_t dim, int64_t begin, int64_t end, Vec decay,
                       float* result) {
  Vec sum[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = load(result + v * kLanes) * decay;
  for (int64_t j = begin; j < end; ++j) {
    const Vec weight = set1(weights[j]);
    for (int v = 0; v < kVectors; ++v) sum[v] = fma(weight, load(values + j * dim + v * kLanes), sum[v]);
  }
  for (int v = 0; v < kVectors; ++v) store(result + v * kLanes, sum[v]);
}

void add_tile(Query& query, const Shape& shape, int64_t start, const float* keys, const float* values) {
  const int64_t begin = std::max<int64_t>(0, shape.first_visible(query.position) - start);
  const int64_t end = std::min<int64_t>(kKeyTile, query.position + 1 - start);
  if (begin >= end) return;
  const int64_t dim = shape.padded_dim();
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  alignas(64) float weights[kKeyTile];
  score(query.q, keys, dim, end, weights);
  const int64_t width = (end + kLanes - 1) / kLanes * kLanes;
  std::fill(weights, weights + begin, kHidden);
  std::fill(weights + end, weights + width, kHidden);
  Vec highest = load(weights);
  for (int64_t j = kLanes; j < width; j += kLanes) highest = max(highest, load(weights + j));
  const float new_highest = std::max(query.highest, max_lanes(highest));
  const Vec decay = exp(set1(query.highest - new_highest));
  Vec total = load(query.total) * decay;
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec weight = exp(load(weights + j) - set1(new_highest));
    store(weights + j, weight);
    total = total + weight;
  }
  store(query.total, total);
  query.highest = new_highest;
  int64_t d = 0;
  for (; d + 8 * kLanes <= dim; d += 8 * kLanes) accumulate<8>(weights, values + d, dim, begin, end, decay, query.result + d);
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) accumulate<4>(weights, values + d, dim, begin, end, decay, query.result + d);
  for (; d < dim; d += kLanes) accumulate<1>(weights, values + d, dim, begin, end, decay, query.result + d);
}

// Rows of a segment and KV heads that a thread works on at a time.
struct Item {
  const Segment* segment;
  int64_t first, count, kv_head, num_heads, cost;
};

template <class T>
struct Attention {
  const T* q;  // [rows][heads][head_dim] at stride ldq
  int64_t ldq;
  const T* keys;
  const T* values;  // [slots][kv_heads][head_dim]
  T* out;  // [rows][heads * head_dim]
  Shape shape;

  int64_t max_queries() const { return std::max<int64_t>(kRowTile * shape.group(), kMergedQueries); }

  // Memory of a work item: a tile of keys and one of values, and the queries.
  int64_t scratch_size() const { return (2 * kKeyTile + 2 * max_queries()) * shape.padded_dim(); }

  // Elements before the key (or value) of a position and head.
  int64_t place(const Segment& segment, int64_t position, int64_t kv_head) const {
    const int64_t block = segment.blocks[position / shape.block_size];
    return (block * shape.block_size + position % shape.block_size) * shape.kv_stride + kv_head * shape.head_dim;
  }

  void widen_tile(const Segment& segment, int64_t start, int64_t count, int64_t kv_head, float* k, float* v) const {
    const int64_t dim = shape.padded_dim();
    for (int64_t j = 0; j < count;) {
      const int64_t page = std::min(count - j, shape.block_size - (start + j) % shape.block_size);
      int64_t from = place(segment, start + j, kv_head);
      for (int64_t i = 0; i < page; ++i, ++j, from += shape.kv_stride) {
        widen_row(keys + from, shape.head_dim, dim, k + j * dim);
        widen_row(values + from, shape.head_dim, dim, v + j * dim);
      }
    }
  }

  // Asks for the keys and values of the positions begin..end: a few at a time, since memory takes only so many requests.
  void prefetch(const Segment& segment, int64_t begin, int64_t end, int64_t kv_head) const {
    const int64_t bytes = shape.head_dim * int64_t{sizeof(T)};
    for (int64_t position = begin; position < end; ++position) {
      const int64_t from = place(segment, position, kv_head);
      for (int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(keys + from) + byte);
        __builtin_prefetch(reinterpret_cast<const char*>(values + from) + byte);
      }
    }
  }

  void run(const Item& item, float* memory, Query* queries) const {
    const Segment& segment = *item.segment;
    const int64_t dim = shape.padded_dim(), group = shape.group(), per_head = item.count * group;
    float* k = memory;
    float* v = k + kKeyTile * dim;
    float* q_memory = v + kKeyTile * dim;
    for (int64_t i = 0; i < item.num_heads * per_head; ++i) {
      Query& query = queries[i];
      query.position = segment.start + item.first + i % per_head / group;
      query.q = q_memory + 2 * i * dim;
      query.result = query.q + dim;
      query.highest = -std::numeric_limits<float>::max();
      std::fill(query.total, query.total + kLanes, 0.0f);
      std::fill(query.result, query.result + dim, 0.0f);
      widen_row(q + row_of(item, i) * ldq + head_of(item, i) * shape.head_dim, shape.head_dim, dim, query.q);
      for (int64_t d = 0; d < dim; ++d) query.q[d] *= shape.scale;
    }
    const int64_t first = segment.start + item.first, last = first + item.count - 1;
    for (int64_t start = shape.first_visible(first) / kKeyTile * kKeyTile; start <= last; start += kKeyTile)
      for (int64_t head = 0; head < item.num_heads; ++head) {
        widen_tile(segment, start, std::min<int64_t>(kKeyTile, last + 1 - start), item.kv_head + head, k, v);
        const int64_t next = start + kKeyTile;
        for (int64_t i = 0; i < per_head; ++i) {
          prefetch(segment, next + kKeyTile * i / per_head, std::min(next + kKeyTile * (i + 1) / per_head, last + 1),
                   item.kv_head + head);
          add_tile(queries[head * per_head + i], shape, start, k, v);
        }
      }
    for (int64_t i = 0; i < item.num_heads * per_head; ++i) {
      T* to = out + (row_of(item, i) * shape.heads + head_of(item, i)) * shape.head_dim;
      const Vec inverse = set1(1.0f / sum_lanes(load(queries[i].total)));
      for (int64_t d = 0; d < shape.head_dim; d += kLanes)
        store_first(to + d, load(queries[i].result + d) * inverse, int(std::min<int64_t>(kLanes, shape.head_dim - d)));
    }
  }

  // Row of the pass and head of an item's query; queries are ordered by KV head, row, head.
  int64_t row_of(const Item& item, int64_t query) const {
    return item.segment->row + item.first + query % (item.count * shape.group()) / shape.group();
  }
  int64_t head_of(const Item& item, int64_t query) const {
    const int64_t per_head = item.count * shape.group();
    return (item.kv_head + query / per_head) * shape.group() + query % per_head % shape.group();
  }
};

template <class T>
void attention(const Attention<T>& work, const std::vector<Segment>& segments) {
  const Shape& shape = work.shape;
  std::vector<Item> items;
  // Keys and values of all heads lie together in memory: read in one go, if that leaves enough items for the threads.
  const bool may_merge = int64_t(segments.size()) >= 4 * omp_get_max_threads();
  for (const Segment& segment : segments)
    for (int64_t first = 0; first < segment.length; first += kRowTile) {
      const int64_t count = std::min<int64_t>(kRowTile, segment.length - first), end = segment.start + first + count;
      const int64_t cost = (end - shape.first_visible(end - count)) * (2 + count * shape.group());
      const int64_t num_heads = may_merge && count * shape.heads <= kMergedQueries ? shape.kv_heads : 1;
      for (int64_t head = 0; head < shape.kv_heads; head += num_heads)
        items.push_back({&segment, first, count, head, num_heads, cost * num_heads});
    }
  // The longest first, so that the threads end together; which thread takes which item changes no result.
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  const int64_t size = work.scratch_size();
  float* memory = scratch(size * omp_get_max_threads());
#pragma omp parallel
  {
    std::vector<Query> queries(work.max_queries());
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); ++i) work.run(items[i], memory + size * thread_index(), queries.data());
  }
}

}  // namespace
}  // namespace llm42

using namespace llm42;

extern "C" void llm42_attention(int dtype, const void* q, int64_t rows, int64_t ldq, const void* keys,
                                const void* values, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                const int64_t* segments, int64_t num_segments, const int32_t* blocks,
                                int64_t block_size, int64_t window, float scale, void* out) {
  std::vector<Segment> list;
  int64_t used = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    const int64_t* s = segments + 4 * i;
    list.push_back({s[0], s[1], s[2], blocks + s[3]});
    used = std::max(used, s[0] + s[2]);
  }
  const Shape shape{heads, kv_heads, head_dim, block_size, window, kv_heads * head_dim, scale};
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    T* to = static_cast<T*>(out);
    std::memset(static_cast<void*>(to + used * heads * head_dim), 0, (rows - used) * heads * head_dim * sizeof(T));
    attention(Attention<T>{static_cast<const T*>(q), ldq, static_cast<const T*>(keys), static_cast<const T*>(values), to,
                           shape},
              list);
  });
}
