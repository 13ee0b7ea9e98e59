// One instruction-set unit: every kernel compiled for one kind of processor, behind one table.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "attention.h"
#include "engine_vector.h"
#if defined(RF_AMX)
#include "engine_amx.h"
#endif

namespace radixfleet {
namespace {

#if defined(RF_AMX)
using Bf16Engine = AmxEngine;
#elif defined(__AVX512BF16__)
using Bf16Engine = PairEngine;
#else
using Bf16Engine = VectorEngine<bf16>;
#endif

void run_attention(Batch& batch, const LayerCall& call) {
  if (batch.dtype == kBfloat16) attention<Bf16Engine>(batch, call);
  else attention<VectorEngine<float>>(batch, call);
}

}  // namespace
}  // namespace radixfleet

#define RF_UNIT(name) const radixfleet::Kernels radixfleet::name = {radixfleet::run_attention};
