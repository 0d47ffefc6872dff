// What becomes of the sums of a product before they are stored.
#pragma once

#include "vector.h"

namespace {

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
template <typename T>
struct Epilogue {
  const T* bias;      // [columns], or [2, columns] if gated, or null
  const T* residual;  // [rows, columns] or null; not if gated
  T* out;
  int64_t residual_stride, n_rows, n_columns;
  int activation;
  bool is_gated;

  // Groups of `width` sums, of which a column needs two if gated.
  int64_t n_groups(int64_t width) const { return ceil_div(n_columns, is_gated ? width / 2 : width); }

  // sums, and those of the second matrix if gated: [n, stride], for the rows from `row` and 16 `n_vectors` columns from
  // `column` on.
  void finish(const float* sums, const float* others, int64_t stride, int64_t n, int64_t row, int64_t column,
              int n_vectors) const {
    for (int v = 0; v < n_vectors; ++v, column += kLanes, sums += kLanes) {
      const __mmask16 mask = first_lanes(n_columns - column);
      if (!mask) return;
      const __m512 b = bias ? load(bias + column, mask) : _mm512_setzero_ps();
      const __m512 other_bias = bias && others ? load(bias + n_columns + column, mask) : _mm512_setzero_ps();
      for (int64_t r = 0; r < n; ++r) {
        __m512 y = activate(_mm512_add_ps(_mm512_load_ps(sums + r * stride), b), activation);
        if (others) y = _mm512_mul_ps(y, _mm512_add_ps(_mm512_load_ps(others + v * kLanes + r * stride), other_bias));
        if (residual) y = _mm512_add_ps(y, load(residual + (row + r) * residual_stride + column, mask));
        store(out + (row + r) * n_columns + column, y, mask);
      }
    }
  }
};

}  // namespace
