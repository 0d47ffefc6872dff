// RMSNorm.
#pragma once

#include "vector.h"

namespace {

// x / rms(x) * weight.
struct Norm {
  const float* weight;  // null: x as it is
  float eps;

  template <typename T>
  float scale(const T* x, int64_t size) const {
    Vector sum = fill(0.0f);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vector v = load_first(x + i, size - i);
      sum = multiply_add(v, v, sum);
    }
    return 1.0f / std::sqrt(sum_of(sum) / size + eps);
  }

  template <typename T>
  void row(const T* x, int64_t size, T* out) const {
    const Vector factor = fill(scale(x, size));
    for (int64_t i = 0; i < size; i += kLanes)
      store_first(out + i, apply(load_first(x + i, size - i), factor, i, size - i), size - i);
  }

  // x: those from i on, of which n are there.
  Vector apply(Vector x, Vector scale, int64_t i, int64_t n) const { return x * scale * load_first(weight + i, n); }
};

template <typename T>
void rms_norm(const T* x, int64_t n_rows, int64_t size, const Norm& norm, T* out, int n_threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(n_rows* size, n_threads))
  for (int64_t r = 0; r < n_rows; ++r) norm.row(x + r * size, size, out + r * size);
}

}  // namespace
