// Penalties, biases and forbidden stop tokens: changes to few logits of a row. Leaves bitmasks to sampling.h, and what is
// counted to the caller.
#pragma once

#include "blocks.h"

namespace radixfleet {
namespace {

struct RowEdit {
  const EditCall& c;
  const int64_t slot;
  const int64_t r;
  float* const row;

  // Tokens of the prompt alone are penalised for repetition only.
  bool spares(float count) const { return count == 0 && c.repetition[slot] == 1; }
  // What lies far away is asked for before any of it is used.
  void fetch(const int64_t* tokens, const float* counts, int64_t n) const {
    for (int64_t i = 0; i < n; i++)
      if (!spares(counts[i])) __builtin_prefetch(row + tokens[i], 1, 3);
  }
  void penalise(const int64_t* tokens, const float* counts, int64_t n) const {
    const float repetition = c.repetition[slot], frequency = c.frequency[slot], presence = c.presence[slot];
    fetch(tokens, counts, n);
    for (int64_t i = 0; i < n; i++) {
      if (spares(counts[i])) continue;
      float& x = row[tokens[i]];
      const float repeated = x > 0 ? x / repetition : x * repetition;
      x = repeated - frequency * counts[i] - (counts[i] > 0 ? presence : 0);
    }
  }
  void renew(const int64_t* tokens, int64_t n, const float* counts = nullptr) const {
    for (int64_t i = 0; i < n; i++)
      if (!counts || !spares(counts[i])) note_block(c.blocks, row, r, c.vocab, (int)(tokens[i] / kBlockLogits));
  }
};

void edit_rows(const EditCall& c) {
#pragma omp parallel for num_threads(c.threads) schedule(dynamic, 1)
  for (int r = 0; r < c.count; r++) {
    const int64_t slot = c.slots[r];
    const RowEdit edit{c, slot, r, c.logits + r * c.stride};
    const int64_t *seen = c.seen[slot], *biased = c.biased[slot], *stops = c.stops[slot];
    const bool forbids = c.positions[r] < c.stops_from[slot] && !(c.keeps_stops && c.keeps_stops[r]);
    edit.penalise(seen, c.counts[slot], c.num_seen[slot]);
    for (int64_t i = 0; i < c.num_biased[slot]; i++) edit.row[biased[i]] += c.biases[slot][i];
    for (int64_t i = 0; forbids && i < c.num_stops[slot]; i++) edit.row[stops[i]] = -INFINITY;
    edit.renew(seen, c.num_seen[slot], c.counts[slot]);
    edit.renew(biased, c.num_biased[slot]);
    if (forbids) edit.renew(stops, c.num_stops[slot]);
  }
}

}  // namespace
}  // namespace radixfleet
