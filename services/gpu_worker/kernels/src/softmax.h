// Softmax of one query tile over one block of keys. Leaves the products to the engines, blocks to state.h.
//
// Scores come as S[key][16 lanes], so that maxima and sums run down the registers, never across them. Everything is
// kept in base 2: p = 2^(s * factor - m), with m the block's maximum of s * factor.
#pragma once

#include "ahead.h"
#include "simd.h"

namespace radixfleet {
namespace {

// Which keys the lanes of a tile may see: positions first[lane]..last[lane].
struct Visible {
  int32_t first[kLanes], last[kLanes];
  int32_t min_first, max_first, min_last, max_last;
};

inline void cap_scores(float* s, int count, float scale, float cap) {
  for (int i = 0; i < count; i += kWidth) store(s + i, tanhv(load(s + i) * (scale / cap)) * cap);
}

inline void mask_rows(float* s, int from, int to, int first_key, const Visible& visible) {
  for (int j = 0; j < kLanes; j += kWidth) {
    const Int first = load_as<Int>(visible.first + j), last = load_as<Int>(visible.last + j);
    for (int i = from; i < to; i++) {
      const int32_t key = first_key + i;
      float* row = s + i * kLanes + j;
      store(row, (last >= key) & (first <= key) ? load(row) : splat(-INFINITY));
    }
  }
}

// Hides what some lane may not see: rows before the last lane's window and after the first lane's position. Whether
// there was anything to hide.
inline bool mask_scores(float* s, int count, int first_key, const Visible& visible) {
  const int before = visible.max_first - first_key, after = visible.min_last + 1 - first_key;
  // Both may lie before the block: a tile's first lanes can end where its last ones only begin.
  const int top = before < 0 ? 0 : before < count ? before : count, bottom = after > top ? after : top;
  if (top > 0) mask_rows(s, 0, top, first_key, visible);
  if (bottom < count) mask_rows(s, bottom, count, first_key, visible);
  return top > 0 || bottom < count;
}

inline Vec column_maximum(const float* s, int count) {
  Vec m[4];
  for (int k = 0; k < 4; k++) m[k] = load(s + k * kLanes);
  for (int i = 4; i < count; i += 4)
    for (int k = 0; k < 4; k++) m[k] = maximum(m[k], load(s + (i + k) * kLanes));
  return maximum(maximum(m[0], m[1]), maximum(m[2], m[3]));
}

// S becomes P in place; count is a multiple of 16. Returns the sums, kept by key modulo 4.
inline Vec exponentials(float* s, int count, float factor, Vec m) {
  Vec sum[4] = {};
  for (int i = 0; i < count; i += 4)
    for (int k = 0; k < 4; k++) {
      const Vec p = exp2v(load(s + (i + k) * kLanes) * factor - m);
      store(s + (i + k) * kLanes, p);
      sum[k] += p;
    }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

#if defined(__AVX512BF16__)
// 32 values 2^(x / 512 - 127) as bf16 from 16-bit fixed-point x, 7 bits of exponent over 9 of fraction f, by
// 2^f = 1 + f - f (1 - f) (k0 + k1 f), fitted with the roundings below; as near to the true values as rounding them to
// bf16 is. 0 gives 0.
inline __m512i exponentials_from_fixed(__m512i x) {
  const __m512i f = _mm512_slli_epi16(x, 7), rest = _mm512_xor_si512(f, _mm512_set1_epi16(-1));
  const __m512i k = _mm512_add_epi16(_mm512_mulhi_epu16(f, _mm512_set1_epi16(40)), _mm512_set1_epi16(155));
  const __m512i bend = _mm512_mulhi_epu16(_mm512_mulhi_epu16(f, rest), k);
  return _mm512_srli_epi16(_mm512_add_epi16(_mm512_sub_epi16(x, bend), _mm512_set1_epi16(1)), 2);
}

// The same for P in pairs [count / 2][16 lanes][2] of bf16, in place, eight keys at a time. The sums are those of the
// rounded values, so that rounding does not bias the quotient.
struct Exponentials {
  __m512 scale, base, sum[4] = {};
  // top: the largest score times factor; a lane that sees no key gets zeros, not NaN.
  Exponentials(float factor, Vec top)
      : scale(_mm512_set1_ps(factor * 512)), base((__m512)((127.0f - maximum(top, splat(-1e30f))) * 512.0f)) {}

  void quarter(float* s, int i) {  // keys 8 i to 8 i + 7
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const float* at = s + i * 8 * kLanes;
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++, at += 2 * kLanes) {
      const __m512i even = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_loadu_ps(at), scale, base));
      const __m512i odd = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_loadu_ps(at + kLanes), scale, base));
      // Saturation makes everything below 2^-127, masked keys included, a zero.
      const __m512i fixed = _mm512_shuffle_epi8(_mm512_packus_epi32(even, odd), order);
      const __m512i p = exponentials_from_fixed(fixed);
      _mm512_storeu_si512(s + (i * 4 + k) * kLanes, p);
      sum[k] = _mm512_dpbf16_ps(sum[k], (__m512bh)p, ones);
    }
  }
  Vec total() const { return (Vec)((sum[0] + sum[1]) + (sum[2] + sum[3])); }
};

inline Vec pair_exponentials(float* s, int count, float factor, Vec top, AheadKeys& ahead) {
  Exponentials exponentials(factor, top);
  for (int i = 0; i < count / 8; i++) {
    if (i % 4 == 0) ahead.step();
    exponentials.quarter(s, i);
  }
  return exponentials.total();
}
#else
inline Vec pair_exponentials(float* s, int count, float factor, Vec m, AheadKeys&) { return exponentials(s, count, factor, m); }
#endif

// Maxima and sums are those of this block alone.
template <bool kPairs>
inline void softmax(float* s, int count, float factor, float* maxima, float* sums, AheadKeys& ahead) {
  for (int j = 0; j < kLanes; j += kWidth) {
    const Vec top = column_maximum(s + j, count) * factor;
    store(maxima + j, top);
    const Vec base = maximum(top, splat(-1e30f));  // a lane that sees no key here gets zeros, not NaN
    store(sums + j, kPairs ? pair_exponentials(s + j, count, factor, base, ahead) : exponentials(s + j, count, factor, base));
  }
}

}  // namespace
}  // namespace radixfleet
