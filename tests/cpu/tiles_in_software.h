// The instructions of the matrix unit in software, so that a CPU without one can run what is written for it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace software {

constexpr int kTileRows = 16, kTileBytes = 64;

struct Tile {
  std::uint8_t bytes[kTileRows][kTileBytes];
};
inline thread_local Tile tiles[8];
inline thread_local bool are_configured = false;

inline void check_configured() {
  if (!are_configured) __builtin_trap();
}

inline void load_tile(int tile, const void* from, long stride) {
  check_configured();
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy(tiles[tile].bytes[r], static_cast<const char*>(from) + r * stride, kTileBytes);
}

inline void store_tile(int tile, void* to, long stride) {
  check_configured();
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile].bytes[r], kTileBytes);
}

inline float to_float(std::uint16_t bf16) {
  const std::uint32_t bits = static_cast<std::uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// sums [16, 16] += a [16, 16 pairs] times b [16 pairs, 16].
inline void multiply_tiles(int sums, int a, int b) {
  check_configured();
  float(*total)[16] = reinterpret_cast<float(*)[16]>(tiles[sums].bytes);
  for (int m = 0; m < kTileRows; ++m) {
    std::uint16_t row[32], column[32];
    std::memcpy(row, tiles[a].bytes[m], sizeof row);
    for (int k = 0; k < 16; ++k) {
      std::memcpy(column, tiles[b].bytes[k], sizeof column);
      for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 2; ++i) total[m][n] += to_float(row[2 * k + i]) * to_float(column[2 * n + i]);
    }
  }
}

}  // namespace software

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (software::are_configured = true)
#define _tile_storeconfig(config) std::memset(config, 0, 64)
#define _tile_release() (software::are_configured = false)
#define _tile_zero(tile) std::memset(&software::tiles[tile], 0, sizeof(software::Tile))
#define _tile_loadd(tile, from, stride) software::load_tile(tile, from, stride)
#define _tile_stored(tile, to, stride) software::store_tile(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) software::multiply_tiles(sums, a, b)
