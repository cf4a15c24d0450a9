// The operations of the library, as Python and `layers.cpp` call them. `dtype` numbers are those of `dispatch`.
#pragma once

#include <cstdint>

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Elements of the packed form of weights [n][k].
EXPORT int64_t llm42_packed_size(int dtype, int64_t n, int64_t k);
EXPORT void llm42_pack(int dtype, const void* weight, int64_t n, int64_t k, void* packed);
// x [rows][k] at stride ldx to out [rows][n]; bias may be null.
EXPORT void llm42_linear(int dtype, const void* x, int64_t rows, int64_t ldx, const void* packed, int64_t n, int64_t k,
                         const float* bias, void* out);
EXPORT void llm42_embedding(int dtype, const int64_t* ids, int64_t rows, const void* packed, int64_t k, void* out);
// `residual` and `sum` may be null together.
EXPORT void llm42_add_rms_norm(int dtype, const void* x, const void* residual, const void* weight, float eps,
                               int64_t rows, int64_t size, void* out, void* sum);
EXPORT void llm42_rms_norm_heads(int dtype, const void* x, const void* weight, float eps, int64_t rows, int64_t ldx,
                                 int64_t heads, int64_t size, void* out);
// `kv` is a layer's memory, as in kv.h; `rope` is [positions][2][head_dim / 2], or null for layers without rotary embedding.
EXPORT void llm42_rope_and_store_kv(int dtype, const int64_t* positions, const int64_t* slots, int64_t rows,
                                    int64_t heads, int64_t kv_heads, int64_t head_dim, const void* q, int64_t ldq,
                                    const void* k, int64_t ldk, const void* v, int64_t ldv, const float* rope,
                                    void* kv, void* q_out);
// `segments` is [num_segments][4]: first row, position of the first row, rows, and where its page table begins in
// `blocks`. Rows of no segment (padding) get zeros; `window` 0 is none.
EXPORT void llm42_attention(int dtype, const void* q, int64_t rows, int64_t ldq, const void* kv, int64_t heads,
                            int64_t kv_heads, int64_t head_dim, const int64_t* segments, int64_t num_segments,
                            const int32_t* blocks, int64_t block_size, int64_t window, float scale, void* out);
EXPORT void llm42_silu_mul(int dtype, const void* gate_up, int64_t rows, int64_t size, void* out);
}
