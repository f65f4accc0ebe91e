// Row optimizers: gradients of a row are summed and applied while they are in the cache.
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/threads.h"
#include "rows/update.h"

namespace nestpipe {

constexpr int64_t kAheadRows = 8;

namespace {

// Vectors that cross cache lines would take half as long again.
float* on_a_line(float* memory) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t{63});
}

// Halves are added until one number is left: a fixed tree that vectors can follow.
float sum_of_squares(const float* g, int64_t dim, float* squares) {
  for (int64_t i = 0; i < dim; ++i) squares[i] = g[i] * g[i];
  int64_t n = dim;
  for (; n % 16 == 0; n /= 2) {
    for (int64_t i = 0; i < n / 2; i += 8) {
      Eight low, high;
      std::memcpy(&low, squares + i, sizeof low);
      std::memcpy(&high, squares + n / 2 + i, sizeof high);
      low += high;
      std::memcpy(squares + i, &low, sizeof low);
    }
  }
  while (n > 1) {
    const int64_t half = (n + 1) / 2;
    for (int64_t i = 0; i < n - half; ++i) squares[i] += squares[half + i];
    n = half;
  }
  return squares[0];
}

void rowwise_adagrad(const Optimizer& of, float* row, const float* g, int64_t dim,
                     float* scratch) {
  float* const moment = row + dim;
  *moment += sum_of_squares(g, dim, scratch) / static_cast<float>(dim);
  const float rate = rowwise_rate(of, *moment, divisor_of(of, moment));
  for (int64_t i = 0; i < dim; ++i) row[i] = row[i] * of.keep - g[i] * rate;
}

void apply(const Optimizer& of, float* row, const float* g, int64_t dim, float* scratch) {
  float* const state = row + dim;
  switch (of.kind) {
    case kSgd:
      for (int64_t i = 0; i < dim; ++i) sgd(of, row[i], g[i]);
      return;
    case kAdagrad:
      for (int64_t i = 0; i < dim; ++i) adagrad(of, row[i], state[i], g[i]);
      return;
    case kAdam:
    case kAdamW:
      for (int64_t i = 0; i < dim; ++i) adam(of, row[i], state[i], state[dim + i], g[i]);
      return;
    case kRowwiseAdagrad:
    case kMomentumScaledRowwiseAdagrad:
    case kTouchScaledRowwiseAdagrad:
      rowwise_adagrad(of, row, g, dim, scratch);
      return;
  }
}

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_update(const nestpipe::Optimizer* optimizer, const nestpipe::Rows* rows,
                                 int64_t count, int64_t dim, const nestpipe::Part* parts,
                                 int64_t num_parts, float times, int64_t threads) {
  using namespace nestpipe;
  if (!is_known(optimizer->kind)) return kUnknownOptimizer;
  try {
    in_ranges(count, threads, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(static_cast<size_t>(dim) * 2 + 32);
      float* const g = on_a_line(scratch.data());
      float* const more = on_a_line(g + dim);
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAheadRows < end) prefetch_row(rows->row(i + kAheadRows), dim + 1);
        sum_segment(parts[0].gradients, parts[0].segments, i, parts[0].segments.end(count - 1), dim, g);
        for (int64_t p = 1; p < num_parts; ++p) {
          const Part& part = parts[p];
          if (part.segments.begin(i) == part.segments.end(i)) continue;
          sum_segment(part.gradients, part.segments, i, part.segments.end(count - 1), dim, more);
          for (int64_t d = 0; d < dim; ++d) g[d] += more[d];
        }
        for (int64_t d = 0; d < dim; ++d) g[d] *= times;
        apply(*optimizer, rows->row(i), g, dim, more);
      }
    });
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kDefect;
  }
}
