// Drawing tokens: weights of a row, the survivors of top-k, top-p and min-p, and the one that a uniform picks. A row is
// one thread's from its logits to its token, so that its weights stay in the cache. Leaves parameters to the sampler.
//
// Nothing is sorted but the few weights above a bound that surely holds all survivors; the bound is lowered until it does.
#pragma once

#include "attention_team.h"
#include "sampling.h"

namespace radixfleet {
namespace {

constexpr float kFirstBound = 1.0f / 64, kLowerBound = 1.0f / 64;  // of the largest weight, which is 1; each next one
constexpr float kLeastWeight = 1.17549435e-38f;  // below it a weight has no probability worth the name
constexpr int kFewCandidates = 96;               // sorted by insertion

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, 2011) as rng.py has it: in [0, 1), with 53 random bits.
inline double uniform(uint64_t seed, uint64_t position) {
  uint64_t c0 = position & 0xFFFFFFFF, c1 = position >> 32, c2 = 0, c3 = 0;
  uint64_t k0 = seed & 0xFFFFFFFF, k1 = seed >> 32;
  for (int round = 0; round < 10; round++) {
    const uint64_t first = 0xD2511F53 * c0, second = 0xCD9E8D57 * c2;
    c0 = (second >> 32) ^ c1 ^ k0, c1 = second & 0xFFFFFFFF;
    c2 = (first >> 32) ^ c3 ^ k1, c3 = first & 0xFFFFFFFF;
    k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF;
  }
  return (double)((c0 << 21) | (c1 >> 11)) * 0x1p-53;
}

// Where the running sum of n parts first exceeds the target; rounding never runs past the last positive part. `before`:
// the sum of the parts in front of it.
template <class Part>
inline int first_above(const Part* parts, int n, double target, double& before) {
  double sum = 0;
  int last = 0;
  before = 0;
  for (int i = 0; i < n; i++) {
    const double next = sum + parts[i];
    if (parts[i] > 0) last = i, before = sum;
    if (next > target) return last;
    sum = next;
  }
  return last;
}

// One thread's memory.
struct Draw {
  const int vocab, blocks;
  float *weights, *sums, *values;
  uint32_t *ids, *keys, *spare;

  Draw(const DrawCall& c, int thread) : vocab(c.vocab), blocks(padded(c.vocab, kWeightBlock) / kWeightBlock) {
    const int64_t width = (int64_t)blocks * kWeightBlock;
    weights = c.scratch + thread * draw_floats(c.vocab);
    values = weights + width;
    ids = (uint32_t*)(values + width);
    keys = ids + width;
    spare = keys + width;
    sums = (float*)(spare + width);
  }

  void weigh_row(const float* row, float peak, float temperature) {
    const float scale = 1.4426950408889634f / temperature;
    for (int b = 0; b < blocks; b++) {
      const int start = b * kWeightBlock, n = vocab - start;
      sums[b] = weigh(row + start, n < kWeightBlock ? n : kWeightBlock, peak, scale, weights + start);
    }
  }
  double total() const {
    double sum = 0;
    for (int b = 0; b < blocks; b++) sum += sums[b];
    return sum;
  }

  int64_t anywhere(double u) const {
    const double target = u * total();
    double before;
    const int block = first_above(sums, blocks, target, before);
    const double rest = target - before > 0 ? target - before : 0;
    return (int64_t)block * kWeightBlock + first_above(weights + block * kWeightBlock, kWeightBlock, rest, before);
  }

  // All weights of at least `bound`, in the order of tokens.
  int gather(float bound) {
    int n = 0;
    const int width = blocks * kWeightBlock;
#if defined(__AVX512F__)
    const __m512 least = _mm512_set1_ps(bound);
    __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int i = 0; i < width; i += 16, place = _mm512_add_epi32(place, _mm512_set1_epi32(16))) {
      const __m512 x = _mm512_loadu_ps(weights + i);
      const __mmask16 kept = _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ);
      if (!kept) continue;
      _mm512_mask_compressstoreu_ps(values + n, kept, x);
      _mm512_mask_compressstoreu_epi32(ids + n, kept, place);
      n += __builtin_popcount(kept);
    }
#else
    for (int i = 0; i < width; i++)
      if (weights[i] >= bound) values[n] = weights[i], ids[n++] = i;
#endif
    return n;
  }

  // The first n values in descending order; positive floats are ordered as their bits.
  const float* ranked(int n) {
    uint32_t *from = keys, *to = spare;
    memcpy(from, values, n * sizeof(float));
    if (n <= kFewCandidates) {
      for (int i = 1; i < n; i++) {
        const uint32_t key = from[i];
        int at = i;
        for (; at > 0 && from[at - 1] < key; at--) from[at] = from[at - 1];
        from[at] = key;
      }
      return (const float*)from;
    }
    for (int shift = 0; shift < 32; shift += 11) {
      uint32_t place[2048] = {};
      for (int i = 0; i < n; i++) place[from[i] >> shift & 2047]++;
      uint32_t sum = 0;
      for (int bucket = 2047; bucket >= 0; bucket--) {
        const uint32_t count = place[bucket];
        place[bucket] = sum;
        sum += count;
      }
      for (int i = 0; i < n; i++) to[place[from[i] >> shift & 2047]++] = from[i];
      uint32_t* swap = from;
      from = to, to = swap;
    }
    return (const float*)from;
  }

  // How many of the n best survive.
  static int survivors(const float* best, int n, double all, int64_t top_k, double top_p, double min_p) {
    const int most = top_k > 0 && top_k < n ? (int)top_k : n;
    double base = all;
    if (top_k > 0) {
      base = 0;
      for (int i = 0; i < most; i++) base += best[i];
    }
    const double mass = top_p * base;
    double running = 0;
    int count = 0;
    while (count < most && running < mass && best[count] >= min_p) running += best[count++];
    return count > 0 ? count : 1;  // the best one survives whatever the numbers say
  }

  int64_t filtered(double u, int64_t top_k, double top_p, double min_p) {
    const double all = total();
    // A nucleus inside a top-k is a share of the whole top-k's mass.
    const float least = fmaxf(top_k > 0 && top_p < 1 ? 0 : (float)min_p, kLeastWeight);
    const bool by_floor = top_k <= 0 && top_p >= 1;
    float bound = by_floor ? least : fmaxf(kFirstBound, least);
    int n = gather(bound);
    while (bound > least && !enough(n, all, top_k, top_p)) n = gather(bound = fmaxf(bound * kLowerBound, least));
    if (n == 0) return 0;
    const float* best = ranked(n);
    const int count = survivors(best, n, all, top_k, top_p, min_p);
    const float last = best[count - 1];
    int equal = 0;  // of the last weight, the first so many tokens
    while (equal < count && best[count - 1 - equal] == last) equal++;
    int kept = 0;
    for (int i = 0; i < n; i++) {
      if (values[i] < last || (values[i] == last && equal-- <= 0)) continue;
      values[kept] = values[i];
      ids[kept++] = ids[i];
    }
    double mass = 0, before;
    for (int i = 0; i < kept; i++) mass += values[i];
    return ids[first_above(values, kept, u * mass, before)];
  }
  bool enough(int n, double all, int64_t top_k, double top_p) const {
    if (top_k > 0) return n >= top_k;
    double sum = 0;
    for (int i = 0; i < n; i++) sum += values[i];
    return sum >= top_p * all;
  }
};

void draw_rows(const DrawCall& c) {
#pragma omp parallel num_threads(c.threads)
  {
    Draw draw(c, thread_number());
#pragma omp for schedule(dynamic, 1)
    for (int r = 0; r < c.count; r++) {
      const float* row = c.logits + r * c.stride;
      c.peaks[r] = peak_of_row(row, c.vocab, c.tokens[r]);
      if (c.greedy[r] || !isfinite(c.peaks[r])) continue;
      draw.weigh_row(row, c.peaks[r], (float)c.temperatures[r]);
      const double u = uniform(c.seeds[r], c.positions[r]);
      const bool filters = c.top_k[r] > 0 || c.top_p[r] < 1 || c.min_p[r] > 0;
      c.tokens[r] = filters ? draw.filtered(u, c.top_k[r], c.top_p[r], c.min_p[r]) : draw.anywhere(u);
    }
  }
}

}  // namespace
}  // namespace radixfleet
