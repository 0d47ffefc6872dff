// From logits and one uniform number per row to a token and its log-probabilities.
#pragma once

#include "vector.h"

namespace {

constexpr int64_t kBlock = 256;  // the cumulative sum runs over blocks of this many tokens, then inside the chosen one

template <typename T>
struct Sampling {
  const T* logits;  // [B, V]
  int64_t n_rows, vocab_size;
  float inverse_temperature;
  bool is_greedy;
  const double* uniforms;        // [B] in [0, 1)
  const std::uint8_t* is_early;  // [B], rows that cannot take a stop token yet
  const int64_t* stop_ids;
  int64_t n_stop_ids;
  int64_t* tokens;  // [B], -1 where a logit is NaN or infinity, or none is allowed
  float *logprobs, *policy_logprobs;

  int64_t n_barred(int64_t row) const { return is_early[row] ? n_stop_ids : 0; }

  bool is_barred(int64_t row, int64_t token) const {
    const int64_t* end = stop_ids + n_barred(row);
    return std::find(stop_ids, end, token) != end;
  }

  Vector scaled(const T* x, int64_t i) const {
    const int64_t n = vocab_size - i;
    return keep_first(load_first(x + i, n) * fill(inverse_temperature), n, fill(-INFINITY));
  }

  void run(int64_t row, float* sums) const {
    const T* x = logits + row * vocab_size;
    Vector most = fill(-INFINITY);
    bool is_valid = true;
    for (int64_t i = 0; i < vocab_size; i += kLanes) {
      const Vector v = scaled(x, i);
      is_valid &= is_all_less(v, fill(INFINITY));  // not if NaN
      most = largest(most, v);
    }
    const float peak = largest_of(most);
    tokens[row] = -1;
    if (!is_valid || peak == -INFINITY) return;
    const double total = add_up(x, peak, sums);
    const float allowed = allowed_peak(row, x, peak);
    if (allowed == -INFINITY) return;
    if (allowed != peak && !is_greedy) add_up(x, allowed, sums);
    const int64_t token = is_greedy ? find_largest(row, x, allowed) : draw(row, x, allowed, sums, &logprobs[row]);
    tokens[row] = token;
    if (is_greedy) logprobs[row] = 0.0f;
    policy_logprobs[row] = (float)(at(x, token) - peak - std::log(total));
  }

  // sums [blocks] of exp(logit - peak), and their sum.
  double add_up(const T* x, float peak, float* sums) const {
    double total = 0.0;
    for (int64_t b = 0; b * kBlock < vocab_size; ++b) {
      Vector sum = fill(0.0f);
      for (int64_t i = b * kBlock; i < std::min((b + 1) * kBlock, vocab_size); i += kLanes)
        sum = sum + keep_first(exp(scaled(x, i) - fill(peak)), vocab_size - i, fill(0.0f));
      total += sums[b] = sum_of(sum);
    }
    return total;
  }

  // The largest of the logits that are not barred: relative to a barred one that is far above them, all would be 0.
  float allowed_peak(int64_t row, const T* x, float peak) const {
    bool is_barred_peak = false;
    for (int64_t s = 0; s < n_barred(row); ++s) is_barred_peak |= at(x, stop_ids[s]) == peak;
    if (!is_barred_peak) return peak;
    float most = -INFINITY;
    for (int64_t i = 0; i < vocab_size; ++i)
      if (at(x, i) > most && !is_barred(row, i)) most = at(x, i);
    return most;
  }

  float at(const T* x, int64_t i) const { return load_first(x + i, 1)[0] * inverse_temperature; }

  int64_t find_largest(int64_t row, const T* x, float allowed) const {
    for (int64_t i = 0;; i += kLanes) {
      for (unsigned found = where_equal(scaled(x, i), fill(allowed)); found; found &= found - 1)
        if (const int64_t token = i + __builtin_ctz(found); !is_barred(row, token)) return token;
    }
  }

  // exp(logit - peak) of a block's tokens; 0 for barred ones.
  int64_t weigh(int64_t row, const T* x, float peak, int64_t block, float* weights) const {
    const int64_t first = block * kBlock, n = std::min(kBlock, vocab_size - first);
    for (int64_t i = 0; i < n; i += kLanes) store_first(weights + i, exp(scaled(x, first + i) - fill(peak)), n - i);
    for (int64_t s = 0; s < n_barred(row); ++s)
      if (stop_ids[s] / kBlock == block) weights[stop_ids[s] % kBlock] = 0.0f;
    return n;
  }

  int64_t draw(int64_t row, const T* x, float peak, float* sums, float* logprob) const {
    float weights[kBlock];
    for (int64_t s = 0; s < n_barred(row); ++s) {
      const int64_t b = stop_ids[s] / kBlock, n = weigh(row, x, peak, b, weights);
      sums[b] = 0.0f;
      for (int64_t i = 0; i < n; ++i) sums[b] += weights[i];
    }
    const int64_t n_blocks = ceil_div(vocab_size, kBlock);
    const double mass = sum(sums, n_blocks);
    double rest = uniforms[row] * mass;
    const int64_t b = find(sums, n_blocks, &rest), n = weigh(row, x, peak, b, weights);
    const int64_t token = b * kBlock + find(weights, n, &rest);
    *logprob = (float)(at(x, token) - peak - std::log(mass));
    return token;
  }

  static double sum(const float* weights, int64_t n) {
    double total = 0.0;
    for (int64_t i = 0; i < n; ++i) total += weights[i];
    return total;
  }

  // The first of the weights whose cumulative sum exceeds the target, of which what comes before is taken off. A target
  // at or beyond the total, by rounding, falls on the last one with weight.
  static int64_t find(const float* weights, int64_t n, double* target) {
    const double limit = std::min(*target, std::nextafter(sum(weights, n), 0.0));
    double before = 0.0;
    int64_t i = 0;
    while (before + weights[i] <= limit) before += weights[i++];
    *target = limit - before;
    return i;
  }
};

template <typename T>
void sample(const Sampling<T>& sampling, int n_threads) {
#pragma omp parallel num_threads(threads_for(sampling.n_rows* sampling.vocab_size, n_threads))
  {
    float* sums = scratch<kSampling, float>(ceil_div(sampling.vocab_size, kBlock));
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < sampling.n_rows; ++row) sampling.run(row, sums);
  }
}

}  // namespace
