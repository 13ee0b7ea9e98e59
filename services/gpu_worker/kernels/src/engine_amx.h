// Attention arithmetic on AMX tiles, bf16 with fp32 accumulation. Leaves the order of blocks, masks and softmax to
// attention.h. K rows of a page are the left operand as they lie in the cache; V is transposed once per block.
//
//   scores    S[16 keys][16 lanes] += K[16 keys][32 d] * Q[16 pairs of d][16 lanes][2]
//   weighted  O[16 d][16 lanes]    += V^T[16 d][32 keys] * P[16 pairs of keys][16 lanes][2]
#pragma once

#include "engine_vector.h"
#include "tiles.h"

namespace radixfleet {
namespace {

struct AmxEngine : PairEngine {
  static constexpr int kKeyStep = 32;
  static void begin() { full_tiles(); }
  static void end() { release_tiles(); }

  // dst: [count / 32][padded head_dim / 16] tiles of [16 d][32 keys].
  static void values(const bf16* const* rows, int count, int head_dim, uint32_t* dst) {
    alignas(64) uint32_t pairs[kTileWords];
    for (int i = 0; i < count; i += 32)
      for (int d = 0; d < head_dim; d += 16, dst += kTileWords) {
        for (int j = 0; j < 16; j++) {
          const bf16 *even = rows[i + 2 * j], *odd = rows[i + 2 * j + 1];
          _mm512_store_si512(pairs + j * 16, interleave(even ? even + d : even, odd ? odd + d : odd, head_dim - d));
        }
        transpose16(pairs, 16, dst, 16);
      }
  }

  // Four tiles of 16 keys at a time share each load of Q.
  static void scores(const uint32_t* q, const uint32_t* const* key_tiles, int count, int head_dim, float* s, int) {
    const int chunks = padded(head_dim, 32) / 32;
    const int64_t stride = padded(head_dim, 32) * 2;
    int t = 0;
    for (; t + 4 <= count / 16; t += 4) {
      zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
      for (int c = 0; c < chunks; c++) {
        load_tile<6>(q + c * kTileWords, 64);
        load_tile<4>(key_tiles[t] + c * 16, stride);
        multiply<0, 4, 6>();
        load_tile<5>(key_tiles[t + 1] + c * 16, stride);
        multiply<1, 5, 6>();
        load_tile<4>(key_tiles[t + 2] + c * 16, stride);
        multiply<2, 4, 6>();
        load_tile<5>(key_tiles[t + 3] + c * 16, stride);
        multiply<3, 5, 6>();
      }
      float* out = s + t * kTileWords;
      store_tile<0>(out, 64), store_tile<1>(out + 256, 64);
      store_tile<2>(out + 512, 64), store_tile<3>(out + 768, 64);
    }
    for (; t < count / 16; t++) {
      zero_tile<0>();
      for (int c = 0; c < chunks; c++) {
        load_tile<6>(q + c * kTileWords, 64);
        load_tile<4>(key_tiles[t] + c * 16, stride);
        multiply<0, 4, 6>();
      }
      store_tile<0>(s + t * kTileWords, 64);
    }
  }

  template <int N>  // N tiles of O at a time share each load of P
  static void weighted_tiles(const uint32_t* p, const uint32_t* v, int64_t v_step, int steps, float* o) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int k = 0; k < steps; k++, v += v_step) {
      load_tile<6>(p + k * kTileWords, 64);
      load_tile<4>(v, 64);
      multiply<0, 4, 6>();
      if (N > 1) load_tile<5>(v + kTileWords, 64), multiply<1, 5, 6>();
      if (N > 2) load_tile<4>(v + 2 * kTileWords, 64), multiply<2, 4, 6>();
      if (N > 3) load_tile<5>(v + 3 * kTileWords, 64), multiply<3, 5, 6>();
    }
    store_tile<0>(o, 64);
    if (N > 1) store_tile<1>(o + 256, 64);
    if (N > 2) store_tile<2>(o + 512, 64);
    if (N > 3) store_tile<3>(o + 768, 64);
  }
  static void weighted(const uint32_t* p, const uint32_t* v, int count, int head_dim, float* o, int) {
    const int tiles = padded(head_dim, 16) / 16, steps = count / 32;
    const int64_t v_step = (int64_t)tiles * kTileWords;
    int d = 0;
    for (; d + 4 <= tiles; d += 4)
      weighted_tiles<4>(p, v + d * kTileWords, v_step, steps, o + d * kTileWords);
    const uint32_t* rest = v + d * kTileWords;
    if (tiles - d == 3) weighted_tiles<3>(p, rest, v_step, steps, o + d * kTileWords);
    if (tiles - d == 2) weighted_tiles<2>(p, rest, v_step, steps, o + d * kTileWords);
    if (tiles - d == 1) weighted_tiles<1>(p, rest, v_step, steps, o + d * kTileWords);
  }
};

}  // namespace
}  // namespace radixfleet
