// RMSNorm.
#pragma once

#include "vector.h"

namespace {

// x / rms(x) * weight.
struct Norm {
  const float* weight;  // null: x as it is
  float eps;

  template <typename T>
  __m512 scale(const T* x, int64_t size) const {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += kLanes) {
      const __m512 v = load(x + i, first_lanes(size - i));
      sum = _mm512_fmadd_ps(v, v, sum);
    }
    return _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / size + eps));
  }

  template <typename T>
  void row(const T* x, int64_t size, T* out) const {
    const __m512 factor = scale(x, size);
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first_lanes(size - i);
      store(out + i, apply(load(x + i, mask), factor, i, mask), mask);
    }
  }

  __m512 apply(__m512 x, __m512 scale, int64_t i, __mmask16 mask) const {
    return _mm512_mul_ps(_mm512_mul_ps(x, scale), load(weight + i, mask));
  }
};

template <typename T>
void rms_norm(const T* x, int64_t n_rows, int64_t size, const Norm& norm, T* out, int n_threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(n_rows* size, n_threads))
  for (int64_t r = 0; r < n_rows; ++r) norm.row(x + r * size, size, out + r * size);
}

}  // namespace
