// Vectors of 16 numbers of 32 bits: AVX-512. See vector.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using std::int64_t;
using std::uint16_t;

using Vector = __m512;
using Words = __m512i;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;

__mmask16 first_lanes(int64_t n) { return n >= kLanes ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

Vector fill(float value) { return _mm512_set1_ps(value); }

Vector widen(__m256i bf16) { return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16); }

// Rounded to nearest, ties to even.
__m256i narrow(Vector x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const Words bits = (Words)x, even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const Words rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  const Words quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
#endif
}

Vector load(const float* p) { return _mm512_loadu_ps(p); }
Vector load(const uint16_t* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
void store(uint16_t* p, Vector x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }

Vector load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
Vector load_first(const uint16_t* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
void store_first(float* p, Vector x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
void store_first(uint16_t* p, Vector x, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

Words load_words(const void* p) { return _mm512_load_si512(p); }
void store_words(void* p, Words x) { _mm512_store_si512(p, x); }
Words load_first_words(const float* p, int64_t n) { return (Words)load_first(p, n); }
Words load_first_words(const uint16_t* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(n >= 2 * kLanes ? ~0u : n <= 0 ? 0 : (1u << n) - 1, p);
}
Words fill_words(int value) { return _mm512_set1_epi32(value); }

Vector keep_first(Vector x, int64_t n, Vector others) { return _mm512_mask_mov_ps(others, first_lanes(n), x); }
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
Vector multiply_add_pairs(Words a, Words b, Vector c) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#else
  const Words upper = _mm512_set1_epi32((int)0xffff0000);
  c = multiply_add((Vector)_mm512_slli_epi32(a, 16), (Vector)_mm512_slli_epi32(b, 16), c);
  return multiply_add((Vector)_mm512_and_si512(a, upper), (Vector)_mm512_and_si512(b, upper), c);
#endif
}
Vector largest(Vector a, Vector b) { return _mm512_max_ps(a, b); }
Vector smallest(Vector a, Vector b) { return _mm512_min_ps(a, b); }
float sum_of(Vector x) { return _mm512_reduce_add_ps(x); }
float largest_of(Vector x) { return _mm512_reduce_max_ps(x); }
unsigned where_equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
bool is_all_less(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) == 0xffff; }
Vector round(Vector x) { return _mm512_roundscale_ps(x, 8); }
Vector scale_by_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }

// Lane i of each quarter of the result is the sum of that quarter of v[i], for four vectors.
Vector sum_four(const Vector* v) {
  const Vector a = _mm512_unpacklo_ps(v[0], v[1]) + _mm512_unpackhi_ps(v[0], v[1]);
  const Vector b = _mm512_unpacklo_ps(v[2], v[3]) + _mm512_unpackhi_ps(v[2], v[3]);
  return _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
}

// Lane i of the result is the sum of the i-th of 16 vectors, of which `parts` has four by four.
Vector sum_each(const Vector* parts) {
  const auto halves = [](Vector x, Vector y) {
    return _mm512_shuffle_f32x4(x, y, 0x88) + _mm512_shuffle_f32x4(x, y, 0xdd);
  };
  return halves(halves(parts[0], parts[1]), halves(parts[2], parts[3]));
}

// The transpose of a matrix of 16 x 16 numbers of 32 bits.
void transpose(Words* m) {
  Words u[kLanes];
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

}  // namespace
