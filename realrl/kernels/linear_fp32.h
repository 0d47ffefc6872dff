// float32 products with vectors.
#pragma once

#include "epilogue.h"
#include "norm.h"

namespace {

constexpr int kVectors = 3;                      // of columns, times
constexpr int kRowsTogether = 8;                 // rows: sums that stay in registers
constexpr int64_t kColumns = kVectors * kLanes;  // of one matrix, in a group
constexpr int64_t kBlockInputs = 128;            // of the weights, that stay in the first-level cache
constexpr int64_t kBlockRows = 256;              // whose sums stay in the second-level cache

// sums [8, kColumns] (+)= x [n_rows, n] times w [n, kColumns]; rows that are not there are the last one again. Adding
// up blocks instead of single products keeps the rounding small. Meanwhile kLines n lines from `ahead` on are fetched.
template <int kLines>
void multiply_rows(const float* x, int64_t stride, int64_t n_rows, const float* w, int64_t n, bool is_first,
                   const float* ahead, float* sums) {
  const float* row[kRowsTogether];
  __m512 sum[kRowsTogether][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRowsTogether; ++r) {
    row[r] = x + std::min<int64_t>(r, n_rows - 1) * stride;
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < n; ++i) {
    prefetch(ahead + i * kLines * kLanes, kLines);
    __m512 weight[kVectors];
    for (int v = 0; v < kVectors; ++v) weight[v] = _mm512_load_ps(w + i * kColumns + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRowsTogether; ++r) {
      const __m512 value = _mm512_set1_ps(row[r][i]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_fmadd_ps(value, weight[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRowsTogether; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + r * kColumns + v * kLanes;
      _mm512_store_ps(to, is_first ? sum[r][v] : _mm512_add_ps(_mm512_load_ps(to), sum[r][v]));
    }
}

// sums [n_rows, kColumns] of x [n_rows, n_inputs] and one matrix's columns w [n_inputs, kColumns].
void multiply_group(const float* x, int64_t stride, int64_t n_rows, int64_t n_inputs, const float* w, float* sums) {
  const int64_t n_parts = ceil_div(n_rows, kRowsTogether);
  for (int64_t i = 0; i < n_inputs; i += kBlockInputs) {
    const int64_t n = std::min(kBlockInputs, n_inputs - i);
    for (int64_t part = 0; part < n_parts; ++part) {
      const int64_t r = part * kRowsTogether;
      const auto multiply = [&](auto lines, int64_t first_line) {
        multiply_rows<lines.value>(x + r * stride + i, stride, n_rows - r, w + i * kColumns, n, i == 0,
                                   w + (i + n) * kColumns + first_line * kLanes, sums + r * kColumns);
      };
      // The next block has kVectors n lines: few parts fetch more of them each, the last of many parts none.
      if (n_parts == 1)
        multiply(std::integral_constant<int, kVectors>(), 0);
      else if (n_parts == 2)
        multiply(std::integral_constant<int, 2>(), part * 2 * n);
      else if (part < kVectors)
        multiply(std::integral_constant<int, 1>(), part * n);
      else
        multiply(std::integral_constant<int, 0>(), 0);
    }
  }
}

// w: [group][matrix][in][kColumns], see `pack`.
void linear(const float* x, int64_t stride, int64_t n_inputs, const Norm& norm, const float* w,
            const Epilogue<float>& epilogue, int n_threads) {
  const int64_t n_rows = epilogue.n_rows, n_matrices = epilogue.is_gated ? 2 : 1,
                n_groups = epilogue.n_groups(n_matrices * kColumns), size = n_inputs * kColumns;
  const bool is_few = n_rows <= 2 * kLanes;  // every thread normalises them for itself, sooner done than waiting
  const int64_t step = norm.weight ? round_up(n_inputs, kLanes) : stride;
  float* shared = norm.weight && !is_few ? scratch<kSharedRows, float>(kBlockRows * step) : nullptr;
#pragma omp parallel num_threads(threads_for(n_groups * n_matrices * size * ceil_div(n_rows, 2 * kLanes), n_threads))
  {
    alignas(64) float sums[2][kBlockRows * kColumns];
    float* normed = norm.weight && is_few ? scratch<kOwnRows, float>(2 * kLanes * step) : shared;
    for (int64_t row0 = 0; row0 < n_rows; row0 += kBlockRows) {
      const int64_t n = std::min(kBlockRows, n_rows - row0);
      const float *from = x + row0 * stride, *rows = norm.weight ? normed : from;
      if (norm.weight && is_few) {
        for (int64_t r = 0; r < n; ++r) norm.row(from + r * stride, n_inputs, normed + r * step);
      } else if (norm.weight) {
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t r = 0; r < n; ++r) norm.row(from + r * stride, n_inputs, normed + r * step);
      }
#pragma omp for schedule(static) nowait
      for (int64_t group = 0; group < n_groups; ++group) {
        for (int64_t m = 0; m < n_matrices; ++m)
          multiply_group(rows, step, n, n_inputs, w + (group * n_matrices + m) * size, sums[m]);
        epilogue.finish(sums[0], epilogue.is_gated ? sums[1] : nullptr, kColumns, n, row0, group * kColumns, kVectors);
      }
    }
  }
}

// w [n, in] to [group][matrix][in][kColumns]; `other`: null, or a second matrix of the same shape.
void pack(const float* w, const float* other, int64_t stride, int64_t n, int64_t n_inputs, float* out, int n_threads) {
  const int64_t n_matrices = other ? 2 : 1, n_vectors = ceil_div(n, kColumns) * n_matrices * kVectors;
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t vector = 0; vector < n_vectors; ++vector) {
    const int64_t panel = vector / kVectors, column = panel / n_matrices * kColumns + vector % kVectors * kLanes;
    const float* from = (panel % n_matrices ? other : w) + column * stride;
    for (int64_t i = 0; i < n_inputs; i += kLanes) {
      __m512i block[kLanes];
      for (int64_t c = 0; c < kLanes; ++c)
        block[c] = _mm512_castps_si512(load(from + c * stride + i, column + c < n ? first_lanes(n_inputs - i) : 0));
      transpose(block);
      float* to = out + (panel * n_inputs + i) * kColumns + vector % kVectors * kLanes;
      for (int64_t j = 0; j < std::min<int64_t>(kLanes, n_inputs - i); ++j)
        _mm512_store_si512(to + j * kColumns, block[j]);
    }
  }
}

}  // namespace
