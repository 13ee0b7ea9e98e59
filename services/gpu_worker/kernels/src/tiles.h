// AMX tile instructions as functions. The compiler's own intrinsics for loads name no memory dependence in some
// versions, so that stores may be moved behind them; these do.
#pragma once

#include "interface.h"

namespace radixfleet {
namespace {

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

inline void load_config(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
inline void release_tiles() { __asm__ volatile("tilerelease"); }

inline void full_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = 16;
  }
  load_config(config);
}

template <int Tile>
inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tile>
inline void load_tile(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
// The same for what is read again late: it does not push out of the nearest cache what is read again soon.
template <int Tile>
inline void load_tile_once(const void* p, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
inline void store_tile(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
template <int C, int A, int B>  // C += A * B, bf16 pairs
inline void multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace
}  // namespace radixfleet
