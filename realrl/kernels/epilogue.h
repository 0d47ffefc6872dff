// What becomes of the sums of a product before they are stored.
#pragma once

#include "vector.h"

namespace {

constexpr int kWidth = 2 * kLanes;  // columns are multiplied together so many at a time

enum Activation { kIdentity, kSilu, kGeluTanh };

__m512 activate(__m512 y, int activation) {
  if (activation == kIdentity) return y;
  __m512 u = y;
  if (activation == kGeluTanh) {  // y (1 + tanh(v)) / 2 = y / (1 + exp(-2 v))
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(y, y), y);
    u = _mm512_mul_ps(_mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), y), _mm512_set1_ps(1.59576912f));
  }
  return _mm512_div_ps(y, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), u))));
}

// out = activation(x W^T + bias) + residual, or of two matrices: activation(x G^T + bias) * (x U^T + bias).
struct Epilogue {
  const uint16_t* bias;      // [columns], or [2, columns] if gated, or null
  const uint16_t* residual;  // [rows, columns] or null; not if gated
  uint16_t* out;
  int64_t residual_stride, n_rows, n_columns;
  int activation;
  bool is_gated;

  // Sums are computed in groups of kWidth columns: neighbours, or half of them of one matrix and half of the other.
  int64_t n_groups() const { return ceil_div(n_columns, is_gated ? kLanes : kWidth); }

  // sums: [n, kWidth], of the rows from `row` on.
  void finish(const float* sums, int64_t n, int64_t row, int64_t group) const {
    if (is_gated) return finish_gated(sums, n, row, group * kLanes);
    for (int half = 0; half < 2; ++half) {
      const int64_t column = group * kWidth + half * kLanes;
      const __mmask16 mask = first_lanes(n_columns - column);
      if (!mask) return;
      const __m512 b = bias ? load(bias + column, mask) : _mm512_setzero_ps();
      for (int64_t r = 0; r < n; ++r) {
        __m512 y = activate(_mm512_add_ps(_mm512_load_ps(sums + r * kWidth + half * kLanes), b), activation);
        if (residual) y = _mm512_add_ps(y, load(residual + (row + r) * residual_stride + column, mask));
        store(out + (row + r) * n_columns + column, y, mask);
      }
    }
  }

  void finish_gated(const float* sums, int64_t n, int64_t row, int64_t column) const {
    const __mmask16 mask = first_lanes(n_columns - column);
    const __m512 gate_bias = bias ? load(bias + column, mask) : _mm512_setzero_ps();
    const __m512 up_bias = bias ? load(bias + n_columns + column, mask) : _mm512_setzero_ps();
    for (int64_t r = 0; r < n; ++r) {
      const __m512 gate = _mm512_add_ps(_mm512_load_ps(sums + r * kWidth), gate_bias);
      const __m512 up = _mm512_add_ps(_mm512_load_ps(sums + r * kWidth + kLanes), up_bias);
      store(out + (row + r) * n_columns + column, _mm512_mul_ps(activate(gate, activation), up), mask);
    }
  }
};

}  // namespace
