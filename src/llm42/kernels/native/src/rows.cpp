// The operations between the linear layers: norms, rotary embedding with the KV store, and SwiGLU.
//
// Invariant: each row is worked on alone, from its first feature to its last, with sums in one fixed order; the threads
// share out rows.
#include <algorithm>
#include <vector>

#include "common.h"
#include "kv.h"
#include "simd.h"

namespace llm42 {
namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 16384;

// y = x / rms(x), rounded to the model's dtype, times the weight (the order of Llama's reference code).
template <class T>
INLINE void normalize(const T* x, const T* weight, float eps, int64_t size, T* out) {
  Vec squares = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec a = load_first(x + i, int(std::min<int64_t>(kLanes, size - i)));
    squares = fma(a, a, squares);
  }
  const Vec scale = set1(1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int width = int(std::min<int64_t>(kLanes, size - i));
    T rounded[kLanes];
    store(rounded, load_first(x + i, width) * scale);
    store_first(out + i, load(rounded) * load_first(weight + i, width), width);
  }
}

template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, int64_t rows, int64_t size, T* out, T* sum) {
#pragma omp parallel for schedule(static) if (rows * size >= kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * size;
    if (residual != nullptr) {
      T* to = sum + row * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        const int width = int(std::min<int64_t>(kLanes, size - i));
        store_first(to + i, load_first(from + i, width) + load_first(residual + row * size + i, width), width);
      }
      from = to;
    }
    normalize(from, weight, eps, size, out + row * size);
  }
}

template <class T>
void rms_norm_heads(const T* x, const T* weight, float eps, int64_t rows, int64_t ldx, int64_t heads, int64_t size,
                    T* out) {
#pragma omp parallel for schedule(static) if (rows * heads * size >= kWorthThreads)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < heads; ++head)
      normalize(x + row * ldx + head * size, weight, eps, size, out + (row * heads + head) * size);
}

// Rotates the halves of one head (arXiv 2104.09864, in the order of Hugging Face checkpoints).
template <class T>
INLINE void rotate(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int width = int(std::min<int64_t>(kLanes, half - i));
    const Vec a = load_first(x + i, width), b = load_first(x + half + i, width);
    const Vec c = load_first(cos + i, width), s = load_first(sin + i, width);
    store_first(out + i, a * c - b * s, width);
    store_first(out + half + i, b * c + a * s, width);
  }
}

// Copies with NaN as 0 and infinities as the largest number; `from` may be `to`.
template <class T>
INLINE void store_finite(const T* from, int64_t count, T* to) {
  constexpr float kLargest = sizeof(T) == 4               ? std::numeric_limits<float>::max()
                             : std::is_same_v<T, Float16> ? 65504.0f
                                                          : 0x1.fep127f;
  Vec sum = zero();  // of x - x, which is 0 for finite numbers only
  for (int64_t i = 0; i < count; i += kLanes) {
    const int width = int(std::min<int64_t>(kLanes, count - i));
    const Vec x = load_first(from + i, width);
    sum = sum + (x - x);
    store_first(to + i, x, width);
  }
  if (sum_lanes(sum) == 0.0f) return;
  for (int64_t i = 0; i < count; ++i) {
    const float x = widen(from[i]);
    narrow(x != x ? 0.0f : std::min(std::max(x, -kLargest), kLargest), to + i);
  }
}

struct Rows {
  const int64_t* positions;
  const int64_t* slots;
  int64_t rows, heads, kv_heads, head_dim;
};

template <class T>
void rope_and_store_kv(const Rows& r, const T* q, int64_t ldq, const T* k, int64_t ldk, const T* v, int64_t ldv,
                       const float* rope, T* kv, T* q_out) {
  const KVShape shape{r.kv_heads, r.head_dim};
  const int64_t dim = r.head_dim, half = dim / 2, kv_width = r.kv_heads * dim;
#pragma omp parallel if (r.rows * r.heads * dim >= kWorthThreads)
  {
    std::vector<T> keys(kv_width), values(kv_width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < r.rows; ++row) {
      T* q_to = q_out + row * r.heads * dim;
      if (rope == nullptr) {
        std::memcpy(static_cast<void*>(q_to), q + row * ldq, r.heads * dim * sizeof(T));
        store_finite(k + row * ldk, kv_width, keys.data());
      } else {
        const float* cos = rope + r.positions[row] * dim;
        for (int64_t h = 0; h < r.heads; ++h) rotate(q + row * ldq + h * dim, cos, cos + half, half, q_to + h * dim);
        for (int64_t h = 0; h < r.kv_heads; ++h)
          rotate(k + row * ldk + h * dim, cos, cos + half, half, keys.data() + h * dim);
        store_finite(keys.data(), kv_width, keys.data());
      }
      store_finite(v + row * ldv, kv_width, values.data());
      const int64_t slot = r.slots[row] % kStripe;
      T* stripe = kv + r.slots[row] / kStripe * shape.stripe_size();
      for (int64_t h = 0; h < r.kv_heads; ++h) {
        const HeadStripe<T> to(stripe + h * shape.head_size(), shape);
        for (int64_t d = 0; d < dim; ++d) to.key(d, slot) = keys[h * dim + d];
        for (int64_t d = 0; d < dim; ++d) to.value(d, slot) = values[h * dim + d];
      }
    }
  }
}

template <class T>
void silu_mul(const T* gate_up, int64_t rows, int64_t size, T* out) {
#pragma omp parallel for schedule(static) if (rows * size >= kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const int width = int(std::min<int64_t>(kLanes, size - i));
      const Vec x = load_first(gate + i, width);
      // exp() ends at e^88. The square of the root of e^-x does not: it is infinite where x is far below zero.
      const Vec root = exp(x * set1(-0.5f));
      store_first(out + row * size + i, x / fma(root, root, set1(1.0f)) * load_first(gate + size + i, width), width);
    }
  }
}

}  // namespace
}  // namespace llm42

using namespace llm42;

extern "C" void llm42_add_rms_norm(int dtype, const void* x, const void* residual, const void* weight, float eps,
                                   int64_t rows, int64_t size, void* out, void* sum) {
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    add_rms_norm(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight), eps, rows,
                 size, static_cast<T*>(out), static_cast<T*>(sum));
  });
}

extern "C" void llm42_rms_norm_heads(int dtype, const void* x, const void* weight, float eps, int64_t rows, int64_t ldx,
                                     int64_t heads, int64_t size, void* out) {
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    rms_norm_heads(static_cast<const T*>(x), static_cast<const T*>(weight), eps, rows, ldx, heads, size,
                   static_cast<T*>(out));
  });
}

extern "C" void llm42_rope_and_store_kv(int dtype, const int64_t* positions, const int64_t* slots, int64_t rows,
                                        int64_t heads, int64_t kv_heads, int64_t head_dim, const void* q, int64_t ldq,
                                        const void* k, int64_t ldk, const void* v, int64_t ldv, const float* rope,
                                        void* kv, void* q_out) {
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    rope_and_store_kv(Rows{positions, slots, rows, heads, kv_heads, head_dim}, static_cast<const T*>(q), ldq,
                      static_cast<const T*>(k), ldk, static_cast<const T*>(v), ldv, rope, static_cast<T*>(kv),
                      static_cast<T*>(q_out));
  });
}

extern "C" void llm42_silu_mul(int dtype, const void* gate_up, int64_t rows, int64_t size, void* out) {
  dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    silu_mul(static_cast<const T*>(gate_up), rows, size, static_cast<T*>(out));
  });
}
