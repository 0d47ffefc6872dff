// bfloat16 products on the matrix unit.
#pragma once

#include "epilogue.h"
#include "norm.h"

namespace tiles {
namespace {

constexpr int kWidth = 2 * kLanes;  // columns are multiplied together so many at a time: neighbours, or half of them
                                    // of one matrix and half of the other
constexpr int kDepth = 32;          // numbers in a row of a tile, of which it has kLanes
constexpr int kTile = kLanes * kDepth;
constexpr int64_t kTileRows = 256;  // rows are multiplied so many at a time: they stay in the second-level cache

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; ++i) row_bytes[i] = 64, rows[i] = 16;
  }
};

// The compiler does not know that loading tiles reads memory.
void finish_stores() { asm volatile("" ::: "memory"); }

// The configuration of a thread's tiles, and on leaving what it was: other libraries keep theirs between calls.
class Tiles {
 public:
  Tiles() {
    static const TileConfig config;
    _tile_storeconfig(before_);
    finish_stores();
    _tile_loadconfig(&config);
  }
  ~Tiles() {
    finish_stores();
    if (before_[0])
      _tile_loadconfig(before_);
    else
      _tile_release();
  }

 private:
  alignas(64) std::uint8_t before_[64] = {};
};

// Row tile `tile` of x [n_rows, n_inputs], normalised, as [depth block][16][32]; what is outside of x is zero.
void pack_rows(const uint16_t* x, int64_t stride, int64_t n_rows, int64_t n_inputs, const Norm& norm, int64_t tile,
               uint16_t* out) {
  const int64_t n_blocks = ceil_div(n_inputs, kDepth);
  for (int64_t r = 0; r < kLanes; ++r) {
    const uint16_t* row = x + (tile * kLanes + r) * stride;
    const bool is_there = tile * kLanes + r < n_rows, is_normed = is_there && norm.weight;
    const Vector scale = fill(is_normed ? norm.scale(row, n_inputs) : 0.0f);
    for (int64_t b = 0; b < n_blocks; ++b) {
      const int64_t i = b * kDepth;
      Words y = load_first_words(row + i, is_there ? n_inputs - i : 0);
      if (is_normed) {
        const Vector left = widen(_mm512_castsi512_si256(y)), right = widen(_mm512_extracti64x4_epi64(y, 1));
        y = (Words)_mm512_cvtne2ps_pbh(norm.apply(right, scale, i + kLanes, n_inputs - i - kLanes),
                                       norm.apply(left, scale, i, n_inputs - i));
      }
      store_words(out + b * kTile + r * kDepth, y);
    }
  }
}

// sums [32, kWidth] of two tiles of rows (or one, [16, kWidth]), `step` apart. Tiles 0 to 3 accumulate, 4 and 5 hold
// rows, 6 and 7 columns.
template <bool has_two>
void multiply_tiles(const uint16_t* rows, int64_t step, const uint16_t* w, int64_t n_blocks, float* sums) {
  constexpr int kAhead = 3;
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t b = 0; b < n_blocks; ++b) {
    const uint16_t* columns = w + 2 * b * kTile;
    prefetch(columns + 2 * kAhead * kTile, 32);
    _tile_loadd(6, columns, 64);
    _tile_loadd(7, columns + kTile, 64);
    _tile_loadd(4, rows + b * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (has_two) {
      _tile_loadd(5, rows + step + b * kTile, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int kStride = kWidth * sizeof(float);
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kLanes, kStride);
  if (has_two) {
    _tile_stored(2, sums + kLanes * kWidth, kStride);
    _tile_stored(3, sums + kLanes * kWidth + kLanes, kStride);
  }
}

// w: [group][depth block][2 tiles], see `pack`.
void linear(const uint16_t* x, int64_t stride, int64_t n_inputs, const Norm& norm, const uint16_t* w,
            const Epilogue<uint16_t>& epilogue, int n_threads) {
  const int64_t n_rows = epilogue.n_rows, n_blocks = ceil_div(n_inputs, kDepth), n_groups = epilogue.n_groups(kWidth);
  const int64_t step = n_blocks * kTile;
  const bool is_few = n_rows <= 2 * kLanes;  // every thread packs them for itself, which is sooner done than waiting
  uint16_t* shared = is_few ? nullptr : scratch<kSharedRows, uint16_t>(kTileRows / kLanes * step);
#pragma omp parallel num_threads(threads_for(2 * n_groups * step * ceil_div(n_rows, 2 * kLanes), n_threads))
  {
    const Tiles tiles;
    alignas(64) float sums[2 * kLanes * kWidth];
    uint16_t* rows = is_few ? scratch<kOwnRows, uint16_t>(2 * step) : shared;
    for (int64_t row0 = 0; row0 < n_rows; row0 += kTileRows) {
      const int64_t n = std::min(kTileRows, n_rows - row0), n_tiles = ceil_div(n, kLanes);
      const uint16_t* from = x + row0 * stride;
      if (is_few) {
        for (int64_t t = 0; t < n_tiles; ++t) pack_rows(from, stride, n, n_inputs, norm, t, rows + t * step);
      } else {
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t t = 0; t < n_tiles; ++t) pack_rows(from, stride, n, n_inputs, norm, t, rows + t * step);
      }
#pragma omp for schedule(dynamic, pieces_at_once(n_groups, n_threads)) nowait
      for (int64_t group = 0; group < n_groups; ++group) {
        const uint16_t* columns = w + 2 * group * step;
        for (int64_t t = 0; t < n_tiles; t += 2) {
          if (t + 1 < n_tiles)
            multiply_tiles<true>(rows + t * step, step, columns, n_blocks, sums);
          else
            multiply_tiles<false>(rows + t * step, step, columns, n_blocks, sums);
          const int64_t m = std::min<int64_t>(2 * kLanes, n - t * kLanes);
          if (epilogue.is_gated)
            epilogue.finish(sums, sums + kLanes, kWidth, m, row0 + t * kLanes, group * kLanes, 1);
          else
            epilogue.finish(sums, nullptr, kWidth, m, row0 + t * kLanes, group * kWidth, 2);
        }
      }
    }
  }
}

// The matrix and the row of it that holds the weights of a group's column; `other` as in `pack`.
const uint16_t* weights_of(const uint16_t* w, const uint16_t* other, int64_t stride, int64_t n, int64_t group,
                           int64_t column) {
  const bool is_second = column >= kLanes;
  const int64_t row = other ? group * kLanes + column % kLanes : group * kWidth + column;
  return row < n ? (other && is_second ? other : w) + row * stride : nullptr;
}

template <typename T>
int64_t packed_size(int64_t n, int64_t n_inputs, bool is_gated) {
  return ceil_div(n, is_gated ? kLanes : kWidth) * kWidth * round_up(n_inputs, kDepth);
}

// w [n, in] to [group][depth block][2 tiles] of [16 pairs][16 columns][2]. With `other`, a matrix of the same shape,
// the two tiles come from one each.
void pack(const uint16_t* w, const uint16_t* other, int64_t stride, int64_t n, int64_t n_inputs, uint16_t* out,
          int n_threads) {
  const int64_t n_blocks = ceil_div(n_inputs, kDepth), n_groups = ceil_div(n, other ? kLanes : kWidth);
#pragma omp parallel for schedule(static) num_threads(n_threads)
  for (int64_t tile = 0; tile < 2 * n_groups; ++tile) {
    const uint16_t* rows[kLanes];
    for (int64_t c = 0; c < kLanes; ++c) rows[c] = weights_of(w, other, stride, n, tile / 2, tile % 2 * kLanes + c);
    for (int64_t b = 0; b < n_blocks; ++b) {
      const int64_t first = b * kDepth;
      Words columns[kLanes];
      for (int c = 0; c < kLanes; ++c) columns[c] = load_first_words(rows[c] + first, rows[c] ? n_inputs - first : 0);
      transpose(columns);
      uint16_t* to = out + ((tile / 2 * n_blocks + b) * 2 + tile % 2) * kTile;
      for (int c = 0; c < kLanes; ++c) store_words(to + c * kDepth, columns[c]);
    }
  }
}

}  // namespace
}  // namespace tiles
