// Whether all numbers of some rows are within a bound: what every step asks of its gradients.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "common/threads.h"
#include "rows/segments.h"

namespace nestpipe {
namespace {

// The bits of a float without its sign grow with its size; those of inf, then NaN, are the largest.
int32_t size_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffff;
}

// Without a branch: compilers make vectors of it.
int32_t largest_of(const float* row, int64_t dim) {
  int32_t largest = 0;
  for (int64_t i = 0; i < dim; ++i) largest = std::max(largest, size_of(row[i]));
  return largest;
}

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_within(const nestpipe::Rows* rows, int64_t count, int64_t dim,
                                 float bound, int64_t threads, int64_t* within) {
  using namespace nestpipe;
  try {
    std::atomic<bool> found{false};
    in_ranges(count, threads, [&](int64_t begin, int64_t end) {
      int32_t largest = 0;
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAheadTerms < end) prefetch_row(rows->row(i + kAheadTerms), dim);
        largest = std::max(largest, largest_of(rows->row(i), dim));
      }
      if (largest > size_of(bound)) found = true;
    });
    *within = !found;
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kDefect;
  }
}
