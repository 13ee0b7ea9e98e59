// Attention of at most four lanes with dot products of bf16 pairs. Leaves softmax to few_lanes.h, the order of blocks and the
// states to attention.h. Sums have the order of sixteen lanes.
//
//   scores     S[lane][16 keys]  += K^T[pair of d][16 keys][2] * Q[pair of d][lane]    keys in the lanes of a register
//   weighted   O[lane][16 d]     += V[pair of keys][16 d][2] * P[pair of keys][lane]   dimensions in them
//
// Sixteen queries in the lanes of a register, as engine_vector.h has them, would leave three quarters of it empty.
#pragma once

#include "few_lanes.h"

namespace radixfleet {
namespace {

struct FewVectors : FewSoftmax {
  static constexpr bool kTakesRows = true;  // V as it lies in the cache
  static void begin(int) {}

  static __m512 step(__m512 sum, __m512i pairs, uint32_t pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)pair));
  }

  // Four lanes of sixteen keys as s [16 keys][4 lanes].
  static void store_lanes(const __m512* lanes, float* s) {
    const __m512 a = _mm512_unpacklo_ps(lanes[0], lanes[1]), b = _mm512_unpacklo_ps(lanes[2], lanes[3]);
    const __m512 c = _mm512_unpackhi_ps(lanes[0], lanes[1]), d = _mm512_unpackhi_ps(lanes[2], lanes[3]);
    __m512 keys[4];  // i, i + 4, i + 8 and i + 12
    keys[0] = (__m512)_mm512_unpacklo_pd((__m512d)a, (__m512d)b), keys[1] = (__m512)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
    keys[2] = (__m512)_mm512_unpacklo_pd((__m512d)c, (__m512d)d), keys[3] = (__m512)_mm512_unpackhi_pd((__m512d)c, (__m512d)d);
    const __m512 e = _mm512_shuffle_f32x4(keys[0], keys[1], 0x88), f = _mm512_shuffle_f32x4(keys[2], keys[3], 0x88);
    const __m512 g = _mm512_shuffle_f32x4(keys[0], keys[1], 0xdd), h = _mm512_shuffle_f32x4(keys[2], keys[3], 0xdd);
    _mm512_storeu_ps(s, _mm512_shuffle_f32x4(e, f, 0x88));
    _mm512_storeu_ps(s + 16, _mm512_shuffle_f32x4(g, h, 0x88));
    _mm512_storeu_ps(s + 32, _mm512_shuffle_f32x4(e, f, 0xdd));
    _mm512_storeu_ps(s + 48, _mm512_shuffle_f32x4(g, h, 0xdd));
  }

  template <int Lanes>
  static void scores_of_lanes(const uint32_t* q, const uint32_t* const* key_tiles, int tiles, int words, float* s, AheadKeys& ahead) {
    for (int t = 0; t < tiles; t++) {
      ahead.step();
      __m512 sums[kLanesFew] = {};
      for (int w = 0; w < words; w += 16) {
        __m512i keys[16];
        load_transposed16(key_tiles[t] + w, words, keys);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
          for (int l = 0; l < Lanes; l++) sums[l] = step(sums[l], keys[i], q[(w + i) * kLanes + l]);
      }
      store_lanes(sums, s + t * 64);
    }
  }
  // s [count][4 lanes] of `lanes` queries.
  static void scores(const uint32_t* q, const uint32_t* const* key_tiles, int count, int head_dim, int lanes, float* s,
                     AheadKeys& ahead) {
    const int tiles = count / 16, words = head_dim / 2;
    switch (lanes) {
      case 1: return scores_of_lanes<1>(q, key_tiles, tiles, words, s, ahead);
      case 2: return scores_of_lanes<2>(q, key_tiles, tiles, words, s, ahead);
      case 3: return scores_of_lanes<3>(q, key_tiles, tiles, words, s, ahead);
      default: return scores_of_lanes<4>(q, key_tiles, tiles, words, s, ahead);
    }
  }

  static __m512i load_values(const bf16* row, int d) { return row ? _mm512_loadu_si512(row + d) : _mm512_setzero_si512(); }

  // Of 32 * Chunks dimensions from d on, in the order that interleaving leaves (state.h).
  template <int Lanes, int Chunks>
  static void weigh(const uint32_t* p, const bf16* const* rows, int count, int d, int head_dim, float* o, AheadKeys& ahead) {
    __m512 sums[Lanes][2 * Chunks] = {};
    for (int i = 0; i < count; i += 2) {
      if (i % 16 == 0) ahead.step();
      const uint32_t* weights = p + i / 32 * 64 + i % 32 / 2;
      for (int c = 0; c < Chunks; c++) {
        const __m512i even = load_values(rows[i], d + c * 32), odd = load_values(rows[i + 1], d + c * 32);
        const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
        for (int l = 0; l < Lanes; l++) {
          sums[l][2 * c] = step(sums[l][2 * c], low, weights[l * 16]);
          sums[l][2 * c + 1] = step(sums[l][2 * c + 1], high, weights[l * 16]);
        }
      }
    }
    for (int l = 0; l < Lanes; l++)
      for (int v = 0; v < 2 * Chunks; v++) _mm512_storeu_ps(o + l * head_dim + d + v * 16, sums[l][v]);
  }
  template <int Lanes>
  static void weighted_lanes(const uint32_t* p, const bf16* const* rows, int count, int head_dim, float* o, AheadKeys& ahead) {
    int d = 0;
    for (; d + 64 <= head_dim; d += 64) weigh<Lanes, 2>(p, rows, count, d, head_dim, o, ahead);
    if (d < head_dim) weigh<Lanes, 1>(p, rows, count, d, head_dim, o, ahead);
  }
  // o [lanes][head_dim]; rows[i] is the V row of key i, or null beyond the row's end; count is a multiple of 16.
  static void weighted(const uint32_t* p, const bf16* const* rows, const uint32_t*, int count, int head_dim, int lanes, float* o,
                       AheadKeys& ahead) {
    switch (lanes) {
      case 1: return weighted_lanes<1>(p, rows, count, head_dim, o, ahead);
      case 2: return weighted_lanes<2>(p, rows, count, head_dim, o, ahead);
      case 3: return weighted_lanes<3>(p, rows, count, head_dim, o, ahead);
      default: return weighted_lanes<4>(p, rows, count, head_dim, o, ahead);
    }
  }
};

}  // namespace
}  // namespace radixfleet
