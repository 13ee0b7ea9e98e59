// What a thread does beside a product: fetching and writing a piece at a time. Leaves how rows are written to linear.h.
#pragma once

#include "ahead.h"
#include "interface.h"

namespace radixfleet {
namespace {

// What a thread does a piece at a time while a block is multiplied: it fetches its next weights and writes the rows of the
// block before. Blocks of values take turns in two places.
struct Beside {
  using Write = void (*)(const LinearCall&, const float* values, int m, int rows, int panel, int panels);
  const LinearCall& call;
  const Write write;
  float *block, *other;  // the block that is computed, and the one that is written
  AheadWeights ahead;
  int m = 0, rows = 0, panel = 0, panels = 0, each = 0;  // rows: not yet written; each: written by one step
  const float* values = nullptr;

  void write_some(int count) {
    count = count < rows ? count : rows;
    if (count == 0) return;
    write(call, values, m, count, panel, panels);
    values += count * panels * kPanel, m += count, rows -= count;
  }
  void step() {
    ahead.step();
    write_some(each);
  }
  void write_rest() { write_some(rows); }
  // The block is computed: its rows, from m on, are written from now on, and the next one has the other place.
  void turn(int first_row, int count, int first_panel, int block_panels, int steps) {
    values = block, block = other, other = (float*)values;
    m = first_row, rows = count, panel = first_panel, panels = block_panels;
    each = (count + steps - 1) / steps;
  }
};

}  // namespace
}  // namespace radixfleet
