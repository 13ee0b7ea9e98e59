// Attention of at most four lanes on AMX tiles. Leaves softmax to few_lanes.h, the order of blocks and the states to
// attention.h.
//
//   scores     S[16 keys][4 lanes]  += K[16 keys][32 d] * Q[16 pairs of d][4 lanes][2]
//   weighted   O[4 lanes][16 d]     += P^T[4 lanes][32 keys] * V[16 pairs of keys][16 d][2]
#pragma once

#include "few_lanes.h"
#include "tiles.h"

namespace radixfleet {
namespace {

struct FewTiles : FewSoftmax {
  static constexpr bool kTakesRows = false;
  static constexpr int64_t kQueryStride = kLanes * 4;  // queries lie packed for sixteen lanes

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
  static void scores(const uint32_t* q, const uint32_t* const* key_tiles, int count, int head_dim, int, float* s,
                     AheadKeys& ahead) {
    switch (head_dim / 32) {
      case 1: return scores_resident<1>(q, key_tiles, count / 16, s, ahead);
      case 2: return scores_resident<2>(q, key_tiles, count / 16, s, ahead);
      case 3: return scores_resident<3>(q, key_tiles, count / 16, s, ahead);
      default: return scores_resident<4>(q, key_tiles, count / 16, s, ahead);
    }
  }

  // o [4 lanes][head_dim]; v as AmxEngine::values leaves it for narrow tiles.
  static void weighted(const uint32_t* p, const bf16* const*, const uint32_t* v, int count, int head_dim, int, float* o,
                       AheadKeys& ahead) {
    const int tiles = head_dim / 16, steps = (count + 31) / 32;
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
