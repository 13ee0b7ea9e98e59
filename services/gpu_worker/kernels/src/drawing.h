// Drawing tokens: the survivors of top-k, top-p and min-p, and the one that a uniform picks. What is known of a row's blocks
// tells which of them to read. Leaves parameters to the sampler.
//
// Weights above a bound are gathered, which is lowered until it holds all survivors; of those only the ones near the cut are
// sorted.
#pragma once

#include "attention_team.h"
#include "sampling.h"

namespace radixfleet {
namespace {

constexpr float kFirstBound = 1.0f / 64, kLowerBound = 1.0f / 64;  // of the largest weight, which is 1; each next one
constexpr float kLeastWeight = 1.17549435e-38f;  // below it a weight has no probability worth the name
constexpr float kSlack = 1e-3f;                  // of an exponent: more than rounding makes of a weight
constexpr float kNextBound = 0.5f, kBelow = 3;   // tried in turn, without reading logits; weights of a block that miss it
constexpr int kHalvings = 12;
constexpr int kCuts = 10;                        // halvings of the logarithms between which the cut of a nucleus is
constexpr int kFewCandidates = 96;               // sorted by insertion
constexpr int kReadAhead = 24;                   // blocks fetched before they are read
constexpr int kChunk = 64;                       // weights summed before they are looked at one by one

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

// The sum of the values of at least `least`.
inline double sum_above(const float* values, int n, float least) {
  constexpr int lanes = 16;
  double sums[lanes] = {}, sum = 0;
  int i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; l++) sums[l] += values[i + l] >= least ? values[i + l] : 0.0f;
  for (; i < n; i++) sum += values[i] >= least ? values[i] : 0.0f;
  for (int l = 0; l < lanes; l++) sum += sums[l];
  return sum;
}

// As first_above, of many: chunks that do not reach the target are summed at once.
inline int first_of_many_above(const float* parts, int n, double target) {
  double sum = 0, unused;
  int start = 0;
  for (; start + kChunk < n; start += kChunk) {
    const double next = sum + sum_above(parts + start, kChunk, 0);
    if (next > target) break;
    sum = next;
  }
  return start + first_above(parts + start, n - start, target - sum, unused);
}

// One row at a time, in one thread's memory.
struct Draw {
  const int vocab, blocks;
  const float *row = nullptr, *peaks = nullptr;
  float peak = 0, scale = 0;
  float *masses, *values;  // of the blocks; of the candidates
  uint32_t *ids, *keys, *spare;

  Draw(const DrawCall& c, int thread) : vocab(c.vocab), blocks(blocks_of(c.vocab)) {
    const int64_t width = (int64_t)blocks * kBlockLogits;
    masses = c.scratch + thread * draw_floats(c.vocab);
    values = masses + padded(blocks, 16);
    ids = (uint32_t*)(values + width);
    keys = ids + width;
    spare = keys + width;
  }

  void begin(const DrawCall& c, int r, float highest, float temperature) {
    row = c.logits + r * c.stride, peaks = c.blocks.peaks + r * c.blocks.stride;
    peak = highest, scale = kLog2e / temperature;
  }
  float crest(int b) const { return (peaks[b] - peak) * scale; }  // the exponent of a block's largest weight
  void weigh_block(int b, float* weights) const {
    weigh(row + b * kBlockLogits, block_size(vocab, b), peak, scale, weights);
  }

  // `all`: the sum of the masses.
  int64_t anywhere(double u, double all) const {
    alignas(64) float parts[kBlockLogits];
    const double target = u * all;
    double before;
    const int block = first_above(masses, blocks, target, before);
    weigh_block(block, parts);
    const double rest = target - before > 0 ? target - before : 0;
    return (int64_t)block * kBlockLogits + first_above(parts, kBlockLogits, rest, before);
  }

  // All weights of at least `bound`, in the order of tokens. Most blocks are passed by for their peaks, and most logits of
  // the others for their exponents.
  int gather(float bound) {
    int n = 0;
    const float least = log2f(bound) - kSlack;
    alignas(64) float held[kBlockLogits];
    const int reached = blocks_that_reach(least);
    for (int k = 0; k < reached; k++) {
      const int b = (int)keys[k], size = block_size(vocab, b);
      const float* x = row + b * kBlockLogits;
      for (int i = 0; k + kReadAhead < reached && i < kBlockLogits; i += 16)
        __builtin_prefetch(row + (int64_t)keys[k + kReadAhead] * kBlockLogits + i);
      if (size < kBlockLogits) {
        for (int i = 0; i < kBlockLogits; i++) held[i] = i < size ? x[i] : -INFINITY;
        x = held;
      }
      for (int i = 0; i < kBlockLogits; i += kWidth)
        n = gather_lanes((load(x + i) - peak) * scale, b * kBlockLogits + i, least, n);
    }
    return weigh_gathered(n, bound);
  }
  // Their numbers become keys; returns how many.
  int blocks_that_reach(float least) {
    int n = 0;
    for (int b = 0; b < blocks; b++) {  // no jumps: nothing foretells which
      keys[n] = (uint32_t)b;
      n += crest(b) >= least;
    }
    return n;
  }
  // Exponents of at least `least`, with their tokens, behind the n that are gathered.
  int gather_lanes(Vec exponents, int start, float least, int n) {
#if defined(__AVX512F__)
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)exponents, _mm512_set1_ps(least), _CMP_GE_OQ);
    if (!kept) return n;
    return put(kept, (__m512)exponents, _mm512_add_epi32(first, _mm512_set1_epi32(start)), n);
#else
    float held[kWidth];
    store(held, exponents);
    for (int i = 0; i < kWidth; i++)
      if (held[i] >= least) values[n] = held[i], ids[n++] = start + i;
    return n;
#endif
  }
  // The first n exponents become weights; those of at least `bound` stay. There is room up to a whole vector.
  int weigh_gathered(int n, float bound) {
    int kept = 0;
    for (int i = n; i < padded(n, kWidth); i++) values[i] = -INFINITY;
    for (int i = 0; i < n; i += kWidth) {
      const Vec weights = exp2v(load(values + i));
#if defined(__AVX512F__)
      const __mmask16 high = _mm512_cmp_ps_mask((__m512)weights, _mm512_set1_ps(bound), _CMP_GE_OQ);
      kept = put(high, (__m512)weights, _mm512_loadu_si512(ids + i), kept);
#else
      float held[kWidth];
      store(held, weights);
      for (int l = 0; l < kWidth; l++)
        if (held[l] >= bound) values[kept] = held[l], ids[kept++] = ids[i + l];
#endif
    }
    return kept;
  }
#if defined(__AVX512F__)
  // Some lanes behind the n that are there. Whole vectors are written, which is faster than some of their lanes: what is
  // behind n was read before, or is not yet written.
  int put(__mmask16 lanes, __m512 weights, __m512i tokens, int n) {
    _mm512_storeu_ps(values + n, _mm512_maskz_compress_ps(lanes, weights));
    _mm512_storeu_si512(ids + n, _mm512_maskz_compress_epi32(lanes, tokens));
    return n + __builtin_popcount(lanes);
  }
#endif

  // The first n keys in descending order; positive floats are ordered as their bits.
  const float* ranked(int n) {
    uint32_t *from = keys, *to = spare;
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

  // A bound that about `count` blocks reach, and no fewer, so that as many weights do.
  float bound_of(int64_t count) const {
    const int n = blocks;
    if (count >= n) return kLeastWeight;
    float low = -126, high = 0;  // exponents: enough blocks reach low, or all that matter
    for (int i = 0; i < kHalvings; i++) {
      const float middle = 0.5f * (low + high), level = peak + middle / scale;
      int reached = 0;
      for (int b = 0; b < n; b++) reached += peaks[b] >= level;
      (reached >= count ? low : high) = middle;
      if (reached >= count && reached < count + count / 4) break;
    }
    return exp2f(low);
  }

  // A bound above which there is probably so much mass, by the masses of the blocks: of each, a few weights are below.
  float bound_of_mass(double mass) const {
    float bound = kFirstBound;
    for (; bound > kLeastWeight; bound *= kNextBound) {
      Vec above = {};
      for (int b = 0; b + kWidth <= blocks; b += kWidth) above += maximum(load(masses + b) - kBelow * bound, Vec{});
      if (lane_sum(above) >= mass) break;
    }
    return bound;
  }

  static int equals_of(const float* best, int count) {
    int equal = 0;
    while (equal < count && best[count - 1 - equal] == best[count - 1]) equal++;
    return equal;
  }

  // Of the first n values the best k, and of these a share of their mass, above a floor.
  int cut_by_rank(int n, int64_t top_k, double top_p, double min_p, float& last) {
    memcpy(keys, values, n * sizeof(float));
    const float* best = ranked(n);
    const int most = top_k < n ? (int)top_k : n;
    double base = 0, running = 0;
    for (int i = 0; i < most; i++) base += best[i];
    const double mass = top_p < 1 ? top_p * base : INFINITY;
    int count = 0;
    while (count < most && running < mass && best[count] >= min_p) running += best[count++];
    if (count == 0) count = 1;  // the best one survives whatever the numbers say
    last = best[count - 1];
    return equals_of(best, count);
  }

  // Of the first n values, none below `bound`, the best that make up `mass`. Only those near the cut are sorted.
  int cut_by_mass(int n, double mass, float bound, float& last) {
    if (!(mass < INFINITY)) return last = bound, n;
    float low = bound, high = INFINITY;  // the cut is in [low, high), or below all
    double above = 0;                    // of the values from `high` on
    for (int i = 0; n > kFewCandidates && i < kCuts; i++) {
      const float middle = between(low, high < 1 ? high : 2.0f);
      const double sum = sum_above(values, n, middle);
      if (sum >= mass) low = middle;
      else high = middle, above = sum;
    }
    const int m = take_keys(n, low, high);
    if (m == 0) return last = high, n;
    const float* best = ranked(m);
    int count = 0;
    while (count < m && above < mass) above += best[count++];
    if (count == 0) count = 1;
    last = best[count - 1];
    return equals_of(best, count);
  }
  // Those of the first n values in [low, high) become keys; returns how many.
  int take_keys(int n, float low, float high) {
    int m = 0, i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
      const __m512 x = _mm512_loadu_ps(values + i);
      const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_GE_OQ);
      const __mmask16 taken = _mm512_mask_cmp_ps_mask(above, x, _mm512_set1_ps(high), _CMP_LT_OQ);
      if (!taken) continue;
      _mm512_storeu_ps(keys + m, _mm512_maskz_compress_ps(taken, x));
      m += __builtin_popcount(taken);
    }
#endif
    for (; i < n; i++) {  // no jumps: few are taken, and nothing foretells which
      memcpy(keys + m, values + i, sizeof(float));
      m += values[i] >= low && values[i] < high;
    }
    return m;
  }
  // Positive floats are ordered as their bits, which are nearly their logarithms.
  static float between(float low, float high) {
    uint32_t from, to;
    memcpy(&from, &low, sizeof from), memcpy(&to, &high, sizeof to);
    from += (to - from) / 2;
    memcpy(&low, &from, sizeof low);
    return low;
  }

  // Of the first n candidates those above `last` and the first `equal` that are it; returns how many.
  int keep(int n, float last, int equal) {
    int kept = 0;
#if defined(__AVX512F__)
    for (int i = 0; i < n; i += 16) {
      const __mmask16 inside = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : (__mmask16)0xffff;
      const __m512 x = _mm512_maskz_loadu_ps(inside, values + i);
      const __m512i tokens = _mm512_maskz_loadu_epi32(inside, ids + i);
      uint32_t wanted = _mm512_mask_cmp_ps_mask(inside, x, _mm512_set1_ps(last), _CMP_GT_OQ);
      uint32_t equals = _mm512_mask_cmp_ps_mask(inside, x, _mm512_set1_ps(last), _CMP_EQ_OQ);
      for (; equals && equal > 0; equal--, equals &= equals - 1) wanted |= equals & -equals;
      kept = put((__mmask16)wanted, x, tokens, kept);
    }
#else
    for (int i = 0; i < n; i++) {
      if (values[i] < last || (values[i] == last && equal-- <= 0)) continue;
      values[kept] = values[i];
      ids[kept++] = ids[i];
    }
#endif
    return kept;
  }

  // `all`: as for anywhere, or infinity where no share of it is wanted.
  int64_t filtered(double u, double all, int64_t top_k, double top_p, double min_p) {
    // A nucleus inside a top-k is a share of the whole top-k's mass.
    const float least = fmaxf(top_k > 0 && top_p < 1 ? 0 : (float)min_p, kLeastWeight);
    const bool by_floor = top_k <= 0 && top_p >= 1;
    float bound = by_floor ? least : fmaxf(top_k > 0 ? bound_of(top_k) : bound_of_mass(top_p * all), least);
    int n = gather(bound);
    while (bound > least && !enough(n, all, top_k, top_p)) n = gather(bound = fmaxf(bound * kLowerBound, least));
    if (n == 0) return 0;
    float last;  // the least that survives; of its equals, the first so many tokens
    const int equal =
        top_k > 0 ? cut_by_rank(n, top_k, top_p, min_p, last) : cut_by_mass(n, top_p * all, bound, last);
    const int kept = keep(n, last, equal);
    return ids[first_of_many_above(values, kept, u * sum_above(values, kept, 0))];
  }
  bool enough(int n, double all, int64_t top_k, double top_p) const {
    if (top_k > 0) return n >= top_k;
    return sum_above(values, n, 0) >= top_p * all;
  }
};

// Rows that only want their likeliest token are done before another thread is awake.
inline int drawing_threads(const DrawCall& c) {
  int rows = 0;
  for (int r = 0; r < c.count; r++) rows += !c.greedy[c.slots[r]];
  return rows < 2 ? 1 : c.threads;
}

void draw_rows(const DrawCall& c) {
#pragma omp parallel num_threads(drawing_threads(c))
  {
    Draw draw(c, thread_number());
#pragma omp for schedule(dynamic, 1)
    for (int r = 0; r < c.count; r++) {
      const float* row = c.logits + r * c.stride;
      c.peaks[r] = peak_of_row(row, c.blocks.peaks + r * c.blocks.stride, c.vocab, c.tokens[r]);
      const int64_t slot = c.slots[r], top_k = c.top_k[slot];
      if (c.greedy[slot] || !isfinite(c.peaks[r])) continue;
      const double u = uniform(c.seeds[slot], c.positions[r]), top_p = c.top_p[slot], min_p = c.min_p[slot];
      draw.begin(c, r, c.peaks[r], (float)c.temperatures[slot]);
      // The best k, and those above a floor, are found by the peaks alone.
      const bool by_peaks = top_k > 0 || (top_p >= 1 && min_p > 0);
      const double all =
          by_peaks ? INFINITY : weigh_blocks(c.blocks, row, r, c.vocab, draw.peak, draw.scale, draw.masses);
      const bool filters = by_peaks || top_p < 1;
      c.tokens[r] = filters ? draw.filtered(u, all, top_k, top_p, min_p) : draw.anywhere(u, all);
    }
  }
}

}  // namespace
}  // namespace radixfleet
