// Pieces of work for the threads of a parallel region.
//
// Each thread has a share of consecutive pieces and takes them in order, so that what it reads next follows in memory
// what it reads now. A thread that is done takes pieces from the end of another's share: one that the system holds up
// does not hold up the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace llm42 {

class Shares {
 public:
  Shares(int64_t num_pieces, int num_threads) : shares_(num_threads) {
    for (int64_t t = 0; t < num_threads; ++t)
      shares_[t].left = pack(uint32_t(num_pieces * t / num_threads), uint32_t(num_pieces * (t + 1) / num_threads));
  }

  // The next piece for a thread, or -1 when there is none.
  int64_t take(int thread) {
    const int num_threads = int(shares_.size());
    int64_t piece = take_first(shares_[thread].left);
    for (int i = 1; i < num_threads && piece < 0; ++i) piece = take_last(shares_[(thread + i) % num_threads].left);
    return piece;
  }

 private:
  struct alignas(64) Share {  // a cache line of its own
    std::atomic<uint64_t> left{0};
  };
  std::vector<Share> shares_;

  // First piece and end of what is left.
  static uint64_t pack(uint32_t first, uint32_t end) { return uint64_t{end} << 32 | first; }
  static uint32_t first_of(uint64_t left) { return uint32_t(left); }
  static uint32_t end_of(uint64_t left) { return uint32_t(left >> 32); }

  static int64_t take_first(std::atomic<uint64_t>& left) {
    uint64_t before = left.load(std::memory_order_relaxed);
    while (first_of(before) < end_of(before))
      if (left.compare_exchange_weak(before, pack(first_of(before) + 1, end_of(before)), std::memory_order_relaxed))
        return first_of(before);
    return -1;
  }
  static int64_t take_last(std::atomic<uint64_t>& left) {
    uint64_t before = left.load(std::memory_order_relaxed);
    while (first_of(before) < end_of(before))
      if (left.compare_exchange_weak(before, pack(first_of(before), end_of(before) - 1), std::memory_order_relaxed))
        return end_of(before) - 1;
    return -1;
  }
};

}  // namespace llm42
