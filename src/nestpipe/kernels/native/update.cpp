// Row optimizers: gradients of a row are summed and applied while they are in the cache.
//
// Every step rounds on its own (the build forbids contraction), so the plain twin in torch, which
// has one operation per step, gives the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "pool.h"
#include "update.h"

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
      *reinterpret_cast<Eight*>(squares + i) += *reinterpret_cast<Eight*>(squares + n / 2 + i);
    }
  }
  while (n > 1) {
    const int64_t half = (n + 1) / 2;
    for (int64_t i = 0; i < n - half; ++i) squares[i] += squares[half + i];
    n = half;
  }
  return squares[0];
}

// The root of a row's moment over c; to divide by 1 changes no bit.
void rowwise_adagrad(const Optimizer& of, float c, float* row, const float* g, int64_t dim,
                     float* scratch) {
  float* const moment = row + dim;
  *moment += sum_of_squares(g, dim, scratch) / static_cast<float>(dim);
  const float rate = 1.0F / (std::sqrt(*moment / c) + of.eps) * of.lr;
  for (int64_t i = 0; i < dim; ++i) row[i] -= g[i] * rate;
}

// From the whole scale, for a row that one group touches, down to 1.
float touch_scale(float scale, float groups_beyond_one) {
  return std::min(std::max(scale / (groups_beyond_one + 1.0F), 1.0F), scale);
}

void apply(const Optimizer& of, float* row, const float* g, int64_t dim, float* scratch) {
  float* const state = row + dim;
  switch (of.kind) {
    case kSgd:
      for (int64_t i = 0; i < dim; ++i) row[i] -= g[i] * of.lr;
      return;
    case kAdagrad:
      for (int64_t i = 0; i < dim; ++i) {
        state[i] += g[i] * g[i];
        row[i] -= g[i] / (std::sqrt(state[i]) + of.eps) * of.lr;
      }
      return;
    case kRowwiseAdagrad:
      return rowwise_adagrad(of, 1.0F, row, g, dim, scratch);
    case kMomentumScaledRowwiseAdagrad:
      return rowwise_adagrad(of, of.scale, row, g, dim, scratch);
    case kTouchScaledRowwiseAdagrad:
      return rowwise_adagrad(of, touch_scale(of.scale, state[1]), row, g, dim, scratch);
    default: {
      float* const mean = state;
      float* const square = state + dim;
      for (int64_t i = 0; i < dim; ++i) {
        mean[i] = mean[i] * of.beta1 + g[i] * of.rest1;
        square[i] = square[i] * of.beta2 + g[i] * g[i] * of.rest2;
        row[i] -= mean[i] / (std::sqrt(square[i]) + of.eps) * of.adam_scale;
      }
    }
  }
}

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_update(const nestpipe::Optimizer* optimizer, const nestpipe::Rows* rows,
                                 int64_t count, int64_t dim, const nestpipe::Part* parts,
                                 int64_t num_parts, float times, int64_t threads) {
  using namespace nestpipe;
  try {
    in_ranges(count, threads, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(static_cast<size_t>(dim) * 2 + 32);
      float* const g = on_a_line(scratch.data());
      float* const more = on_a_line(g + dim);
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAheadRows < end) prefetch_row(rows->row(i + kAheadRows), dim + 1);
        sum_bag(parts[0].gradients, parts[0].bags, i, parts[0].bags.end(count - 1), dim, g);
        for (int64_t p = 1; p < num_parts; ++p) {
          const Part& part = parts[p];
          if (part.bags.begin(i) == part.bags.end(i)) continue;
          sum_bag(part.gradients, part.bags, i, part.bags.end(count - 1), dim, more);
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
