// Products of bf16 rows on AMX tiles over the packed panels of linear.h. Leaves everything around them to linear.h.
//
//   C[16 rows][16 outputs] += X[16 rows][32 inputs] * W[16 pairs of inputs][16 outputs][2]
//
// A panel's 32 inputs are one tile of W as they lie in memory; x is laid out in tiles once, [rows / 16][inputs / 32].
// Rows that fill up the last tile hold anything: what comes of them is not written.
#pragma once

#include "linear.h"
#include "tiles.h"

namespace radixfleet {
namespace {

struct Bf16Dot {
  template <int C, int A, int B>
  static void multiply() { radixfleet::multiply<C, A, B>(); }
};

// The tile products, for inputs of any kind: a tile is 1 KiB either way.
template <class Dot>
struct AmxTiles {
  static constexpr int kNear = 4 * kTileWords;  // words of weights brought into the nearest cache ahead of use
  static constexpr int kTileBytes = kTileWords * 4;

  static void prefetch_tile(const uint32_t* w) {
    for (int line = 0; line < 16; line++) prefetch(w + line * 16);
  }

  // Two steps in a row go to one accumulator, which is faster than changing it.
  template <int C>
  static void two_steps(const uint32_t* w, bool two) {
    prefetch_tile(w + kNear);
    load_tile<6>(w, 64);
    Dot::template multiply<C, 4, 6>();
    if (!two) return;
    prefetch_tile(w + kNear + 2 * kTileWords);
    load_tile<7>(w + 2 * kTileWords, 64);
    Dot::template multiply<C, 5, 7>();
  }
  // 16 rows by one pair of panels. Not by two at once: memory that is read in one place, and fetched in the next, serves
  // faster than in three.
  static void one_row_tile(const char* x, const uint32_t* w, int steps, float* c, int64_t stride, Beside& beside) {
    zero_tile<0>();
    zero_tile<1>();
    for (int k = 0; k < steps; k += 2, x += 2 * kTileBytes, w += 4 * kTileWords) {
      const bool two = k + 1 < steps;
      for (int i = 0; i < (two ? 2 : 1); i++) beside.step();
      load_tile<4>(x, 64);
      if (two) load_tile<5>(x + kTileBytes, 64);
      two_steps<0>(w, two);
      two_steps<1>(w + kTileWords, two);
    }
    store_tile<0>(c, stride);
    store_tile<1>(c + 16, stride);
  }

  // 32 rows by one pair of panels; only the first rows find the weights in memory rather than in a cache. The weights stay
  // in the nearest cache, rows pass by it; loads go together, since a change from loads to products and back waits where
  // both hardware threads of a core are busy.
  template <bool kFirst>
  static void two_row_tiles(const char* x, const uint32_t* w, int steps, float* c, int64_t stride, Beside& beside) {
    const char* y = x + (int64_t)steps * kTileBytes;
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (int k = 0; k < steps; k++, x += kTileBytes, y += kTileBytes, w += 2 * kTileWords) {
      if (kFirst) prefetch_tile(w + kNear);
      if (kFirst) prefetch_tile(w + kNear + kTileWords);
      load_tile_once<4>(x, 64);
      load_tile_once<5>(y, 64);
      load_tile<6>(w, 64);
      load_tile<7>(w + kTileWords, 64);
      Dot::template multiply<0, 4, 6>();
      Dot::template multiply<1, 4, 7>();
      Dot::template multiply<2, 5, 6>();
      Dot::template multiply<3, 5, 7>();
      beside.step();
    }
    store_tile<0>(c, stride);
    store_tile<1>(c + 16, stride);
    store_tile<2>(c + 4 * stride, stride);
    store_tile<3>(c + 4 * stride + 16, stride);
  }

  // Up to 32 tile rows by all panels; `first`: the weights come from memory.
  static void block(const char* x, int rows, bool first, const uint32_t* w, int steps, int panels, float* c,
                    Beside& beside) {
    const int64_t pair = (int64_t)steps * 2 * kTileWords, stride = panels * kPanel * 4;
    for (int p = 0; p < panels; p += 2) {
      if (rows <= 16) one_row_tile(x, w + p / 2 * pair, steps, c + p * kPanel, stride, beside);
      else if (first) two_row_tiles<true>(x, w + p / 2 * pair, steps, c + p * kPanel, stride, beside);
      else two_row_tiles<false>(x, w + p / 2 * pair, steps, c + p * kPanel, stride, beside);
    }
  }
};

struct AmxLinear {
  using Storage = bf16;
  static constexpr int kValueRows = 32;
  static bool fetches_ahead(int) { return true; }
  static void begin() { full_tiles(); }
  static void end() { release_tiles(); }
  static int steps(const LinearCall& c) { return input_steps(c.inputs, kBfloat16); }
  static size_t prepared_bytes(const LinearCall& c) { return (size_t)padded(c.rows, 16) * steps(c) * 64; }

  static void pack_row(const LinearCall& c, const bf16* row, int m, char* prepared) {
    bf16* dst = (bf16*)prepared + (int64_t)(m / 16) * steps(c) * 512 + m % 16 * 32;
    for (int i = 0; i < c.inputs; i += 32, dst += 512) {
      const int n = c.inputs - i;
      _mm512_storeu_si512(dst, n >= 32 ? _mm512_loadu_si512(row + i) : _mm512_maskz_loadu_epi16((1u << n) - 1, row + i));
    }
  }
  static void block(const LinearCall& call, const char* prepared, int m, int rows, const uint32_t* w, int panels, float* c,
                    Beside& beside) {
    const int n = steps(call);
    AmxTiles<Bf16Dot>::block(prepared + (int64_t)(m / 16) * n * 1024, rows, m == 0, w, n, panels, c, beside);
  }
  static void finish(const LinearCall&, const char*, int, int, int, int, float*) {}
};

}  // namespace
}  // namespace radixfleet
