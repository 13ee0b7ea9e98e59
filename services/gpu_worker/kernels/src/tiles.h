// AMX tile instructions as functions. The compiler's own intrinsics for loads name no memory dependence in some
// versions, so that stores may be moved behind them; these do. Built with RF_SOFT_TILES they are plain code: for tests on
// processors without tiles, and for sanitizers, which do not see what tile instructions read and write.
#pragma once

#include "interface.h"
#if defined(RF_SOFT_TILES)
#include "soft_tiles.h"
#endif

namespace radixfleet {
namespace {

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

#if defined(RF_SOFT_TILES)
inline void load_config(const TileConfig& config) { soft_tiles().configure(config.rows, config.bytes_per_row); }
inline void release_tiles() { soft_tiles().configured = false; }
#else
inline void load_config(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
inline void release_tiles() { __asm__ volatile("tilerelease"); }
#endif

inline void full_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = 16;
  }
  load_config(config);
}

#if defined(RF_SOFT_TILES)
template <int Tile>
inline void zero_tile() {
  soft_tiles().zero(Tile);
}
template <int Tile>
inline void load_tile(const void* p, int64_t stride) {
  soft_tiles().load(Tile, p, stride);
}
template <int Tile>
inline void load_tile_once(const void* p, int64_t stride) {
  soft_tiles().load(Tile, p, stride);
}
template <int Tile>
inline void store_tile(void* p, int64_t stride) {
  soft_tiles().store(Tile, p, stride);
}
template <int C, int A, int B>
inline void multiply() {
  soft_tiles().multiply<float>(C, A, B);
}
template <int C, int A, int B>
inline void multiply_bytes() {
  soft_tiles().multiply<int32_t>(C, A, B);
}
#else
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
template <int C, int A, int B>  // C += A * B, four int8 at a time
inline void multiply_bytes() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
#endif

}  // namespace
}  // namespace radixfleet
