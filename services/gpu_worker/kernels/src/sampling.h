// Passes over logits before a token is chosen: bitmasks, and weights relative to the likeliest token with sums of their
// blocks. Leaves choosing to the sampler.
#pragma once

#include "simd.h"

namespace radixfleet {
namespace {

inline void forbid(float* logits, uint32_t allowed, int n) {
#if defined(__AVX512F__)
  const __m512 never = _mm512_set1_ps(-INFINITY);
  const uint32_t inside = n < 32 ? (1u << n) - 1 : ~0u, bits = ~allowed & inside;
  _mm512_mask_storeu_ps(logits, (__mmask16)bits, never);
  _mm512_mask_storeu_ps(logits + 16, (__mmask16)(bits >> 16), never);
#else
  for (int i = 0; i < n; i++) logits[i] = allowed >> i & 1 ? logits[i] : -INFINITY;
#endif
}

void mask_rows(const MaskCall& c) {
  const int words = (c.vocab + 31) / 32;
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int r = 0; r < c.count; r++) {
    float* row = c.logits + c.rows[r] * c.stride;
    const uint32_t* allowed = c.words + r * c.word_stride;
    for (int w = 0; w < words; w++) {
      const int n = c.vocab - w * 32;
      if (allowed[w] != ~0u) forbid(row + w * 32, allowed[w], n < 32 ? n : 32);
    }
  }
}

constexpr int kPeakBlock = 2048;  // of it only the best is looked through for the place

// The largest of n values; `broken` where any of them is NaN.
inline float peak_of(const float* x, int n, bool& broken) {
  Vec best[2] = {splat(-INFINITY), splat(-INFINITY)};
  Int bad = {};
  int i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    const Vec a = load(x + i), b = load(x + i + kWidth);
    best[0] = maximum(best[0], a);
    best[1] = maximum(best[1], b);
    bad |= (a != a) | (b != b);
  }
  float lanes[kWidth], peak = -INFINITY;
  store(lanes, maximum(best[0], best[1]));
  for (int l = 0; l < kWidth; l++) {
    peak = lanes[l] > peak ? lanes[l] : peak;
    broken |= bad[l] != 0;
  }
  for (; i < n; i++) {
    peak = x[i] > peak ? x[i] : peak;
    broken |= x[i] != x[i];
  }
  return peak;
}

// The largest logit of each row, NaN where any of them is, and where it stands first.
void peak_rows(const PeakCall& c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int r = 0; r < c.count; r++) {
    const float* row = c.logits + r * c.stride;
    float peak = -INFINITY;
    bool broken = false;
    int64_t place = 0;
    for (int start = 0; start < c.vocab; start += kPeakBlock) {
      const int n = c.vocab - start < kPeakBlock ? c.vocab - start : kPeakBlock;
      const float here = peak_of(row + start, n, broken);
      if (here > peak) peak = here, place = start;
    }
    while (!broken && row[place] != peak) place++;
    c.peaks[r] = broken ? NAN : peak;
    c.places[r] = place;
  }
}

// e^((x - peak) / temperature) of one block of at most kWeightBlock logits, zeros behind them; returns their sum.
inline float weigh(const float* x, int n, float peak, float scale, float* out) {
  alignas(64) float held[kWeightBlock];
  if (n < kWeightBlock) {
    for (int i = 0; i < kWeightBlock; i++) held[i] = i < n ? x[i] : -INFINITY;
    x = held;
  }
  Vec sum = {};
  for (int i = 0; i < kWeightBlock; i += kWidth) {
    const Vec e = exp2v((load(x + i) - peak) * scale);
    store(out + i, e);
    sum += e;
  }
  return sum_of(sum);
}

void weigh_rows(const WeightCall& c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int r = 0; r < c.count; r++) {
    const int64_t from = c.rows[r];
    const float* row = c.logits + from * c.stride;
    const float peak = c.peaks[from], scale = 1.4426950408889634f / c.temperatures[r];
    for (int b = 0; b < c.blocks; b++) {
      const int start = b * kWeightBlock, n = c.vocab - start;
      float* out = c.weights + ((int64_t)r * c.blocks + b) * kWeightBlock;
      c.sums[(int64_t)r * c.blocks + b] = weigh(row + start, n < kWeightBlock ? n : kWeightBlock, peak, scale, out);
    }
  }
}

}  // namespace
}  // namespace radixfleet
