// The AVX-512 instructions that the kernels use, in software, so that a CPU without them can run what is written for
// them. With REALRL_BF16 the bfloat16 ones are there too.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define SOFTWARE [[gnu::noinline]] inline  // or to compile takes half a minute

namespace software {

using Floats = __m512;
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint16_t Shorts __attribute__((vector_size(64)));
typedef std::uint16_t HalfShorts __attribute__((vector_size(32)));
constexpr int kLanes = 16;

template <typename To, typename From>
To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Each lane of the result is f(i).
template <typename V, typename F>
V lanes(F f) {
  V v{};
  for (unsigned i = 0; i < sizeof v / sizeof v[0]; ++i) v[i] = f(i);
  return v;
}

inline std::uint16_t narrow(float x) {
  const auto bits = bits_of<std::uint32_t>(x);
  if (std::isnan(x)) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float widen(std::uint16_t x) { return bits_of<float>((std::uint32_t)x << 16); }

template <typename V, typename T>
SOFTWARE V load_where(std::uint32_t mask, const T* p) {
  return lanes<V>([&](int i) { return mask >> i & 1 ? p[i] : T(0); });
}

template <typename V, typename T>
SOFTWARE void store_where(T* p, std::uint32_t mask, V v) {
  for (unsigned i = 0; i < sizeof v / sizeof v[0]; ++i)
    if (mask >> i & 1) p[i] = v[i];
}

// Within each quarter of 128 bits, the lanes of a and b alternately, from its lower or upper half.
template <typename V>
SOFTWARE V unpack(V a, V b, bool is_upper) {
  constexpr int kQuarter = 16 / sizeof(a[0]);
  return lanes<V>([&](int i) {
    const int from = i / kQuarter * kQuarter + is_upper * kQuarter / 2 + i % kQuarter / 2;
    return i % 2 ? b[from] : a[from];
  });
}

// Within each quarter: two lanes of a, then two of b.
SOFTWARE Floats shuffle(Floats a, Floats b, int which) {
  return lanes<Floats>([&](int i) { return (i % 4 < 2 ? a : b)[i / 4 * 4 + (which >> 2 * (i % 4) & 3)]; });
}

// Two quarters of a, then two of b.
template <typename V>
SOFTWARE V shuffle_quarters(V a, V b, int which) {
  return lanes<V>([&](int i) { return (i < 8 ? a : b)[(which >> 2 * (i / 4) & 3) * 4 + i % 4]; });
}

SOFTWARE __mmask16 compare(Floats a, Floats b, int how) {
  __mmask16 mask = 0;
  for (int i = 0; i < kLanes; ++i) {
    const bool is_so = how == _CMP_UNORD_Q ? std::isnan(a[i]) || std::isnan(b[i])
                       : how == _CMP_LT_OQ ? a[i] < b[i]
                                           : a[i] == b[i];
    mask |= is_so << i;
  }
  return mask;
}

SOFTWARE Floats dot_pairs(Floats sums, Shorts a, Shorts b) {
  return lanes<Floats>(
      [&](int i) { return sums[i] + widen(a[2 * i]) * widen(b[2 * i]) + widen(a[2 * i + 1]) * widen(b[2 * i + 1]); });
}

inline Ints ints(__m512i x) { return bits_of<Ints>(x); }
inline __m512i words(Ints x) { return bits_of<__m512i>(x); }

}  // namespace software

#define SOFTWARE_LANES(f) software::lanes<__m512>([&](int i) { return f; })
#define SOFTWARE_WORDS(f) software::words(software::lanes<software::Ints>([&](int i) { return f; }))

namespace software {

SOFTWARE Floats set(float x) { return SOFTWARE_LANES(x); }
SOFTWARE Floats fused(Floats a, Floats b, Floats c) { return SOFTWARE_LANES(std::fma(a[i], b[i], c[i])); }
SOFTWARE Floats max(Floats a, Floats b) { return SOFTWARE_LANES(a[i] > b[i] ? a[i] : b[i]); }
SOFTWARE Floats min(Floats a, Floats b) { return SOFTWARE_LANES(a[i] < b[i] ? a[i] : b[i]); }
SOFTWARE Floats round(Floats x) { return SOFTWARE_LANES(std::nearbyint(x[i])); }
SOFTWARE Floats scale(Floats x, Floats n) {
  return SOFTWARE_LANES(std::isnan(n[i]) ? n[i] : std::ldexp(x[i], (int)std::floor(n[i])));
}
SOFTWARE Floats choose(Floats others, __mmask16 mask, Floats x) {
  return SOFTWARE_LANES(mask >> i & 1 ? x[i] : others[i]);
}
SOFTWARE __m512i choose_words(__m512i others, __mmask16 mask, __m512i x) {
  return SOFTWARE_WORDS((mask >> i & 1 ? ints(x) : ints(others))[i]);
}
SOFTWARE float sum(Floats x) {
  for (int n = kLanes / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  return x[0];
}
SOFTWARE float largest(Floats x) { return *std::max_element(&x[0], &x[0] + kLanes); }
SOFTWARE __m512i set_words(int x) { return SOFTWARE_WORDS(x); }
SOFTWARE __m512i shift_up(__m512i x, int n) { return SOFTWARE_WORDS((std::int32_t)((std::uint32_t)ints(x)[i] << n)); }
SOFTWARE __m512i shift_down(__m512i x, int n) { return SOFTWARE_WORDS((std::int32_t)((std::uint32_t)ints(x)[i] >> n)); }
SOFTWARE __m512i add_words(__m512i a, __m512i b) {
  return SOFTWARE_WORDS((std::int32_t)((std::uint32_t)ints(a)[i] + (std::uint32_t)ints(b)[i]));
}
SOFTWARE __m512i widen_shorts(__m256i x) { return SOFTWARE_WORDS(bits_of<HalfShorts>(x)[i]); }
SOFTWARE __m256i narrow_words(__m512i x) {
  return bits_of<__m256i>(lanes<HalfShorts>([&](int i) { return (std::uint16_t)ints(x)[i]; }));
}
SOFTWARE HalfShorts narrow_floats(Floats x) {
  return lanes<HalfShorts>([&](int i) { return narrow(x[i]); });
}
SOFTWARE Shorts narrow_both(Floats upper, Floats lower) {
  return lanes<Shorts>([&](int i) { return narrow(i < kLanes ? lower[i] : upper[i - kLanes]); });
}
SOFTWARE __m256i half(__m512i x, int upper) {
  __m256i y;
  std::memcpy(&y, (const char*)&x + 32 * upper, sizeof y);
  return y;
}
SOFTWARE __m512i unpack_words(__m512i a, __m512i b, bool is_upper) { return words(unpack(ints(a), ints(b), is_upper)); }
SOFTWARE __m512i shuffle_word_quarters(__m512i a, __m512i b, int which) {
  return words(shuffle_quarters(ints(a), ints(b), which));
}
template <typename Register, typename V>
SOFTWARE Register load_shorts(std::uint32_t mask, const std::uint16_t* p) {
  return bits_of<Register>(load_where<V>(mask, p));
}
inline void check_aligned(const void* p) {
  if ((std::uintptr_t)p % 64) __builtin_trap();
}
SOFTWARE __m512i load_aligned(const void* p) {
  check_aligned(p);
  __m512i x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
SOFTWARE void store_aligned(void* p, __m512i x) {
  check_aligned(p);
  std::memcpy(p, &x, sizeof x);
}

}  // namespace software

#undef __AVX512F__
#define __AVX512F__ 1
#undef _mm512_set1_ps
#undef _mm512_loadu_ps
#undef _mm512_storeu_ps
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#undef _mm512_fmadd_ps
#undef _mm512_max_ps
#undef _mm512_min_ps
#undef _mm512_roundscale_ps
#undef _mm512_scalef_ps
#undef _mm512_mask_mov_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_reduce_add_ps
#undef _mm512_reduce_max_ps
#undef _mm512_unpacklo_ps
#undef _mm512_unpackhi_ps
#undef _mm512_shuffle_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_set1_epi32
#undef _mm512_load_si512
#undef _mm512_store_si512
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_add_epi32
#undef _mm512_and_si512
#undef _mm512_or_si512
#undef _mm512_mask_mov_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_castsi512_si256
#undef _mm512_extracti64x4_epi64
#undef _mm512_unpacklo_epi32
#undef _mm512_unpackhi_epi32
#undef _mm512_unpacklo_epi64
#undef _mm512_unpackhi_epi64
#undef _mm512_shuffle_i32x4
#undef _mm512_maskz_loadu_epi16
#undef _mm256_maskz_loadu_epi16
#undef _mm256_mask_storeu_epi16
#define _mm512_set1_ps(x) software::set(x)
#define _mm512_loadu_ps(p) software::load_where<__m512>(0xffff, p)
#define _mm512_storeu_ps(p, x) software::store_where(p, 0xffff, x)
#define _mm512_maskz_loadu_ps(mask, p) software::load_where<__m512>(mask, p)
#define _mm512_mask_storeu_ps(p, mask, x) software::store_where(p, mask, x)
#define _mm512_fmadd_ps(a, b, c) software::fused(a, b, c)
#define _mm512_max_ps(a, b) software::max(a, b)
#define _mm512_min_ps(a, b) software::min(a, b)
#define _mm512_roundscale_ps(x, how) software::round(x)
#define _mm512_scalef_ps(x, n) software::scale(x, n)
#define _mm512_mask_mov_ps(others, mask, x) software::choose(others, mask, x)
#define _mm512_cmp_ps_mask(a, b, how) software::compare(a, b, how)
#define _mm512_reduce_add_ps(x) software::sum(x)
#define _mm512_reduce_max_ps(x) software::largest(x)
#define _mm512_unpacklo_ps(a, b) software::unpack(a, b, false)
#define _mm512_unpackhi_ps(a, b) software::unpack(a, b, true)
#define _mm512_shuffle_ps(a, b, which) software::shuffle(a, b, which)
#define _mm512_shuffle_f32x4(a, b, which) software::shuffle_quarters(a, b, which)
#define _mm512_set1_epi32(x) software::set_words(x)
#define _mm512_load_si512(p) software::load_aligned(p)
#define _mm512_store_si512(p, x) software::store_aligned(p, x)
#define _mm512_slli_epi32(x, n) software::shift_up(x, n)
#define _mm512_srli_epi32(x, n) software::shift_down(x, n)
#define _mm512_add_epi32(a, b) software::add_words(a, b)
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_or_si512(a, b) ((a) | (b))
#define _mm512_mask_mov_epi32(others, mask, x) software::choose_words(others, mask, x)
#define _mm512_cvtepu16_epi32(x) software::widen_shorts(x)
#define _mm512_cvtepi32_epi16(x) software::narrow_words(x)
#define _mm512_castsi512_si256(x) software::half(x, 0)
#define _mm512_extracti64x4_epi64(x, upper) software::half(x, upper)
#define _mm512_unpacklo_epi32(a, b) software::unpack_words(a, b, false)
#define _mm512_unpackhi_epi32(a, b) software::unpack_words(a, b, true)
#define _mm512_unpacklo_epi64(a, b) software::unpack(a, b, false)
#define _mm512_unpackhi_epi64(a, b) software::unpack(a, b, true)
#define _mm512_shuffle_i32x4(a, b, which) software::shuffle_word_quarters(a, b, which)
#define _mm512_maskz_loadu_epi16(mask, p) software::load_shorts<__m512i, software::Shorts>(mask, p)
#define _mm256_maskz_loadu_epi16(mask, p) software::load_shorts<__m256i, software::HalfShorts>(mask, p)
#define _mm256_mask_storeu_epi16(p, mask, x) software::store_where(p, mask, software::bits_of<software::HalfShorts>(x))

#ifdef REALRL_BF16
#undef __AVX512BF16__
#define __AVX512BF16__ 1
#define __m512bh software::Shorts
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#undef _mm512_dpbf16_ps
#define _mm512_cvtneps_pbh(x) software::narrow_floats(x)
#define _mm512_cvtne2ps_pbh(upper, lower) software::narrow_both(upper, lower)
#define _mm512_dpbf16_ps(sums, a, b) software::dot_pairs(sums, (software::Shorts)(a), (software::Shorts)(b))
#endif
