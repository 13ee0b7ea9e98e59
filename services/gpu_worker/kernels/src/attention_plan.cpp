// Cuts one step's rows into items of attention work, once per step. Leaves the arithmetic to the units.
//
// Items are large enough to share the preparation of a block among query tiles and small enough to balance threads;
// rows with few queries and long contexts are split over their blocks. Neither changes any result.
#include <stdlib.h>

#include <algorithm>
#include <new>
#include <vector>

#include "interface.h"

namespace radixfleet {

size_t scratch_bytes(int head_dim) {
  const size_t wide = padded(head_dim, 32), state = partial_floats(head_dim) * 4;
  return kMaxItemTiles * (wide * kLanes * 4 + state) + 2 * (size_t)kBlock * kLanes * 4 + state + 2 * kBlock * wide * 4 +
         kLanes * wide * 4 + kBlock * 16 + 16 * 64;
}

namespace {

struct Plan {
  Batch batch{};
  std::vector<Item> items;
  std::vector<int64_t> costs;
  std::vector<Split> splits;
  char *scratch = nullptr, *partials = nullptr;
  size_t scratch_size = 0, partials_size = 0;

  ~Plan() {
    free(scratch);
    free(partials);
  }

  static char* grown(char* old, size_t& size, size_t wanted) {
    if (wanted <= size) return old;
    free(old);
    size = (wanted + wanted / 4 + 4095) / 4096 * 4096;
    char* fresh = (char*)aligned_alloc(4096, size);
    if (!fresh) size = 0;
    return fresh;
  }
};

// Key blocks one tile-sized piece of a row visits; preparing a block costs about as much as six tiles.
int64_t cost_of(int tiles, int blocks) { return (int64_t)blocks * (tiles + 6); }

void add_items(Plan& plan, int row, int tokens, int kv_length) {
  const int lanes = tokens * (plan.batch.q_heads / plan.batch.kv_heads), start = kv_length - tokens;
  const int group = plan.batch.q_heads / plan.batch.kv_heads, most = kMaxItemTiles * kLanes;
  const int pieces = (lanes + most - 1) / most, per = padded((lanes + pieces - 1) / pieces, kLanes);
  for (int lane = 0; lane < lanes; lane += per) {
    const int take = std::min(per, lanes - lane), seen = start + (lane + take - 1) / group + 1;
    const int blocks = (seen + kBlock - 1) / kBlock;
    for (int h = 0; h < plan.batch.kv_heads; h++) plan.items.push_back({row, h, lane, take, 0, blocks, -1});
  }
}

// Splits small items whose cost is a large part of one thread's share.
void split_items(Plan& plan) {
  int64_t total = 0, partials = 0;
  auto tiles_of = [](const Item& item) { return (item.lanes + kLanes - 1) / kLanes; };
  for (const Item& item : plan.items) total += cost_of(tiles_of(item), item.last_block);
  const int64_t share = std::max<int64_t>(1, total / (plan.batch.threads * 4));
  std::vector<Item> whole;
  whole.swap(plan.items);
  for (Item item : whole) {
    const int tiles = tiles_of(item), blocks = item.last_block;
    const int parts = (int)std::min<int64_t>(blocks, (cost_of(tiles, blocks) + share - 1) / share);
    if (plan.batch.threads == 1 || tiles > kSplitTiles || parts <= 1) {
      plan.items.push_back(item);
      continue;
    }
    item.split = (int)plan.splits.size();
    plan.splits.push_back({partials, blocks, parts, parts});
    partials += (int64_t)tiles * blocks;
    for (int i = 0; i < parts; i++) {
      item.first_block = blocks * i / parts, item.last_block = blocks * (i + 1) / parts;
      plan.items.push_back(item);
    }
  }
  const size_t bytes = partials * partial_floats(plan.batch.head_dim) * 4;
  plan.partials = Plan::grown(plan.partials, plan.partials_size, bytes);
  if (bytes && !plan.partials) throw std::bad_alloc();
}

// The first wrong page, slot or length: 0 when there is none.
int check(const Batch& batch, int64_t num_pages) {
  if (batch.kv_heads < 1 || batch.q_heads % batch.kv_heads || batch.head_dim < 1 || batch.page_size < 1) return 1;
  for (int r = 0; r < batch.rows; r++) {
    const int tokens = batch.qo_indptr[r + 1] - batch.qo_indptr[r], length = batch.kv_lengths[r];
    if (tokens < 0 || tokens > length || batch.qo_indptr[r] < 0 || batch.qo_indptr[r + 1] > batch.tokens) return 2;
    const int pages = (length + batch.page_size - 1) / batch.page_size;
    if (pages > batch.page_table_stride) return 3;
    const int32_t* table = batch.page_tables + r * batch.page_table_stride;
    for (int i = 0; i < pages; i++)
      if (table[i] < 0 || table[i] >= num_pages) return 3;
  }
  for (int t = 0; t < batch.tokens; t++)
    if (batch.kv_slots[t] < 0 || batch.kv_slots[t] >= num_pages * batch.page_size) return 4;
  return 0;
}

int build(Plan& plan) {
  Batch& batch = plan.batch;
  plan.items.clear();
  plan.splits.clear();
  for (int r = 0; r < batch.rows; r++) {
    const int tokens = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    if (tokens > 0) add_items(plan, r, tokens, batch.kv_lengths[r]);
  }
  split_items(plan);
  // The largest first, so that the last items to be taken are small.
  std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& a, const Item& b) {
    return cost_of(a.lanes / kLanes, a.last_block - a.first_block) > cost_of(b.lanes / kLanes, b.last_block - b.first_block);
  });
  batch.scratch_stride = (scratch_bytes(batch.head_dim) + 4095) / 4096 * 4096;
  plan.scratch = Plan::grown(plan.scratch, plan.scratch_size, batch.scratch_stride * batch.threads);
  if (!plan.scratch) return -1;
  batch.items = plan.items.data(), batch.num_items = (int)plan.items.size();
  batch.splits = plan.splits.data(), batch.partials = (float*)plan.partials, batch.scratch = plan.scratch;
  return 0;
}

}  // namespace
}  // namespace radixfleet

using namespace radixfleet;

RF_EXPORT void* rf_plan_new() { return new (std::nothrow) Plan(); }
RF_EXPORT void rf_plan_free(void* plan) { delete (Plan*)plan; }
RF_EXPORT uint64_t rf_plan_kv_bytes(const void* plan) { return ((const Plan*)plan)->batch.kv_bytes; }

// 0, or -1 without memory, or what is wrong: 1 shape, 2 row lengths, 3 page table, 4 slots. The arrays must live until
// the plan is made anew.
RF_EXPORT int rf_plan_make(void* handle, const int32_t* qo_indptr, const int32_t* kv_lengths, const int32_t* page_tables,
                           int64_t page_table_stride, const int64_t* kv_slots, int rows, int tokens, int q_heads,
                           int kv_heads, int head_dim, int page_size, int64_t num_pages, int dtype, int threads) {
  Plan& plan = *(Plan*)handle;
  Batch& batch = plan.batch;
  batch.qo_indptr = qo_indptr, batch.kv_lengths = kv_lengths, batch.page_tables = page_tables;
  batch.page_table_stride = page_table_stride, batch.kv_slots = kv_slots;
  batch.rows = rows, batch.tokens = tokens, batch.q_heads = q_heads, batch.kv_heads = kv_heads;
  batch.head_dim = head_dim, batch.page_size = page_size, batch.dtype = dtype;
  batch.threads = std::max(1, threads);
  batch.num_items = 0;
  if (int wrong = check(batch, num_pages)) return wrong;
  try {
    return build(plan);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

RF_EXPORT void rf_attention(int isa, void* plan, const LayerCall* call) {
  kernels_of(isa).attention(((Plan*)plan)->batch, *call);
}
