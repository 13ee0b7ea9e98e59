// Attention of two query tiles over the same keys on AMX tiles: they share the loads of K and V, and the matrix unit works
// while their softmax does. Leaves single tiles to engine_amx.h; the bits are those of single tiles.
//
// Where both hardware threads of a core are busy, loads of tiles and products hardly overlap, and every change from one
// kind to the other waits: so four loads go together, then four products, with vector work between the products. S stays in
// the nearest cache and K and V pass by it.
#pragma once

#include "softmax.h"
#include "tiles.h"

namespace radixfleet {
namespace {

struct TwoTiles {
  // The largest scores of each lane so far.
  struct Tops {
    Vec of[4];
    Tops() {
      for (Vec& v : of) v = splat(-INFINITY);
    }
    void see(const float* s) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) of[i % 4] = maximum(of[i % 4], load(s + i * kLanes));
    }
    Vec all() const { return maximum(maximum(of[0], of[1]), maximum(of[2], of[3])); }
  };

  // Head sizes up to 64: the queries of both tiles stay in registers 4-7. tops[2][16 lanes]: the largest scores.
  template <int Chunks>
  static void scores(const uint32_t* q0, const uint32_t* q1, const uint32_t* const* key_tiles, int tiles, float* s0,
                     float* s1, float* tops, AheadKeys& ahead) {
    constexpr int64_t stride = Chunks * 64;
    Tops first, second;
    load_tile<4>(q0, 64);
    load_tile<6>(q1, 64);
    if (Chunks > 1) load_tile<5>(q0 + kTileWords, 64);
    if (Chunks > 1) load_tile<7>(q1 + kTileWords, 64);
    for (int t = 0; t < tiles; t++, s0 += kTileWords, s1 += kTileWords) {
      ahead.step();
      load_tile_once<2>(key_tiles[t], stride);
      if (Chunks > 1) load_tile_once<3>(key_tiles[t] + 16, stride);
      zero_tile<0>();
      zero_tile<1>();
      multiply<0, 2, 4>();
      multiply<1, 2, 6>();
      if (Chunks > 1) multiply<0, 3, 5>();
      if (Chunks > 1) multiply<1, 3, 7>();
      if (t > 0) first.see(s0 - kTileWords);
      if (t > 0) second.see(s1 - kTileWords);
      store_tile<0>(s0, 64);
      store_tile<1>(s1, 64);
    }
    first.see(s0 - kTileWords);
    second.see(s1 - kTileWords);
    store(tops, first.all());
    store(tops + kLanes, second.all());
  }

  static void load_step(const uint32_t* p0, const uint32_t* p1, const uint32_t* v) {
    load_tile_once<4>(v, 64);
    load_tile_once<5>(v + kTileWords, 64);
    load_tile<6>(p0, 64);
    load_tile<7>(p1, 64);
  }
  static void zero_sums() {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }
  static void store_sums(float* o0, float* o1) {
    store_tile<0>(o0, 64);
    store_tile<1>(o0 + kTileWords, 64);
    store_tile<2>(o1, 64);
    store_tile<3>(o1 + kTileWords, 64);
  }

  // The first 32 dimensions of both results; weights of the next 32 keys are computed between the products of these.
  static void weigh_first(float* s0, float* s1, const uint32_t* v, int64_t v_step, int steps, Exponentials& e0, Exponentials& e1,
                          float* o0, float* o1, AheadKeys& ahead) {
    zero_sums();
    e0.quarter(s0, 0), e0.quarter(s0, 1), e0.quarter(s0, 2), e0.quarter(s0, 3);
    e1.quarter(s1, 0), e1.quarter(s1, 1), e1.quarter(s1, 2), e1.quarter(s1, 3);
    for (int k = 0; k < steps; k++, v += v_step) {
      ahead.step();
      load_step((uint32_t*)s0 + k * kTileWords, (uint32_t*)s1 + k * kTileWords, v);
      const bool more = k + 1 < steps;
      const int next = 4 * (k + 1);
      multiply<0, 4, 6>();
      if (more) e0.quarter(s0, next), e0.quarter(s0, next + 1);
      multiply<1, 5, 6>();
      if (more) e0.quarter(s0, next + 2), e0.quarter(s0, next + 3);
      multiply<2, 4, 7>();
      if (more) e1.quarter(s1, next), e1.quarter(s1, next + 1);
      multiply<3, 5, 7>();
      if (more) e1.quarter(s1, next + 2), e1.quarter(s1, next + 3);
    }
    store_sums(o0, o1);
  }
  static void weigh(const uint32_t* p0, const uint32_t* p1, const uint32_t* v, int64_t v_step, int steps, float* o0, float* o1) {
    zero_sums();
    for (int k = 0; k < steps; k++, v += v_step, p0 += kTileWords, p1 += kTileWords) {
      load_step(p0, p1, v);
      multiply<0, 4, 6>();
      multiply<1, 5, 6>();
      multiply<2, 4, 7>();
      multiply<3, 5, 7>();
    }
    store_sums(o0, o1);
  }

  // S of `count` keys, a multiple of 32, with its largest values, becomes P in place; o [d][16 lanes] are the sums of V.
  static void weighted(float* s0, float* s1, const float* tops, const uint32_t* v, int count, int head_dim, float factor,
                       float* o0, float* o1, AheadKeys& ahead) {
    const int width = padded(head_dim, 32);
    const int64_t v_step = (int64_t)width / 16 * kTileWords;
    const Vec top0 = load(tops) * factor, top1 = load(tops + kLanes) * factor;
    Exponentials e0(factor, top0), e1(factor, top1);
    weigh_first(s0, s1, v, v_step, count / 32, e0, e1, o0, o1, ahead);
    for (int d = 32; d < width; d += 32) {
      const int at = d * kLanes;
      weigh((uint32_t*)s0, (uint32_t*)s1, v + at, v_step, count / 32, o0 + at, o1 + at);
    }
    store(o0 + width * kLanes, top0), store(o0 + (width + 1) * kLanes, e0.total());
    store(o1 + width * kLanes, top1), store(o1 + (width + 1) * kLanes, e1.total());
  }
};

}  // namespace
}  // namespace radixfleet
