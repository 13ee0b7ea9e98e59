// All layers of a decoder's step in one parallel region. Leaves embedding, the last norm and the head to the caller.
//
// A step of few rows is bound by reading weights; what it must not do is stop between them. Threads meet six times a
// layer, nothing is allocated, and each row's norm, bias, gate and residual are done where its values already are.
#pragma once

#include "attention_team.h"
#include "linear.h"

namespace radixfleet {
namespace {

template <class Product, class Engine>
struct Decoder {
  using T = typename Product::Storage;
  const DecoderCall& c;
  Batch& batch;
  char* scratch;  // of the products
  T *qkv, *mixed, *gated, *kept;
  int64_t q_size, qkv_size;
  int32_t* taken;  // of each product

  static int64_t activation_bytes(const DecoderCall& c) {
    const int64_t heads = c.q_heads * 2 + c.kv_heads * 2;
    return 16 * c.num_layers + (c.tokens * (heads * c.head_dim + c.intermediate) + (int64_t)c.num_keep * c.q_heads * c.head_dim) * sizeof(T) + 4096;
  }
  static size_t product_bytes(const DecoderCall& c) {
    LinearCall widest{};
    widest.rows = c.tokens, widest.threads = c.threads;
    widest.inputs = c.hidden > c.intermediate ? c.hidden : c.intermediate;
    if (c.q_heads * c.head_dim > widest.inputs) widest.inputs = c.q_heads * c.head_dim;
    const size_t all = LinearScratch<Product>(widest).bytes(c.threads);
    widest.rows = c.tokens < kSharedRows ? c.tokens : kSharedRows;  // the last rows may be few where all are many
    const size_t few = LinearScratch<Product>(widest).bytes(c.threads);
    return all > few ? all : few;
  }

  Decoder(const DecoderCall& call, Batch& b, char* memory) : c(call), batch(b), scratch(memory + activation_bytes(call) / 4096 * 4096 + 4096) {
    q_size = (int64_t)c.q_heads * c.head_dim;
    qkv_size = q_size + 2 * (int64_t)c.kv_heads * c.head_dim;
    taken = (int32_t*)memory;
    qkv = (T*)(memory + 16 * c.num_layers);
    mixed = qkv + c.tokens * qkv_size;
    gated = mixed + c.tokens * q_size;
    kept = gated + (int64_t)c.tokens * c.intermediate;
  }

  LinearCall product(const void* x, int64_t inputs, const void* weight, const float* bias, void* out, int64_t outputs, int rows) const {
    LinearCall p{};
    p.x = x, p.weight = weight, p.bias = bias, p.out = out;
    p.x_stride = inputs, p.out_stride = outputs;
    p.rows = rows, p.outputs = (int)outputs, p.inputs = (int)inputs;
    p.dtype = p.out_dtype = c.dtype, p.weights = c.weights, p.threads = c.threads, p.eps = c.eps;
    return p;
  }
  static void add_to(LinearCall& p) { p.residual = p.out, p.residual_stride = p.out_stride; }

  // Norm and rotation of q and k, and K and V to the cache: each token by one thread.
  void place(const DecoderLayer& layer, const LayerCall& attention) {
    const Range tokens(c.tokens);
    RopeCall rope{qkv, qkv + q_size, c.cos, c.sin, qkv_size, qkv_size, c.table_stride,
                  c.tokens, c.q_heads, c.kv_heads, c.head_dim, c.dtype, c.threads};
    for (int t = tokens.first; t < tokens.last; t++) {
      T* heads = qkv + t * qkv_size;
      for (int h = 0; layer.qk_norm && h < c.q_heads + c.kv_heads; h++) {
        T* head = heads + (int64_t)h * c.head_dim;
        normalise(head, (const T*)layer.qk_norm + (int64_t)h * c.head_dim, c.head_dim, c.eps, head);
      }
      if (layer.rope) rotate_token<T>(rope, t);
    }
    write_kv<T>(batch, attention, tokens.first, tokens.last);
    if (thread_number() == 0) batch.next_item = thread_count();
#pragma omp barrier
  }

  void attend(const DecoderLayer& layer) {
    LayerCall attention{qkv, qkv + q_size, qkv + q_size + (int64_t)c.kv_heads * c.head_dim, mixed, layer.cache,
                        qkv_size, qkv_size, qkv_size, q_size, layer.scale, layer.soft_cap, layer.window};
    place(layer, attention);
    attention_in_team<Engine>(batch, attention);
  }

  // The rows whose logits are wanted, side by side.
  void gather() {
    const Range rows(c.num_keep);
    for (int i = rows.first; i < rows.last; i++) {
      memcpy((T*)c.out + (int64_t)i * c.hidden, (const T*)c.x + c.keep[i] * c.hidden, c.hidden * sizeof(T));
      memcpy(kept + i * q_size, mixed + c.keep[i] * q_size, q_size * sizeof(T));
    }
#pragma omp barrier
  }

  void run_layer(const DecoderLayer& layer, bool last) {
    int32_t* counts = taken + 4 * (&layer - c.layers);
    LinearCall p = product(c.x, c.hidden, layer.qkv, layer.qkv_bias, qkv, qkv_size, c.tokens);
    p.norm = layer.input_norm;
    const LinearCall o = product(nullptr, q_size, layer.output, nullptr, nullptr, c.hidden, c.tokens);
    linear_in_team<Product>(p, scratch, counts, &o);
    attend(layer);
    if (last) gather();
    void* x = last ? c.out : c.x;
    const int rows = last ? c.num_keep : c.tokens;
    p = product(last ? kept : mixed, q_size, layer.output, layer.output_bias, x, c.hidden, rows);
    add_to(p);
    LinearCall g = product(x, c.hidden, layer.gate_up, layer.gate_up_bias, gated, 2 * (int64_t)c.intermediate, rows);
    g.norm = layer.mlp_norm, g.gated = 1, g.out_stride = c.intermediate;
    linear_in_team<Product>(p, scratch, counts + 1, &g);
    LinearCall d = product(gated, c.intermediate, layer.down, layer.down_bias, x, c.hidden, rows);
    add_to(d);
    linear_in_team<Product>(g, scratch, counts + 2, &d);
    const LinearCall q = product(nullptr, c.hidden, last ? nullptr : (&layer)[1].qkv, nullptr, nullptr, qkv_size, c.tokens);
    linear_in_team<Product>(d, scratch, counts + 3, last ? nullptr : &q);
  }
};

template <class Product, class Engine>
bool decoder(const DecoderCall& c, Batch& batch) {
  using D = Decoder<Product, Engine>;
  char* memory = (char*)thread_scratch(D::activation_bytes(c) + 8192 + D::product_bytes(c));
  if (!memory) return false;
  memset(memory, 0, 16 * c.num_layers);
#pragma omp parallel num_threads(c.threads)
  {
    D step(c, batch, memory);
    for (int l = 0; l < c.num_layers; l++) step.run_layer(c.layers[l], l + 1 == c.num_layers);
  }
  return true;
}

}  // namespace
}  // namespace radixfleet
