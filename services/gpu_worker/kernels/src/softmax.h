// Softmax of one query tile over one block of keys, and the merging of blocks. Leaves the products to the engines.
//
// Scores come as S[key][16 lanes], so that maxima and sums run down the registers, never across them. Everything is
// kept in base 2: p = 2^(s * factor - m), with m the block's maximum of s * factor. Blocks are merged as in the
// online softmax of Milakov and Gimelshein (2018), always in block order: a query's result depends on its position
// and its keys alone, not on the rows beside it, its chunk, or the threads.
#pragma once

#include "simd.h"

namespace radixfleet {
namespace {

// Which keys the lanes of a tile may see: positions first[lane]..last[lane].
struct Visible {
  int32_t first[kLanes], last[kLanes];
  int32_t min_last, max_first, max_last, min_first;
};

inline void cap_scores(float* s, int count, float scale, float cap) {
  for (int i = 0; i < count * kLanes; i += kWidth) store(s + i, tanhv(load(s + i) * (scale / cap)) * cap);
}

inline void mask_scores(float* s, int count, int first_key, const Visible& visible) {
  for (int j = 0; j < kLanes; j += kWidth) {
    const Int first = load_as<Int>(visible.first + j), last = load_as<Int>(visible.last + j);
    for (int i = 0; i < count; i++) {
      const int32_t key = first_key + i;
      float* row = s + i * kLanes + j;
      store(row, (last >= key) & (first <= key) ? load(row) : splat(-INFINITY));
    }
  }
}

// Sums are kept by key modulo 4. Turns S into P in place: floats, or pairs [count / 2][16][2] of bf16.
template <bool kPairs>
inline void exponentials(float* s, int count, float factor, Vec m, float* sums) {
  Vec sum[4] = {};
  for (int i = 0; i < count; i += 4) {
    Vec p[4];
    for (int k = 0; k < 4; k++) {
      p[k] = exp2v<kPairs>(load(s + (i + k) * kLanes) * factor - m);
      sum[k] += p[k];
    }
    if (kPairs) {
      store_as(s + i / 2 * kLanes, pack_pairs(p[0], p[1]));
      store_as(s + (i / 2 + 1) * kLanes, pack_pairs(p[2], p[3]));
    } else {
      for (int k = 0; k < 4; k++) store(s + (i + k) * kLanes, p[k]);
    }
  }
  store(sums, (sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// count is a multiple of 16; maxima and sums are those of this block alone.
template <bool kPairs>
inline void softmax(float* s, int count, float factor, float* maxima, float* sums) {
  for (int j = 0; j < kLanes; j += kWidth) {
    Vec m[4];
    for (int k = 0; k < 4; k++) m[k] = load(s + k * kLanes + j);
    for (int i = 4; i < count; i += 4)
      for (int k = 0; k < 4; k++) m[k] = maximum(m[k], load(s + (i + k) * kLanes + j));
    const Vec top = maximum(maximum(m[0], m[1]), maximum(m[2], m[3])) * factor;
    store(maxima + j, top);
    // A lane that sees no key of this block gets zeros, not NaN.
    exponentials<kPairs>(s + j, count, factor, maximum(top, splat(-1e30f)), sums + j);
  }
}

// state += block, both as [width][16] sums followed by 16 maxima and 16 sums.
inline void merge(float* state, const float* block, int width) {
  float *maxima = state + width * kLanes, *sums = maxima + kLanes;
  const float *block_maxima = block + width * kLanes, *block_sums = block_maxima + kLanes;
  for (int j = 0; j < kLanes; j += kWidth) {
    const Vec old = load(maxima + j), add = load(block_maxima + j), top = maximum(old, add);
    const Vec base = maximum(top, splat(-1e30f));
    const Vec a = exp2v<false>(old - base), b = exp2v<false>(add - base);
    store(maxima + j, top);
    store(sums + j, load(sums + j) * a + load(block_sums + j) * b);
    for (int d = 0; d < width; d++) {
      float* o = state + d * kLanes + j;
      store(o, load(o) * a + load(block + d * kLanes + j) * b);
    }
  }
}

inline void clear_state(float* state, int width) {
  memset(state, 0, (size_t)(width + 2) * kLanes * 4);
  for (int i = 0; i < kLanes; i++) state[width * kLanes + i] = -INFINITY;
}

}  // namespace
}  // namespace radixfleet
