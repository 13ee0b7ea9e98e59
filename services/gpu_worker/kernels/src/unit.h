// One instruction-set unit: every kernel compiled for one kind of processor, behind one table.
#pragma once

#include "decoder.h"
#include "engine_vector.h"
#include "linear_int8.h"
#include "drawing.h"
#include "edits.h"
#include "sampling.h"
#if defined(RF_AMX)
#include "engine_amx.h"
#include "linear_amx_int8.h"
#endif

namespace radixfleet {
namespace {

#if defined(RF_AMX)
using Bf16Engine = AmxEngine;
using Bf16Linear = AmxLinear;
template <class T>
using Int8Linear = AmxInt8Linear<T>;
#elif defined(__AVX512BF16__)
using Bf16Engine = PairEngine;
using Bf16Linear = VectorLinear<PairForm>;
#else
using Bf16Engine = VectorEngine<bf16>;
using Bf16Linear = VectorLinear<PairForm>;
#endif
#if !defined(RF_AMX)
template <class T>
using Int8Linear = VectorLinear<Int8Form<T>>;
#endif
using FloatLinear = VectorLinear<FloatForm>;
using FloatEngine = VectorEngine<float>;

void run_attention(Batch& batch, const LayerCall& call) {
  if (batch.dtype == kBfloat16) attention<Bf16Engine>(batch, call);
  else attention<FloatEngine>(batch, call);
}

bool run_linear(const LinearCall& c) {
  const bool narrow = c.dtype == kBfloat16;
  if (c.weights == kInt8) return narrow ? linear<Int8Linear<bf16>>(c) : linear<Int8Linear<float>>(c);
  return narrow ? linear<Bf16Linear>(c) : linear<FloatLinear>(c);
}
bool run_decoder(const DecoderCall& c, Batch& batch) {
  const bool narrow = c.dtype == kBfloat16;
  if (c.weights == kInt8)
    return narrow ? decoder<Int8Linear<bf16>, Bf16Engine>(c, batch) : decoder<Int8Linear<float>, FloatEngine>(c, batch);
  return narrow ? decoder<Bf16Linear, Bf16Engine>(c, batch) : decoder<FloatLinear, FloatEngine>(c, batch);
}
void run_norm(const NormCall& c) { c.dtype == kBfloat16 ? norm_rows<bf16>(c) : norm_rows<float>(c); }
void run_rope(const RopeCall& c) { c.dtype == kBfloat16 ? rotate_rows<bf16>(c) : rotate_rows<float>(c); }
void run_gate(const GateCall& c) { c.dtype == kBfloat16 ? gate_rows<bf16>(c) : gate_rows<float>(c); }

}  // namespace
}  // namespace radixfleet

#define RF_UNIT(name)                                                                          \
  const radixfleet::Kernels radixfleet::name = {radixfleet::run_attention, radixfleet::run_linear, \
                                                radixfleet::run_decoder, radixfleet::run_norm, \
                                                radixfleet::run_rope, radixfleet::run_gate, \
                                                radixfleet::find_blocks, radixfleet::edit_rows, \
                                                radixfleet::mask_rows, radixfleet::score_rows, radixfleet::draw_rows};
