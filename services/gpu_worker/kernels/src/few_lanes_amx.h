// Attention of at most four lanes on AMX: a decode row of one KV head has as many as it has query heads there. Leaves
// the order of blocks and the states to attention.h; every lane gets the bits it gets among sixteen.
//
//   scores     S[16 keys][4 lanes]  += K[16 keys][32 d] * Q[16 pairs of d][4 lanes][2]
//   weighted   O[4 lanes][16 d]     += P^T[4 lanes][32 keys] * V[16 pairs of keys][16 d][2]
//
// Softmax goes over [key][4 lanes], a quarter of what sixteen lanes take; a register holds four keys.
#pragma once

#include "softmax.h"
#include "tiles.h"

namespace radixfleet {
namespace {

struct FewLanes {
  static constexpr int kLanesFew = 4;
  static constexpr int64_t kQueryStride = kLanes * 4;  // queries lie packed for sixteen lanes
  static bool takes(int lanes, int head_dim) { return lanes <= kLanesFew && head_dim <= 128 && head_dim % 32 == 0; }

  // Tiles 0: S, 1: K or V, 2: O, 3: P, 4 and 5: Q. With heads of up to 64 also 6: S, 7: K or V; with larger ones Q.
  static void begin(int chunks) {
    TileConfig config;
    auto shape = [&](int tile, int rows, int bytes) { config.rows[tile] = rows, config.bytes_per_row[tile] = bytes; };
    shape(0, 16, 16);
    shape(1, 16, 64);
    shape(2, 4, 64);
    shape(3, 4, 64);
    shape(4, 16, 16);
    shape(5, 16, 16);
    shape(6, 16, 16);
    shape(7, 16, chunks > 2 ? 16 : 64);
    load_config(config);
  }

  template <int S, int K, int Chunks>
  static void scores_of_keys(const uint32_t* keys, float* s) {
    constexpr int64_t stride = Chunks * 64;
    zero_tile<S>();
    load_tile<K>(keys, stride);
    multiply<S, K, 4>();
    if constexpr (Chunks > 1) {
      load_tile<K>(keys + 16, stride);
      multiply<S, K, 5>();
    }
    if constexpr (Chunks > 2) {
      load_tile<K>(keys + 32, stride);
      multiply<S, K, 6>();
    }
    if constexpr (Chunks > 3) {
      load_tile<K>(keys + 48, stride);
      multiply<S, K, 7>();
    }
    store_tile<S>(s, 16);
  }
  template <int Chunks>
  static void scores_resident(const uint32_t* q, const uint32_t* const* key_tiles, int tiles, float* s, AheadKeys& ahead) {
    load_tile<4>(q, kQueryStride);
    if constexpr (Chunks > 1) load_tile<5>(q + kTileWords, kQueryStride);
    if constexpr (Chunks > 2) load_tile<6>(q + 2 * kTileWords, kQueryStride);
    if constexpr (Chunks > 3) load_tile<7>(q + 3 * kTileWords, kQueryStride);
    for (int t = 0; t < tiles; t++) {
      if (t % 2 == 0) ahead.step();
      if (Chunks > 2 || t % 2 == 0) scores_of_keys<0, 1, Chunks>(key_tiles[t], s + t * 64);
      else scores_of_keys<(Chunks > 2 ? 0 : 6), (Chunks > 2 ? 1 : 7), Chunks>(key_tiles[t], s + t * 64);
    }
  }
  // s [count][4 lanes]; head_dim 32, 64, 96 or 128.
  static void scores(const uint32_t* q, const uint32_t* const* key_tiles, int count, int head_dim, float* s, AheadKeys& ahead) {
    switch (head_dim / 32) {
      case 1: return scores_resident<1>(q, key_tiles, count / 16, s, ahead);
      case 2: return scores_resident<2>(q, key_tiles, count / 16, s, ahead);
      case 3: return scores_resident<3>(q, key_tiles, count / 16, s, ahead);
      default: return scores_resident<4>(q, key_tiles, count / 16, s, ahead);
    }
  }

  static void mask_scores(float* s, int count, int first_key, const Visible& visible) {
    for (int lane = 0; lane < kLanesFew; lane++) {
      const int first = visible.first[lane] - first_key, last = visible.last[lane] - first_key;
      for (int i = 0; i < first && i < count; i++) s[i * 4 + lane] = -INFINITY;
      for (int i = last < -1 ? 0 : last + 1; i < count; i++) s[i * 4 + lane] = -INFINITY;
    }
  }

  // The largest (or the sum) of the four keys of a register, lane by lane, in all four places.
  static __m512 over_keys(__m512 v, bool sum) {
    const __m512 a = _mm512_shuffle_f32x4(v, v, 0xb1), pairs = sum ? v + a : _mm512_max_ps(v, a);
    const __m512 b = _mm512_shuffle_f32x4(pairs, pairs, 0x4e);
    return sum ? pairs + b : _mm512_max_ps(pairs, b);
  }
  static __m512 maxima_of(const float* s, int count) {
    __m512 a = _mm512_loadu_ps(s), b = a;
    for (int i = 0; i < count * 4; i += 32) {
      a = _mm512_max_ps(a, _mm512_loadu_ps(s + i));
      b = _mm512_max_ps(b, _mm512_loadu_ps(s + i + 16));
    }
    return over_keys(_mm512_max_ps(a, b), false);
  }

  // P of 8 keys as [4 pairs of keys][4 lanes][2], as pair_exponentials computes them.
  static __m512i weights_of(const float* s, __m512 scale, __m512 base) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m512 low = _mm512_loadu_ps(s), high = _mm512_loadu_ps(s + 16);
    const __m512 even = _mm512_shuffle_f32x4(low, high, 0x88), odd = _mm512_shuffle_f32x4(low, high, 0xdd);
    const __m512i x = _mm512_packus_epi32(_mm512_cvtps_epi32(_mm512_fmadd_ps(even, scale, base)),
                                          _mm512_cvtps_epi32(_mm512_fmadd_ps(odd, scale, base)));
    return exponentials_from_fixed(_mm512_shuffle_epi8(x, order));
  }

  // S [count][4 lanes] becomes P^T [count / 32][4 lanes][32 keys] in `p`, the last 16 keys of an odd count zeros.
  static void softmax(const float* s, int count, float factor, float* maxima, float* sums, uint32_t* p, AheadKeys& ahead) {
    const __m512 top = maxima_of(s, count) * _mm512_set1_ps(factor);
    const __m512 scale = _mm512_set1_ps(factor * 512);
    const __m512 base = (127.0f - _mm512_max_ps(top, _mm512_set1_ps(-1e30f))) * 512.0f;
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i third = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 32, p += 64) {
      ahead.step();
      __m512i w[4] = {};
      for (int k = 0; k < (count - i < 32 ? 2 : 4); k++) {
        w[k] = weights_of(s + (i + 8 * k) * 4, scale, base);
        sum = _mm512_dpbf16_ps(sum, (__m512bh)w[k], ones);
      }
      const __m512i a = _mm512_permutex2var_epi32(w[0], first, w[1]), b = _mm512_permutex2var_epi32(w[2], first, w[3]);
      const __m512i c = _mm512_permutex2var_epi32(w[0], third, w[1]), d = _mm512_permutex2var_epi32(w[2], third, w[3]);
      _mm512_storeu_si512(p, _mm512_shuffle_i64x2(a, b, 0x44));
      _mm512_storeu_si512(p + 16, _mm512_shuffle_i64x2(a, b, 0xee));
      _mm512_storeu_si512(p + 32, _mm512_shuffle_i64x2(c, d, 0x44));
      _mm512_storeu_si512(p + 48, _mm512_shuffle_i64x2(c, d, 0xee));
    }
    const __mmask16 lanes = (1 << kLanesFew) - 1;
    _mm512_storeu_ps(maxima, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes, top));
    _mm512_storeu_ps(sums, _mm512_maskz_mov_ps(lanes, over_keys(sum, true)));
  }

  // o [4 lanes][head_dim]; v as AmxEngine::values leaves it for narrow tiles; count is a multiple of 32.
  static void weighted(const uint32_t* p, const uint32_t* v, int count, int head_dim, float* o, AheadKeys& ahead) {
    const int tiles = head_dim / 16, steps = count / 32;
    for (int d = 0; d < tiles; d++, v += kTileWords) {
      ahead.step();
      zero_tile<2>();
      for (int k = 0; k < steps; k++) {
        load_tile<3>(p + k * 64, 64);
        load_tile<1>(v + (int64_t)k * tiles * kTileWords, 64);
        multiply<2, 3, 1>();
      }
      store_tile<2>(o + d * 16, head_dim * 4);
    }
  }
};

}  // namespace
}  // namespace radixfleet
