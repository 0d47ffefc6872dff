// What becomes of the sums of a product before they are stored.
#pragma once

#include "vector.h"

namespace {

enum Activation { kIdentity, kSilu, kGeluTanh };

Vector activate(Vector y, int activation) {
  if (activation == kIdentity) return y;
  Vector u = y;
  if (activation == kGeluTanh) {  // y (1 + tanh(v)) / 2 = y / (1 + exp(-2 v))
    u = multiply_add(y * y * y, fill(0.044715f), y) * fill(1.59576912f);
  }
  return y / (fill(1.0f) + exp(-u));
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

  // sums, and those of the second matrix if gated: [n, stride], for the rows from `row` and `n_vectors` of columns from
  // `column` on.
  void finish(const float* sums, const float* others, int64_t stride, int64_t n, int64_t row, int64_t column,
              int n_vectors) const {
    for (int v = 0; v < n_vectors; ++v, column += kLanes, sums += kLanes) {
      const int64_t m = n_columns - column;
      if (m <= 0) return;
      const Vector b = bias ? load_first(bias + column, m) : fill(0.0f);
      const Vector other_bias = bias && others ? load_first(bias + n_columns + column, m) : fill(0.0f);
      for (int64_t r = 0; r < n; ++r) {
        Vector y = activate(load(sums + r * stride) + b, activation);
        if (others) y = y * (load(others + v * kLanes + r * stride) + other_bias);
        if (residual) y = y + load_first(residual + (row + r) * residual_stride + column, m);
        store_first(out + (row + r) * n_columns + column, y, m);
      }
    }
  }
};

}  // namespace
