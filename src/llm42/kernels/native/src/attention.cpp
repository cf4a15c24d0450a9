// Attention of flat rows over paged KV: decode rows, verification windows and prompt chunks in one call.
//
// Invariant: what makes up a row's result, and in which order, follows from its position and the window alone. Keys
// come in tiles of kKeyTile positions, counted from position 0, and each query takes them in order (attention_tile.h).
// Positions past the row, or outside its window, have no part in it. Rows of a segment share nothing but the tile's
// keys and values, brought into a form for arithmetic once for all of them.
#include <algorithm>
#include <utility>
#include <vector>

#include "attention_tile.h"
#include "common.h"

namespace llm42 {
namespace {

constexpr int kRowTile = 16;     // rows of a segment that share a tile of keys and values
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
  int64_t padded_dim() const { return round_up(head_dim, kLanes); }
  int64_t first_visible(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// Rows of a segment and KV heads that a thread works on at a time.
struct Item {
  const Segment* segment;
  int64_t first, count, kv_head, num_heads, cost;
  int64_t start() const { return segment->start + first; }  // positions
  int64_t stop() const { return start() + count; }
};

template <class T>
struct Attention {
  const T* q;  // [rows][heads][head_dim] at stride ldq
  int64_t ldq;
  const T* keys;
  const T* values;  // [slots][kv_heads][head_dim]
  T* out;  // [rows][heads * head_dim]
  Shape shape;

  // Memory of a work item: a tile of keys and one of values, and the queries.
  int64_t q_size() const { return round_up((shape.head_dim + Factors<T>::kStep - 1) / Factors<T>::kStep, kLanes); }
  int64_t max_queries() const { return std::max<int64_t>(kRowTile * shape.group(), kMergedQueries); }
  int64_t tile_size() const { return kKeyTile * (q_size() + shape.padded_dim()); }
  int64_t scratch_size() const {
    return round_up(tile_size() + max_queries() * (q_size() + shape.padded_dim() + kLanes + 1), kLanes);
  }

  // Bytes before the keys (and values) of the positions begin..end of a head, in its own memory; at most a tile of them.
  int64_t locate(const Segment& segment, int64_t begin, int64_t end, int64_t* places) const {
    const int64_t slot_bytes = shape.kv_stride * int64_t{sizeof(T)};
    for (int64_t position = begin; position < end;) {
      const int64_t page = position / shape.block_size, page_end = std::min((page + 1) * shape.block_size, end);
      int64_t place = (segment.blocks[page] * shape.block_size + position - page * shape.block_size) * slot_bytes;
      for (; position < page_end; ++position, place += slot_bytes) *places++ = place;
    }
    return std::max<int64_t>(0, end - begin);
  }

  // The item's queries before the first tile.
  Queries<T> begin(const Item& item, float* memory, int64_t* positions) const {
    const int64_t dim = shape.padded_dim(), count = item.num_heads * item.count * shape.group();
    float* q_factors = memory;
    float* results = q_factors + count * q_size();
    float* totals = results + count * dim;
    float* highest = totals + count * kLanes;
    std::fill(results, highest, 0.0f);
    std::fill(highest, highest + count, -std::numeric_limits<float>::max());
    for (int64_t i = 0; i < count; ++i) {
      positions[i] = item.segment->start + row_of(item, i) - item.segment->row;
      const T* from = q + row_of(item, i) * ldq + head_of(item, i) * shape.head_dim;
      for (int64_t f = 0; f < q_size(); f += kLanes)
        store(q_factors + i * q_size() + f, load_factors(from, f, shape.head_dim));
    }
    return {reinterpret_cast<const Factor<T>*>(q_factors), positions, highest, totals, results, q_size(), dim};
  }

  // The item's results after the last tile.
  void end(const Item& item, const Queries<T>& queries) const {
    for (int64_t i = 0; i < item.num_heads * item.count * shape.group(); ++i) {
      T* to = out + (row_of(item, i) * shape.heads + head_of(item, i)) * shape.head_dim;
      const Vec inverse = set1(1.0f / sum_lanes(load(queries.totals + i * kLanes)));
      for (int64_t d = 0; d < shape.head_dim; d += kLanes)  // + 0: no zero keeps its sign
        store_first(to + d, fma(load(queries.results + i * queries.dim + d), inverse, zero()),
                    int(std::min<int64_t>(kLanes, shape.head_dim - d)));
    }
  }

  // Where the keys of an item's next tile lie, from position `start` on, and how many there are.
  int64_t locate_tile(const Item& item, int64_t start, int64_t* places) const {
    return locate(*item.segment, start, std::min(start + kKeyTile, item.stop()), places);
  }
  int64_t first_tile(const Item& item) const { return shape.first_visible(item.start()) / kKeyTile * kKeyTile; }

  // `follower` is what the thread will probably do next, or null.
  void run(const Item& item, const Item* follower, float* memory, int64_t* positions) const {
    const Queries<T> queries = begin(item, memory + tile_size(), positions);
    Factor<T>* k = reinterpret_cast<Factor<T>*>(memory);
    float* v = memory + kKeyTile * q_size();
    const int64_t per_head = item.count * shape.group(), head_bytes = shape.head_dim * int64_t{sizeof(T)};
    const bool is_stored = per_head <= kValueQueries && shape.head_dim % kLanes == 0;
    int64_t places[2][kKeyTile], *here = places[0], *next = places[1];
    int64_t start = first_tile(item), size = locate_tile(item, start, here);
    for (; start < item.stop(); start += kKeyTile, std::swap(here, next)) {
      const Item* then = start + kKeyTile < item.stop() ? &item : follower;
      const int64_t next_size = then ? locate_tile(*then, then == &item ? start + kKeyTile : first_tile(*then), next) : 0;
      for (int64_t head = 0; head < item.num_heads; ++head) {
        const char* of_keys = reinterpret_cast<const char*>(keys) + (item.kv_head + head) * head_bytes;
        const char* of_values = reinterpret_cast<const char*>(values) + (item.kv_head + head) * head_bytes;
        const int64_t moved = then ? (then->kv_head - item.kv_head) * head_bytes : 0;
        Upcoming upcoming{of_keys + moved, of_values + moved, next, next_size, head_bytes};
        pack_keys<T>(of_keys, here, size, shape.head_dim, q_size(), k, upcoming);
        auto add = [&](const auto& tile_values) {
          for (int64_t i = 0; i < per_head; i += kBlockQueries)
            add_tile(queries.from(head * per_head + i), std::min<int64_t>(kBlockQueries, per_head - i),
                     [&](int64_t position) { return shape.first_visible(position); }, start, shape.scale, k, tile_values,
                     upcoming);
        };
        if (is_stored) {
          add(StoredValues<T>{of_values, here});
        } else {
          widen_values<T>(of_values, here, size, shape.head_dim, queries.dim, v, upcoming);
          add(WideValues{v, queries.dim});
        }
      }
      size = next_size;
    }
    end(item, queries);
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
  const int64_t size = work.scratch_size(), num_items = int64_t(items.size());
  float* memory = scratch(size * omp_get_max_threads());
#pragma omp parallel
  {
    std::vector<int64_t> positions(work.max_queries());
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items; ++i) {
      const Item* follower = i + thread_count() < num_items ? &items[i + thread_count()] : nullptr;
      work.run(items[i], follower, memory + size * thread_index(), positions.data());
    }
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
