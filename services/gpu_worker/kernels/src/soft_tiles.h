// What AMX tile instructions do, in plain code. Leaves when it is used to tiles.h; sums differ from the instructions' in
// their last bits.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "interface.h"

namespace radixfleet {
namespace {

struct SoftTiles {
  uint32_t words[8][16][16];
  uint8_t rows[8];
  uint16_t bytes[8];
  bool configured = false;

  void configure(const uint8_t* all_rows, const uint16_t* all_bytes) {
    memcpy(rows, all_rows, sizeof rows);
    memcpy(bytes, all_bytes, sizeof bytes);
    memset(words, 0, sizeof words);
    configured = true;
  }
  void require() const {
    if (!configured) abort();  // as the processor does
  }
  void zero(int tile) {
    require();
    memset(words[tile], 0, sizeof words[tile]);
  }
  void load(int tile, const void* p, int64_t stride) {
    zero(tile);
    for (int i = 0; i < rows[tile]; i++) memcpy(words[tile][i], (const char*)p + i * stride, bytes[tile]);
  }
  void store(int tile, void* p, int64_t stride) const {
    require();
    for (int i = 0; i < rows[tile]; i++) memcpy((char*)p + i * stride, words[tile][i], bytes[tile]);
  }

  static float add_products(float sum, uint32_t a, uint32_t b) {
    const uint32_t low[2] = {a << 16, b << 16}, high[2] = {a & 0xffff0000u, b & 0xffff0000u};
    float x[2], y[2];
    memcpy(x, low, 8);
    memcpy(y, high, 8);
    sum += x[0] * x[1];
    return sum + y[0] * y[1];
  }
  static int32_t add_products(int32_t sum, uint32_t a, uint32_t b) {
    for (int i = 0; i < 4; i++) sum += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return sum;
  }
  // Sum: of pairs of bf16, or of four int8 at a time.
  template <class Sum>
  void multiply(int c, int a, int b) {
    require();
    if (rows[c] != rows[a] || bytes[c] != bytes[b] || bytes[a] != 4 * rows[b]) abort();
    for (int i = 0; i < rows[c]; i++)
      for (int j = 0; j < bytes[c] / 4; j++) {
        Sum sum;
        memcpy(&sum, &words[c][i][j], 4);
        for (int k = 0; k < rows[b]; k++) sum = add_products(sum, words[a][i][k], words[b][k][j]);
        memcpy(&words[c][i][j], &sum, 4);
      }
  }
};

inline SoftTiles& soft_tiles() {
  static thread_local SoftTiles tiles;
  return tiles;
}

}  // namespace
}  // namespace radixfleet
