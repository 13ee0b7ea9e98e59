// Masks and softmax of at most four lanes: a decode row of one KV head has as many as it has query heads there. Leaves the
// products to few_lanes_amx.h and few_lanes_vector.h; every lane gets the bits it gets among sixteen.
//
// Softmax goes over S [key][4 lanes], a quarter of what sixteen lanes take; a register holds four keys.
#pragma once

#include "softmax.h"

namespace radixfleet {
namespace {

struct FewSoftmax {
  static constexpr int kLanesFew = 4;
  static bool takes(int lanes, int head_dim) { return lanes <= kLanesFew && head_dim <= 128 && head_dim % 32 == 0; }

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
};

}  // namespace
}  // namespace radixfleet
