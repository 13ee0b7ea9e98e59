// The chunks of a product, as threads take them: each its own in a row, which memory serves fastest, and then the last ones
// of who is slower. Leaves what a chunk is to linear.h.
//
//   thread 0  0 > 1 > 2 > 3 . . . . < 8         thread 1  9 > 10 > 11 > 12 > 13 > 14 > 15 > 16 > 17 > 8 > ...
#pragma once

#include <stdint.h>

namespace radixfleet {
namespace {

// How many of one thread's chunks are taken: from the first on in the low half, from the last on in the high half.
struct alignas(64) Turn {
  uint64_t taken;
};

// One thread's view of all turns. There are two sets, since all threads have left a product before one begins the next but
// one: meanwhile each makes its own turn of the other set ready.
struct Turns {
  Turn* const turns;  // [2][threads], zeros at first
  const int thread, threads;
  int set = 0;

  static constexpr uint64_t kBack = (uint64_t)1 << 32;
  static int64_t bytes(int threads) { return 2 * threads * (int64_t)sizeof(Turn); }

  Turns(void* memory, int own, int all) : turns((Turn*)memory), thread(own), threads(all) {}

  int first(int chunks, int of) const { return (int)((int64_t)chunks * of / threads); }
  int first(int chunks) const { return first(chunks, thread); }

  // To be called by each thread before a product, and once all have met after it.
  void begin() { __atomic_store_n(&turns[(1 - set) * threads + thread].taken, 0, __ATOMIC_RELAXED); }
  void end() { set = 1 - set; }

  // The chunk that this thread does next, -1: none are left.
  int take(int chunks) {
    uint64_t taken;
    if (add(chunks, thread, 1, taken)) return first(chunks) + (int)(uint32_t)taken;
    for (int i = 1; i < threads; i++) {
      const int other = (thread + i) % threads;
      if (add(chunks, other, kBack, taken)) return first(chunks, other + 1) - 1 - (int)(taken / kBack);
    }
    return -1;
  }

  // One more of a thread's chunks; `taken`: of it before.
  bool add(int chunks, int of, uint64_t one, uint64_t& taken) {
    uint64_t* turn = &turns[set * threads + of].taken;
    const uint64_t size = first(chunks, of + 1) - first(chunks, of);
    taken = __atomic_load_n(turn, __ATOMIC_RELAXED);
    while ((uint32_t)taken + taken / kBack < size)
      if (__atomic_compare_exchange_n(turn, &taken, taken + one, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return true;
    return false;
  }
};

}  // namespace
}  // namespace radixfleet
