// Vectors of 16 float32 numbers, loaded from and stored as float32 or bfloat16 (uint16_t).
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace {

using std::int64_t;
using std::uint16_t;

constexpr int kLanes = 16;  // float32 numbers in a vector
constexpr __mmask16 kAll = 0xffff;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
__mmask16 first_lanes(int64_t n) { return n >= kLanes ? kAll : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

__m512 widen(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

// Rounded to nearest, ties to even.
__m256i narrow(__m512 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = (__m512i)x, even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
#endif
}

__m512 load(const float* p, __mmask16 mask = kAll) { return _mm512_maskz_loadu_ps(mask, p); }
__m512 load(const uint16_t* p, __mmask16 mask = kAll) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }
void store(float* p, __m512 x, __mmask16 mask = kAll) { _mm512_mask_storeu_ps(p, mask, x); }
void store(uint16_t* p, __m512 x, __mmask16 mask = kAll) { _mm256_mask_storeu_epi16(p, mask, narrow(x)); }

// A vector of the first n numbers, and zeros after them.
__m512i load_words(const float* p, int64_t n) { return (__m512i)load(p, first_lanes(n)); }
__m512i load_words(const uint16_t* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(n >= 2 * kLanes ? ~0u : n <= 0 ? 0 : (1u << n) - 1, p);
}

// Cephes' expf: relative error below 2e-7.
__m512 exp(__m512 x) {
  // of two operands of which one is NaN, max and min give the second one
  x = _mm512_max_ps(_mm512_set1_ps(-150.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// Lane i of each quarter of the result is the sum of that quarter of v[i], for four vectors.
__m512 sum_quarters(const __m512* v) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

// Lane i of the result is the sum of the i-th of 16 vectors, of which `quarters` has four by four.
__m512 sum_each(const __m512* quarters) {
  const auto halves = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  return halves(halves(quarters[0], quarters[1]), halves(quarters[2], quarters[3]));
}

// The transpose of a matrix of 16 x 16 numbers of 32 bits.
void transpose(__m512i* m) {
  __m512i u[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    u[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    u[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 2; ++j) {
      m[i + 2 * j] = _mm512_unpacklo_epi64(u[i + j], u[i + j + 2]);
      m[i + 2 * j + 1] = _mm512_unpackhi_epi64(u[i + j], u[i + j + 2]);
    }
  for (int j = 0; j < 4; ++j) {  // m[4 a + j] has column 4 b + j of rows 4 a to 4 a + 3 in its quarter b
    u[j] = _mm512_shuffle_i32x4(m[j], m[4 + j], 0x88);
    u[4 + j] = _mm512_shuffle_i32x4(m[j], m[4 + j], 0xdd);
    u[8 + j] = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0x88);
    u[12 + j] = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; ++j) {
    m[j] = _mm512_shuffle_i32x4(u[j], u[8 + j], 0x88);
    m[8 + j] = _mm512_shuffle_i32x4(u[j], u[8 + j], 0xdd);
    m[4 + j] = _mm512_shuffle_i32x4(u[4 + j], u[12 + j], 0x88);
    m[12 + j] = _mm512_shuffle_i32x4(u[4 + j], u[12 + j], 0xdd);
  }
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

template <_mm_hint hint = _MM_HINT_T0>
void prefetch(const void* p, int64_t n_lines) {
  for (int64_t i = 0; i < n_lines; ++i) _mm_prefetch((const char*)p + 64 * i, hint);
}

}  // namespace
