// Products over int8 weights with a scale per output. Leaves the quantising of weights to pack.cpp.
//
// With integer dot products a row is written as scale * (256 * high + low), both digits in -128..127, so that activations
// keep 16 bits: what is lost is lost in the weights alone. The sums are integers and exact, so no row can depend on
// its neighbours. Without such instructions weights are widened in registers and meet activations as they are, in fp32.
#pragma once

#include "linear.h"

namespace radixfleet {
namespace {

typedef int8_t Byte __attribute__((vector_size(kWidth)));

constexpr float kLargestDigits = 127 * 256 + 127;

struct Digits {
  float scale;  // NaN where the row holds NaN or infinities
  int32_t high, low;  // sums of the digits
};

// The largest absolute value, in fp32; NaN where one is not finite.
template <class T>
inline float largest(const T* row, int n) {
  Vec top = {}, poison = {};
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Vec v = load_wide(row + i);
    top = maximum(top, (Vec)((Uint)v & 0x7fffffffu));
    poison += v - v;
  }
  float most = 0, bad = sum_of(poison), lanes[kWidth];
  store(lanes, top);
  for (int j = 0; j < kWidth; j++) most = lanes[j] > most ? lanes[j] : most;
  for (; i < n; i++) {
    const float v = fabsf(wide_scalar(row[i]));
    most = v > most ? v : most;
    bad += v - v;
  }
  return most + bad;
}

// One step: 64 high digits, then 64 low ones. Adds them to the sums.
template <class T>
inline void write_digits(const T* row, float inverse, char* dst, Int& high_sum, Int& low_sum) {
  for (int i = 0; i < 64; i += kWidth) {
    const Int q = (Int)(load_wide(row + i) * inverse + 12582912.0f) - 0x4b400000;  // to nearest even
    const Int high = (q + 128) >> 8, low = q - (high << 8);
    store_as(dst + i, __builtin_convertvector(high, Byte));
    store_as(dst + 64 + i, __builtin_convertvector(low, Byte));
    high_sum += high;
    low_sum += low;
  }
}

inline int32_t total_of(Int v) {
  int32_t lanes[kWidth], sum = 0;
  store_as(lanes, v);
  for (int i = 0; i < kWidth; i++) sum += lanes[i];
  return sum;
}

// The digits of a row, a step every `stride` bytes; inputs up to the end of the last step are zeros.
template <class T>
inline Digits quantise_row(const T* row, int n, char* dst, int64_t stride) {
  const float most = largest(row, n);
  const float inverse = most > 0 && most < INFINITY ? kLargestDigits / most : 0;
  Int high = {}, low = {};
  for (int i = 0; i < n; i += 64, dst += stride) {
    if (n - i >= 64) {
      write_digits(row + i, inverse, dst, high, low);
      continue;
    }
    T rest[64] = {};
    memcpy(rest, row + i, (n - i) * sizeof(T));
    write_digits(rest, inverse, dst, high, low);
  }
  return {inverse > 0 && inverse < INFINITY ? 1 / inverse : most, total_of(high), total_of(low)};
}

inline const float* output_scales(const LinearCall& c) {
  const int64_t tiles = (int64_t)panels_of(c.outputs, c.gated) * input_steps(c.inputs, kInt8);
  return (const float*)c.weight + tiles * kTileWords;
}

inline void scale_columns(float* values, const float* scales, float row_scale, int count) {
  for (int i = 0; i < count; i += kWidth) store(values + i, load(values + i) * (load(scales + i) * row_scale));
}

#if defined(__AVX512VNNI__)
// The instruction wants one side unsigned: weights are shifted by 128, and the sums start at what that adds.
template <class T>
struct Int8Form {
  using Storage = T;
  using Left = uint32_t;
  using Right = uint32_t;
  struct Sum {
    __m512i high, low;
  };
  static constexpr int kLefts = 32, kTail = 16, kSums = 2;
  static constexpr Dtype kWeights = kInt8;
  static Sum start(const Left* tail) { return {_mm512_set1_epi32((int)tail[1]), _mm512_set1_epi32((int)tail[2])}; }
  static Uint lanes(const uint32_t* w) { return load_as<Uint>(w) ^ 0x80808080u; }
  // In assembly: around the compiler's own form of it gcc 12 copies every sum, twice.
  static void dot(__m512i& sum, Uint w, Left x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"((__m512i)w), "v"(_mm512_set1_epi32((int)x)));
  }
  static Sum step(Sum sum, Uint w, const Left* x) {
    dot(sum.high, w, x[0]);
    dot(sum.low, w, x[16]);
    return sum;
  }
  static Vec total(Sum sum) {
    return (Vec)_mm512_fmadd_ps(_mm512_cvtepi32_ps(sum.high), _mm512_set1_ps(256), _mm512_cvtepi32_ps(sum.low));
  }
  static void pack(const T* row, int inputs, Left* dst) {
    const Digits digits = quantise_row(row, inputs, (char*)dst, 128);
    Left* tail = dst + input_steps(inputs, kInt8) * kLefts;
    memcpy(tail, &digits.scale, 4);
    tail[1] = (Left)(-128 * digits.high), tail[2] = (Left)(-128 * digits.low);
  }
  static void finish(const LinearCall& c, const Left* x, int64_t size, int rows, int panel, int panels, float* values) {
    const float* scales = output_scales(c) + panel * kPanel;
    for (int r = 0; r < rows; r++) {
      float scale;
      memcpy(&scale, x + r * size + size - kTail, 4);
      scale_columns(values + r * panels * kPanel, scales, scale, panels * kPanel);
    }
  }
};
#else
template <class T>
struct Int8Form : PlainSum {
  struct Left {
    float x[4];
  };
  struct Lanes {
    Vec w[4];
  };
  using Storage = T;
  using Right = uint32_t;
  static constexpr Dtype kWeights = kInt8;
  static Lanes lanes(const uint32_t* w) {
    const Int v = load_as<Int>(w);
    return {{__builtin_convertvector((v << 24) >> 24, Vec), __builtin_convertvector((v << 16) >> 24, Vec),
             __builtin_convertvector((v << 8) >> 24, Vec), __builtin_convertvector(v >> 24, Vec)}};
  }
  static Vec step(Vec acc, const Lanes& b, const Left* a) {
    for (int i = 0; i < 4; i++) acc = acc + b.w[i] * a->x[i];
    return acc;
  }
  static void pack(const T* row, int inputs, Left* dst) {
    float* to = (float*)dst;
    for (int i = 0; i < inputs; i++) to[i] = wide_scalar(row[i]);
    for (int i = inputs; i < padded(inputs, 64); i++) to[i] = 0;
  }
  static void finish(const LinearCall& c, const Left*, int64_t, int rows, int panel, int panels, float* values) {
    const float* scales = output_scales(c) + panel * kPanel;
    for (int r = 0; r < rows; r++) scale_columns(values + r * panels * kPanel, scales, 1, panels * kPanel);
  }
};
#endif

}  // namespace
}  // namespace radixfleet
