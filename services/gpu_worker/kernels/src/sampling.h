// Passes over logits around the choice of a token: bitmasks and scores. Leaves choosing to drawing.h.
#pragma once

#include "blocks.h"

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

inline void mask_block(const MaskCall& c, float* row, int64_t r, int w, uint32_t allowed) {
  fetch_ahead(row + w * 32);
  forbid(row + w * 32, allowed, block_size(c.vocab, w));
  note_block(c.blocks, row, r, c.vocab, w);
}

// For who asks a row's peaks for its likeliest token and nothing else: blocks that cannot hold it stay as they are, and
// have a peak of -infinity.
inline void mask_likeliest(const MaskCall& c, float* row, int64_t r, const uint32_t* allowed) {
  float *peaks = c.blocks.peaks + r * c.blocks.stride, best = -INFINITY;
  for (int w = 0; w < blocks_of(c.vocab); w++) {
    if (!allowed[w] || peaks[w] <= best) {
      peaks[w] = -INFINITY;
      continue;
    }
    if (allowed[w] != ~0u) mask_block(c, row, r, w, allowed[w]);  // also where some logit is NaN
    if (peaks[w] > best) best = peaks[w];
  }
}

void mask_rows(const MaskCall& c) {
  static_assert(kBlockLogits == 32, "a word of a mask is a block");
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int i = 0; i < c.count; i++) {
    const int64_t r = c.rows[i];
    float* row = c.logits + r * c.stride;
    const uint32_t* allowed = c.words + i * c.word_stride;
    if (c.likeliest && c.likeliest[i]) {
      mask_likeliest(c, row, r, allowed);
      continue;
    }
    for (int w = 0; w < blocks_of(c.vocab); w++) {
      if (allowed[w] == ~0u) continue;
      if (allowed[w]) {
        mask_block(c, row, r, w, allowed[w]);
      } else {
        forbid(row + w * 32, 0, block_size(c.vocab, w));
        c.blocks.peaks[r * c.blocks.stride + w] = -INFINITY, c.blocks.sums[r * c.blocks.stride + w] = 0;
      }
    }
  }
}

// The k largest of a row, in descending order; equal ones in the order of tokens.
inline void top_of(const float* row, const float* peaks, int vocab, int k, float* values, int32_t* tokens) {
  for (int i = 0; i < k; i++) values[i] = -INFINITY, tokens[i] = i;
  int held = 0;
  for (int b = 0; b < blocks_of(vocab); b++) {
    if (held == k && !(peaks[b] > values[k - 1])) continue;
    const int start = b * kBlockLogits;
    for (int i = start; i < start + block_size(vocab, b); i++) {
      const float x = row[i];
      if (held == k && !(x > values[k - 1])) continue;
      int at = held < k ? held++ : k - 1;
      for (; at > 0 && values[at - 1] < x; at--) values[at] = values[at - 1], tokens[at] = tokens[at - 1];
      values[at] = x, tokens[at] = i;
    }
  }
}

void score_rows(const ScoreCall& c) {
#pragma omp parallel num_threads(c.threads)
  {
    float* masses = (float*)thread_scratch(padded(blocks_of(c.vocab), 16) * sizeof(float));
#pragma omp for schedule(static)
    for (int r = 0; r < c.count; r++) {
      const float *row = c.logits + r * c.stride, *peaks = c.blocks.peaks + r * c.blocks.stride;
      const float peak = peak_of(peaks, blocks_of(c.vocab));
      // Of a broken row NaN, as its peak is.
      const float norm = masses ? (float)(peak + log(weigh_blocks(c.blocks, row, r, c.vocab, peak, kLog2e, masses))) : NAN;
      c.norms[r] = norm;
      c.chosen[r] = row[c.targets[r]] - norm;
      float* values = c.values + (int64_t)r * c.top;
      if (c.top > 0) top_of(row, peaks, c.vocab, c.top, values, c.tokens + (int64_t)r * c.top);
      for (int i = 0; i < c.top; i++) values[i] -= norm;
    }
  }
}

}  // namespace
}  // namespace radixfleet
