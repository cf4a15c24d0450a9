// Attention of flat rows over paged KV: decode rows, verification windows and prompt chunks in one call.
//
// Invariant: what makes up a row's result, and in which order, follows from its position and the window alone. Keys
// come in tiles of kKeyTile positions, counted from position 0, and each query takes them in order (attention_tile.h).
// Positions past the row, or outside its window, have no part in it. Keys and values are read where they are stored
// (kv.h), in any number of rows; only those of blocks that are not whole stripes are copied, tile by tile.
#include <algorithm>
#include <vector>

#include "attention_tile.h"
#include "common.h"

namespace llm42 {
namespace {

constexpr int kRowTile = 16;        // rows of a segment that a thread takes together
constexpr int kMergedQueries = 48;  // an item takes all heads together up to so many queries

struct Segment {
  int64_t row, start, length;
  const int32_t* blocks;
};

struct Shape : KVShape {
  int64_t heads, block_size, window;  // window 0: none
  float scale;
  int64_t group() const { return heads / kv_heads; }
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
  const T* kv;  // as in kv.h
  T* out;  // [rows][heads * head_dim]
  Shape shape;

  // Memory of a work item: its queries, and a tile of keys and values that are not in stripes.
  int64_t max_queries() const { return std::max<int64_t>(kRowTile * shape.group(), kMergedQueries); }
  int64_t queries_size() const { return round_up(max_queries() * (2 * shape.dim() + kLanes + 1), kLanes); }
  bool is_in_stripes() const { return shape.block_size % kStripe == 0; }
  int64_t scratch_size() const {
    return queries_size() + (is_in_stripes() ? 0 : round_up(kTileStripes * shape.stripe_size(), kLanes));
  }

  // The item's queries before the first tile.
  Queries<T> begin(const Item& item, float* memory, int64_t* positions) const {
    constexpr int64_t kFactor = Factors<T>::kStep;
    const int64_t dim = shape.dim(), count = item.num_heads * item.count * shape.group();
    float* results = memory;
    float* totals = results + count * dim;
    float* q_factors = totals + count * kLanes;
    float* highest = q_factors + count * dim;
    std::fill(results, highest, 0.0f);
    std::fill(highest, highest + count, -std::numeric_limits<float>::max());
    for (int64_t i = 0; i < count; ++i) {
      positions[i] = item.segment->start + row_of(item, i) - item.segment->row;
      const T* from = q + row_of(item, i) * ldq + head_of(item, i) * shape.head_dim;
      for (int64_t f = 0; f * kFactor < shape.head_dim; f += kLanes)
        store(q_factors + i * (dim / kFactor) + f, load_factors(from, f, shape.head_dim));
    }
    return {reinterpret_cast<const Factor<T>*>(q_factors), positions, highest, totals, results, dim};
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

  int64_t slot_of(const Segment& segment, int64_t position) const {
    return segment.blocks[position / shape.block_size] * shape.block_size + position % shape.block_size;
  }
  const T* stripe(int64_t slot) const { return kv + slot / kStripe * shape.stripe_size(); }

  // The stripes of the item's tile from position `start` on: where they are, ...
  int64_t stored_stripes(const Item& item, int64_t start, const T** stripes) const {
    int64_t count = 0;
    for (int64_t at = start; at < std::min(start + kKeyTile, item.stop()); at += kStripe)
      stripes[count++] = stripe(slot_of(*item.segment, at));
    return count;
  }
  // ... or, of blocks that are not made of stripes, where they are copied to.
  int64_t copied_stripes(const Item& item, int64_t start, T* memory, const T** stripes) const {
    const int64_t stop = std::min(start + kKeyTile, item.stop());
    for (int64_t position = start; position < stop; ++position) {
      const int64_t slot = slot_of(*item.segment, position), to_slot = (position - start) % kStripe;
      for (int64_t head = item.kv_head; head < item.kv_head + item.num_heads; ++head) {
        const HeadStripe<const T> from(stripe(slot) + head * shape.head_size(), shape);
        const HeadStripe<T> to(memory + (position - start) / kStripe * shape.stripe_size() + head * shape.head_size(), shape);
        for (int64_t d = 0; d < shape.dim(); ++d) {
          to.key(d, to_slot) = from.key(d, slot % kStripe);
          to.value(d, to_slot) = from.value(d, slot % kStripe);
        }
      }
    }
    const int64_t count = (stop - start + kStripe - 1) / kStripe;
    for (int64_t i = 0; i < count; ++i) stripes[i] = memory + i * shape.stripe_size();
    return count;
  }

  int64_t first_tile(const Item& item) const { return shape.first_visible(item.start()) / kKeyTile * kKeyTile; }

  // What is read after the item's tile from `start` on: its next one, or the first of the follower.
  Upcoming upcoming(const Item& item, int64_t start, const Item* follower) const {
    const bool is_last = start + kKeyTile >= item.stop();
    if (!is_in_stripes() || (is_last && follower == nullptr)) return {};
    const Item& then = is_last ? *follower : item;
    const T* stripes[kTileStripes];
    Upcoming next{};
    next.count = stored_stripes(then, is_last ? first_tile(then) : start + kKeyTile, stripes);
    next.bytes = then.num_heads * shape.head_size() * int64_t{sizeof(T)};
    for (int64_t i = 0; i < next.count; ++i)
      next.runs[i] = reinterpret_cast<const char*>(stripes[i] + then.kv_head * shape.head_size());
    return next;
  }

  // `follower` is what the thread will probably do next, or null.
  void run(const Item& item, const Item* follower, float* memory, int64_t* positions) const {
    const Queries<T> queries = begin(item, memory, positions);
    T* copies = reinterpret_cast<T*>(memory + queries_size());
    const int64_t per_head = item.count * shape.group();
    for (int64_t start = first_tile(item); start < item.stop(); start += kKeyTile) {
      const T* stripes[kTileStripes];
      const int64_t count =
          is_in_stripes() ? stored_stripes(item, start, stripes) : copied_stripes(item, start, copies, stripes);
      Upcoming next = upcoming(item, start, follower);
      for (int64_t head = 0; head < item.num_heads; ++head) {
        HeadTile<T> tile;
        for (int64_t i = 0; i < kTileStripes; ++i) {  // a stripe too few is read in place of one, and has no weight
          const HeadStripe<const T> of(stripes[std::min(i, count - 1)] + (item.kv_head + head) * shape.head_size(), shape);
          tile.keys[i] = of.keys, tile.values[i] = of.values;
        }
        for (int64_t i = 0; i < per_head; i += kBlockQueries)
          add_tile(queries.from(head * per_head + i), std::min<int64_t>(kBlockQueries, per_head - i),
                   [&](int64_t position) { return shape.first_visible(position); }, start, shape.scale, tile, next);
      }
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

extern "C" void llm42_attention(int dtype, const void* q, int64_t rows, int64_t ldq, const void* kv, int64_t heads,
                                int64_t kv_heads, int64_t head_dim, const int64_t* segments, int64_t num_segments,
                                const int32_t* blocks, int64_t block_size, int64_t window, float scale, void* out) {
  std::vector<Segment> list;
  int64_t used = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    const int64_t* s = segments + 4 * i;
    list.push_back({s[0], s[1], s[2], blocks + s[3]});
    used = std::max(used, s[0] + s[2]);
  }
  const Shape shape{{kv_heads, head_dim}, heads, block_size, window, scale};
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    T* to = static_cast<T*>(out);
    std::memset(static_cast<void*>(to + used * heads * head_dim), 0, (rows - used) * heads * head_dim * sizeof(T));
    attention(Attention<T>{static_cast<const T*>(q), ldq, static_cast<const T*>(kv), to, shape}, list);
  });
}
