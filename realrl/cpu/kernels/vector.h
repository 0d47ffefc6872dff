// Vectors of kLanes numbers of 32 bits, float32 (`Vector`) or whatever they are (`Words`), with +, -, * and / of the
// compiler. A file for each instruction set says how they are loaded from and stored as float32 or bfloat16 (uint16_t).
// Where only the first n numbers are there, no other memory is touched and the others are zeros; n may be more than
// kLanes, or negative.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#ifdef __AVX512F__
#include "vector_avx512.h"
#else
#include "vector_avx2.h"
#endif

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Cephes' expf: relative error below 2e-7.
Vector exp(Vector x) {
  // of two operands of which one is NaN, largest and smallest give the second one
  x = largest(fill(-150.0f), smallest(fill(89.0f), x));
  const Vector n = round(x * fill(1.44269504f));
  Vector r = multiply_add(n, fill(-0.693359375f), x);
  r = multiply_add(n, fill(2.12194440e-4f), r);
  Vector p = fill(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = multiply_add(p, r, fill(c));
  p = multiply_add(p, r * r, r + fill(1.0f));
  return scale_by_power(p, n);
}

enum Use { kSharedRows, kOwnRows, kSums, kAttention, kSampling };

// Memory of the calling thread that outlives the call.
template <Use, typename T>
T* scratch(int64_t n) {
  struct Block {
    void* data = nullptr;
    int64_t size = 0;
    ~Block() { std::free(data); }
  };
  thread_local Block block;
  const int64_t size = round_up(n * (int64_t)sizeof(T), 4096);
  if (size > block.size) {
    std::free(block.data);
    block.data = std::aligned_alloc(4096, size);
    block.size = size;
  }
  return static_cast<T*>(block.data);
}

// So few elements are dealt with before another thread has woken up.
int threads_for(int64_t n_elements, int n_threads) { return n_elements < (1 << 16) ? 1 : n_threads; }

// How many of n pieces of work a thread takes at a time: enough that what it fetches ahead is mostly its own, so few
// that the others take over where one is slow, as they are on machines that are shared.
int64_t pieces_at_once(int64_t n, int n_threads) { return std::max<int64_t>(1, ceil_div(n, 4 * n_threads)); }

template <_mm_hint hint = _MM_HINT_T0>
void prefetch(const void* p, int64_t n_lines) {
  for (int64_t i = 0; i < n_lines; ++i) _mm_prefetch((const char*)p + 64 * i, hint);
}

}  // namespace
