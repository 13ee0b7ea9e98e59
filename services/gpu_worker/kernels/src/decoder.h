// A decoder's step, from token ids to what the head makes of them, in one parallel region. Leaves checks to the caller.
//
// A step of few rows is bound by reading weights; what it must not do is stop between them. Threads meet six times a
// layer, nothing is allocated, and each row's norm, bias, gate and residual are done where its values already are.
// In a step of many rows each thread has rows of its own: what it writes it reads again from its own cache, and threads
// meet twice a layer, around attention.
#pragma once

#include "attention_team.h"
#include "linear.h"
#include "shares.h"

namespace radixfleet {
namespace {

constexpr int kOwnRows = 128;    // with so many rows for each thread, each has its own
constexpr int kTogether = 256;  // rows that pass several products while a cache keeps them

template <class Product, class Engine>
struct Decoder {
  using T = typename Product::Storage;
  const DecoderCall& c;
  Batch& batch;
  char* scratch;  // of the products
  T *x, *qkv, *mixed, *gated, *kept;
  int64_t q_size, qkv_size;
  Turns turns;
  Shares shares;

  static int64_t team_bytes(const DecoderCall& c) { return Turns::bytes(c.threads) + padded((int)Shares::bytes(c.threads), 64); }
  // Of what is gated: the last layer has a row for each that is kept, and a token may be kept more than once.
  static int64_t gated_elements(const DecoderCall& c) {
    return (int64_t)(c.tokens > c.num_keep ? c.tokens : c.num_keep) * c.intermediate;
  }
  static int64_t activation_bytes(const DecoderCall& c) {
    const int64_t heads = c.q_heads * 2 + c.kv_heads * 2, kept = (int64_t)c.num_keep * c.q_heads * c.head_dim;
    return team_bytes(c) + (c.tokens * (c.hidden + heads * c.head_dim) + gated_elements(c) + kept) * sizeof(T) + 4096;
  }
  static bool own_rows(const DecoderCall& c) { return c.tokens >= kOwnRows * c.threads; }
  static size_t bytes_of(LinearCall widest, int rows) {
    widest.rows = rows;
    return LinearScratch<Product>(widest).bytes(widest.threads);
  }
  static size_t alone_bytes(LinearCall widest) {
    widest.rows = kTogether;
    return LinearScratch<Product>(widest).alone();
  }
  static LinearCall widest(const DecoderCall& c) {
    LinearCall widest{};
    widest.threads = c.threads;
    widest.inputs = c.hidden > c.intermediate ? c.hidden : c.intermediate;
    if (c.q_heads * c.head_dim > widest.inputs) widest.inputs = c.q_heads * c.head_dim;
    return widest;
  }
  static size_t product_bytes(const DecoderCall& c) {
    const LinearCall w = widest(c);
    // The last rows may be few where all are many.
    const size_t few = bytes_of(w, c.tokens < kSharedRows ? c.tokens : kSharedRows);
    const size_t kept = bytes_of(w, c.num_keep), most = own_rows(c) ? alone_bytes(w) * c.threads : bytes_of(w, c.tokens);
    const size_t larger = most > kept ? most : kept;
    return larger > few ? larger : few;
  }

  Decoder(const DecoderCall& call, Batch& b, char* memory)
      : c(call),
        batch(b),
        scratch(memory + activation_bytes(call) / 4096 * 4096 + 4096),
        turns(memory, thread_number(), thread_count()),
        shares(call.tokens, (double*)(memory + Turns::bytes(call.threads))) {
    q_size = (int64_t)c.q_heads * c.head_dim;
    qkv_size = q_size + 2 * (int64_t)c.kv_heads * c.head_dim;
    x = (T*)(memory + team_bytes(c));
    qkv = x + (int64_t)c.tokens * c.hidden;
    mixed = qkv + c.tokens * qkv_size;
    gated = mixed + c.tokens * q_size;
    kept = gated + gated_elements(c);
  }

  LinearCall product(const void* from, int64_t inputs, const void* weight, const float* bias, void* out, int64_t outputs, int rows) const {
    LinearCall p{};
    p.x = from, p.weight = weight, p.bias = bias, p.out = out;
    p.x_stride = inputs, p.out_stride = outputs;
    p.rows = rows, p.outputs = (int)outputs, p.inputs = (int)inputs;
    p.dtype = p.out_dtype = c.dtype, p.weights = c.weights, p.threads = c.threads, p.eps = c.eps;
    return p;
  }
  static void add_to(LinearCall& p) { p.residual = p.out, p.residual_stride = p.out_stride; }

  void embed() {
    const Range tokens(c.tokens);
    for (int t = tokens.first; t < tokens.last; t++)
      memcpy(x + (int64_t)t * c.hidden, (const T*)c.embedding + c.token_ids[t] * c.hidden, c.hidden * sizeof(T));
#pragma omp barrier
  }

  // Norm and rotation of q and k, and K and V to the cache: each token by one thread.
  void place(const DecoderLayer& layer, const LayerCall& attention) {
    const Range tokens = own_rows(c) ? shares.range : Range(c.tokens);
    for (int t = tokens.first; t < tokens.last; t++) {
      T* heads = qkv + t * qkv_size;
      for (int h = 0; layer.qk_norm && h < c.q_heads + c.kv_heads; h++) {
        T* head = heads + (int64_t)h * c.head_dim;
        normalise(head, (const T*)layer.qk_norm + (int64_t)h * c.head_dim, c.head_dim, c.eps, head);
      }
      const int64_t at = c.positions[t] * (c.head_dim / 2);
      if (layer.rope) rotate_heads(heads, c.q_heads + c.kv_heads, c.cos + at, c.sin + at, c.head_dim);
    }
    write_kv<T>(batch, attention, tokens.first, tokens.last);
    shares.done(index(layer));
    if (thread_number() == 0) batch.next_item = thread_count();
#pragma omp barrier
  }

  int index(const DecoderLayer& layer) const { return (int)(&layer - c.layers); }

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
      memcpy((T*)c.out + (int64_t)i * c.hidden, x + c.keep[i] * c.hidden, c.hidden * sizeof(T));
      memcpy(kept + i * q_size, mixed + c.keep[i] * q_size, q_size * sizeof(T));
    }
#pragma omp barrier
  }

  LinearCall first_product(const DecoderLayer& layer) const {
    LinearCall p = product(x, c.hidden, layer.qkv, layer.qkv_bias, qkv, qkv_size, c.tokens);
    p.norm = layer.input_norm;
    return p;
  }
  // What follows attention, for `rows` rows: output projection, gate and up, down.
  struct Products {
    LinearCall output, gate, down;
  };
  Products products(const DecoderLayer& layer, const T* from, T* to, T* between, int rows) const {
    Products p{product(from, q_size, layer.output, layer.output_bias, to, c.hidden, rows),
               product(to, c.hidden, layer.gate_up, layer.gate_up_bias, between, 2 * (int64_t)c.intermediate, rows),
               product(between, c.intermediate, layer.down, layer.down_bias, to, c.hidden, rows)};
    add_to(p.output);
    p.gate.norm = layer.mlp_norm, p.gate.gated = 1, p.gate.out_stride = c.intermediate;
    add_to(p.down);
    return p;
  }

  // Some rows of a call by this thread alone.
  void alone(LinearCall p, int first, int rows, const LinearCall& then) {
    p.x = (const T*)p.x + first * p.x_stride, p.out = (T*)p.out + first * p.out_stride, p.rows = rows;
    if (p.residual) p.residual = p.out;
    linear_alone<Product>(p, scratch + alone_bytes(widest(c)) * thread_number(), &then);
  }
  void project_own(const DecoderLayer& layer) {
    const Range tokens = shares.range;
    const LinearCall p = first_product(layer);
    for (int m = tokens.first; m < tokens.last; m += kTogether)
      alone(p, m, tokens.last - m < kTogether ? tokens.last - m : kTogether, p);
  }
  void feed_forward_own(const DecoderLayer& layer) {
    shares.share(index(layer));
    const Range tokens = shares.range;
    T* between = gated + (int64_t)tokens.first * c.intermediate;
    for (int m = tokens.first; m < tokens.last; m += kTogether) {
      const int rows = tokens.last - m < kTogether ? tokens.last - m : kTogether;
      const Products p = products(layer, mixed + m * q_size, x + (int64_t)m * c.hidden, between, rows);
      alone(p.output, 0, rows, p.gate);
      alone(p.gate, 0, rows, p.down);
      alone(p.down, 0, rows, m + kTogether < tokens.last ? p.output : first_product((&layer)[1]));
    }
  }

  void run_layer(const DecoderLayer& layer, bool last) {
    const bool own = own_rows(c);
    const Products p = products(layer, last ? kept : mixed, last ? (T*)c.out : x, gated, last ? c.num_keep : c.tokens);
    if (own) project_own(layer);
    else linear_in_team<Product>(first_product(layer), scratch, turns, &p.output);
    attend(layer);
    if (last) gather();
    else if (own) return feed_forward_own(layer);
    linear_in_team<Product>(p.output, scratch, turns, &p.gate);
    linear_in_team<Product>(p.gate, scratch, turns, &p.down);
    const LinearCall next = last ? LinearCall{} : first_product((&layer)[1]);
    linear_in_team<Product>(p.down, scratch, turns, last ? c.head : &next);
  }

  void run() {
    embed();
    for (int l = 0; l < c.num_layers; l++) run_layer(c.layers[l], l + 1 == c.num_layers);
    if (c.head) linear_in_team<Product>(*c.head, scratch, turns);
  }
};

template <class Product, class Engine>
bool decoder(const DecoderCall& c, Batch& batch) {
  using D = Decoder<Product, Engine>;
  char* memory = (char*)thread_scratch(D::activation_bytes(c) + 8192 + D::product_bytes(c));
  if (!memory) return false;
  memset(memory, 0, Turns::bytes(c.threads));
#pragma omp parallel num_threads(c.threads)
  {
    keep_place(thread_number());
    D(c, batch, memory).run();
  }
  return true;
}

}  // namespace
}  // namespace radixfleet
