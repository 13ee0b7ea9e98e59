// Attention arithmetic on AMX tiles, bf16 with fp32 accumulation. Leaves the order of blocks, masks and softmax to
// attention.h. K rows of a page are the left operand as they lie in the cache.
//
//   scores           S[16 keys][16 lanes] += K[16 keys][32 d] * Q[16 pairs of d][16 lanes][2]
//   weighted         O[16 d][16 lanes]    += V^T[16 d][32 keys] * P[16 pairs of keys][16 lanes][2]
//   weighted_narrow  O[16 lanes][16 d]    += P^T[16 lanes][32 keys] * V[16 pairs of keys][16 d][2]
//
// With many query tiles V is transposed once for all of them; with one tile it is cheaper to transpose P. Products of
// one element are summed in the same order in both. Two steps of depth in a row go to the same accumulator, and each
// loaded tile is used as often as the eight registers allow: loads and changes of accumulator are what costs.
#pragma once

#include "engine_vector.h"
#include "few_lanes_amx.h"
#include "tiles.h"
#include "two_tiles_amx.h"

namespace radixfleet {
namespace {

struct AmxEngine : PairEngine {
  using Few = FewTiles;
  static bool is_narrow(int lanes, int) { return lanes <= kLanes; }
  using Two = TwoTiles;
  static constexpr int kKeyStep = 32;
  static void begin() { full_tiles(); }
  static void end() { release_tiles(); }

  // dst: [count / 32][padded head_dim / 16] tiles, of [16 d][32 keys], or [16 pairs of keys][16 d][2] when narrow.
  static void values(const bf16* const* rows, int count, int head_dim, bool narrow, uint32_t* dst, AheadKeys& ahead) {
    alignas(64) uint32_t pairs[2 * kTileWords];
    if (narrow) return narrow_values(rows, count, head_dim, dst, ahead);
    for (int i = 0; i < count; i += 32)
      for (int d = 0; d < head_dim; d += 32, dst += 2 * kTileWords) {
        if (d == 0) ahead.step();
        for (int j = 0; j < 16; j++) {
          const bf16 *even = rows[i + 2 * j], *odd = rows[i + 2 * j + 1];
          interleave(at(even, d), at(odd, d), head_dim - d, pairs + j * 16, pairs + kTileWords + j * 16);
        }
        transpose16(pairs, 16, dst, 16);
        transpose16(pairs + kTileWords, 16, dst + kTileWords, 16);
      }
  }

  static void narrow_values(const bf16* const* rows, int count, int head_dim, uint32_t* dst, AheadKeys& ahead) {
    const int64_t block = padded(head_dim, 32) / 16 * kTileWords;
    for (int i = 0; i < count; i += 32, dst += block) {
      ahead.step();
      for (int j = 0; j < 16; j++) {
        const bf16 *even = rows[i + 2 * j], *odd = rows[i + 2 * j + 1];
        uint32_t* to = dst + j * 16;
        for (int d = 0; d < head_dim; d += 32, to += 2 * kTileWords)
          interleave(at(even, d), at(odd, d), head_dim - d, to, to + kTileWords);
      }
    }
  }

  // Head sizes up to 128: the queries of one tile stay in registers 4-7.
  template <int Chunks, int C>
  static void scores_of_keys(const uint32_t* keys, float* s) {
    constexpr int64_t stride = Chunks * 64;
    zero_tile<C>();
    load_tile<2>(keys, stride);
    multiply<C, 2, 4>();
    if (Chunks > 1) {
      load_tile<3>(keys + 16, stride);
      multiply<C, 3, 5>();
    }
    if (Chunks > 2) {
      load_tile<2>(keys + 32, stride);
      multiply<C, 2, 6>();
    }
    if (Chunks > 3) {
      load_tile<3>(keys + 48, stride);
      multiply<C, 3, 7>();
    }
    store_tile<C>(s, 64);
  }
  template <int Chunks>
  static void scores_resident(const uint32_t* q, const uint32_t* const* key_tiles, int tiles, float* s, AheadKeys& ahead) {
    load_tile<4>(q, 64);
    if (Chunks > 1) load_tile<5>(q + kTileWords, 64);
    if (Chunks > 2) load_tile<6>(q + 2 * kTileWords, 64);
    if (Chunks > 3) load_tile<7>(q + 3 * kTileWords, 64);
    for (int t = 0; t + 1 < tiles; t += 2) {
      ahead.step();
      scores_of_keys<Chunks, 0>(key_tiles[t], s + t * kTileWords);
      scores_of_keys<Chunks, 1>(key_tiles[t + 1], s + (t + 1) * kTileWords);
    }
    if (tiles % 2) scores_of_keys<Chunks, 0>(key_tiles[tiles - 1], s + (tiles - 1) * kTileWords);
  }

  // Any head size: two key tiles share each load of the queries.
  static void scores_streamed(const uint32_t* q, const uint32_t* const* key_tiles, int tiles, int chunks, float* s,
                              AheadKeys& ahead) {
    const int64_t stride = chunks * 64;
    for (int t = 0; t < tiles; t += 2) {
      ahead.step();
      ahead.step();
      const uint32_t *k0 = key_tiles[t], *k1 = key_tiles[t + 1 < tiles ? t + 1 : t];
      zero_tile<0>();
      zero_tile<1>();
      for (int c = 0; c < chunks; c++) {
        load_tile<6>(q + c * kTileWords, 64);
        load_tile<2>(k0 + c * 16, stride);
        multiply<0, 2, 6>();
        load_tile<3>(k1 + c * 16, stride);
        multiply<1, 3, 6>();
      }
      store_tile<0>(s + t * kTileWords, 64);
      if (t + 1 < tiles) store_tile<1>(s + (t + 1) * kTileWords, 64);
    }
  }

  static void scores(const uint32_t* q, const uint32_t* const* key_tiles, int count, int head_dim, float* s, int,
                     AheadKeys& ahead) {
    const int tiles = count / 16, chunks = padded(head_dim, 32) / 32;
    switch (chunks) {
      case 1: return scores_resident<1>(q, key_tiles, tiles, s, ahead);
      case 2: return scores_resident<2>(q, key_tiles, tiles, s, ahead);
      case 3: return scores_resident<3>(q, key_tiles, tiles, s, ahead);
      case 4: return scores_resident<4>(q, key_tiles, tiles, s, ahead);
      default: return scores_streamed(q, key_tiles, tiles, chunks, s, ahead);
    }
  }
  // tops [2][16 lanes]: the largest scores.
  static void scores_of_two(const uint32_t* q0, const uint32_t* q1, const uint32_t* const* key_tiles, int count,
                            int head_dim, float* s0, float* s1, float* tops, AheadKeys& ahead) {
    if (head_dim <= 32) return TwoTiles::scores<1>(q0, q1, key_tiles, count / 16, s0, s1, tops, ahead);
    if (head_dim <= 64) return TwoTiles::scores<2>(q0, q1, key_tiles, count / 16, s0, s1, tops, ahead);
    scores(q0, key_tiles, count, head_dim, s0, 0, ahead);
    scores(q1, key_tiles, count, head_dim, s1, 0, ahead);
    store(tops, column_maximum(s0, count));
    store(tops + kLanes, column_maximum(s1, count));
  }

  // Accumulator C of one tile of O over two steps of 32 keys (or one, when v1 is null).
  template <int C>
  static void weigh(const uint32_t* v0, const uint32_t* v1) {
    load_tile<4>(v0, 64);
    multiply<C, 4, 6>();
    if (!v1) return;
    load_tile<5>(v1, 64);
    multiply<C, 5, 7>();
  }
  // Two tiles of O at a time (head sizes are padded to 32); four where there are.
  template <int N>
  static void weighted_tiles(const uint32_t* p, const uint32_t* v, int64_t v_step, int steps, float* o) {
    zero_tile<0>();
    zero_tile<1>();
    if (N > 2) zero_tile<2>();
    if (N > 2) zero_tile<3>();
    for (int k = 0; k < steps; k += 2, v += 2 * v_step) {
      const bool two = k + 1 < steps;
      load_tile<6>(p + k * kTileWords, 64);
      if (two) load_tile<7>(p + (k + 1) * kTileWords, 64);
      weigh<0>(v, two ? v + v_step : nullptr);
      weigh<1>(v + kTileWords, two ? v + v_step + kTileWords : nullptr);
      if (N > 2) weigh<2>(v + 2 * kTileWords, two ? v + v_step + 2 * kTileWords : nullptr);
      if (N > 2) weigh<3>(v + 3 * kTileWords, two ? v + v_step + 3 * kTileWords : nullptr);
    }
    store_tile<0>(o, 64);
    store_tile<1>(o + kTileWords, 64);
    if (N > 2) store_tile<2>(o + 2 * kTileWords, 64);
    if (N > 2) store_tile<3>(o + 3 * kTileWords, 64);
  }
  static void weighted(const uint32_t* p, const uint32_t* v, int count, int head_dim, float* o, int) {
    const int tiles = padded(head_dim, 32) / 16, steps = count / 32;
    const int64_t v_step = (int64_t)tiles * kTileWords;
    int d = 0;
    for (; d + 4 <= tiles; d += 4) weighted_tiles<4>(p, v + d * kTileWords, v_step, steps, o + d * kTileWords);
    if (d < tiles) weighted_tiles<2>(p, v + d * kTileWords, v_step, steps, o + d * kTileWords);
  }

  template <int C>
  static void weigh_narrow(const uint32_t* v0, const uint32_t* v1) {
    load_tile<6>(v0, 64);
    multiply<C, 4, 6>();
    if (!v1) return;
    load_tile<7>(v1, 64);
    multiply<C, 5, 7>();
  }
  template <int N>
  static void weighted_narrow_tiles(const uint32_t* p, const uint32_t* v, int64_t v_step, int steps, int width, float* o) {
    zero_tile<0>();
    zero_tile<1>();
    if (N > 2) zero_tile<2>();
    if (N > 2) zero_tile<3>();
    for (int k = 0; k < steps; k += 2, v += 2 * v_step) {
      const bool two = k + 1 < steps;
      load_tile<4>(p + k * kTileWords, 64);
      if (two) load_tile<5>(p + (k + 1) * kTileWords, 64);
      weigh_narrow<0>(v, two ? v + v_step : nullptr);
      weigh_narrow<1>(v + kTileWords, two ? v + v_step + kTileWords : nullptr);
      if (N > 2) weigh_narrow<2>(v + 2 * kTileWords, two ? v + v_step + 2 * kTileWords : nullptr);
      if (N > 2) weigh_narrow<3>(v + 3 * kTileWords, two ? v + v_step + 3 * kTileWords : nullptr);
    }
    store_tile<0>(o, width * 4);
    store_tile<1>(o + 16, width * 4);
    if (N > 2) store_tile<2>(o + 32, width * 4);
    if (N > 2) store_tile<3>(o + 48, width * 4);
  }
  // P is transposed in place.
  static void weighted_narrow(uint32_t* p, const uint32_t* v, int count, int head_dim, float* o, AheadKeys& ahead) {
    const int width = padded(head_dim, 32), tiles = width / 16, steps = count / 32;
    const int64_t v_step = (int64_t)tiles * kTileWords;
    for (int k = 0; k < steps; k++) {
      ahead.step();
      transpose16(p + k * kTileWords, 16, p + k * kTileWords, 16);
    }
    int d = 0;
    for (; d + 4 <= tiles; d += 4)
      weighted_narrow_tiles<4>(p, v + d * kTileWords, v_step, steps, width, o + d * 16);
    if (d < tiles) weighted_narrow_tiles<2>(p, v + d * kTileWords, v_step, steps, width, o + d * 16);
  }
};

}  // namespace
}  // namespace radixfleet
