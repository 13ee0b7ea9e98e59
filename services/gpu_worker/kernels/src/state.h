// Running results of query tiles: merging blocks and writing outputs. Leaves scores and products to others.
//
// A state is 16 lanes of O (a sum not yet divided), then 16 maxima, then 16 sums. O lies transposed, [d][lane], for wide
// tiles and straight, [lane][d], for narrow ones, which hold only their live lanes. Blocks are merged as in the online
// softmax of Milakov and Gimelshein (2018), always in block order and by the same arithmetic in both forms: a query's
// result depends on its position and its keys alone, not on the rows beside it, its chunk, or the threads.
#pragma once

#include "simd.h"

namespace radixfleet {
namespace {

// New maxima and sums; the old O is to be multiplied by a, the block's by b.
inline void merge_weights(float* maxima, const float* block_maxima, float* a, float* b) {
  float *sums = maxima + kLanes;
  const float* block_sums = block_maxima + kLanes;
  for (int j = 0; j < kLanes; j += kWidth) {
    const Vec old = load(maxima + j), add = load(block_maxima + j), top = maximum(old, add);
    const Vec base = maximum(top, splat(-1e30f));
    const Vec wa = exp2v(old - base), wb = exp2v(add - base);
    store(maxima + j, top);
    store(sums + j, load(sums + j) * wa + load(block_sums + j) * wb);
    store(a + j, wa);
    store(b + j, wb);
  }
}

inline Vec blend(Vec o, Vec a, Vec block, Vec b) { return o * a + block * b; }

inline void merge_wide(float* state, const float* block, int width) {
  float a[kLanes], b[kLanes];
  merge_weights(state + width * kLanes, block + width * kLanes, a, b);
  for (int j = 0; j < kLanes; j += kWidth) {
    const Vec va = load(a + j), vb = load(b + j);
    for (int i = j; i < width * kLanes; i += kLanes) store(state + i, blend(load(state + i), va, load(block + i), vb));
  }
}

inline void merge_narrow(float* state, const float* block, int width, int live) {
  float a[kLanes], b[kLanes];
  merge_weights(state + width * kLanes, block + width * kLanes, a, b);
  for (int lane = 0; lane < live; lane++) {
    const Vec va = splat(a[lane]), vb = splat(b[lane]);
    for (int i = lane * width; i < (lane + 1) * width; i += kWidth)
      store(state + i, blend(load(state + i), va, load(block + i), vb));
  }
}

inline void clear_state(float* state, int width) {
  memset(state, 0, (size_t)(width + 2) * kLanes * 4);
  for (int i = 0; i < kLanes; i++) state[width * kLanes + i] = -INFINITY;
}

// O of a wide state, straightened into rows[lane][width].
inline void straighten(const float* state, int width, float* rows) {
  for (int d = 0; d < width; d += 16)
    transpose16((const uint32_t*)state + d * kLanes, kLanes, (uint32_t*)rows + d, width);
}

#if defined(__AVX512F__)
// Interleaving whole registers leaves the dimensions of each 32 as 0-3 8-11 16-19 24-27 | 4-7 12-15 20-23 28-31.
inline void order_dimensions(float* row, int width) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int d = 0; d < width; d += 32) {
    const __m512 low = _mm512_loadu_ps(row + d), high = _mm512_loadu_ps(row + d + 16);
    _mm512_storeu_ps(row + d, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(row + d + 16, _mm512_permutex2var_ps(low, second, high));
  }
}
#else
inline void order_dimensions(float*, int) {}
#endif

// One lane of O divided by its sum, in the output's type.
template <class T>
inline void write_row(const float* row, int head_dim, float sum, T* out) {
  const float inverse = 1 / sum;
  int d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) store_narrow(out + d, load(row + d) * inverse);
  for (; d < head_dim; d++) out[d] = sizeof(T) == 2 ? (T)to_bf16(row[d] * inverse) : (T)(row[d] * inverse);
}

}  // namespace
}  // namespace radixfleet
