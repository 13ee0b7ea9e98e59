// Matrix products of few rows over packed weights. Leaves the packing to pack.cpp and large batches to the caller.
//
// Weights lie in the order in which they are read (interface.h), so that one pass over memory serves all rows. Each
// output is one sum over the inputs in order, by the same instructions whatever the number of rows, their place and the
// threads: a row's result does not depend on the others.
#pragma once

#include "beside.h"
#include "blocks.h"
#include "rows.h"
#include "turns.h"

namespace radixfleet {
namespace {

constexpr int kSharedRows = 32;  // more rows than this are prepared by all threads together, then awaited

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// A line that is going to be written, and that another processor's cache may hold.
inline void prefetch_to_write(void* p) {
#if defined(__x86_64__)
  __asm__ volatile("prefetchw %0" : : "m"(*(char*)p));
#else
  __builtin_prefetch(p, 1, 3);
#endif
}

// c[r][panel * 16 + lane] of R rows and P panels: one panel, a pair or two pairs that lie pair_words apart.
template <class Form, int R, int P>
inline void panel_product(const typename Form::Left* x, int64_t x_stride, const typename Form::Right* w, int64_t pair_words,
                          int steps, bool fetches, AheadWeights& ahead, int each, float* c, int64_t c_stride) {
  typename Form::Sum acc[R][P][kVectors];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++)
      for (int j = 0; j < kVectors; j++) acc[r][p][j] = Form::start(x + r * x_stride + steps * Form::kLefts);
  for (int step = 0; step < steps; step++, w += 2 * kTileWords, x += Form::kLefts) {
    ahead.fetch(each);
    if (fetches)
      for (int p = 0; p < P; p++)
        for (int k = 0; k < 16; k++) prefetch(w + p / 2 * pair_words + (p % 2 + 6) * kTileWords + k * kPanel);
    for (int k = 0; k < 16; k++)
      for (int p = 0; p < P; p++) {
        const typename Form::Right* at = w + p / 2 * pair_words + p % 2 * kTileWords + k * kPanel;
        for (int j = 0; j < kVectors; j++) {
          const auto lanes = Form::lanes(at + j * kWidth);
          for (int r = 0; r < R; r++) acc[r][p][j] = Form::step(acc[r][p][j], lanes, x + r * x_stride + k);
        }
      }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++)
      for (int j = 0; j < kVectors; j++) store(c + r * c_stride + p * kPanel + j * kWidth, Form::total(acc[r][p][j]));
}

// What a form says: how a row is prepared (kLefts a step, then kTail), how a word of weights meets it, and in what kind
// of sum. These two sum in fp32 and need no tail.
struct PlainSum {
  using Sum = Vec;
  static constexpr int kLefts = 16, kTail = 0, kSums = 1;
  template <class Left>
  static Vec start(const Left*) { return Vec{}; }
  static Vec total(Vec sum) { return sum; }
};

struct FloatForm : PlainSum {
  using Left = float;
  using Right = float;
  using Storage = float;
  static Vec lanes(const float* w) { return load(w); }
  static Vec step(Vec acc, Vec b, const float* a) { return acc + b * *a; }
  static constexpr Dtype kWeights = kFloat32;
  static void pack(const float* row, int inputs, Left* dst) {
    memcpy(dst, row, inputs * 4);
    memset(dst + inputs, 0, (padded(inputs, 16) - inputs) * 4);
  }
  static void finish(const LinearCall&, const Left*, int64_t, int, int, int, float*) {}
};

#if defined(__AVX512BF16__)
struct PairForm : PlainSum {
  using Left = uint32_t;
  using Right = uint32_t;
  using Storage = bf16;
  static Uint lanes(const uint32_t* w) { return load_as<Uint>(w); }
  static Vec step(Vec acc, Uint b, const uint32_t* a) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)b, (__m512bh)_mm512_set1_epi32((int)*a));
  }
  static constexpr Dtype kWeights = kBfloat16;
  static void pack(const bf16* row, int inputs, Left* dst) {
    memcpy(dst, row, inputs * 2);
    memset((bf16*)dst + inputs, 0, (padded(inputs, 32) - inputs) * 2);
  }
  static void finish(const LinearCall&, const Left*, int64_t, int, int, int, float*) {}
};
#else
struct PairForm : PlainSum {  // without the instruction: two inputs in fp32
  struct Left {
    float even, odd;
  };
  using Right = uint32_t;
  using Storage = bf16;
  static Uint lanes(const uint32_t* w) { return load_as<Uint>(w); }
  static Vec step(Vec acc, Uint b, const Left* a) {
    acc = acc + (Vec)(b << 16) * a->even;
    return acc + (Vec)(b & 0xffff0000u) * a->odd;
  }
  static constexpr Dtype kWeights = kBfloat16;
  static void pack(const bf16* row, int inputs, Left* dst) {
    float* to = (float*)dst;
    for (int i = 0; i < inputs; i++) to[i] = to_float(row[i]);
    for (int i = inputs; i < padded(inputs, 32); i++) to[i] = 0;
  }
  static void finish(const LinearCall&, const Left*, int64_t, int, int, int, float*) {}
};
#endif

// Vector products: prepared rows lie one after the other. As many sums stay in registers as there are: of many rows and
// few panels, where each word of weights serves most, or, of the rows that are left, with more panels the fewer they are.
template <class F>
struct VectorLinear {
  using Storage = typename F::Storage;
  using Left = typename F::Left;
  using Right = typename F::Right;
#if defined(__aarch64__)
  static constexpr int kMostRows = 4;
#else
  static constexpr int kMostRows = kWidth == 16 ? 8 / F::kSums : kWidth == 8 ? 4 : 2;
#endif
  static constexpr int panels_for(int rows) {
    return kWidth == 16 ? (rows * F::kSums <= 4 ? 4 : 2) : kWidth == 8 && rows <= 2 ? 2 : 1;
  }
  static constexpr int kValueRows = 32;
  // Few rows fetch their weights a moment before they meet them. More pass them again and again, out of a cache, and
  // fetch meanwhile what comes next.
  static bool fetches_ahead(int rows) { return rows >= kMostRows; }
  static void begin() {}
  static void end() {}
  static int steps(const LinearCall& c) { return input_steps(c.inputs, F::kWeights); }
  static int64_t row_size(const LinearCall& c) { return (int64_t)steps(c) * F::kLefts + F::kTail; }
  static size_t prepared_bytes(const LinearCall& c) { return c.rows * row_size(c) * sizeof(Left); }
  static void pack_row(const LinearCall& c, const Storage* row, int m, char* prepared) {
    F::pack(row, c.inputs, (Left*)prepared + m * row_size(c));
  }

  // Some rows of a block of so many panels.
  struct Part {
    const Left* x;
    int64_t size;
    const Right* w;
    int steps, panels;
    float* c;
    AheadWeights& ahead;
    int each;  // lines fetched by a step
    bool fetches;
    template <int R, int P>
    void panels_from(int p, int m) const {
      const int64_t pair = (int64_t)steps * 2 * kTileWords;
      panel_product<F, R, P>(x + m * size, size, w + p / 2 * pair + p % 2 * kTileWords, pair, steps, fetches, ahead, each,
                             c + m * panels * kPanel + p * kPanel, panels * kPanel);
    }
    // Rows m .. end - 1, R at a time; returns the first row left.
    template <int R>
    int run(int m, int end) const {
      constexpr int P = panels_for(R);
      const int last = m + (end - m) / R * R;
      int p = 0;
      for (; p + P <= panels; p += P)
        for (int i = m; i < last; i += R) panels_from<R, P>(p, i);
      if (P == 4 && p < panels)  // a pair
        for (int i = m; i < last; i += R) panels_from<R, 2>(p, i);
      return last;
    }
    // The last rows, at most R.
    template <int R>
    void rest(int m, int end) const {
      if (end - m == R) run<R>(m, end);
      else if constexpr (R > 1) rest<R - 1>(m, end);
    }
  };
  // c[rows][panels * 16] of `rows` (at most 32) rows from row m and an even number of panels.
  static void block(const LinearCall& call, const char* prepared, int m, int rows, const uint32_t* weight, int panels, float* c,
                    Beside& beside) {
    const int64_t size = row_size(call);
    const int passes = (rows + kMostRows - 1) / kMostRows, each = (beside.ahead.each + passes - 1) / passes;
    const Part part{(const Left*)prepared + m * size, size, (const Right*)weight, steps(call), panels, c, beside.ahead, each,
                    !fetches_ahead(call.rows)};
    part.template rest<kMostRows>(part.template run<kMostRows>(0, rows), rows);
  }
  // Scales where the form has any.
  static void finish(const LinearCall& call, const char* prepared, int m, int rows, int panel, int panels, float* c) {
    F::finish(call, (const Left*)prepared + m * row_size(call), row_size(call), rows, panel, panels, c);
  }
};

// 16 finished values of one row, in the output's type; of the last ones only `count` are written.
template <class Out>
inline void write_values(const Vec* values, const Out* residual, int count, Out* out) {
  if (count >= kPanel) {
    for (int j = 0; j < kVectors; j++) {
      const Vec v = residual ? values[j] + load_wide(residual + j * kWidth) : values[j];
      store_narrow(out + j * kWidth, v);
    }
    return;
  }
  float lanes[kPanel];
  for (int j = 0; j < kVectors; j++) store(lanes + j * kWidth, values[j]);
  for (int i = 0; i < count; i++) out[i] = narrow_scalar<Out>(lanes[i] + (residual ? wide_scalar(residual[i]) : 0));
}

// The rows of a block: bias, gate, residual, and the output's type. Columns beyond the last output are not written.
template <class Out, bool kGated>
void write_rows(const LinearCall& c, const float* values, int m, int rows, int panel, int panels) {
  const int columns = kGated ? c.outputs / 2 : c.outputs, first = kGated ? panel / 2 * kPanel : panel * kPanel;
  for (int r = 0; r < rows; r++) {
    const Out* residual = c.residual ? (const Out*)c.residual + (m + r) * c.residual_stride + first : nullptr;
    Out* out = (Out*)c.out + (m + r) * c.out_stride + first;
    for (int p = 0; p < panels; p += kGated ? 2 : 1) {
      Vec sums[2 * kVectors];
      for (int j = 0; j < (kGated ? 2 : 1) * kVectors; j++) {
        sums[j] = load(values + p * kPanel + j * kWidth);
        if (c.bias) sums[j] += load(c.bias + (panel + p) * kPanel + j * kWidth);
      }
      for (int j = 0; kGated && j < kVectors; j++) sums[j] = silu(sums[j]) * sums[kVectors + j];
      const int at = (kGated ? p / 2 : p) * kPanel;
      write_values(sums, residual ? residual + at : nullptr, columns - first - at, out + at);
    }
    values += panels * kPanel;
  }
}

// Of rows that were just written: a pair of panels is a block.
inline void note_blocks(const LinearCall& c, int m, int rows, int panel, int panels) {
  static_assert(kBlockLogits == 2 * kPanel, "");
  const int end = (panel + panels) / 2, last = end < blocks_of(c.outputs) ? end : blocks_of(c.outputs);
  for (int r = m; r < m + rows; r++)
    for (int b = panel / 2; b < last; b++) note_block(c.blocks, (const float*)c.out + r * c.out_stride, r, c.outputs, b);
}

template <class Out>
void write_block(const LinearCall& c, const float* values, int m, int rows, int panel, int panels) {
  if (c.gated) write_rows<Out, true>(c, values, m, rows, panel, panels);
  else write_rows<Out, false>(c, values, m, rows, panel, panels);
  if (c.blocks.peaks) note_blocks(c, m, rows, panel, panels);
}

inline Beside::Write writer(const LinearCall& c) { return c.out_dtype == kBfloat16 ? write_block<bf16> : write_block<float>; }

template <class Product>
void prepare_rows(const LinearCall& c, int first, int last, char* prepared, typename Product::Storage* normed) {
  using T = typename Product::Storage;
  for (int m = first; m < last; m++) {
    const T* row = (const T*)c.x + m * c.x_stride;
    if (c.norm) normalise(row, (const T*)c.norm, c.inputs, c.eps, normed);
    Product::pack_row(c, c.norm ? normed : row, m, prepared);
  }
}

// Where the rows of a block will be written to.
inline void fetch_outputs(const LinearCall& c, int m, int rows, int panel) {
  const int64_t size = c.out_dtype == kBfloat16 ? 2 : 4;
  for (int r = 0; r < rows; r++) prefetch_to_write((char*)c.out + ((m + r) * c.out_stride + panel * kPanel) * size);
}

// A panel pair is read once for all rows: from memory for the first 32, from a cache for the others.
template <class Product>
void run_panels(const LinearCall& c, const char* prepared, int panel, int panels, Beside& beside) {
  const int steps = Product::steps(c);
  const int64_t pair = (int64_t)steps * 2 * kTileWords;
  const int together = c.rows > kSharedRows ? 2 : panels;
  for (const int end = panel + panels; panel < end; panel += together) {
    const uint32_t* weight = (const uint32_t*)c.weight + panel / 2 * pair;
    for (int m = 0; m < c.rows; m += 32) {
      const int rows = c.rows - m < 32 ? c.rows - m : 32;
      if (c.rows > kSharedRows && !c.gated) fetch_outputs(c, m, rows, panel);
      Product::block(c, prepared, m, rows, weight, together, beside.block, beside);
      beside.write_rest();
      Product::finish(c, prepared, m, rows, panel, together, beside.block);
      beside.turn(m, rows, panel, together, steps);
    }
  }
}

constexpr int kChunksEach = 8;
constexpr int kChunkPanels = 4;  // at most; many rows take a pair, which then stays in the nearest cache

// The weights of some panels, to be fetched while `rows` rows are multiplied with as many.
template <class Product>
AheadWeights weights_ahead(const LinearCall& c, int panel, int panels, int rows) {
  AheadWeights weights;
  if (panels <= 0 || !Product::fetches_ahead(c.rows)) return weights;
  const int64_t pair = (int64_t)Product::steps(c) * 2 * kTileWords;
  weights.at = (const char*)((const uint32_t*)c.weight + panel / 2 * pair);
  weights.lines = (int)(panels / 2 * pair / 16);
  const int blocks = rows > 32 ? (rows + 31) / 32 : 1;
  weights.each = (32 + blocks - 1) / blocks;
  return weights;
}

// The pieces of one product that threads take in turn.
template <class Product>
struct Chunks {
  const LinearCall& c;
  int all, per, count;
  Chunks(const LinearCall& call, int threads) : c(call), all(panels_of(call.outputs, call.gated)) {
    // Where a thread has few chunks, small ones: who is done first waits for the last.
    per = (call.rows > kSharedRows && !call.gated) || all < kChunksEach * kChunkPanels * threads ? 2 : kChunkPanels;
    count = (all + per - 1) / per;
  }
  int panel(int i) const { return i * per; }
  int panels(int i) const { return all - panel(i) < per ? all - panel(i) : per; }
  AheadWeights ahead(int i, int rows) const { return weights_ahead<Product>(c, panel(i), panels(i), rows); }
  AheadWeights ahead_of_first(const Turns& turns, int rows) const { return ahead(turns.first(count), rows); }
};

// Memory of one product: per thread for two blocks of values and a normed row, then the prepared rows. Few rows are prepared by every
// thread for itself, which costs less than waiting for each other.
template <class Product>
struct LinearScratch {
  size_t values, own, rows;
  bool shared;
  explicit LinearScratch(const LinearCall& c)
      : values(Product::kValueRows * kChunkPanels * kPanel * 4),
        own(padded(2 * values + c.inputs * 4, 4096)),
        rows((Product::prepared_bytes(c) + 4095) / 4096 * 4096),
        shared(c.rows > kSharedRows) {}
  size_t bytes(int threads) const { return own * threads + rows * (shared ? 1 : threads); }
  size_t alone() const { return own + rows; }
};

// To be called by all threads of a parallel region; returns when all outputs are written. `then`: the next product, or
// null.
template <class Product>
void linear_in_team(const LinearCall& c, char* scratch, Turns& turns, const LinearCall* then = nullptr) {
  const LinearScratch<Product> memory(c);
  const int thread = turns.thread, threads = turns.threads;
  const Chunks<Product> chunks(c, threads);
  char* own = scratch + memory.own * thread;
  auto* normed = (typename Product::Storage*)(own + 2 * memory.values);
  char* prepared = scratch + memory.own * c.threads + (memory.shared ? 0 : memory.rows * thread);
  const int first = memory.shared ? (int)((int64_t)c.rows * thread / threads) : 0;
  const int last = memory.shared ? (int)((int64_t)c.rows * (thread + 1) / threads) : c.rows;
  turns.begin();
  Product::begin();
  prepare_rows<Product>(c, first, last, prepared, normed);
  if (memory.shared) {
#pragma omp barrier
  }
  Beside beside{c, writer(c), (float*)own, (float*)(own + memory.values)};
  for (int i = turns.take(chunks.count); i >= 0;) {
    const int next = turns.take(chunks.count);
    if (next >= 0) beside.ahead = chunks.ahead(next, c.rows);
    else beside.ahead = then ? Chunks<Product>(*then, threads).ahead_of_first(turns, c.rows) : AheadWeights();
    run_panels<Product>(c, prepared, chunks.panel(i), chunks.panels(i), beside);
    beside.ahead.rest();
    i = next;
  }
  beside.write_rest();
  Product::end();
#pragma omp barrier
  turns.end();
}

// The same by the calling thread alone, which meets nobody: for its own rows of many. `scratch`: LinearScratch::alone().
template <class Product>
void linear_alone(const LinearCall& c, char* scratch, const LinearCall* then) {
  const LinearScratch<Product> memory(c);
  char* prepared = scratch + memory.own;
  const int panels = panels_of(c.outputs, c.gated);
  Product::begin();
  prepare_rows<Product>(c, 0, c.rows, prepared, (typename Product::Storage*)(scratch + 2 * memory.values));
  Beside beside{c, writer(c), (float*)scratch, (float*)(scratch + memory.values)};
  for (int p = 0; p < panels; p += 2) {
    if (p + 2 < panels) beside.ahead = weights_ahead<Product>(c, p + 2, 2, c.rows);
    else beside.ahead = then ? weights_ahead<Product>(*then, 0, 2, c.rows) : AheadWeights();
    run_panels<Product>(c, prepared, p, 2, beside);
    beside.ahead.rest();
  }
  beside.write_rest();
  Product::end();
}

template <class Product>
bool linear(const LinearCall& c) {
  const int64_t turn_bytes = Turns::bytes(c.threads);
  char* memory = (char*)thread_scratch(turn_bytes + LinearScratch<Product>(c).bytes(c.threads));
  if (!memory) return false;
  memset(memory, 0, turn_bytes);
#pragma omp parallel num_threads(c.threads)
  {
    Turns turns(memory, thread_number(), thread_count());
    linear_in_team<Product>(c, memory + turn_bytes, turns);
  }
  return true;
}

}  // namespace
}  // namespace radixfleet
