// Cuts one step's rows into items of attention work, once per step. Leaves the arithmetic to the units.
//
// Items are large enough to share the preparation of a block among query tiles and small enough to balance threads;
// rows with few queries and long contexts are split over their blocks. Neither changes any result.
// Decode rows that share pages attend to these as one item, and continue alone from where it ends.
#include <stdlib.h>

#include <algorithm>
#include <new>
#include <vector>

#include "interface.h"

namespace radixfleet {

size_t scratch_bytes(int head_dim) {
  const size_t wide = padded(head_dim, 32), state = partial_floats(head_dim) * 4;
  return kMaxItemTiles * (wide * kLanes * 4 + state) + 2 * (size_t)kBlock * kLanes * 4 + 2 * state + 2 * kBlock * wide * 4 +
         kLanes * wide * 4 + kBlock * 16 + 16 * 64;
}

namespace {

struct Plan {
  Batch batch{};
  std::vector<Item> items;
  std::vector<int64_t> costs;
  std::vector<Split> splits;
  std::vector<int32_t> members, row_splits, shared_keys;
  int64_t num_partials = 0;
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

int tiles_of(const Item& item) { return (item.lanes + kLanes - 1) / kLanes; }
int64_t cost_of(const Item& item) { return cost_of(tiles_of(item), item.last_block - item.first_block); }
int blocks_until(int key) { return (key + kBlock - 1) / kBlock; }

void add_row(Plan& plan, int row) {
  const int32_t* indptr = plan.batch.qo_indptr;
  const int tokens = indptr[row + 1] - indptr[row], start = plan.batch.kv_lengths[row] - tokens;
  const int group = plan.batch.q_heads / plan.batch.kv_heads, lanes = tokens * group;
  const int most = kMaxItemTiles * kLanes, pieces = (lanes + most - 1) / most, shared = plan.shared_keys[row];
  if (tokens == 0) return;
  const int per = padded((lanes + pieces - 1) / pieces, kLanes);
  for (int lane = 0; lane < lanes; lane += per) {
    const int take = std::min(per, lanes - lane), end = start + (lane + take - 1) / group + 1;
    for (int h = 0; h < plan.batch.kv_heads; h++)
      plan.items.push_back({row, h, -1, lane, take, shared, end, shared / kBlock, blocks_until(end), -1});
  }
}

// Rows of a group that truly share the pages, are in no other group and have one token behind them.
std::vector<int32_t> sharing_rows(const Plan& plan, const int32_t* rows, int count, int pages, int keys) {
  const Batch& batch = plan.batch;
  std::vector<int32_t> sharing;
  for (int i = 0; i < count; i++) {
    const int row = rows[i];
    if (row < 0 || row >= batch.rows || plan.shared_keys[row] || batch.qo_indptr[row + 1] - batch.qo_indptr[row] != 1) continue;
    if (batch.kv_lengths[row] <= keys || std::count(sharing.begin(), sharing.end(), row)) continue;
    const int32_t* table = batch.page_tables + row * batch.page_table_stride;
    const int32_t* first = sharing.empty() ? table : batch.page_tables + sharing[0] * batch.page_table_stride;
    if (std::equal(table, table + pages, first)) sharing.push_back(row);
  }
  return sharing;
}

// Items for the shared keys of one group; its rows' own items begin behind them.
void add_group(Plan& plan, const int32_t* rows, int count, int pages, bool whole_blocks) {
  Batch& batch = plan.batch;
  const int group = batch.q_heads / batch.kv_heads;
  int keys = pages * batch.page_size;
  if (whole_blocks) keys -= keys % kBlock;
  if (pages < 1 || pages > batch.page_table_stride || keys < 1 || group > kLanes) return;
  const std::vector<int32_t> sharing = sharing_rows(plan, rows, count, pages, keys);
  if (sharing.size() < 2) return;
  const int members = (int)plan.members.size(), total = (int)sharing.size(), most = kMaxItemTiles * kLanes / group;
  plan.members.insert(plan.members.end(), sharing.begin(), sharing.end());
  for (int32_t row : sharing) plan.shared_keys[row] = keys;
  for (int first = 0; first < total; first += most) {
    const int take = std::min(most, total - first);
    for (int h = 0; h < batch.kv_heads; h++)
      plan.items.push_back({sharing[0], h, members + first, 0, take * group, 0, keys, 0, blocks_until(keys), -1});
  }
}

// Splits items whose cost is a large part of one thread's share, and gives every grouped row its place to merge in.
void split_items(Plan& plan) {
  int64_t total = 0;
  for (const Item& item : plan.items) total += cost_of(item);
  const int64_t share = std::max<int64_t>(1, total / (plan.batch.threads * 4));
  std::vector<Item> whole;
  whole.swap(plan.items);
  for (Item item : whole) {
    const int tiles = tiles_of(item), blocks = item.last_block - item.first_block, first = item.first_block;
    const bool grouped = item.members < 0 && plan.shared_keys[item.row] > 0;
    const bool may = plan.batch.threads > 1 && (tiles <= kSplitTiles || item.members >= 0);
    const int parts = may ? (int)std::clamp<int64_t>((cost_of(item) + share - 1) / share, 1, blocks) : 1;
    if (parts == 1 && !grouped) {
      plan.items.push_back(item);
      continue;
    }
    item.split = (int)plan.splits.size();
    if (grouped && item.kv_head == 0) plan.row_splits[item.row] = item.split;
    plan.splits.push_back({plan.num_partials, -1, first, blocks, parts, parts});
    plan.num_partials += (int64_t)tiles * blocks;
    if (grouped) {
      Split& split = plan.splits.back();
      split.initial = plan.num_partials++;
      split.items = split.remaining = parts + 1;
    }
    for (int i = 0; i < parts; i++) {
      item.first_block = first + blocks * i / parts, item.last_block = first + blocks * (i + 1) / parts;
      plan.items.push_back(item);
    }
  }
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

struct Groups {
  const int32_t *rows, *sizes, *pages;
  int count, whole_blocks;
};

int build(Plan& plan, const Groups& groups) {
  Batch& batch = plan.batch;
  plan.items.clear();
  plan.splits.clear();
  plan.members.clear();
  plan.num_partials = 0;
  plan.row_splits.assign(batch.rows, -1);
  plan.shared_keys.assign(batch.rows, 0);
  const int32_t* rows = groups.rows;
  for (int g = 0; g < groups.count; rows += groups.sizes[g++])
    add_group(plan, rows, groups.sizes[g], groups.pages[g], groups.whole_blocks);
  for (int r = 0; r < batch.rows; r++) add_row(plan, r);
  split_items(plan);
  // The largest first, so that the last items to be taken are small; groups before all, since rows wait for them.
  std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& a, const Item& b) {
    if ((a.members < 0) != (b.members < 0)) return b.members < 0;
    return cost_of(a) > cost_of(b);
  });
  batch.scratch_stride = (scratch_bytes(batch.head_dim) + 4095) / 4096 * 4096;
  plan.scratch = Plan::grown(plan.scratch, plan.scratch_size, batch.scratch_stride * batch.threads);
  plan.partials = Plan::grown(plan.partials, plan.partials_size, plan.num_partials * partial_floats(batch.head_dim) * 4);
  if (!plan.scratch || (plan.num_partials && !plan.partials)) return -1;
  batch.items = plan.items.data(), batch.num_items = (int)plan.items.size();
  batch.splits = plan.splits.data(), batch.partials = (float*)plan.partials, batch.scratch = plan.scratch;
  batch.members = plan.members.data(), batch.row_splits = plan.row_splits.data();
  return 0;
}

}  // namespace
}  // namespace radixfleet

using namespace radixfleet;

RF_EXPORT void* rf_plan_new() { return new (std::nothrow) Plan(); }
RF_EXPORT void rf_plan_free(void* plan) { delete (Plan*)plan; }
RF_EXPORT uint64_t rf_plan_kv_bytes(const void* plan) { return ((const Plan*)plan)->batch.kv_bytes; }

// 0, or -1 without memory, or what is wrong: 1 shape, 2 row lengths, 3 page table, 4 slots. The arrays must live until
// the plan is made anew. Groups: decode rows whose first pages are the same are read together; with whole_blocks only as
// far as that leaves every bit of the results as it is without groups.
RF_EXPORT int rf_plan_make(void* handle, const int32_t* qo_indptr, const int32_t* kv_lengths, const int32_t* page_tables,
                           int64_t page_table_stride, const int64_t* kv_slots, int rows, int tokens, int q_heads,
                           int kv_heads, int head_dim, int page_size, int64_t num_pages, int dtype, int threads,
                           const int32_t* group_rows, const int32_t* group_sizes, const int32_t* group_pages,
                           int num_groups, int whole_blocks) {
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
    return build(plan, {group_rows, group_sizes, group_pages, num_groups, whole_blocks});
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

RF_EXPORT void rf_attention(int isa, void* plan, const LayerCall* call) {
  kernels_of(isa).attention(((Plan*)plan)->batch, *call);
}

// 0, or what is wrong (StepError). The plan must be of the same step, heads and cache shape.
RF_EXPORT int rf_decoder(int isa, void* plan, const DecoderCall* call) {
  if (!within(call->token_ids, call->tokens, call->vocab)) return kNoToken;
  if (!within(call->positions, call->tokens, call->table_rows)) return kBeyondTables;
  if (!within(call->keep, call->num_keep, call->tokens)) return kNotInStep;
  return kernels_of(isa).decoder(*call, ((Plan*)plan)->batch) ? 0 : kNoMemory;
}
