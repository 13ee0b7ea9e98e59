// Vectors of the width this unit is compiled for, as compiler vector extensions. Leaves matrix units to the engines.
#pragma once

#include <math.h>
#include <string.h>

#include "interface.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace radixfleet {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kVectors = kLanes / kWidth;  // vectors of one query tile

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t Int __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Uint __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Half __attribute__((vector_size(kWidth * 2)));

template <class V>
inline V load_as(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store_as(void* p, V v) {
  memcpy(p, &v, sizeof v);
}
inline Vec load(const float* p) { return load_as<Vec>(p); }
inline void store(float* p, Vec v) { store_as(p, v); }
inline Vec splat(float x) { return x - Vec{}; }

inline Vec maximum(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline bf16 to_bf16(float x) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)(bits >> 16 | 0x40);
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Vec load_wide(const float* p) { return load(p); }
inline Vec load_wide(const bf16* p) {
  return (Vec)(__builtin_convertvector(load_as<Half>(p), Uint) << 16);
}
inline void store_narrow(float* p, Vec v) { store(p, v); }
inline void store_narrow(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  store_as(p, _mm512_cvtneps_pbh((__m512)v));
#else
  Uint bits = (Uint)v;
  Uint rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  Uint nan = bits >> 16 | 0x40;
  rounded = (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
  store_as(p, __builtin_convertvector(rounded, Half));
#endif
}

// 2^x for x <= 127; exactly 0 below -126.5, exactly 1 at 0, so that a merge with nothing changes no bit. Relative error
// 9e-8 and rounding: a large constant and a minimax polynomial on [-0.5, 0.5] (Lawson's weighted least squares).
inline Vec exp2v(Vec x) {
  x = maximum(x, splat(-127.0f));
  const Vec shifted = x + 12582912.0f;
  const Vec f = x - (shifted - 12582912.0f);
  Vec p = 0.001326472876915705f * f + 0.009671513183104965f;
  p = p * f + 0.05550733744477561f;
  p = p * f + 0.24022242077091396f;
  p = p * f + 0.6931469775951143f;
  p = p * f + 1.0f;
  const Uint scale = ((Uint)shifted << 23) + 0x3f800000u;
  return p * (Vec)scale;
}

inline Vec tanhv(Vec x) {  // 1 - 2 / (1 + e^2x), saturated where float is
  const Vec t = maximum(splat(-20.0f), -maximum(splat(-20.0f), -x)) * 2.885390081777927f;
  return 1.0f - 2.0f / (1.0f + exp2v(t));
}

#if defined(__AVX512F__)
// columns[j] word i = src[i][j], 16 x 16 words of 32 bits; stride in words.
inline void load_transposed16(const uint32_t* src, int64_t src_stride, __m512i* columns) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(src + i * src_stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    columns[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    columns[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
  }
}
#endif

// dst[j][i] = src[i][j], 16 x 16 words of 32 bits; strides in words.
inline void transpose16(const uint32_t* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride) {
#if defined(__AVX512F__)
  __m512i columns[16];
  load_transposed16(src, src_stride, columns);
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(dst + i * dst_stride, columns[i]);
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) dst[j * dst_stride + i] = src[i * src_stride + j];
#endif
}

}  // namespace
}  // namespace radixfleet
