// All decoder layers of a pass in one call: the operations of the other files, in the order of `Kernels.run_layers`.
//
// Invariant: it computes what the operations one by one compute, bit for bit; it only spares the calls between them.
#include "api.h"
#include "common.h"

namespace {

using namespace llm42;

struct LinearWeights {
  const void* packed;
  const float* bias;
  int64_t out_features, in_features;
};

void apply(int dtype, const LinearWeights& w, const void* x, int64_t rows, void* out) {
  llm42_linear(dtype, x, rows, w.in_features, w.packed, w.out_features, w.in_features, w.bias, out);
}

}  // namespace

// As `llm42.kernels.native.layers` lays them out.
struct Llm42Layer {
  const void* input_norm;
  LinearWeights qkv;
  const void* q_norm;  // null: none
  const void* k_norm;
  LinearWeights o;
  const void* post_attention_norm;
  LinearWeights gate_up, down;
  const float* rope;  // null: no rotary embedding
  int64_t window;     // 0: none
  void* kv;
};

struct Llm42Stack {
  const Llm42Layer* layers;
  const void* final_norm;
  int64_t num_layers, hidden, heads, kv_heads, head_dim, block_size;
  float eps, scale;
  int32_t dtype;
};

struct Llm42Pass {
  int64_t rows;
  const int64_t* positions;
  const int64_t* slots;
  const int64_t* segments;
  int64_t num_segments;
  const int32_t* blocks;
};

// x and out are [rows][hidden]; out gets the final norm of the last layer's output.
extern "C" EXPORT void llm42_layers(const Llm42Stack* s, const Llm42Pass* pass, const void* x, void* out) {
  const int dtype = s->dtype;
  const int64_t rows = pass->rows, size = dtype == 0 ? 4 : 2, intermediate = s->layers[0].down.in_features;
  const int64_t q_width = s->heads * s->head_dim, kv_width = s->kv_heads * s->head_dim, qkv_width = q_width + 2 * kv_width;
  int64_t used = 0;
  const int64_t widths[] = {s->hidden, s->hidden, s->hidden, s->hidden, qkv_width, q_width, q_width, kv_width, q_width,
                            2 * intermediate, intermediate};
  for (int64_t width : widths) used += (rows * width * size + 63) / 64 * 64;
  char* memory = reinterpret_cast<char*>(scratch<kWorkspace>(used / int64_t{sizeof(float)}));
  auto take = [&](int64_t width) {
    char* taken = memory;
    memory += (rows * width * size + 63) / 64 * 64;
    return taken;
  };
  void* normed = take(s->hidden);
  void* residual = take(s->hidden);
  void* next_residual = take(s->hidden);
  void* branch = take(s->hidden);
  char* qkv = take(qkv_width);
  void* q_rotated = take(q_width);
  void* q_normed = take(q_width);
  void* k_normed = take(kv_width);
  void* attended = take(q_width);
  void* gate_up = take(2 * intermediate);
  void* gated = take(intermediate);
  auto add_norm = [&](const void* weight, void* to) {
    llm42_add_rms_norm(dtype, branch, residual, weight, s->eps, rows, s->hidden, to, next_residual);
    std::swap(residual, next_residual);
  };
  for (int64_t i = 0; i < s->num_layers; ++i) {
    const Llm42Layer& layer = s->layers[i];
    if (i == 0) {
      llm42_add_rms_norm(dtype, x, nullptr, layer.input_norm, s->eps, rows, s->hidden, normed, nullptr);
      std::memcpy(residual, x, rows * s->hidden * size);
    } else {
      add_norm(layer.input_norm, normed);
    }
    apply(dtype, layer.qkv, normed, rows, qkv);
    const void* q = qkv;
    const void* k = qkv + q_width * size;
    const void* v = qkv + (q_width + kv_width) * size;
    int64_t ldq = qkv_width, ldk = qkv_width;
    if (layer.q_norm != nullptr) {
      llm42_rms_norm_heads(dtype, q, layer.q_norm, s->eps, rows, ldq, s->heads, s->head_dim, q_normed);
      llm42_rms_norm_heads(dtype, k, layer.k_norm, s->eps, rows, ldk, s->kv_heads, s->head_dim, k_normed);
      q = q_normed, k = k_normed, ldq = q_width, ldk = kv_width;
    }
    llm42_rope_and_store_kv(dtype, pass->positions, pass->slots, rows, s->heads, s->kv_heads, s->head_dim, q, ldq, k, ldk,
                            v, qkv_width, layer.rope, layer.kv, q_rotated);
    llm42_attention(dtype, q_rotated, rows, q_width, layer.kv, s->heads, s->kv_heads, s->head_dim, pass->segments,
                    pass->num_segments, pass->blocks, s->block_size, layer.window, s->scale, attended);
    apply(dtype, layer.o, attended, rows, branch);
    add_norm(layer.post_attention_norm, normed);
    apply(dtype, layer.gate_up, normed, rows, gate_up);
    llm42_silu_mul(dtype, gate_up, rows, intermediate, gated);
    apply(dtype, layer.down, gated, rows, branch);
  }
  add_norm(s->final_norm, out);
}
