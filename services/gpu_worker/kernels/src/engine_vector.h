// Attention arithmetic on vectors: scores and weighted sums with the 16 queries of a tile in the lanes. Leaves the
// order of blocks, masks and softmax to attention.h.
//
//   scores    S[key][lane]  = sum_d K[key][d] * Q[d][lane]        broadcast K, Q in vectors
//   weighted  O[d][lane]    = sum_key V[key][d] * P[key][lane]    broadcast V, P in vectors
#pragma once

#include "ahead.h"
#include "simd.h"
#if defined(__AVX512BF16__)
#include "few_lanes_vector.h"
#endif

namespace radixfleet {
namespace {

// Multiply-accumulate of one step: floats, or pairs of bf16.
inline Vec step(Vec acc, Vec b, float a) { return acc + b * a; }
#if defined(__AVX512BF16__)
inline Vec step(Vec acc, Uint b, uint32_t a) {
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)b, (__m512bh)_mm512_set1_epi32((int)a));
}
#endif

// C[i][lanes] = sum_k a[i * si + k * sk] * b[k][lanes] for R rows i and N vectors of lanes.
template <int R, int N, class B, class A>
inline void block_product(const A* a, int64_t si, int64_t sk, const A* b, int depth, float* c) {
  Vec acc[R][N] = {};
  for (int k = 0; k < depth; k++) {
    B lanes[N];
    for (int j = 0; j < N; j++) lanes[j] = load_as<B>(b + (int64_t)k * kLanes + j * kWidth);
    for (int i = 0; i < R; i++)
      for (int j = 0; j < N; j++) acc[i][j] = step(acc[i][j], lanes[j], a[i * si + k * sk]);
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < N; j++) store(c + i * kLanes + j * kWidth, acc[i][j]);
}

// The same for any number of rows that is a multiple of 16; `vectors` of the lanes are alive.
template <class B, class A>
inline void product(const A* a, int64_t si, int64_t sk, const A* b, int depth, float* c, int rows, int vectors) {
  constexpr int most = kWidth == 16 ? 16 : 8;  // sums that registers hold
  for (int i = 0; i < rows && vectors == 1; i += most) block_product<most, 1, B>(a + i * si, si, sk, b, depth, c + i * kLanes);
  for (int i = 0; i < rows && vectors > 1; i += 8, a += 8 * si, c += 8 * kLanes) {
    if (vectors == 2) {
      for (int r = 0; r < 8; r += 4) block_product<4, kVectors >= 2 ? 2 : 1, B>(a + r * si, si, sk, b, depth, c + r * kLanes);
    } else {
      for (int r = 0; r < 8; r += 2) block_product<2, kVectors, B>(a + r * si, si, sk, b, depth, c + r * kLanes);
    }
  }
}

// fp32 arithmetic over a cache of fp32 or bf16; K and V of a block are widened into scratch.
template <class T>
struct VectorEngine {
  using Storage = T;
  using Word = float;  // what queries, K and V are held in
  static constexpr bool kPairs = false;
  static bool is_narrow(int, int) { return false; }
  using Few = void;
  using Two = void;
  static constexpr bool kDirectKeys = false;
  static constexpr int kKeyStep = 16;
  static void begin() {}
  static void end() {}
  static int64_t key_words(int head_dim) { return padded(head_dim, 16); }
  static int width(int head_dim) { return padded(head_dim, 16); }

  static void widen_row(const T* src, int n, int width, float* dst) {
    int d = 0;
    for (; d + kWidth <= n; d += kWidth) store(dst + d, load_wide(src + d));
    for (; d < n; d++) dst[d] = sizeof(T) == 2 ? to_float((bf16)src[d]) : (float)src[d];
    for (; d < width; d++) dst[d] = 0;
  }
  static void key_row(const T* src, int head_dim, float* dst) { widen_row(src, head_dim, padded(head_dim, 16), dst); }

  // rows[i] is the V row of key i, or null beyond the row's end; count is a multiple of 16.
  static void values(const T* const* rows, int count, int head_dim, bool, float* dst, AheadKeys& ahead) {
    const int width = padded(head_dim, 16);
    for (int i = 0; i < count; i++) {
      if (i % 16 == 0) ahead.step();
      if (rows[i]) widen_row(rows[i], head_dim, width, dst + (int64_t)i * width);
      else memset(dst + (int64_t)i * width, 0, width * 4);
    }
  }
  static void scores(const float* q, const float* const* key_tiles, int count, int head_dim, float* s, int vectors, AheadKeys& ahead) {
    const int width = padded(head_dim, 16);
    for (int i = 0; i < count; i += 16, ahead.step())
      product<Vec>(key_tiles[i / 16], (int64_t)width, (int64_t)1, q, width, s + i * kLanes, 16, vectors);
  }
  static void weighted(const float* p, const float* v, int count, int head_dim, float* o, int vectors) {
    const int width = padded(head_dim, 16);
    product<Vec>(v, (int64_t)1, (int64_t)width, p, count, o, width, vectors);
  }
  static void weighted_narrow(float*, const float*, int, int, float*, AheadKeys&) {}
};

#if defined(__AVX512BF16__)
// bf16 pairs through the dot-product instruction: K rows as they are, V interleaved [key / 2][d][2].
struct PairEngine {
  using Storage = bf16;
  using Word = uint32_t;
  static constexpr bool kPairs = true;
  using Few = FewVectors;
  static bool is_narrow(int lanes, int head_dim) { return Few::takes(lanes, head_dim); }
  using Two = void;
  static constexpr bool kDirectKeys = true;
  static constexpr int kKeyStep = 16;
  static void begin() {}
  static void end() {}
  static int64_t key_words(int head_dim) { return padded(head_dim, 32) / 2; }
  static int width(int head_dim) { return padded(head_dim, 32); }

  static __m512i load_dimensions(const bf16* row, int dims) {
    if (!row) return _mm512_setzero_si512();
    return dims >= 32 ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16((1u << dims) - 1, row);
  }
  static void key_row(const bf16* src, int head_dim, uint32_t* dst) {
    for (int d = 0; d < head_dim; d += 32, dst += 16) _mm512_storeu_si512(dst, load_dimensions(src + d, head_dim - d));
  }
  // 32 dimensions of two keys as 2 x 16 words, the even key low; order_dimensions of state.h undoes the order.
  static void interleave(const bf16* even, const bf16* odd, int dims, uint32_t* low, uint32_t* high) {
    const __m512i a = load_dimensions(even, dims), b = load_dimensions(odd, dims);
    _mm512_storeu_si512(low, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(high, _mm512_unpackhi_epi16(a, b));
  }
  static const bf16* at(const bf16* row, int d) { return row ? row + d : nullptr; }

  static void values(const bf16* const* rows, int count, int head_dim, bool, uint32_t* dst, AheadKeys& ahead) {
    for (int i = 0; i < count; i += 2) {
      if (i % 16 == 0) ahead.step();
      for (int d = 0; d < head_dim; d += 32, dst += 32)
        interleave(at(rows[i], d), at(rows[i + 1], d), head_dim - d, dst, dst + 16);
    }
  }
  // Width: the words of a key, where they are known when this is compiled: sixteen addresses then need one register.
  template <int Width>
  static void scores_of_width(const uint32_t* q, const uint32_t* const* key_tiles, int count, int width, float* s, AheadKeys& ahead) {
    if (Width) width = Width;
    for (int i = 0; i < count; i += 16, ahead.step())
      block_product<16, 1, Uint>(key_tiles[i / 16], width, 1, q, width, s + i * kLanes);
  }
  static void scores(const uint32_t* q, const uint32_t* const* key_tiles, int count, int head_dim, float* s, int, AheadKeys& ahead) {
    const int width = padded(head_dim, 32) / 2;
    if (width == 32) scores_of_width<32>(q, key_tiles, count, width, s, ahead);
    else if (width == 64) scores_of_width<64>(q, key_tiles, count, width, s, ahead);
    else scores_of_width<0>(q, key_tiles, count, width, s, ahead);
  }
  static void weighted(const uint32_t* p, const uint32_t* v, int count, int head_dim, float* o, int vectors) {
    const int width = padded(head_dim, 32);
    product<Uint>(v, (int64_t)1, (int64_t)width, p, count / 2, o, width, vectors);
  }
  static void weighted_narrow(uint32_t*, const uint32_t*, int, int, float*, AheadKeys&) {}
};
#endif

}  // namespace
}  // namespace radixfleet
