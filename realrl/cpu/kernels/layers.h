// Layers of a decoder: attention and MLP, each with the norm before it and the residual after it.
#pragma once

#include "attention.h"
#include "product.h"

namespace {

// As `Layer` in loader.py has it.
template <typename T>
struct Layer {
  Product<T> qkv, o, inner, down;
  int64_t n_heads, n_kv_heads, head_dim, window;
  float scale;

  // out [tokens, hidden] of x [tokens, hidden], which may be the same memory. Of the attention, the cache and the tokens
  // are given. memory: for what is in between, [tokens, width of qkv + of attention + hidden + width of the MLP].
  void run(const T* x, Attention<T> attention, T* memory, T* out, int n_threads) const {
    const int64_t n = attention.n_tokens, hidden = qkv.n_inputs, width = o.n_inputs;
    T *projected = memory, *attended = projected + n * qkv.n_columns, *middle = attended + n * width,
      *activated = middle + n * hidden;
    multiply<T>(qkv, x, hidden, n, nullptr, 0, projected, n_threads);
    attention.qkv = projected;
    attention.stride = qkv.n_columns;
    attention.n_heads = n_heads;
    attention.n_kv_heads = n_kv_heads;
    attention.head_dim = head_dim;
    attention.window = window;
    attention.scale = scale;
    attention.out = attended;
    attend(attention, n_threads);
    multiply<T>(o, attended, width, n, x, hidden, middle, n_threads);
    multiply<T>(inner, middle, hidden, n, nullptr, 0, activated, n_threads);
    multiply<T>(down, activated, down.n_inputs, n, middle, hidden, out, n_threads);
  }
};

// out [tokens, hidden] of x [tokens, hidden]. memory: as much as the layer needs that needs most. keys, values: of each
// layer.
template <typename T>
void run_layers(const Layer<T>* layers, int64_t n_layers, const T* x, Attention<T> attention, T* const* keys,
                T* const* values, T* memory, T* out, int n_threads) {
  for (int64_t i = 0; i < n_layers; ++i, x = out) {
    attention.keys = keys[i];
    attention.values = values[i];
    layers[i].run(x, attention, memory, out, n_threads);
  }
}

}  // namespace
