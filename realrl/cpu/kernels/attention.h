// Attention of new tokens over a KV cache.
#pragma once

#include "vector.h"

namespace {

template <typename T>
struct Attention {
  const T* qkv;  // [tokens, N + 2 K, D]
  int64_t stride;
  T *keys, *values;  // [rows, K, capacity, D]
  int64_t capacity;
  const int64_t* rows;       // [tokens], of the cache; null: every token has one of its own, in order
  const int64_t* positions;  // [tokens] in these rows
  int64_t n_tokens, n_heads, n_kv_heads, head_dim;
  int64_t window;      // 0: none
  const T *cos, *sin;  // [tokens, D] or null
  float scale;
  T* out;  // [tokens, N, D]

  // An item: all query heads of one token that share a KV head.
  int64_t n_items() const { return n_tokens * n_kv_heads; }
  int64_t group() const { return n_heads / n_kv_heads; }
  int64_t padded() const { return round_up(capacity, kLanes); }
  int64_t scratch_size() const { return group() * (head_dim + padded()); }

  // Where the cache has the keys or values of an item.
  int64_t place(int64_t item) const {
    const int64_t token = item / n_kv_heads, head = item % n_kv_heads;
    return ((rows ? rows[token] : token) * n_kv_heads + head) * capacity * head_dim;
  }

  // The positions that an item's token sees.
  struct Range {
    int64_t first, n;
  };
  Range seen(int64_t item) const {
    const int64_t length = positions[item / n_kv_heads] + 1, first = window ? std::max<int64_t>(0, length - window) : 0;
    return {first, length - first};
  }

  // What an item's token sees of the cache.
  struct KeysAndValues {
    const T *keys = nullptr, *values = nullptr;
  };
  KeysAndValues part(int64_t item) const {
    const int64_t from = place(item) + seen(item).first * head_dim;
    return {keys + from, values + from};
  }

  // One head's vector [D], rotated.
  void read(const T* x, int64_t token, float* y) const {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      Vector value = load(x + i);
      if (cos) {
        const Vector other = load(x + (i < half ? i + half : i - half));
        value = value * load(cos + token * head_dim + i);
        value = multiply_add(other, load(sin + token * head_dim + i), value);
      }
      store(y + i, value);
    }
  }

  // scores [G, padded] of kLanes tokens, of which n are there. Meanwhile the keys of `next`, if any, are fetched.
  template <int G>
  void score(const float* queries, const T* keys, int64_t n, const T* next, float* scores) const {
    constexpr int kTogether = 4;  // tokens, whose sums stay in registers
    Vector parts[G][kLanes / kTogether];
#pragma GCC unroll 4
    for (int64_t t = 0; t < kLanes; t += kTogether) {
      Vector sums[G][kTogether];
      const T* key[kTogether];
      for (int j = 0; j < kTogether; ++j) {
        key[j] = keys + std::min(t + j, n - 1) * head_dim;
        if (next) fetch_row(next + (t + j) * head_dim);
        for (int g = 0; g < G; ++g) sums[g][j] = fill(0.0f);
      }
      for (int64_t i = 0; i < head_dim; i += kLanes) {
        Vector part[kTogether];
        for (int j = 0; j < kTogether; ++j) part[j] = load(key[j] + i);
        for (int g = 0; g < G; ++g) {
          const Vector query = load(queries + g * head_dim + i);
          for (int j = 0; j < kTogether; ++j) sums[g][j] = multiply_add(query, part[j], sums[g][j]);
        }
      }
      for (int g = 0; g < G; ++g) parts[g][t / kTogether] = sum_four(sums[g]);
    }
    for (int g = 0; g < G; ++g)
      store(scores + g * padded(), keep_first(sum_each(parts[g]) * fill(scale), n, fill(-INFINITY)));
  }

  static void softmax(float* p, int64_t n) {
    Vector most = load(p), total = fill(0.0f);
    for (int64_t t = kLanes; t < n; t += kLanes) most = largest(most, load(p + t));
    most = fill(largest_of(most));
    for (int64_t t = 0; t < n; t += kLanes) {
      const Vector e = keep_first(exp(load(p + t) - most), n - t, fill(0.0f));
      store(p + t, e);
      total = total + e;
    }
    const Vector inverse = fill(1.0f / sum_of(total));
    for (int64_t t = 0; t < n; t += kLanes) store(p + t, load(p + t) * inverse);
  }

  // Columns [kLanes V] of the outputs [G, D] for probabilities p [G, padded]. Meanwhile the values of `next`, if any,
  // are fetched.
  template <int G, int V>
  void mix(const float* p, const T* values, int64_t n, const T* next, T* outputs) const {
    Vector sums[G][V];
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < V; ++i) sums[g][i] = fill(0.0f);
    for (int64_t t = 0; t < n; ++t) {
      Vector value[V];
      for (int i = 0; i < V; ++i) value[i] = load(values + t * head_dim + i * kLanes);
      if (next) fetch_row(next + t * head_dim);
      for (int g = 0; g < G; ++g) {
        const Vector weight = fill(p[g * padded() + t]);
        for (int i = 0; i < V; ++i) sums[g][i] = multiply_add(weight, value[i], sums[g][i]);
      }
    }
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < V; ++i) store(outputs + g * head_dim + i * kLanes, sums[g][i]);
  }

  // To the second-level cache: the first has no room for two items.
  void fetch_row(const T* row) const { prefetch<_MM_HINT_T1>(row, head_dim * sizeof(T) / 64); }

  // G query heads [G, D] that share a KV head.
  template <int G>
  void run(const float* queries, const KeysAndValues& own, const KeysAndValues& next, int64_t n, float* scores,
           T* outputs) const {
    for (int64_t t = 0; t < n; t += kLanes)
      score<G>(queries, own.keys + t * head_dim, std::min<int64_t>(kLanes, n - t),
               next.keys ? next.keys + t * head_dim : nullptr, scores + t);
    for (int g = 0; g < G; ++g) softmax(scores + g * padded(), n);
    int64_t i = 0;
    for (; i + 4 * kLanes <= head_dim; i += 4 * kLanes)
      mix<G, 4>(scores, own.values + i, n, i ? nullptr : next.values, outputs + i);
    for (; i < head_dim; i += 2 * kLanes) mix<G, 2>(scores, own.values + i, n, i ? nullptr : next.values, outputs + i);
  }

  // Put an item's key and value into the cache.
  void keep(int64_t item, float* memory) const {
    const int64_t token = item / n_kv_heads, head = item % n_kv_heads;
    const T *k = qkv + token * stride + (n_heads + head) * head_dim, *v = k + n_kv_heads * head_dim;
    const int64_t to = place(item) + positions[token] * head_dim;
    read(k, token, memory);
    for (int64_t i = 0; i < head_dim; i += kLanes) store(keys + to + i, load(memory + i));
    std::memcpy(values + to, v, head_dim * sizeof(T));
  }

  void run(int64_t item, float* memory) const {
    const int64_t token = item / n_kv_heads, head = item % n_kv_heads;
    const T* q = qkv + token * stride + head * group() * head_dim;
    const int64_t n = seen(item).n;
    float* queries = memory;                       // [group, D]
    float* scores = queries + group() * head_dim;  // [group, padded]
    for (int64_t g = 0; g < group(); ++g) read(q + g * head_dim, token, queries + g * head_dim);
    const KeysAndValues own = part(item);
    // tokens of one row have the same keys and values
    const KeysAndValues next = rows || item + 1 == n_items() ? KeysAndValues() : part(item + 1);
    T* outputs = out + (token * n_heads + head * group()) * head_dim;
    for (int64_t g = 0; g < group(); g += 4) {
      const auto run_some = [&](auto count) {
        run<count.value>(queries + g * head_dim, own, g ? KeysAndValues() : next, n, scores + g * padded(),
                         outputs + g * head_dim);
      };
      switch (group() - g) {
        case 1:
          run_some(std::integral_constant<int, 1>());
          break;
        case 2:
          run_some(std::integral_constant<int, 2>());
          break;
        case 3:
          run_some(std::integral_constant<int, 3>());
          break;
        default:
          run_some(std::integral_constant<int, 4>());
      }
    }
  }
};

template <typename T>
void attend(const Attention<T>& attention, int n_threads) {
  const int64_t size = attention.n_tokens * attention.n_heads * attention.head_dim * attention.capacity;
#pragma omp parallel num_threads(threads_for(size, n_threads))
  {
    float* memory = scratch<kAttention, float>(attention.scratch_size());
    if (attention.rows) {  // tokens see one another
#pragma omp for schedule(static)
      for (int64_t item = 0; item < attention.n_items(); ++item) attention.keep(item, memory);
#pragma omp for schedule(dynamic, 64) nowait
      for (int64_t item = 0; item < attention.n_items(); ++item) attention.run(item, memory);
    } else {
#pragma omp for schedule(dynamic, pieces_at_once(attention.n_items(), n_threads)) nowait
      for (int64_t item = 0; item < attention.n_items(); ++item) {
        attention.keep(item, memory);
        attention.run(item, memory);
      }
    }
  }
}

}  // namespace
