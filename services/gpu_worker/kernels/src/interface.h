// The plain C interface of the kernel library and the tables behind it. Leaves algorithms to the headers that each
// instruction-set unit compiles for itself.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#error "Linux and macOS only"
#endif
#define RF_EXPORT extern "C" __attribute__((visibility("default")))

namespace radixfleet {

using bf16 = uint16_t;

enum Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3, kNumIsas = 4 };
enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1 };

constexpr int kLanes = 16;         // queries of one tile
constexpr int kBlock = 256;        // keys of one attention block, at positions that are multiples of it
constexpr int kMaxItemTiles = 24;  // query tiles that share the preparation of a block
constexpr int kSplitTiles = 4;     // items of at most so many tiles may be split over their blocks

// One unit of attention work: some query tiles of one row and KV head against the blocks first_block..last_block - 1.
struct Item {
  int32_t row, kv_head;
  int32_t first_lane, lanes;  // lane = token of the row's chunk * group size + query head in the group
  int32_t first_block, last_block;
  int32_t split;  // index into the plan's splits, -1: the item does all blocks
};

// An item whose blocks are spread over several items; the last one to finish merges in block order.
struct Split {
  int64_t first_partial;  // partial of tile t, block b: first_partial + t * blocks + b
  int32_t blocks, items, remaining;
};

// One step's batch, as the instruction-set units see it.
struct Batch {
  const int32_t *qo_indptr, *kv_lengths, *page_tables;
  const int64_t* kv_slots;
  int64_t page_table_stride;
  int32_t rows, tokens, q_heads, kv_heads, head_dim, page_size, dtype, threads;
  int32_t num_items;
  const Item* items;
  Split* splits;
  float* partials;
  char* scratch;
  size_t scratch_stride;  // bytes of one thread's scratch
  uint64_t kv_bytes;      // bytes of K and V read from the cache, since the plan was made
};

// One layer's inputs; the heads of a token lie next to each other, strides are in elements.
struct LayerCall {
  const void *q, *k, *v;
  void *out, *cache;
  int64_t q_stride, k_stride, v_stride, out_stride;
  float scale, soft_cap;
  int32_t window;
};

struct Kernels {
  void (*attention)(Batch&, const LayerCall&);
};

// Floats of one partial result: 16 lanes of O, then their maxima and sums.
inline int padded(int n, int to) { return (n + to - 1) / to * to; }
inline size_t partial_floats(int head_dim) { return (size_t)(padded(head_dim, 32) + 2) * kLanes; }
size_t scratch_bytes(int head_dim);

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_amx;
const Kernels& kernels_of(int isa);

}  // namespace radixfleet
