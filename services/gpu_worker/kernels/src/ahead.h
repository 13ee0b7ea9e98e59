// What will be read next, fetched a piece at a time while something else is computed. Leaves the choice to the callers.
#pragma once

#include <stdint.h>

namespace radixfleet {
namespace {

// K and V of one block of keys of one KV head, piece by piece: the V of a page, then its K.
struct AheadKeys {
  static constexpr int kLines = 32;  // fetched by one step
  const int32_t* table = nullptr;    // from the first page on
  const char* cache = nullptr;       // of the KV head, at page 0
  int64_t page_bytes = 0, value_bytes = 0;  // from page to page, and from a page's K to its V
  int64_t piece_bytes = 0;                  // a page's K, or V, of one head
  int pieces = 0;
  int64_t done = 0;  // bytes of the first piece left

  void step() {
    if (pieces == 0) return;
    const char* at = cache + *table * page_bytes + (pieces % 2 ? 0 : value_bytes) + done;
    const int64_t lines = (piece_bytes - done + 63) / 64;
    for (int i = 0; i < kLines && i < lines; i++) __builtin_prefetch(at + i * 64, 0, 2);
    done += kLines * 64;
    if (done < piece_bytes) return;
    done = 0;
    table += pieces % 2;
    pieces--;
  }
};

// The packed weights that this thread multiplies with next.
struct AheadWeights {
  const char* at = nullptr;
  int lines = 0, each = 0;  // left; fetched by one step, so that a chunk's work fetches a chunk

  void fetch(int count) {
    count = count < lines ? count : lines;
    for (int i = 0; i < count; i++) __builtin_prefetch(at + i * 64, 0, 2);
    at += count * 64, lines -= count;
  }
  void step() { fetch(each); }
  void rest() { fetch(lines); }
};

}  // namespace
}  // namespace radixfleet
