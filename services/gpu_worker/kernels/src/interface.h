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
enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };  // kInt8: of weights only

inline bool within(const int64_t* values, int count, int64_t end) {
  for (int i = 0; i < count; i++)
    if (values[i] < 0 || values[i] >= end) return false;
  return true;
}

inline int padded(int n, int to) { return (n + to - 1) / to * to; }

constexpr int kLanes = 16;         // queries of one tile
constexpr int kBlock = 256;        // keys of one attention block, at positions that are multiples of it
constexpr int kMaxItemTiles = 24;  // query tiles that share the preparation of a block
constexpr int kSplitTiles = 4;     // items of at most so many tiles may be split over their blocks

// One unit of attention work: some query tiles of one KV head against the blocks first_block..last_block - 1, of keys
// first_key..end_key - 1. The queries are those of one row, or those of the decode rows of a group.
struct Item {
  int32_t row, kv_head;           // of a group: its first row, whose pages are read
  int32_t members;                // of a group: index of its first lane's row in `members`; -1: one row
  int32_t first_lane, lanes;      // lane = token of the row's chunk, or member * group size + query head in the group
  int32_t first_key, end_key;
  int32_t first_block, last_block;
  int32_t split;  // index into the plan's splits, -1: the item does all blocks
};

// A result that several items make together; the last one to finish merges in block order.
struct Split {
  int64_t first_partial;    // partial of tile t, block first_block + i: first_partial + t * blocks + i
  int64_t initial;          // the partial that a group leaves as the state to start from, -1: none
  int32_t first_block, blocks;
  int32_t items, remaining;  // arrivals until the result is complete
};

// One step's batch, as the instruction-set units see it.
struct Batch {
  const int32_t *qo_indptr, *kv_lengths, *page_tables;
  const int64_t* kv_slots;
  int64_t page_table_stride;
  int32_t rows, tokens, q_heads, kv_heads, head_dim, page_size, dtype, threads;
  int32_t num_items, next_item;  // next_item: nobody has taken yet
  const Item* items;
  Split* splits;
  const int32_t *members, *row_splits;  // rows of groups; the split of each grouped row's first KV head, else -1
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

// What is known of each kBlockLogits logits of a row: the largest, NaN where any of them is, and in rows with a scale the
// sum of 2^((logit - largest) * scale). These and a few of a row's blocks answer what is asked of the row; whoever changes
// logits keeps them true.
constexpr int kBlockLogits = 32;
inline int blocks_of(int vocab) { return (vocab + kBlockLogits - 1) / kBlockLogits; }
struct Blocks {
  float *peaks, *sums;  // [rows][blocks_of(vocab)]; peaks null: not wanted
  const float* scales;  // [rows], 0: no sums
  int64_t stride;
};

// y = norm(x) W^T + bias, then the gate, then + residual. W is packed by pack_weight; x is of `dtype`, as W is unless
// its form, `weights`, is int8.
struct LinearCall {
  const void *x, *weight, *norm, *residual;  // norm: weights of an RMS norm, or null; residual in out's dtype, or null
  const float* bias;
  void* out;
  Blocks blocks;  // of fp32 outputs without a gate
  int64_t x_stride, residual_stride, out_stride;  // elements per row
  float eps;
  int32_t rows, outputs, inputs;  // outputs counts the rows of W
  int32_t dtype, out_dtype;
  int32_t gated;  // W is gate over up: out = silu(gate) * up has outputs / 2 columns
  int32_t threads, weights;
};

// Rows of x [tokens][n]: out = RMS norm of (x + added) by weight; where `added` is given, x + added goes to x.
struct NormCall {
  void* x;
  const void *added, *weight;
  void* out;
  int64_t x_stride, added_stride, out_stride;
  float eps;
  int32_t rows, size, dtype, threads;
};

// Rotates the halves of each head of q and k in place.
struct RopeCall {
  void *q, *k;
  const float *cos, *sin;  // [tokens][head_dim / 2]
  int64_t q_stride, k_stride, table_stride;
  int32_t tokens, q_heads, kv_heads, head_dim, dtype, threads;
};

struct GateCall {  // out = silu(x[:, :size]) * x[:, size:]
  const void* x;
  void* out;
  int64_t x_stride, out_stride;
  int32_t rows, size, dtype, threads;
};

// What is known of logits [count][vocab].
struct BlockCall {
  const float* logits;
  Blocks blocks;
  int64_t stride;
  int32_t count, vocab, threads;
};

// Penalties, biases and forbidden stop tokens of rows [count] of logits. What each slot wants are columns
// over slots: tokens seen (and how often in the answer), tokens biased (and by what), and stop tokens, which must not be
// drawn at positions before `stops_from`, unless the row `keeps_stops`.
struct EditCall {
  float* logits;
  Blocks blocks;
  const int64_t *slots, *positions;
  const uint8_t* keeps_stops;  // or null
  const int64_t *const *seen, *const *biased, *const *stops;
  const float *const *counts, *const *biases;
  const int64_t *num_seen, *num_biased, *num_stops, *stops_from;
  const float *repetition, *frequency, *presence;
  int64_t stride;
  int32_t count, vocab, threads;
};

// Of logits [][vocab]: -inf where bit i of word w of words [count][ceil(vocab / 32)] is 0, for token 32 w + i. A word is
// a block.
struct MaskCall {
  float* logits;
  Blocks blocks;
  const uint32_t* words;
  const int64_t* rows;       // [count], which rows of the logits
  const uint8_t* likeliest;  // [count] or null: of this row only the likeliest token is wanted, from its peaks
  int64_t stride, word_stride;
  int32_t count, vocab, threads;
};

// Log-probabilities of each row of logits [count][vocab]: what to take off a logit (the logarithm of the sum of e^logit), that
// of its target, and the `top` largest [count][top] with their tokens, the lower one first among equals.
struct ScoreCall {
  const float* logits;
  Blocks blocks;
  const int64_t* targets;
  float *norms, *chosen, *values;
  int32_t* tokens;
  int64_t stride;
  int32_t count, vocab, top, threads;
};

// A token of each row of logits [count][vocab], and its largest logit, NaN where any is; no token is drawn where that is
// not finite. Greedy rows take the first of the largest. Of the others' weights e^((logit - peak) / temperature) those
// survive that the filters leave (top_k 0, top_p 1, min_p 0: none), in the order of weight, then token; a uniform of (seed,
// position) picks among them. scratch: draw_floats() for each thread.
struct DrawCall {
  const float* logits;
  Blocks blocks;
  const uint8_t* greedy;
  const double *temperatures, *top_p, *min_p;
  const int64_t* top_k;
  const uint64_t* seeds;
  const int64_t *slots, *positions;  // of each row; parameters are those of its slot
  int64_t* tokens;
  float *peaks, *scratch;
  int64_t stride;
  int32_t count, vocab, num_slots, threads;
};
inline int64_t draw_floats(int vocab) { return 5 * (int64_t)padded(vocab, kBlockLogits) + 64; }

// One decoder layer's weights (products packed), and its part of the cache.
struct DecoderLayer {
  const void *input_norm, *mlp_norm, *qk_norm;  // qk_norm [q_heads + kv_heads][head_dim], or null
  const void *qkv, *output, *gate_up, *down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // in panel order, or null
  void* cache;
  float scale, soft_cap;
  int32_t window, rope;
};

// One step: the embeddings of its tokens pass all layers, those of the tokens `keep` also the last one's feed-forward, to
// `out` [num_keep][hidden]. `head`, or null: the product whose x they are then.
struct DecoderCall {
  const DecoderLayer* layers;
  const LinearCall* head;
  const void* embedding;  // [vocab][hidden]
  const int64_t *token_ids, *positions, *keep;
  void* out;
  const float *cos, *sin;  // [table_rows][head_dim / 2], of every position
  float eps;
  int32_t vocab, table_rows, num_layers, num_keep, tokens, hidden, intermediate;
  int32_t q_heads, kv_heads, head_dim, dtype, threads, weights;
};
enum StepError : int { kNoMemory = -1, kNoToken = 1, kBeyondTables = 2, kNotInStep = 3 };

struct Kernels {
  void (*attention)(Batch&, const LayerCall&);
  bool (*linear)(const LinearCall&);  // false without memory
  bool (*decoder)(const DecoderCall&, Batch&);  // false without memory
  void (*norm)(const NormCall&);
  void (*rope)(const RopeCall&);
  void (*gate)(const GateCall&);
  void (*blocks)(const BlockCall&);
  void (*edit)(const EditCall&);
  void (*mask)(const MaskCall&);
  void (*score)(const ScoreCall&);
  void (*draw)(const DrawCall&);
};

// Floats of one partial result: 16 lanes of O, then their maxima and sums.
inline size_t partial_floats(int head_dim) { return (size_t)(padded(head_dim, 32) + 2) * kLanes; }
size_t scratch_bytes(int head_dim);
bool keep_place(int thread);  // whether the calling thread is kept on the core of its number
void* thread_scratch(size_t bytes);  // this thread's, valid until its next call; null without memory

// Packed weights: tiles of 256 words, [outputs / 32][steps][2 panels of 16 outputs][16][16 outputs]; a word is a float,
// two bf16 inputs or four int8 ones, so that a step is 16 inputs, 32 or 64. Outputs and inputs are padded with zeros.
// Gated weights alternate panels of gate and up. After int8 tiles come the outputs' scales, fp32 in panel order.
constexpr int kPanel = 16, kTileWords = 256;
inline int input_steps(int inputs, int weights) {
  const int step = weights == kInt8 ? 64 : weights == kBfloat16 ? 32 : 16;
  return (inputs + step - 1) / step;
}
inline int panels_of(int outputs, int gated) {
  return gated ? (outputs / 2 + kPanel - 1) / kPanel * 2 : padded(outputs, 2 * kPanel) / kPanel;
}

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_amx;
const Kernels& kernels_of(int isa);

}  // namespace radixfleet
