// Products over int8 weights on AMX tiles: a row's high and low digits are two rows of a tile. Leaves digits and scales
// to linear_int8.h.
#pragma once

#include "linear_amx.h"
#include "linear_int8.h"

namespace radixfleet {
namespace {

struct Int8Dot {
  template <int C, int A, int B>  // C += A * B, both signed, int32 sums
  static void multiply() {
    multiply_bytes<C, A, B>();
  }
};

// Prepared rows: tiles [rows / 8][steps][8 rows][high, low][64 inputs], then every row's scale.
template <class T>
struct AmxInt8Linear {
  using Storage = T;
  static constexpr int kValueRows = 64;
  static bool fetches_ahead(int) { return true; }
  static void begin() { full_tiles(); }
  static void end() { release_tiles(); }
  static int steps(const LinearCall& c) { return input_steps(c.inputs, kInt8); }
  static size_t tile_bytes(const LinearCall& c) { return (size_t)padded(c.rows, 8) * steps(c) * 128; }
  static size_t prepared_bytes(const LinearCall& c) { return tile_bytes(c) + c.rows * sizeof(float); }

  static void pack_row(const LinearCall& c, const T* row, int m, char* prepared) {
    char* dst = prepared + (int64_t)(m / 8) * steps(c) * 1024 + m % 8 * 128;
    ((float*)(prepared + tile_bytes(c)))[m] = quantise_row(row, c.inputs, dst, 1024).scale;
  }
  static void block(const LinearCall& call, const char* prepared, int m, int rows, const uint32_t* w, int panels, float* c,
                    Beside& beside) {
    const int n = steps(call), tile_rows = 2 * rows;
    for (int t = 0; t < tile_rows; t += 32) {
      const char* x = prepared + (int64_t)((2 * m + t) / 16) * n * 1024;
      const int some = tile_rows - t < 32 ? tile_rows - t : 32;
      AmxTiles<Int8Dot>::block(x, some, m == 0 && t == 0, w, n, panels, c + (int64_t)t * panels * kPanel, beside);
    }
  }
  // Two rows of integers become one of floats, in place: row r is read before anything reaches its memory.
  static void finish(const LinearCall& call, const char* prepared, int m, int rows, int panel, int panels, float* c) {
    const float* row_scales = (const float*)(prepared + tile_bytes(call)) + m;
    const int columns = panels * kPanel;
    for (int r = 0; r < rows; r++) {
      const float *high = c + (int64_t)2 * r * columns, *low = high + columns;
      float* row = c + (int64_t)r * columns;
      for (int i = 0; i < columns; i += kWidth) {
        const __m512 h = _mm512_cvtepi32_ps(_mm512_loadu_si512(high + i)), l = _mm512_cvtepi32_ps(_mm512_loadu_si512(low + i));
        _mm512_storeu_ps(row + i, _mm512_fmadd_ps(h, _mm512_set1_ps(256), l));
      }
      scale_columns(row, output_scales(call) + panel * kPanel, row_scales[r], columns);
    }
  }
};

}  // namespace
}  // namespace radixfleet
