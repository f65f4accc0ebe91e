// Row optimizers: gradients of a row are summed and applied while they are in the cache.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/threads.h"
#include "rows/update.h"

namespace nestpipe {

namespace {

constexpr int64_t kAheadRows = 16;
// Rows whose gradients are summed before any is applied. What one row needs waits for itself, from
// sum to square to root to quotient, so several go side by side, one step after the other.
constexpr int64_t kTogether = 16;

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

// The same tree in registers.
template <int64_t kDim>
float sum_of_squares(const float* g) {
  Eight part[kDim / 8];
  for (int64_t i = 0; i < kDim / 8; ++i) {
    std::memcpy(&part[i], g + 8 * i, sizeof part[i]);
    part[i] *= part[i];
  }
  for (int64_t half = kDim / 16; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) part[i] += part[half + i];
  }
  const Eight& of = part[0];
  return ((of[0] + of[4]) + (of[2] + of[6])) + ((of[1] + of[5]) + (of[3] + of[7]));
}

float squares_of(const float* g, int64_t dim, float* scratch) {
  switch (dim) {
    case 32: return sum_of_squares<32>(g);
    case 64: return sum_of_squares<64>(g);
    case 128: return sum_of_squares<128>(g);
    default: return sum_of_squares(g, dim, scratch);
  }
}

// Gradients of several rows, one behind the other at `stride`.
struct Summed {
  float* first;
  int64_t stride;
  int64_t count;

  float* of(int64_t j) const { return first + j * stride; }
};

void rowwise_adagrad(const Optimizer& of, const Rows& rows, int64_t at, const Summed& sums,
                     int64_t dim, float* scratch) {
  float rates[kTogether];
  for (int64_t j = 0; j < sums.count; ++j) {
    rates[j] = squares_of(sums.of(j), dim, scratch);
  }
  for (int64_t j = 0; j < sums.count; ++j) {
    float* const moment = rows.row(at + j) + dim;
    *moment += rates[j] / static_cast<float>(dim);
    rates[j] = rowwise_rate(of, *moment, divisor_of(of, moment));
  }
  for (int64_t j = 0; j < sums.count; ++j) {
    float* const row = rows.row(at + j);
    const float* const g = sums.of(j);
    const float rate = rates[j];
    for (int64_t i = 0; i < dim; ++i) row[i] = row[i] * of.keep - g[i] * rate;
  }
}

void apply(const Optimizer& of, float* row, const float* g, int64_t dim) {
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
  }
}

bool is_rowwise(int64_t kind) {
  return kind == kRowwiseAdagrad || kind == kMomentumScaledRowwiseAdagrad ||
         kind == kTouchScaledRowwiseAdagrad;
}

class Update {
 public:
  Update(const Optimizer& optimizer, const Rows& rows, int64_t count, int64_t dim,
         const Part* parts, int64_t num_parts, float times)
      : of_(optimizer),
        rows_(rows),
        count_(count),
        dim_(dim),
        parts_(parts),
        num_parts_(num_parts),
        times_(times) {}

  void run(int64_t begin, int64_t end) const {
    const int64_t stride = (dim_ + 15) / 16 * 16;
    std::vector<float> memory(static_cast<size_t>((kTogether + 1) * stride + 16));
    Summed sums{on_a_line(memory.data()), stride, 0};
    float* const more = sums.of(kTogether);
    for (int64_t at = begin; at < end; at += kTogether) {
      sums.count = std::min(kTogether, end - at);
      for (int64_t j = 0; j < sums.count; ++j) {
        if (at + j + kAheadRows < end) prefetch_row(rows_.row(at + j + kAheadRows), dim_ + 1);
        sum(at + j, sums.of(j), more);
      }
      if (is_rowwise(of_.kind)) {
        rowwise_adagrad(of_, rows_, at, sums, dim_, more);
        continue;
      }
      for (int64_t j = 0; j < sums.count; ++j) apply(of_, rows_.row(at + j), sums.of(j), dim_);
    }
  }

 private:
  void sum(int64_t i, float* g, float* more) const {
    sum_segment(parts_[0].gradients, parts_[0].segments, i, last_of(parts_[0]), dim_, g);
    for (int64_t p = 1; p < num_parts_; ++p) {
      const Part& part = parts_[p];
      if (part.segments.begin(i) == part.segments.end(i)) continue;
      sum_segment(part.gradients, part.segments, i, last_of(part), dim_, more);
      for (int64_t d = 0; d < dim_; ++d) g[d] += more[d];
    }
    for (int64_t d = 0; d < dim_; ++d) g[d] *= times_;
  }

  int64_t last_of(const Part& part) const { return part.segments.end(count_ - 1); }

  const Optimizer& of_;
  const Rows& rows_;
  const int64_t count_;
  const int64_t dim_;
  const Part* const parts_;
  const int64_t num_parts_;
  const float times_;
};

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_update(const nestpipe::Optimizer* optimizer, const nestpipe::Rows* rows,
                                 int64_t count, int64_t dim, const nestpipe::Part* parts,
                                 int64_t num_parts, float times, int64_t threads) {
  using namespace nestpipe;
  if (!is_known(optimizer->kind)) return kUnknownOptimizer;
  try {
    const Update update(*optimizer, *rows, count, dim, parts, num_parts, times);
    in_ranges(count, threads, [&](int64_t begin, int64_t end) { update.run(begin, end); });
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kDefect;
  }
}
