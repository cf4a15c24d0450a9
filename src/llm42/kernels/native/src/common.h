// What all kernels share: dtypes by number, scratch memory, and torch's OpenMP pool.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "api.h"
#include "simd.h"

namespace llm42 {

// The numbers are those of `llm42.kernels.native.linears`.
template <class Function>
auto dispatch(int dtype, Function function) {
  switch (dtype) {
    case 0:
      return function(float{});
    case 1:
      return function(BFloat16{});
    default:
      return function(Float16{});
  }
}

inline int64_t thread_count() { return omp_get_num_threads(); }
inline int64_t thread_index() { return omp_get_thread_num(); }

// What scratch memory is for: a user keeps it until it asks for more of the same.
constexpr int kOperation = 0, kWorkspace = 1;

// fp32 memory of the calling thread; the threads of a parallel region may share it.
template <int kUse = kOperation>
float* scratch(int64_t count) {
  struct Buffer {
    float* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  if (count > buffer.size) {
    std::free(buffer.data);
    const int64_t bytes = (count * int64_t{sizeof(float)} + 4095) / 4096 * 4096;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (buffer.data == nullptr) {
      // Nothing can be thrown through a C interface, and every caller writes to what it gets.
      std::fprintf(stderr, "llm42: no memory for %lld bytes of intermediate results\n", static_cast<long long>(bytes));
      std::abort();
    }
    buffer.size = bytes / int64_t{sizeof(float)};
  }
  return buffer.data;
}

}  // namespace llm42
