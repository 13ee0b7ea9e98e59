// What is known of each block of a row's logits, and what that says of the row. Leaves to others when it is noted.
#pragma once

#include "rows.h"

namespace radixfleet {
namespace {

// The largest of n values, NaN where any of them is.
inline float peak_of(const float* x, int n) {
  int i = 0;
  float peak = -INFINITY;
#if defined(__AVX512F__)
  __m512 best = _mm512_set1_ps(-INFINITY);
  __mmask16 broken = 0;
  for (; i < n; i += 16) {
    const __mmask16 inside = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : (__mmask16)0xffff;
    const __m512 v = _mm512_mask_loadu_ps(best, inside, x + i);
    broken |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    best = _mm512_max_ps(best, v);
  }
  if (broken) return NAN;
  peak = _mm512_reduce_max_ps(best);
#else
  bool broken = false;
  if (n >= kWidth) {
    Vec best = load(x);
    Int bad = best != best;
    for (i = kWidth; i + kWidth <= n; i += kWidth) {
      const Vec v = load(x + i);
      bad |= v != v;
      best = maximum(best, v);
    }
    float lanes[kWidth];
    store(lanes, best);
    for (int l = 0; l < kWidth; l++) {
      peak = lanes[l] > peak ? lanes[l] : peak;
      broken |= bad[l] != 0;
    }
  }
  for (; i < n; i++) {
    peak = x[i] > peak ? x[i] : peak;
    broken |= x[i] != x[i];
  }
  if (broken) return NAN;
#endif
  return peak;
}

// A block of the same row some blocks behind x: rows come from a far cache.
inline void fetch_ahead(const float* x) {
  for (int i = 0; i < kBlockLogits; i += 16) __builtin_prefetch(x + 64 * kBlockLogits + i);
}

inline int block_size(int vocab, int block) {
  const int rest = vocab - block * kBlockLogits;
  return rest < kBlockLogits ? rest : kBlockLogits;
}

constexpr float kLog2e = 1.4426950408889634f;

inline float lane_sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  return sum_of(v);
#endif
}

// 2^((x - peak) * scale) of a block of n logits, zeros behind them; returns their sum.
inline float weigh(const float* x, int n, float peak, float scale, float* out) {
  alignas(64) float held[kBlockLogits];
  if (n < kBlockLogits) {
    for (int i = 0; i < kBlockLogits; i++) held[i] = i < n ? x[i] : -INFINITY;
    x = held;
  }
  Vec sum = {};
  for (int i = 0; i < kBlockLogits; i += kWidth) {
    const Vec e = exp2v((load(x + i) - peak) * scale);
    store(out + i, e);
    sum += e;
  }
  return lane_sum(sum);
}

// A block is as its logits are now.
inline void note_block(const Blocks& blocks, const float* row, int64_t r, int vocab, int block) {
  const float *x = row + block * kBlockLogits, scale = blocks.scales[r], peak = peak_of(x, block_size(vocab, block));
  const int64_t at = r * blocks.stride + block;
  blocks.peaks[at] = peak;
  alignas(64) float unused[kBlockLogits];
  if (scale > 0) blocks.sums[at] = peak > -INFINITY ? weigh(x, block_size(vocab, block), peak, scale, unused) : 0;
}

// The largest logit of a row, NaN where any is, and where it stands first; any place where that is -infinity, for then it
// need not be in the row.
inline float peak_of_row(const float* row, const float* peaks, int vocab, int64_t& place) {
  const float peak = peak_of(peaks, blocks_of(vocab));
  place = 0;
  if (!(peak > -INFINITY)) return peak;
  int block = 0;
  while (peaks[block] != peak) block++;
  place = (int64_t)block * kBlockLogits;
  while (row[place] != peak) place++;
  return peak;
}


// 2^((x - peak) * scale) summed: over each block into `masses`, zeros behind them up to a multiple of 16; returns the sum
// of all. Where the sums that are known are of another scale, all logits are read.
inline double weigh_blocks(const Blocks& blocks, const float* row, int64_t r, int vocab, float peak, float scale,
                           float* masses) {
  const float* peaks = blocks.peaks + r * blocks.stride;
  const int n = blocks_of(vocab);
  if (blocks.scales[r] == scale) {
    memcpy(masses, blocks.sums + r * blocks.stride, n * sizeof(float));
  } else {
    alignas(64) float unused[kBlockLogits];
    for (int b = 0; b < n; b++) {
      const float* x = row + b * kBlockLogits;
      fetch_ahead(x);
      masses[b] = peaks[b] > -INFINITY ? weigh(x, block_size(vocab, b), peaks[b], scale, unused) : 0;
    }
  }
  double all = 0;
  for (int b = 0; b < n; b += kWidth) {
    float held[2][kWidth] = {};
    const int rest = n - b;
    if (rest < kWidth) {
      memcpy(held[0], peaks + b, rest * sizeof(float));
      memcpy(held[1], masses + b, rest * sizeof(float));
    }
    const Vec below = load(rest < kWidth ? held[0] : peaks + b), sums = load(rest < kWidth ? held[1] : masses + b);
    const Vec mass = sums * exp2v((below - peak) * scale);
    store(masses + b, mass);
    all += lane_sum(mass);
  }
  for (int b = padded(n, kWidth); b < padded(n, 16); b++) masses[b] = 0;
  return all;
}

void find_blocks(const BlockCall& c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int r = 0; r < c.count; r++)
    for (int b = 0; b < blocks_of(c.vocab); b++) note_block(c.blocks, c.logits + r * c.stride, r, c.vocab, b);
}

}  // namespace
}  // namespace radixfleet
