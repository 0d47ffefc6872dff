// Products with vectors: of float32, and of bfloat16 where there is no matrix unit.
#pragma once

#include "epilogue.h"
#include "norm.h"

namespace vectors {
namespace {

constexpr int kVectors = 3;                      // of columns, times
constexpr int kRowsTogether = kRegisters / 4;    // rows: sums that stay in registers
constexpr int64_t kColumns = kVectors * kLanes;  // of one matrix, in a group
constexpr int64_t kBlockWords = 4 * kRegisters;  // of a column: the weights of a group stay in the first-level cache
constexpr int64_t kFewRows = 32;                 // which every thread prepares for itself, sooner done than waiting
constexpr int64_t kBlockRows = 256;              // whose sums stay in the second-level cache

// A row is multiplied in words of 32 bits: a float32, or two neighbours in bfloat16.
using Word = std::uint32_t;
constexpr int kLineWords = 64 / sizeof(Word);
template <typename T>
constexpr int64_t kPerWord = sizeof(Word) / sizeof(T);

Words broadcast(const void* word) {
  int value;
  std::memcpy(&value, word, sizeof value);
  return fill_words(value);
}

// sum + x w, lane by lane.
template <typename T>
Vector add_product(Words x, Words w, Vector sum) {
  if constexpr (std::is_same_v<T, float>) return multiply_add((Vector)x, (Vector)w, sum);
  return multiply_add_pairs(x, w, sum);
}

// sums [kRowsTogether, kColumns] (+)= x [n_rows, n words] times w [n, kColumns]; rows that are not there are the last
// one again. Adding up blocks instead of single products keeps the rounding small. Meanwhile kLines n lines from
// `ahead` on, in the next block, are fetched, and to the second-level cache as many of the block after it.
template <typename T, int kLines>
void multiply_rows(const T* x, int64_t stride, int64_t n_rows, const Word* w, int64_t n, bool is_first,
                   const Word* ahead, float* sums) {
  const T* row[kRowsTogether];
  Vector sum[kRowsTogether][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRowsTogether; ++r) {
    row[r] = x + std::min<int64_t>(r, n_rows - 1) * stride;
    for (int v = 0; v < kVectors; ++v) sum[r][v] = fill(0.0f);
  }
  for (int64_t i = 0; i < n; ++i) {
    prefetch(ahead + i * kLines * kLineWords, kLines);
    prefetch<_MM_HINT_T1>(ahead + kBlockWords * kColumns + i * kLines * kLineWords, kLines);
    Words weight[kVectors];
    for (int v = 0; v < kVectors; ++v) weight[v] = load_words(w + i * kColumns + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRowsTogether; ++r) {
      const Words value = broadcast(row[r] + i * kPerWord<T>);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = add_product<T>(value, weight[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRowsTogether; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + r * kColumns + v * kLanes;
      store(to, is_first ? sum[r][v] : load(to) + sum[r][v]);
    }
}

// sums [n_rows, kColumns] of x [n_rows, n_words] and one matrix's columns w [n_words, kColumns].
template <typename T>
void multiply_group(const T* x, int64_t stride, int64_t n_rows, int64_t n_words, const Word* w, float* sums) {
  constexpr int kLines = (kColumns + kLineWords - 1) / kLineWords, kHalf = (kLines + 1) / 2;
  const int64_t n_parts = ceil_div(n_rows, kRowsTogether);
  for (int64_t i = 0; i < n_words; i += kBlockWords) {
    const int64_t n = std::min(kBlockWords, n_words - i);
    for (int64_t part = 0; part < n_parts; ++part) {
      const int64_t r = part * kRowsTogether;
      const auto multiply = [&](auto lines, int64_t first_line) {
        multiply_rows<T, lines.value>(x + r * stride + i * kPerWord<T>, stride, n_rows - r, w + i * kColumns, n, i == 0,
                                      w + (i + n) * kColumns + first_line * kLineWords, sums + r * kColumns);
      };
      // The next block has kLines n lines: few parts fetch more of them each, the last of many parts none.
      if (n_parts == 1)
        multiply(std::integral_constant<int, kLines>(), 0);
      else if (n_parts == 2)
        multiply(std::integral_constant<int, kHalf>(), part * kHalf * n);
      else if (part < kLines)
        multiply(std::integral_constant<int, 1>(), part * n);
      else
        multiply(std::integral_constant<int, 0>(), 0);
    }
  }
}

// Row [size], normalised; what it lacks to whole words is zero.
template <typename T>
void prepare_row(const T* x, int64_t size, const Norm& norm, T* out) {
  for (int64_t i = size; i % kPerWord<T>; ++i) out[i] = 0;
  if (norm.weight)
    norm.row(x, size, out);
  else
    std::memcpy(out, x, size * sizeof(T));
}

// packed: see `pack`.
template <typename T>
void linear(const T* x, int64_t stride, int64_t n_inputs, const Norm& norm, const T* packed,
            const Epilogue<T>& epilogue, int n_threads) {
  const Word* w = reinterpret_cast<const Word*>(packed);
  const int64_t n_rows = epilogue.n_rows, n_matrices = epilogue.is_gated ? 2 : 1,
                n_groups = epilogue.n_groups(n_matrices * kColumns), n_words = ceil_div(n_inputs, kPerWord<T>),
                size = n_words * kColumns;
  const bool prepares = norm.weight || n_inputs % kPerWord<T>;
  const bool is_few = n_rows <= kFewRows;
  const int64_t step = prepares ? round_up(n_inputs, kLanes) : stride;
  T* shared = prepares && !is_few ? scratch<kSharedRows, T>(kBlockRows * step) : nullptr;
#pragma omp parallel num_threads(threads_for(n_groups * n_matrices * size * ceil_div(n_rows, kFewRows), n_threads))
  {
    float* sums = scratch<kSums, float>(2 * kBlockRows * kColumns);  // of one matrix, and of the other
    float* others = sums + kBlockRows * kColumns;
    T* prepared = prepares && is_few ? scratch<kOwnRows, T>(kFewRows * step) : shared;
    for (int64_t row0 = 0; row0 < n_rows; row0 += kBlockRows) {
      const int64_t n = std::min(kBlockRows, n_rows - row0);
      const T *from = x + row0 * stride, *rows = prepares ? prepared : from;
      if (prepares && is_few) {
        for (int64_t r = 0; r < n; ++r) prepare_row(from + r * stride, n_inputs, norm, prepared + r * step);
      } else if (prepares) {
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t r = 0; r < n; ++r) prepare_row(from + r * stride, n_inputs, norm, prepared + r * step);
      }
#pragma omp for schedule(dynamic, pieces_at_once(n_groups, n_threads)) nowait
      for (int64_t group = 0; group < n_groups; ++group) {
        for (int64_t m = 0; m < n_matrices; ++m)
          multiply_group(rows, step, n, n_words, w + (group * n_matrices + m) * size, m ? others : sums);
        epilogue.finish(sums, epilogue.is_gated ? others : nullptr, kColumns, n, row0, group * kColumns, kVectors);
      }
    }
  }
}

template <typename T>
int64_t packed_size(int64_t n, int64_t n_inputs, bool is_gated) {
  return ceil_div(n, kColumns) * kColumns * round_up(n_inputs, kPerWord<T>) * (is_gated ? 2 : 1);
}

// w [n, in] to [group][matrix][words of in][kColumns]; `other`: null, or a second matrix of the same shape.
template <typename T>
void pack(const T* w, const T* other, int64_t stride, int64_t n, int64_t n_inputs, T* out, int n_threads) {
  const int64_t n_matrices = other ? 2 : 1, n_vectors = ceil_div(n, kColumns) * n_matrices * kVectors,
                n_words = ceil_div(n_inputs, kPerWord<T>);
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t vector = 0; vector < n_vectors; ++vector) {
    const int64_t panel = vector / kVectors, column = panel / n_matrices * kColumns + vector % kVectors * kLanes;
    const T* from = (panel % n_matrices ? other : w) + column * stride;
    for (int64_t i = 0; i < n_words; i += kLanes) {
      const int64_t first = i * kPerWord<T>;
      Words block[kLanes];
      for (int64_t c = 0; c < kLanes; ++c)
        block[c] = load_first_words(from + c * stride + first, column + c < n ? n_inputs - first : 0);
      transpose(block);
      Word* to = reinterpret_cast<Word*>(out) + (panel * n_words + i) * kColumns + vector % kVectors * kLanes;
      for (int64_t j = 0; j < std::min<int64_t>(kLanes, n_words - i); ++j) store_words(to + j * kColumns, block[j]);
    }
  }
}

}  // namespace
}  // namespace vectors
