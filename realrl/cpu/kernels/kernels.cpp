// The arithmetic of generation on x86-64 CPUs. Numbers are float32, or bfloat16 (uint16_t) with everything in between in
// float32. The compiler's options say what there is: AVX2, or AVX-512, with bfloat16 instructions or without; with
// REALRL_TILES, a matrix unit (AMX) that may be used.
//
// What a row's result is depends neither on the other rows nor on the number of threads.

#include "attention.h"
#include "layers.h"
#include "norm.h"
#include "product.h"
#include "sampling.h"

// Every function but the first ends with the number of threads.
#define EXPORT(T, NAME)                                                                                                \
  extern "C" int64_t packed_size_##NAME(int64_t n, int64_t n_inputs, int is_gated) {                                   \
    return packed_size<T>(n, n_inputs, is_gated != 0);                                                                 \
  }                                                                                                                    \
  extern "C" void pack_##NAME(const T* w, const T* other, int64_t stride, int64_t n, int64_t n_inputs, T* out,         \
                              int threads) {                                                                           \
    pack(w, other, stride, n, n_inputs, out, threads);                                                                 \
  }                                                                                                                    \
  extern "C" void multiply_##NAME(const Product<T>* product, const T* x, int64_t stride, int64_t n_rows,               \
                                  const T* residual, int64_t residual_stride, T* out, int threads) {                   \
    multiply(*product, x, stride, n_rows, residual, residual_stride, out, threads);                                    \
  }                                                                                                                    \
  extern "C" void rms_norm_##NAME(const T* x, int64_t n_rows, int64_t size, const float* weight, float eps, T* out,    \
                                  int threads) {                                                                       \
    rms_norm(x, n_rows, size, Norm{weight, eps}, out, threads);                                                        \
  }                                                                                                                    \
  extern "C" void attend_##NAME(const T* qkv, int64_t stride, T* keys, T* values, int64_t capacity,                    \
                                const int64_t* rows, const int64_t* positions, int64_t n_tokens, int64_t n_heads,      \
                                int64_t n_kv_heads, int64_t head_dim, int64_t window, const T* cos, const T* sin,      \
                                float scale, T* out, int threads) {                                                    \
    attend(Attention<T>{qkv, stride, keys, values, capacity, rows, positions, n_tokens, n_heads, n_kv_heads, head_dim, \
                        window, cos, sin, scale, out},                                                                 \
           threads);                                                                                                   \
  }                                                                                                                    \
  extern "C" void run_layers_##NAME(const Layer<T>* layers, int64_t n_layers, const T* x, T* const* keys,              \
                                    T* const* values, int64_t capacity, const int64_t* rows, const int64_t* positions, \
                                    int64_t n_tokens, const T* cos, const T* sin, T* memory, T* out, int threads) {    \
    Attention<T> attention{};                                                                                          \
    attention.capacity = capacity;                                                                                     \
    attention.rows = rows;                                                                                             \
    attention.positions = positions;                                                                                   \
    attention.n_tokens = n_tokens;                                                                                     \
    attention.cos = cos;                                                                                               \
    attention.sin = sin;                                                                                               \
    run_layers(layers, n_layers, x, attention, keys, values, memory, out, threads);                                    \
  }                                                                                                                    \
  extern "C" void sample_##NAME(const T* logits, int64_t n_rows, int64_t vocab_size, float inverse_temperature,        \
                                int is_greedy, const double* uniforms, const std::uint8_t* is_early,                   \
                                const int64_t* stop_ids, int64_t n_stop_ids, int64_t* tokens, float* logprobs,         \
                                float* policy_logprobs, int threads) {                                                 \
    sample(Sampling<T>{logits, n_rows, vocab_size, inverse_temperature, is_greedy != 0, uniforms, is_early, stop_ids,  \
                       n_stop_ids, tokens, logprobs, policy_logprobs},                                                 \
           threads);                                                                                                   \
  }
EXPORT(float, fp32)
EXPORT(uint16_t, bf16)
