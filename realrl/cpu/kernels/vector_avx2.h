// Vectors of 8 numbers of 32 bits: AVX2 and FMA. See vector.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using std::int64_t;
using std::uint16_t;

using Vector = __m256;
using Words = __m256i;
constexpr int kLanes = 8;
constexpr int kRegisters = 16;

Words first_lanes(int64_t n) {
  const int count = n >= kLanes ? kLanes : n <= 0 ? 0 : (int)n;
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

Vector fill(float value) { return _mm256_set1_ps(value); }

Vector widen(__m128i bf16) { return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16); }

// Rounded to nearest, ties to even.
__m128i narrow(Vector x) {
  const Words bits = (Words)x, even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const Words rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
  const Words quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const Vector y = _mm256_blendv_ps((Vector)rounded, (Vector)quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const Words upper = _mm256_srli_epi32((Words)y, 16);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0xd8));
}

// There is no load or store of some numbers of 16 bits.
template <typename Block>
Block copy_first(const uint16_t* p, int64_t n) {
  constexpr int64_t kSize = sizeof(Block) / sizeof(uint16_t);
  Block block{};
  if (n > 0) std::memcpy(&block, p, (n < kSize ? n : kSize) * sizeof(uint16_t));
  return block;
}

Vector load(const float* p) { return _mm256_loadu_ps(p); }
Vector load(const uint16_t* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
void store(uint16_t* p, Vector x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }

Vector load_first(const float* p, int64_t n) {
  if (n <= 0) return fill(0.0f);
  return n >= kLanes ? load(p) : _mm256_maskload_ps(p, first_lanes(n));
}
Vector load_first(const uint16_t* p, int64_t n) { return n >= kLanes ? load(p) : widen(copy_first<__m128i>(p, n)); }
void store_first(float* p, Vector x, int64_t n) {
  if (n >= kLanes)
    store(p, x);
  else
    _mm256_maskstore_ps(p, first_lanes(n), x);
}
void store_first(uint16_t* p, Vector x, int64_t n) {
  if (n >= kLanes) return store(p, x);
  const __m128i block = narrow(x);
  if (n > 0) std::memcpy(p, &block, n * sizeof(uint16_t));
}

Words load_words(const void* p) { return _mm256_load_si256((const Words*)p); }
void store_words(void* p, Words x) { _mm256_store_si256((Words*)p, x); }
Words load_first_words(const float* p, int64_t n) { return (Words)load_first(p, n); }
Words load_first_words(const uint16_t* p, int64_t n) { return copy_first<Words>(p, n); }
Words fill_words(int value) { return _mm256_set1_epi32(value); }

Vector keep_first(Vector x, int64_t n, Vector others) {
  return n >= kLanes ? x : _mm256_blendv_ps(others, x, (Vector)first_lanes(n));
}
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
Vector multiply_add_pairs(Words a, Words b, Vector c) {
  const Words upper = _mm256_set1_epi32((int)0xffff0000);
  c = multiply_add((Vector)_mm256_slli_epi32(a, 16), (Vector)_mm256_slli_epi32(b, 16), c);
  return multiply_add((Vector)_mm256_and_si256(a, upper), (Vector)_mm256_and_si256(b, upper), c);
}
Vector largest(Vector a, Vector b) { return _mm256_max_ps(a, b); }
Vector smallest(Vector a, Vector b) { return _mm256_min_ps(a, b); }
float sum_of(Vector x) {
  const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
}
float largest_of(Vector x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
unsigned where_equal(Vector a, Vector b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
bool is_all_less(Vector a, Vector b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) == 0xff; }
Vector round(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// In two steps, each within the range of normal numbers: n is between -252 and 254.
Vector scale_by_power(Vector x, Vector n) {
  const auto power = [](Words m) { return (Vector)_mm256_slli_epi32(_mm256_add_epi32(m, fill_words(127)), 23); };
  const Words whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  return x * power(half) * power(_mm256_sub_epi32(whole, half));
}

// Lane i of each half of the result is the sum of that half of v[i], for four vectors.
Vector sum_four(const Vector* v) {
  const Vector a = _mm256_unpacklo_ps(v[0], v[1]) + _mm256_unpackhi_ps(v[0], v[1]);
  const Vector b = _mm256_unpacklo_ps(v[2], v[3]) + _mm256_unpackhi_ps(v[2], v[3]);
  return _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
}

// Lane i of the result is the sum of the i-th of 8 vectors, of which `parts` has four by four.
Vector sum_each(const Vector* parts) {
  return _mm256_permute2f128_ps(parts[0], parts[1], 0x20) + _mm256_permute2f128_ps(parts[0], parts[1], 0x31);
}

// The transpose of a matrix of 8 x 8 numbers of 32 bits.
void transpose(Words* m) {
  Words u[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    u[i] = _mm256_unpacklo_epi32(m[i], m[i + 1]);
    u[i + 1] = _mm256_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 2; ++j) {
      m[i + 2 * j] = _mm256_unpacklo_epi64(u[i + j], u[i + j + 2]);
      m[i + 2 * j + 1] = _mm256_unpackhi_epi64(u[i + j], u[i + j + 2]);
    }
  for (int j = 0; j < 4; ++j) {  // m[4 a + j] has column 4 b + j of rows 4 a to 4 a + 3 in its half b
    u[j] = _mm256_permute2x128_si256(m[j], m[4 + j], 0x20);
    u[4 + j] = _mm256_permute2x128_si256(m[j], m[4 + j], 0x31);
  }
  for (int i = 0; i < kLanes; ++i) m[i] = u[i];
}

}  // namespace
