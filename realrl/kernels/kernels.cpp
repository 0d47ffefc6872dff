// A decode step's arithmetic on x86-64 CPUs with a matrix unit (AMX) and AVX-512. Numbers are float32, or bfloat16
// (uint16_t) with everything in between in float32.
//
// What a row's result is depends neither on the other rows nor on the number of threads.

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "linear_bf16.h"
#include "linear_fp32.h"
#include "norm.h"
#include "sampling.h"

// Every function ends with the number of threads.
#define EXPORT(T, NAME)                                                                                               \
  extern "C" void pack_##NAME(const T* w, const T* other, int64_t stride, int64_t n, int64_t n_inputs, T* out,        \
                              int threads) {                                                                          \
    pack(w, other, stride, n, n_inputs, out, threads);                                                                \
  }                                                                                                                   \
  extern "C" void linear_##NAME(const T* x, int64_t stride, int64_t n_rows, int64_t n_inputs, const float* norm,      \
                                float eps, const T* w, int64_t n_columns, const T* bias, const T* residual,           \
                                int64_t residual_stride, int activation, int is_gated, T* out, int threads) {         \
    linear(x, stride, n_inputs, Norm{norm, eps}, w,                                                                   \
           Epilogue<T>{bias, residual, out, residual_stride, n_rows, n_columns, activation, is_gated != 0}, threads); \
  }                                                                                                                   \
  extern "C" void rms_norm_##NAME(const T* x, int64_t n_rows, int64_t size, const float* weight, float eps, T* out,   \
                                  int threads) {                                                                      \
    rms_norm(x, n_rows, size, Norm{weight, eps}, out, threads);                                                       \
  }                                                                                                                   \
  extern "C" void attend_##NAME(const T* qkv, int64_t stride, T* keys, T* values, int64_t capacity,                   \
                                const int64_t* lengths, int64_t n_rows, int64_t n_heads, int64_t n_kv_heads,          \
                                int64_t head_dim, int64_t window, const T* cos, const T* sin, float scale, T* out,    \
                                int threads) {                                                                        \
    attend(Attention<T>{qkv, stride, keys, values, capacity, lengths, n_rows, n_heads, n_kv_heads, head_dim, window,  \
                        cos, sin, scale, out},                                                                        \
           threads);                                                                                                  \
  }                                                                                                                   \
  extern "C" void sample_##NAME(const T* logits, int64_t n_rows, int64_t vocab_size, float inverse_temperature,       \
                                int is_greedy, const double* uniforms, const std::uint8_t* is_early,                  \
                                const int64_t* stop_ids, int64_t n_stop_ids, int64_t* tokens, float* logprobs,        \
                                float* policy_logprobs, int threads) {                                                \
    sample(Sampling<T>{logits, n_rows, vocab_size, inverse_temperature, is_greedy != 0, uniforms, is_early, stop_ids, \
                       n_stop_ids, tokens, logprobs, policy_logprobs},                                                \
           threads);                                                                                                  \
  }
EXPORT(float, fp32)
EXPORT(uint16_t, bf16)

// Ask the system for the right to use tiles, which a process has to do once; 0 if it is given, or an error number.
extern "C" int enable_tiles() {
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) ? errno : 0;
}
