// Lays weights out for linear.h, and hands the remaining calls to the units. Leaves the products to them.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "interface.h"

namespace radixfleet {

// A thread's memory between calls, freed with the thread.
struct Scratch {
  void* memory = nullptr;
  size_t size = 0;
  ~Scratch() { free(memory); }
};

void* thread_scratch(size_t bytes) {
  static thread_local Scratch scratch;
  if (bytes > scratch.size) {
    free(scratch.memory);
    const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    scratch.memory = aligned_alloc(4096, size);
    scratch.size = scratch.memory ? size : 0;
  }
  return scratch.memory;
}

namespace {

// Row of W that output `column` of panel `panel` holds, -1 for padding. Gated weights alternate panels of gate and up.
int64_t source_row(int panel, int column, int outputs, bool gated) {
  const int half = outputs / 2, limit = gated ? half : outputs;
  const int row = (gated ? panel / 2 : panel) * 16 + column;
  if (row >= limit) return -1;
  return gated && panel % 2 ? row + half : row;
}

// words: of one row of W; the rest of the steps is padding.
void pack(const uint32_t* weight, int words, int steps, int outputs, bool gated, uint32_t* dst) {
  const int panels = panels_of(outputs, gated);
#pragma omp parallel for schedule(static)
  for (int p = 0; p < panels; p++) {
    uint32_t* panel = dst + ((int64_t)(p / 2) * steps * 2 + p % 2) * kTileWords;
    for (int column = 0; column < kPanel; column++) {
      const int64_t row = source_row(p, column, outputs, gated);
      for (int k = 0; k < steps * 16; k++) {
        const bool real = row >= 0 && k < words;
        panel[(int64_t)(k / 16) * 2 * kTileWords + k % 16 * kPanel + column] = real ? weight[row * words + k] : 0;
      }
    }
  }
}

float value_at(const void* row, int i, int dtype) {
  if (dtype == kFloat32) return ((const float*)row)[i];
  const uint32_t bits = (uint32_t)((const uint16_t*)row)[i] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// One output's column of a panel, in -127..127; returns its scale.
float quantise_column(const void* row, int inputs, int dtype, int8_t* first) {
  float most = 0;
  for (int i = 0; i < inputs; i++) {
    const float size = fabsf(value_at(row, i, dtype));  // of NaN nothing: it is no weight
    most = size > most ? size : most;
  }
  const float inverse = most > 0 ? 127 / most : 0;
  for (int i = 0; i < inputs; i++) {
    const int word = i / 4;
    int8_t* to = first + ((int64_t)(word / 16) * 2 * kTileWords + word % 16 * kPanel) * 4 + i % 4;
    *to = (int8_t)lrintf(value_at(row, i, dtype) * inverse);
  }
  return most / 127;
}

void pack_int8(const char* weight, int inputs, int dtype, int outputs, bool gated, int8_t* dst) {
  const int panels = panels_of(outputs, gated), steps = input_steps(inputs, kInt8);
  const int64_t row_bytes = (int64_t)inputs * (dtype == kBfloat16 ? 2 : 4), tiles = (int64_t)panels * steps * kTileWords * 4;
  float* scales = (float*)(dst + tiles);
  memset(dst, 0, tiles);
#pragma omp parallel for schedule(static)
  for (int p = 0; p < panels; p++) {
    int8_t* panel = dst + ((int64_t)(p / 2) * steps * 2 + p % 2) * kTileWords * 4;
    for (int column = 0; column < kPanel; column++) {
      const int64_t row = source_row(p, column, outputs, gated);
      scales[p * kPanel + column] = row < 0 ? 0 : quantise_column(weight + row * row_bytes, inputs, dtype, panel + column * 4);
    }
  }
}

}  // namespace
}  // namespace radixfleet

using namespace radixfleet;

RF_EXPORT int64_t rf_packed_bytes(int outputs, int inputs, int weights, int gated) {
  const int64_t panels = panels_of(outputs, gated);
  return panels * input_steps(inputs, weights) * kTileWords * 4 + (weights == kInt8 ? panels * kPanel * 4 : 0);
}

// weight: contiguous [outputs][inputs] of dtype; packed as bf16 it needs an even number of inputs.
RF_EXPORT void rf_pack_weight(const void* weight, int outputs, int inputs, int dtype, int weights, int gated, void* dst) {
  if (weights == kInt8) return pack_int8((const char*)weight, inputs, dtype, outputs, gated, (int8_t*)dst);
  const int words = dtype == kBfloat16 ? inputs / 2 : inputs;
  pack((const uint32_t*)weight, words, input_steps(inputs, dtype), outputs, gated, (uint32_t*)dst);
}

// 0, or -1 without memory.
RF_EXPORT int rf_linear(int isa, const LinearCall* call) { return kernels_of(isa).linear(*call) ? 0 : -1; }
RF_EXPORT void rf_norm(int isa, const NormCall* call) { kernels_of(isa).norm(*call); }
RF_EXPORT void rf_rope(int isa, const RopeCall* call) { kernels_of(isa).rope(*call); }
RF_EXPORT void rf_gate(int isa, const GateCall* call) { kernels_of(isa).gate(*call); }
RF_EXPORT void rf_blocks(int isa, const BlockCall* call) { kernels_of(isa).blocks(*call); }
RF_EXPORT void rf_edit(int isa, const EditCall* call) { kernels_of(isa).edit(*call); }
RF_EXPORT void rf_mask(int isa, const MaskCall* call) { kernels_of(isa).mask(*call); }
RF_EXPORT void rf_score(int isa, const ScoreCall* call) { kernels_of(isa).score(*call); }
RF_EXPORT int64_t rf_draw_floats(int vocab) { return draw_floats(vocab); }
// 0, or -1 for a row whose slot has no parameters.
RF_EXPORT int rf_draw(int isa, const DrawCall* call) {
  if (!within(call->slots, call->count, call->num_slots)) return -1;
  kernels_of(isa).draw(*call);
  return 0;
}
