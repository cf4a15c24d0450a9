// Where keys and values lie in memory.
//
// Slots of a layer come in stripes of kStripe: [stripe][KV head][keys, values], all of them next to one another, since
// long runs of memory are read fastest. Keys are panels whose lanes are the stripe's slots and whose k are the head's
// dimensions, so that a query is multiplied with all of them at once; values are panels whose lanes are the dimensions
// and whose k are the slots. The head's dimensions are filled up to kStripe with zeros that nothing overwrites.
// `llm42.kernels.native.kv` says the same for tensors.
#pragma once

#include <type_traits>

#include "panels.h"

namespace llm42 {

constexpr int kStripe = 16;
static_assert(kStripe % kLanes == 0, "a vector does not reach into another stripe");

struct KVShape {
  int64_t kv_heads, head_dim;
  int64_t dim() const { return round_up(head_dim, kStripe); }
  // In numbers: keys (or values) of a head, both, and those of all heads.
  int64_t part_size() const { return kStripe * dim(); }
  int64_t head_size() const { return 2 * part_size(); }
  int64_t stripe_size() const { return kv_heads * head_size(); }
};

// The keys and values of one head of a stripe.
template <class T>
struct HeadStripe {
  T* keys;
  T* values;
  int64_t dim;
  HeadStripe(T* head, const KVShape& shape) : keys(head), values(head + shape.part_size()), dim(shape.dim()) {}

  T& key(int64_t d, int64_t slot) const { return keys[place<std::remove_const_t<T>>(d, slot, kStripe)]; }
  T& value(int64_t d, int64_t slot) const { return values[place<std::remove_const_t<T>>(slot, d, dim)]; }
};

}  // namespace llm42
