// Paged attention of one layer by all threads: K and V are stored, then decode rows and prefill chunks attend in one pass
// over the plan's items. Leaves an item to attention.h.
#pragma once

#include "attention.h"

namespace radixfleet {
namespace {

// Stores the K and V of tokens first..last - 1 at their slots.
template <class T>
void write_kv(const Batch& batch, const LayerCall& call, int first, int last) {
  const int64_t size = batch.page_size, dim = batch.head_dim;
  for (int t = first; t < last; t++) {
    const int64_t id = batch.kv_slots[t] / size, offset = batch.kv_slots[t] % size;
    for (int h = 0; h < batch.kv_heads; h++) {
      T* k = (T*)call.cache + ((id * 2 * batch.kv_heads + h) * size + offset) * dim;
      memcpy(k, (const T*)call.k + t * call.k_stride + h * dim, dim * sizeof(T));
      memcpy(k + batch.kv_heads * size * dim, (const T*)call.v + t * call.v_stride + h * dim, dim * sizeof(T));
    }
  }
}

// To be called by all threads of a parallel region once K and V are stored; returns when all outputs are written.
template <class Engine>
void attention_in_team(Batch& batch, const LayerCall& call) {
  Attention<Engine> attention(batch, call, batch.scratch + batch.scratch_stride * thread_number());
  Engine::begin();
  // Each thread takes its next item before it works at one, so that it can be fetched meanwhile.
  for (int i = thread_number(); i < batch.num_items;) {
    const int next = __atomic_fetch_add(&batch.next_item, 1, __ATOMIC_RELAXED);
    attention.run(batch.items[i], next < batch.num_items ? &batch.items[next] : nullptr);
    i = next;
  }
#pragma omp barrier
  Engine::end();
}

struct Range {  // this thread's share of so many
  int first, last;
  Range(int from, int to) : first(from), last(to) {}
  explicit Range(int tokens)
      : first((int)((int64_t)tokens * thread_number() / thread_count())),
        last((int)((int64_t)tokens * (thread_number() + 1) / thread_count())) {}
};

template <class Engine>
void attention(Batch& batch, const LayerCall& call) {
#pragma omp parallel num_threads(batch.threads)
  {
    const Range tokens(batch.tokens);
    write_kv<typename Engine::Storage>(batch, call, tokens.first, tokens.last);
    if (thread_number() == 0) batch.next_item = thread_count();
#pragma omp barrier
    attention_in_team<Engine>(batch, call);
  }
}

}  // namespace
}  // namespace radixfleet
