// A product with a packed weight, and which of the implementations computes it.
#pragma once

#include "linear_vectors.h"
#ifdef REALRL_TILES
#include "linear_tiles.h"
namespace bf16_products = tiles;
#else
namespace bf16_products = vectors;
#endif

namespace {

// As `Product` in loader.py has it.
template <typename T>
struct Product {
  const float* norm;  // of the rows before they are multiplied; or null
  const T* w;         // as `pack` made it
  const T* bias;      // see `Epilogue`
  int64_t n_inputs, n_columns;
  float eps;  // of the norm
  int activation, is_gated;
};

// out [n_rows, n_columns] of x [n_rows, n_inputs], of which rows are `stride` apart.
template <typename T>
void multiply(const Product<T>& product, const T* x, int64_t stride, int64_t n_rows, const T* residual,
              int64_t residual_stride, T* out, int n_threads) {
  const Norm norm{product.norm, product.eps};
  const Epilogue<T> epilogue{
      product.bias,         residual, out, residual_stride, n_rows, product.n_columns, product.activation,
      product.is_gated != 0};
  if constexpr (std::is_same_v<T, float>)
    vectors::linear(x, stride, product.n_inputs, norm, product.w, epilogue, n_threads);
  else
    bf16_products::linear(x, stride, product.n_inputs, norm, product.w, epilogue, n_threads);
}

template <typename T>
int64_t packed_size(int64_t n, int64_t n_inputs, bool is_gated) {
  if constexpr (std::is_same_v<T, float>) return vectors::packed_size<T>(n, n_inputs, is_gated);
  return bf16_products::packed_size<T>(n, n_inputs, is_gated);
}

template <typename T>
void pack(const T* w, const T* other, int64_t stride, int64_t n, int64_t n_inputs, T* out, int n_threads) {
  if constexpr (std::is_same_v<T, float>)
    vectors::pack(w, other, stride, n, n_inputs, out, n_threads);
  else
    bf16_products::pack(w, other, stride, n, n_inputs, out, n_threads);
}

}  // namespace
