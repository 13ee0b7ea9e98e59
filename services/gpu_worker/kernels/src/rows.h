// Row-wise kernels around the matrix products: RMS norm with residual, rotary embedding, gated activation. Leaves their
// fusion into products to linear.h.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "simd.h"

namespace radixfleet {
namespace {

inline int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}
inline int thread_count() {
#if defined(_OPENMP)
  return omp_get_num_threads();
#else
  return 1;
#endif
}

inline float wide_scalar(float x) { return x; }
inline float wide_scalar(bf16 x) { return to_float(x); }
template <class T>
T narrow_scalar(float x);
template <>
inline float narrow_scalar<float>(float x) {
  return x;
}
template <>
inline bf16 narrow_scalar<bf16>(float x) {
  return to_bf16(x);
}
template <class T>
inline Vec rounded(Vec v) {
  alignas(64) T narrow[kWidth];
  store_narrow(narrow, v);
  return load_wide(narrow);
}

inline float sum_of(Vec v) {
  float lanes[kWidth], sum = 0;
  store(lanes, v);
  for (int i = 0; i < kWidth; i++) sum += lanes[i];
  return sum;
}

template <class T>
inline float inverse_rms(const T* row, int n, float eps) {
  Vec sum[2] = {};
  int i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    const Vec a = load_wide(row + i), b = load_wide(row + i + kWidth);
    sum[0] += a * a;
    sum[1] += b * b;
  }
  float total = sum_of(sum[0] + sum[1]);
  for (; i < n; i++) total += wide_scalar(row[i]) * wide_scalar(row[i]);
  return 1 / sqrtf(total / n + eps);
}

// RMS norm (Zhang and Sennrich, 2019) in fp32, rounded to T before the weight is applied.
template <class T>
inline void normalise(const T* row, const T* weight, int n, float eps, T* out) {
  const float inverse = inverse_rms(row, n, eps);
  int i = 0;
  for (; i + kWidth <= n; i += kWidth)
    store_narrow(out + i, rounded<T>(load_wide(row + i) * inverse) * load_wide(weight + i));
  for (; i < n; i++) {
    const float normed = wide_scalar(narrow_scalar<T>(wide_scalar(row[i]) * inverse));
    out[i] = narrow_scalar<T>(normed * wide_scalar(weight[i]));
  }
}

template <class T>
inline void add_row(T* row, const T* added, int n) {
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) store_narrow(row + i, load_wide(row + i) + load_wide(added + i));
  for (; i < n; i++) row[i] = narrow_scalar<T>(wide_scalar(row[i]) + wide_scalar(added[i]));
}

template <class T>
void norm_rows(const NormCall& c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int r = 0; r < c.rows; r++) {
    T* row = (T*)c.x + r * c.x_stride;
    if (c.added) add_row(row, (const T*)c.added + r * c.added_stride, c.size);
    normalise(row, (const T*)c.weight, c.size, c.eps, (T*)c.out + r * c.out_stride);
  }
}

// x' = x cos - y sin, y' = y cos + x sin for the halves x and y of one head (Su et al., 2021), in fp32.
template <class T>
inline void rotate_head(T* head, const float* cos, const float* sin, int half) {
  T* other = head + half;
  int i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const Vec x = load_wide(head + i), y = load_wide(other + i), c = load(cos + i), s = load(sin + i);
    store_narrow(head + i, x * c - y * s);
    store_narrow(other + i, y * c + x * s);
  }
  for (; i < half; i++) {
    const float x = wide_scalar(head[i]), y = wide_scalar(other[i]);
    head[i] = narrow_scalar<T>(x * cos[i] - y * sin[i]);
    other[i] = narrow_scalar<T>(y * cos[i] + x * sin[i]);
  }
}

template <class T>
inline void rotate_heads(T* heads, int count, const float* cos, const float* sin, int dim) {
  for (int h = 0; h < count; h++) rotate_head(heads + (int64_t)h * dim, cos, sin, dim / 2);
}

template <class T>
void rotate_rows(const RopeCall& c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int t = 0; t < c.tokens; t++) {
    const float *cos = c.cos + t * c.table_stride, *sin = c.sin + t * c.table_stride;
    rotate_heads((T*)c.q + t * c.q_stride, c.q_heads, cos, sin, c.head_dim);
    rotate_heads((T*)c.k + t * c.k_stride, c.kv_heads, cos, sin, c.head_dim);
  }
}

inline Vec silu(Vec x) {
  const Vec t = maximum(splat(-126.0f), -maximum(splat(-126.0f), x * 1.4426950408889634f));  // -x log2 e, within 126
  const Vec d = 1.0f + exp2v(t);
#if defined(__AVX512F__)
  const __m512 r = _mm512_rcp14_ps((__m512)d);  // one Newton step: as near as a division, at a fifth of its time
  return x * (Vec)_mm512_mul_ps(r, _mm512_fnmadd_ps((__m512)d, r, _mm512_set1_ps(2)));
#else
  return x / d;
#endif
}

template <class T>
inline void gate_row(const T* gate, const T* up, int n, T* out) {
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) store_narrow(out + i, silu(load_wide(gate + i)) * load_wide(up + i));
  for (; i < n; i++) {
    float lanes[kWidth] = {wide_scalar(gate[i])};
    store(lanes, silu(load(lanes)));
    out[i] = narrow_scalar<T>(lanes[0] * wide_scalar(up[i]));
  }
}

template <class T>
void gate_rows(const GateCall& c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int r = 0; r < c.rows; r++) {
    const T* row = (const T*)c.x + r * c.x_stride;
    gate_row(row, row + c.size, c.size, (T*)c.out + r * c.out_stride);
  }
}

}  // namespace
}  // namespace radixfleet
