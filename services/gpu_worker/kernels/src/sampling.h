// Passes over logits around the choice of a token: bitmasks, the likeliest token, weights relative to it, scores. Leaves
// choosing to drawing.h.
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

// The largest logit of a row, NaN where any of them is, and where it stands first.
inline float peak_of_row(const float* row, int vocab, int64_t& place) {
  float peak = -INFINITY;
  bool broken = false;
  place = 0;
  for (int start = 0; start < vocab; start += kPeakBlock) {
    const int n = vocab - start < kPeakBlock ? vocab - start : kPeakBlock;
    const float here = peak_of(row + start, n, broken);
    if (here > peak) peak = here, place = start;
  }
  if (broken) return NAN;
  while (row[place] != peak) place++;
  return peak;
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

// The k largest of a row, in descending order; equal ones in the order of tokens.
inline void top_of(const float* row, int n, int k, float* values, int64_t* tokens) {
  for (int i = 0; i < k; i++) values[i] = -INFINITY, tokens[i] = i;
  int held = 0;
  const auto take = [&](float x, int token) {
    int at = held < k ? held++ : k - 1;
    for (; at > 0 && values[at - 1] < x; at--) values[at] = values[at - 1], tokens[at] = tokens[at - 1];
    values[at] = x, tokens[at] = token;
  };
  int i = 0;
  for (; i < n && held < k; i++) take(row[i], i);
  for (; i + kWidth <= n; i += kWidth) {
    const Int above = load(row + i) > splat(values[k - 1]);
    bool any = false;
    for (int l = 0; l < kWidth; l++) any |= above[l] != 0;
    for (int l = 0; any && l < kWidth; l++)
      if (row[i + l] > values[k - 1]) take(row[i + l], i + l);
  }
  for (; i < n; i++)
    if (row[i] > values[k - 1]) take(row[i], i);
}

void score_rows(const ScoreCall& c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int r = 0; r < c.count; r++) {
    const float* row = c.logits + r * c.stride;
    bool broken = false;
    const float peak = peak_of(row, c.vocab, broken);
    alignas(64) float unused[kWeightBlock];
    double sum = 0;
    for (int start = 0; start < c.vocab; start += kWeightBlock) {
      const int n = c.vocab - start;
      sum += weigh(row + start, n < kWeightBlock ? n : kWeightBlock, peak, 1.4426950408889634f, unused);
    }
    c.norms[r] = broken ? NAN : (float)(peak + log(sum));
    if (c.top > 0) top_of(row, c.vocab, c.top, c.values + (int64_t)r * c.top, c.tokens + (int64_t)r * c.top);
  }
}

}  // namespace
}  // namespace radixfleet
