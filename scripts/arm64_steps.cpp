// Steps of small random decoders through the portable kernels, printed: the same program on two processors shows whether
// they compute the same. Leaves building, running and comparing to check_arm64.py.
//
// Of each model: a step of two prompts, then steps of decode rows, of which two share pages, then draws from the logits.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "interface.h"

using namespace radixfleet;

extern "C" {
int64_t rf_packed_bytes(int outputs, int inputs, int weights, int gated);
void rf_pack_weight(const void* weight, int outputs, int inputs, int dtype, int weights, int gated, void* packed);
void* rf_plan_new();
void rf_plan_free(void* plan);
int rf_plan_make(void*, const int32_t*, const int32_t*, const int32_t*, int64_t, const int64_t*, int, int, int, int, int, int,
                 int64_t, int, int, const int32_t*, const int32_t*, const int32_t*, int, int);
int rf_decoder(int isa, void* plan, const DecoderCall* call);
int rf_draw(int isa, const DrawCall* call);
}

namespace {

constexpr int kHidden = 96, kInner = 112, kVocab = 333, kLayers = 2, kPages = 24, kPageSize = 16, kSlots = 8, kThreads = 2;

uint64_t state = 88172645463325252u;
float number() {  // xorshift64 (Marsaglia, 2003), in [-1, 1)
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (float)(int64_t)(state >> 40) / (1 << 23) - 1;
}

struct Shape {
  const char* name;
  int dtype, weights, heads, kv_heads, dim, window;
  float soft_cap;
  bool qk_norm;
};

// Numbers of a dtype, 64 bytes apart from anything else.
struct Array {
  std::vector<char> memory;
  char* at;
  explicit Array(int64_t bytes) : memory(bytes + 192), at((char*)(((uintptr_t)memory.data() + 127) / 64 * 64)) {}
  Array(Array&& other) = default;
};

Array numbers(int64_t count, int dtype, float scale, float shift = 0) {
  Array array(count * (dtype == kBfloat16 ? 2 : 4));
  for (int64_t i = 0; i < count; i++) {
    const float x = number() * scale + shift;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (dtype == kBfloat16) ((bf16*)array.at)[i] = (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    else ((float*)array.at)[i] = x;
  }
  return array;
}

struct Model {
  const Shape& shape;
  std::vector<Array> held;
  std::vector<DecoderLayer> layers;
  LinearCall head{};
  DecoderCall call{};

  const char* keep(Array array) {
    held.push_back(std::move(array));
    return held.back().at;
  }
  const char* packed(int outputs, int inputs, bool gated) {
    const Array plain = numbers((int64_t)outputs * inputs, shape.dtype, 1.7f / sqrtf((float)inputs));
    Array array(rf_packed_bytes(outputs, inputs, shape.weights, gated));
    memset(array.at, 0, rf_packed_bytes(outputs, inputs, shape.weights, gated));
    rf_pack_weight(plain.at, outputs, inputs, shape.dtype, shape.weights, gated, array.at);
    return keep(std::move(array));
  }
  const char* norm(int size) { return keep(numbers(size, shape.dtype, 0.3f, 1)); }

  explicit Model(const Shape& s) : shape(s) {
    const int q = s.heads * s.dim, rows = q + 2 * s.kv_heads * s.dim, width = s.dtype == kBfloat16 ? 2 : 4;
    for (int l = 0; l < kLayers; l++) {
      DecoderLayer layer{};
      layer.input_norm = norm(kHidden), layer.mlp_norm = norm(kHidden);
      if (s.qk_norm) layer.qk_norm = norm((s.heads + s.kv_heads) * s.dim);
      layer.qkv = packed(rows, kHidden, false), layer.output = packed(kHidden, q, false);
      layer.gate_up = packed(2 * kInner, kHidden, true), layer.down = packed(kHidden, kInner, false);
      const int64_t bytes = (int64_t)kPages * 2 * s.kv_heads * kPageSize * s.dim * width;
      layer.cache = (void*)keep(Array(bytes));
      layer.scale = 1 / sqrtf((float)s.dim), layer.soft_cap = s.soft_cap, layer.window = s.window, layer.rope = 1;
      layers.push_back(layer);
    }
    head.weight = packed(kVocab, kHidden, false), head.norm = norm(kHidden), head.x_stride = kHidden, head.out_stride = kVocab;
    head.eps = 1e-5f, head.outputs = kVocab, head.inputs = kHidden, head.dtype = s.dtype, head.out_dtype = kFloat32;
    head.weights = s.weights, head.threads = kThreads;
    call.layers = layers.data(), call.head = &head, call.embedding = keep(numbers(kVocab * kHidden, s.dtype, 1));
    call.cos = (const float*)keep(numbers(512 * s.dim / 2, kFloat32, 1));
    call.sin = (const float*)keep(numbers(512 * s.dim / 2, kFloat32, 1));
    call.eps = 1e-5f, call.vocab = kVocab, call.table_rows = 512, call.num_layers = kLayers, call.hidden = kHidden;
    call.intermediate = kInner, call.q_heads = s.heads, call.kv_heads = s.kv_heads, call.head_dim = s.dim;
    call.dtype = s.dtype, call.threads = kThreads, call.weights = s.weights;
  }
};

// Rows of one step: tokens each, and where each begins.
void step(Model& model, void* plan, const std::vector<int>& sizes, std::vector<int>& lengths, const int32_t* tables, bool grouped) {
  const Shape& s = model.shape;
  const int rows = (int)sizes.size();
  std::vector<int32_t> indptr{0}, ends;
  std::vector<int64_t> ids, positions, slots, keep;
  for (int r = 0; r < rows; r++) {
    for (int i = 0; i < sizes[r]; i++) {
      const int at = lengths[r]++;
      ids.push_back((int64_t)((number() + 1) / 2 * (kVocab - 1)));
      positions.push_back(at), slots.push_back(tables[r * 8 + at / kPageSize] * kPageSize + at % kPageSize);
    }
    indptr.push_back((int32_t)ids.size()), ends.push_back(lengths[r]), keep.push_back((int64_t)ids.size() - 1);
  }
  const int32_t members[] = {0, 1}, count = 2, pages = 2;
  const int wrong = rf_plan_make(plan, indptr.data(), ends.data(), tables, 8, slots.data(), rows, (int)ids.size(), s.heads,
                                 s.kv_heads, s.dim, kPageSize, kPages, s.dtype, kThreads, members, &count, &pages, grouped, 0);
  std::vector<float> logits(rows * kVocab), states(rows * kHidden), peaks(rows * 11), sums(rows * 11), scales(rows, 1.4426951f);
  model.head.blocks = {peaks.data(), sums.data(), scales.data(), 11};
  model.head.x = states.data(), model.head.out = logits.data(), model.head.rows = rows;
  DecoderCall& call = model.call;
  call.token_ids = ids.data(), call.positions = positions.data(), call.keep = keep.data(), call.out = states.data();
  call.tokens = (int)ids.size(), call.num_keep = rows;
  const int failed = wrong ? wrong : rf_decoder(kPortable, plan, &call);
  printf("step %d rows %d\n", failed, rows);
  for (float x : logits) printf("%.9g\n", x);
  // A draw of each kind from each row.
  const uint8_t greedy[kSlots] = {1};
  const double temperatures[kSlots] = {1, 1, 1, 1, 0.7, 1, 1, 1}, top_p[kSlots] = {1, 1, 0.9, 1, 0.8, 1, 1, 1};
  const double min_p[kSlots] = {0, 0, 0, 0, 0, 0.1, 0, 0};
  const int64_t top_k[kSlots] = {0, 0, 0, 20, 5, 0, 1, 0};
  const uint64_t seeds[kSlots] = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> scratch(draw_floats(kVocab) * kThreads), highest(rows);
  std::vector<int64_t> who(rows), tokens(rows);
  for (int64_t slot = 0; slot < kSlots; slot++) {
    std::fill(who.begin(), who.end(), slot);
    DrawCall draw{logits.data(), model.head.blocks, greedy, temperatures, top_p, min_p, top_k, seeds, who.data(), keep.data(),
                  tokens.data(), highest.data(), scratch.data(), kVocab, rows, kVocab, kSlots, kThreads};
    printf("draws %d", rf_draw(kPortable, &draw));
    for (int64_t token : tokens) printf(" %d", (int)token);
    printf("\n");
  }
}

}  // namespace

int main() {
  const Shape shapes[] = {
      {"fp32", kFloat32, kFloat32, 6, 2, 32, 0, 0, false},       {"bf16", kBfloat16, kBfloat16, 6, 2, 32, 0, 0, false},
      {"int8", kBfloat16, kInt8, 6, 2, 32, 0, 0, false},         {"fp32 of 64, norms", kFloat32, kFloat32, 9, 3, 64, 0, 0, true},
      {"bf16 of 64, window", kBfloat16, kBfloat16, 9, 3, 64, 20, 0, false},
      {"fp32 of 80", kFloat32, kFloat32, 4, 4, 80, 0, 0, false}, {"bf16 of 96, cap", kBfloat16, kBfloat16, 8, 1, 96, 0, 20, false},
      {"fp32 of 128", kFloat32, kFloat32, 8, 2, 128, 33, 30, true}, {"bf16 of 256", kBfloat16, kBfloat16, 2, 1, 256, 0, 0, true},
      {"fp32 in int8", kFloat32, kInt8, 6, 2, 64, 0, 0, false},
  };
  // Rows 0 and 1 share their first two pages.
  const int32_t tables[4 * 8] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 0, 0, 0, 0, 18, 19, 20, 21};
  for (const Shape& shape : shapes) {
    printf("model %s\n", shape.name);
    Model model(shape);
    void* plan = rf_plan_new();
    std::vector<int> lengths{0, 32, 0, 0};
    step(model, plan, {70, 9, 37, 1}, lengths, tables, false);
    for (int i = 0; i < 3; i++) step(model, plan, {1, 1, 1, 1}, lengths, tables, true);
    rf_plan_free(plan);
  }
  return 0;
}
