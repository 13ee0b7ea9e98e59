// Paged attention of one item of work: some queries of one KV head over their pages. Leaves arithmetic to an Engine, the
// cutting of work into items to attention_plan.cpp and sharing them out to attention_team.h.
#pragma once

#include <type_traits>

#include "ahead.h"
#include "rows.h"
#include "softmax.h"
#include "state.h"

namespace radixfleet {
namespace {

template <class Engine>
struct Attention {
  using T = typename Engine::Storage;
  using Word = typename Engine::Word;

  Batch& batch;
  const LayerCall& call;
  const int head_dim, width, group;
  const int64_t key_words, page_elements;
  const size_t state_floats;
  // One thread's scratch.
  Word *queries, *keys, *values;
  float *states, *scores, *block;
  Word* staging;
  const T** value_rows;
  const Word** key_tiles;
  AheadKeys ahead;

  Attention(Batch& b, const LayerCall& c, char* scratch)
      : batch(b),
        call(c),
        head_dim(b.head_dim),
        width(Engine::width(b.head_dim)),
        group(b.q_heads / b.kv_heads),
        key_words(Engine::key_words(b.head_dim)),
        page_elements((int64_t)b.page_size * b.head_dim),
        state_floats(partial_floats(b.head_dim)) {
    auto carve = [&](size_t bytes) {
      char* at = scratch;
      scratch += (bytes + 63) / 64 * 64;
      return (void*)at;
    };
    queries = (Word*)carve((size_t)kMaxItemTiles * key_words * kLanes * 4);
    states = (float*)carve(kMaxItemTiles * state_floats * 4);
    scores = (float*)carve(2 * kBlock * kLanes * 4);
    block = (float*)carve(2 * state_floats * 4);
    keys = (Word*)carve((size_t)kBlock * key_words * 4);
    values = (Word*)carve((size_t)kBlock * width * 4);
    staging = (Word*)carve((size_t)kLanes * padded(head_dim, 32) * 4);
    value_rows = (const T**)carve(kBlock * sizeof(T*));
    key_tiles = (const Word**)carve(kBlock / 16 * sizeof(Word*));
  }

  const T* page(int64_t id, int value, int head) const {
    return (const T*)call.cache + ((id * 2 + value) * batch.kv_heads + head) * page_elements;
  }

  int row_of(const Item& item, int lane) const {
    return item.members < 0 ? item.row : batch.members[item.members + lane / group];
  }
  int token_of(const Item& item, int lane) const {
    return batch.qo_indptr[row_of(item, lane)] + (item.members < 0 ? lane / group : 0);
  }
  int position_of(const Item& item, int lane) const {
    const int row = row_of(item, lane);
    return batch.kv_lengths[row] - batch.qo_indptr[row + 1] + token_of(item, lane);
  }
  int64_t query_offset(const Item& item, int lane, int64_t stride) const {
    return token_of(item, lane) * stride + (int64_t)(item.kv_head * group + lane % group) * head_dim;
  }

  // Queries of one tile, transposed: [word of d][16 lanes].
  void pack_queries(const Item& item, int lane, int live, Word* dst) {
    if (live < kLanes) memset(staging, 0, (size_t)kLanes * key_words * 4);
    for (int i = 0; i < live; i++) {
      const T* q = (const T*)call.q + query_offset(item, lane + i, call.q_stride);
      Engine::key_row(q, head_dim, staging + i * key_words);
    }
    for (int w = 0; w < key_words; w += 16)
      transpose16((const uint32_t*)staging + w, key_words, (uint32_t*)dst + w * kLanes, kLanes);
  }

  // Whether the item's results lie straight.
  bool narrow(int lanes) const { return Engine::is_narrow(lanes, head_dim); }
  bool narrow(const Item& item) const { return narrow(item.lanes); }

  // Whether the engine has a form of its own for so few lanes.
  static constexpr bool kHasFew = !std::is_void<typename Engine::Few>::value;
  static constexpr bool kHasTwo = !std::is_void<typename Engine::Two>::value;
  bool few(const Item& item) const {
    if constexpr (kHasFew) return Engine::Few::takes(item.lanes, head_dim);
    return false;
  }
  bool takes_rows(const Item& item) const {  // of V, as they are
    if constexpr (kHasFew) return Engine::Few::kTakesRows && few(item);
    return false;
  }

  // K tiles and V of `count` keys from position first_key on; reads each page of the row once.
  void load_block(const Item& item, int first_key, int count) {
    const int32_t* table = batch.page_tables + item.row * batch.page_table_stride;
    const int size = batch.page_size;
    const bool direct = Engine::kDirectKeys && size % 16 == 0 && head_dim % 32 == 0;
    for (int i = 0; i < count;) {
      const int at = first_key + i, offset = at % size, take = size - offset < count - i ? size - offset : count - i;
      const int64_t id = table[at / size];
      const T* k = page(id, 0, item.kv_head) + (int64_t)offset * head_dim;
      const T* v = page(id, 1, item.kv_head) + (int64_t)offset * head_dim;
      for (int j = 0; j < take; j++) value_rows[i + j] = v + (int64_t)j * head_dim;
      if (direct) {
        for (int j = 0; j < take; j += 16) key_tiles[(i + j) / 16] = (const Word*)(k + (int64_t)j * head_dim);
      } else {
        for (int j = 0; j < take; j++) Engine::key_row(k + (int64_t)j * head_dim, head_dim, keys + (i + j) * key_words);
      }
      i += take;
    }
    const int rounded = padded(count, Engine::kKeyStep);
    for (int i = count; i < rounded; i++) value_rows[i] = nullptr;
    if (!direct)
      for (int i = 0; i < rounded; i += 16) key_tiles[i / 16] = keys + i * key_words;
    if (!takes_rows(item)) Engine::values(value_rows, rounded, head_dim, narrow(item), values, ahead);
    __atomic_fetch_add(&batch.kv_bytes, (uint64_t)count * head_dim * 2 * sizeof(T), __ATOMIC_RELAXED);
  }

  Visible visible_keys(const Item& item, int lane, int live) const {
    Visible visible;
    visible.min_first = visible.min_last = INT32_MAX;
    visible.max_first = visible.max_last = 0;
    for (int i = 0; i < kLanes; i++) {
      const int position = position_of(item, lane + (i < live ? i : live - 1));
      const int first = call.window > 0 && position >= call.window ? position - call.window + 1 : 0;
      const int last = position < item.end_key ? position : item.end_key - 1;
      visible.first[i] = first, visible.last[i] = last;
      visible.min_first = first < visible.min_first ? first : visible.min_first;
      visible.max_first = first > visible.max_first ? first : visible.max_first;
      visible.min_last = last < visible.min_last ? last : visible.min_last;
      visible.max_last = last > visible.max_last ? last : visible.max_last;
    }
    return visible;
  }

  // As attend, over S[key][4 lanes]; P gets the place behind it.
  template <class Few = typename Engine::Few>
  void attend_few(const Item& item, float* s, int first_key, int count, const Visible& visible, float* result) {
    float factor = call.scale * 1.4426950408889634f, *maxima = result + width * kLanes;
    if (call.soft_cap > 0) {
      cap_scores(s, count * Few::kLanesFew, call.scale, call.soft_cap);
      factor = 1.4426950408889634f;
    }
    Few::mask_scores(s, count, first_key, visible);
    Word* p = (Word*)s + kBlock * Few::kLanesFew;
    Few::softmax(s, count, factor, maxima, maxima + kLanes, p, ahead);
    Few::weighted(p, value_rows, values, count, head_dim, item.lanes, result, ahead);
  }

  // Scores become weights, and these a sum of V; the result goes to `result` in the form of a state.
  void attend(const Item& item, float* s, int first_key, int count, int live, const Visible& visible, float* result) {
    float factor = call.scale * 1.4426950408889634f;
    if constexpr (kHasFew) {
      if (few(item)) return attend_few(item, s, first_key, count, visible, result);
    }
    if (call.soft_cap > 0) {
      cap_scores(s, count * kLanes, call.scale, call.soft_cap);
      factor = 1.4426950408889634f;
    }
    mask_scores(s, count, first_key, visible);
    float* maxima = result + width * kLanes;
    softmax<Engine::kPairs>(s, count, factor, maxima, maxima + kLanes, ahead);
    const int stepped = padded(count, Engine::kKeyStep);
    if (stepped > count) memset(s + count / 2 * kLanes, 0, (stepped - count) / 2 * kLanes * 4);
    if (narrow(item)) Engine::weighted_narrow((Word*)s, values, stepped, head_dim, result, ahead);
    else Engine::weighted((const Word*)s, values, stepped, head_dim, result, (live + kWidth - 1) / kWidth);
  }

  float* partial_at(int64_t index) const { return batch.partials + index * state_floats; }
  float* partial(const Split& split, int tile, int b) const {
    return partial_at(split.first_partial + (int64_t)tile * split.blocks + b - split.first_block);
  }
  static int live_lanes(const Item& item, int tile) {
    return item.lanes - tile * kLanes < kLanes ? item.lanes - tile * kLanes : kLanes;
  }
  void merge(const Item& item, float* state, const float* add) const {
    if (narrow(item)) merge_narrow(state, add, width, item.lanes);
    else merge_wide(state, add, width);
  }

  // The item's first key in a block.
  static int start_of(const Item& item, int b) { return b * kBlock > item.first_key ? b * kBlock : item.first_key; }

  // Keys of the block that a tile sees, from its first one on; 0: none.
  static int keys_seen(const Item& item, const Visible& visible, int b) {
    const int start = start_of(item, b), limit = (b + 1) * kBlock < item.end_key ? (b + 1) * kBlock : item.end_key;
    const int end = visible.max_last + 1 < limit ? visible.max_last + 1 : limit;
    return end > start && limit > visible.min_first ? end - start : 0;
  }

  // Where the block's result of a tile goes: to be merged at once, or later in the order of the blocks.
  float* result_of(const Item& item, int tile, int b) const {
    if (item.split >= 0) return partial(batch.splits[item.split], tile, b);
    return block + tile % 2 * state_floats;
  }
  void merge_result(const Item& item, int tile, const float* result) const {
    if (item.split < 0) merge(item, states + tile * state_floats, result);
  }

  void run_tile(const Item& item, const Visible& visible, int tile, int b, int seen) {
    const int count = padded(seen, 16);
    const Word* q = queries + (int64_t)tile * key_words * kLanes;
    float* result = result_of(item, tile, b);
    if (count == 0) {
      if (item.split >= 0) clear_state(result, width);
      return;
    }
    if (!scores_of_few(item, q, count))
      Engine::scores(q, key_tiles, count, head_dim, scores, (live_lanes(item, tile) + kWidth - 1) / kWidth, ahead);
    attend(item, scores, start_of(item, b), count, live_lanes(item, tile), visible, result);
    merge_result(item, tile, result);
  }

  // Whether the item has few lanes: then these are their scores.
  bool scores_of_few(const Item& item, const Word* q, int count) {
    if constexpr (kHasFew) {
      if (few(item)) Engine::Few::scores(q, key_tiles, count, head_dim, item.lanes, scores, ahead);
    }
    return few(item);
  }

  // Tiles `tile` and the one after it, of which one sees `seen` keys and the other no more.
  template <class Two = typename Engine::Two>
  void run_two(const Item& item, const Visible* visible, int tile, int b, int seen) {
    const int count = padded(seen, 16), stepped = padded(count, 32);
    const Word* q = queries + (int64_t)tile * key_words * kLanes;
    float *s[2] = {scores, scores + kBlock * kLanes}, tops[2 * kLanes], factor = call.scale * 1.4426950408889634f;
    float* results[2] = {result_of(item, tile, b), result_of(item, tile + 1, b)};
    Engine::scores_of_two(q, q + key_words * kLanes, key_tiles, count, head_dim, s[0], s[1], tops, ahead);
    if (call.soft_cap > 0) factor = 1.4426950408889634f;
    for (int i = 0; i < 2; i++) {
      if (call.soft_cap > 0) cap_scores(s[i], count * kLanes, call.scale, call.soft_cap);
      const bool masked = mask_scores(s[i], count, start_of(item, b), visible[tile + i]);
      if (masked || call.soft_cap > 0) store(tops + i * kLanes, column_maximum(s[i], count));
      for (int k = count * kLanes; k < stepped * kLanes; k += kWidth) store(s[i] + k, splat(-INFINITY));
    }
    Two::weighted(s[0], s[1], tops, values, stepped, head_dim, factor, results[0], results[1], ahead);
    for (int i = 0; i < 2; i++) merge_result(item, tile + i, results[i]);
  }

  // Tiles go two by two where the engine has a form for it.
  void run_block(const Item& item, const Visible* visible, int tiles, int b) {
    int counts[kMaxItemTiles + 1] = {}, most = 0;
    for (int t = 0; t < tiles; t++) {
      counts[t] = keys_seen(item, visible[t], b);
      most = counts[t] > most ? counts[t] : most;
    }
    if (most) load_block(item, start_of(item, b), most);
    for (int t = 0; t < tiles; t++) {
      if constexpr (kHasTwo) {
        if (counts[t] && counts[t + 1]) {
          run_two(item, visible, t, b, counts[t] > counts[t + 1] ? counts[t] : counts[t + 1]);
          t++;
          continue;
        }
      }
      run_tile(item, visible[t], t, b, counts[t]);
    }
  }

  void write_tiles(const Item& item, int tiles) {
    for (int t = 0; t < tiles; t++) {
      float *state = states + t * state_floats, *rows = straight(item, state);
      const float* sums = state + (width + 1) * kLanes;
      for (int i = 0; i < live_lanes(item, t); i++) {
        if (Engine::kPairs) order_dimensions(rows + i * width, width);
        const int64_t to = query_offset(item, item.first_lane + t * kLanes + i, call.out_stride);
        write_row(rows + i * width, head_dim, sums[i], (T*)call.out + to);
      }
    }
  }
  // O of a state as [lane][width].
  float* straight(const Item& item, float* state) const {
    if (narrow(item)) return state;
    straighten(state, width, (float*)staging);
    return (float*)staging;
  }

  // A group's lanes become the states that its rows start from; rows that were waiting for nothing else are finished.
  void hand_over(const Item& item, int tiles) {
    for (int t = 0; t < tiles; t++) {
      float *state = states + t * state_floats, *rows = straight(item, state);
      for (int i = 0; i < live_lanes(item, t); i++) {
        const int lane = item.first_lane + t * kLanes + i, g = lane % group;
        float* to = partial_at(row_split(item, lane).initial);
        const float* row = rows + i * width;
        if (narrow(group)) memcpy(to + g * width, row, width * 4);
        else for (int d = 0; d < width; d++) to[d * kLanes + g] = row[d];
        to[width * kLanes + g] = state[width * kLanes + i];
        to[(width + 1) * kLanes + g] = state[(width + 1) * kLanes + i];
      }
    }
    for (int lane = item.first_lane; lane < item.first_lane + item.lanes; lane += group)
      arrive({row_of(item, lane), item.kv_head, -1, 0, group, 0, 0, 0, 0, 0}, row_split(item, lane));
  }
  Split& row_split(const Item& item, int lane) const {
    return batch.splits[batch.row_splits[row_of(item, lane)] + item.kv_head];
  }

  void arrive(const Item& item, Split& split) {
    if (__atomic_sub_fetch(&split.remaining, 1, __ATOMIC_ACQ_REL) != 0) return;
    __atomic_store_n(&split.remaining, split.items, __ATOMIC_RELAXED);
    const int tiles = (item.lanes + kLanes - 1) / kLanes;
    for (int t = 0; t < tiles; t++) {
      float* state = states + t * state_floats;
      if (split.initial >= 0) memcpy(state, partial_at(split.initial), state_floats * 4);
      else clear_state(state, width);
      for (int b = 0; b < split.blocks; b++) merge(item, state, partial(split, t, split.first_block + b));
    }
    complete(item, tiles);
  }
  void complete(const Item& item, int tiles) {
    if (item.members < 0) write_tiles(item, tiles);
    else hand_over(item, tiles);
  }

  // What `item` will read of its block b.
  AheadKeys keys_of(const Item& item, int b) const {
    const int first = start_of(item, b), end = (b + 1) * kBlock < item.end_key ? (b + 1) * kBlock : item.end_key;
    const int size = batch.page_size, page = first / size;
    AheadKeys next;
    next.table = batch.page_tables + item.row * batch.page_table_stride + page;
    next.piece_bytes = page_elements * sizeof(T);
    next.page_bytes = 2 * batch.kv_heads * next.piece_bytes, next.value_bytes = batch.kv_heads * next.piece_bytes;
    next.cache = (const char*)call.cache + item.kv_head * next.piece_bytes;
    next.pieces = end > first ? 2 * ((end - 1) / size - page + 1) : 0;
    return next;
  }

  void run(const Item& item, const Item* next) {
    const int tiles = (item.lanes + kLanes - 1) / kLanes;
    Visible visible[kMaxItemTiles];
    if constexpr (kHasFew) {
      if (few(item)) Engine::Few::begin(head_dim / 32);
      else Engine::begin();
    }
    for (int t = 0; t < tiles; t++) {
      visible[t] = visible_keys(item, item.first_lane + t * kLanes, live_lanes(item, t));
      pack_queries(item, item.first_lane + t * kLanes, live_lanes(item, t), queries + (int64_t)t * key_words * kLanes);
      if (item.split < 0) clear_state(states + t * state_floats, width);
    }
    for (int b = item.first_block; b < item.last_block; b++) {
      if (b + 1 < item.last_block) ahead = keys_of(item, b + 1);
      else ahead = next ? keys_of(*next, next->first_block) : AheadKeys();
      run_block(item, visible, tiles, b);
    }
    if (item.split < 0) complete(item, tiles);
    else arrive(item, batch.splits[item.split]);
  }
};

}  // namespace
}  // namespace radixfleet
