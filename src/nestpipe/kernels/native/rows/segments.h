// Sums of rows in the order of `sum_order.h`: the order is part of the result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/abi.h"
#include "rows/sum_order.h"

namespace nestpipe {

// Rows of floats: one after the other at a stride, or each at an address of its own.
struct Rows {
  std::byte* base;
  int64_t stride;           // bytes
  std::byte* const* pointers;  // null: base and stride count

  float* row(int64_t i) const {
    return reinterpret_cast<float*>(pointers ? pointers[i] : base + i * stride);
  }
};

// Which rows each sum has: terms [ends[i], ends[i + 1]); without ends, sum i is row terms[i] alone;
// without terms either, it is row i.
struct Segments {
  const int32_t* terms;
  const int32_t* ends;

  int64_t begin(int64_t sum) const { return ends ? ends[sum] : sum; }
  int64_t end(int64_t sum) const { return ends ? ends[sum + 1] : sum + 1; }
  int64_t term(int64_t i) const { return terms ? terms[i] : i; }
};

using Eight = float __attribute__((vector_size(32)));
using Sixteen = float __attribute__((vector_size(64)));
constexpr int64_t kAheadTerms = 20;

inline void prefetch_row(const float* row, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 16) __builtin_prefetch(row + i);
}

// Numbers [at, at + kVectors vectors) of all terms, summed in registers.
template <typename Vector, int64_t kVectors>
inline void sum_block(const Rows& rows, const Segments& segments, int64_t begin, int64_t end,
                      int64_t& at, float* out) {
  constexpr int64_t kNumbers = sizeof(Vector) / sizeof(float);
  Vector sums[kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    const float* row = rows.row(segments.term(i)) + at;
    for (int64_t v = 0; v < kVectors; ++v) {
      Vector term;  // by memcpy: a row begins at any float, and clang takes a vector for aligned
      std::memcpy(&term, row + kNumbers * v, sizeof term);
      sums[v] += term;
    }
  }
  std::memcpy(out + at, sums, sizeof sums);
  at += kNumbers * kVectors;
}

// out = terms [begin, end), one after the other. `last` bounds the terms that may be prefetched.
inline void sum_piece(const Rows& rows, const Segments& segments, int64_t begin, int64_t end,
                      int64_t last, int64_t dim, float* out) {
  for (int64_t i = begin + kAheadTerms; i < std::min(end + kAheadTerms, last); ++i) {
    prefetch_row(rows.row(segments.term(i)), dim);
  }
  int64_t at = 0;
  while (at + 64 <= dim) sum_block<Sixteen, 4>(rows, segments, begin, end, at, out);
  if (at + 32 <= dim) sum_block<Sixteen, 2>(rows, segments, begin, end, at, out);
  if (at + 16 <= dim) sum_block<Sixteen, 1>(rows, segments, begin, end, at, out);
  if (at + 8 <= dim) sum_block<Eight, 1>(rows, segments, begin, end, at, out);
  for (; at < dim; ++at) {
    float total = 0.0F;
    for (int64_t i = begin; i < end; ++i) total += rows.row(segments.term(i))[at];
    out[at] = total;
  }
}

struct RowSum {
  std::vector<float> of;

  void clear() { std::fill(of.begin(), of.end(), 0.0F); }
  void add(const RowSum& other) {
    for (size_t i = 0; i < of.size(); ++i) of[i] += other.of[i];
  }
};

// Apart from short segments: what they do not need would slow them down.
__attribute__((noinline)) inline void sum_long_segment(const Rows& rows, const Segments& segments,
                                                       int64_t begin, int64_t end, int64_t last,
                                                       int64_t dim, float* out) {
  RowSum sum{std::vector<float>(static_cast<size_t>(dim))};
  sum_in_order(begin, end, sum, [&](int64_t first, int64_t stop, RowSum& piece) {
    sum_piece(rows, segments, first, stop, last, dim, piece.of.data());
  });
  std::copy(sum.of.begin(), sum.of.end(), out);
}

// out = the sum of a segment; zeros where it is empty.
inline void sum_segment(const Rows& rows, const Segments& segments, int64_t sum, int64_t last,
                        int64_t dim, float* out) {
  const int64_t begin = segments.begin(sum), end = segments.end(sum);
  if (segments.ends == nullptr) {  // a row as it is: added to zero it would lose the sign of a zero
    if (begin + kAheadTerms < last) prefetch_row(rows.row(segments.term(begin + kAheadTerms)), dim);
    std::copy_n(rows.row(segments.term(begin)), dim, out);
  } else if (end - begin <= kPiece) {
    sum_piece(rows, segments, begin, end, last, dim, out);
  } else {
    sum_long_segment(rows, segments, begin, end, last, dim, out);
  }
}

}  // namespace nestpipe

// out[i] = sum i, or out[i] += sum i for all that have terms.
NESTPIPE_API int nestpipe_segment_sum(const nestpipe::Rows* rows,
                                      const nestpipe::Segments* segments, int64_t sums, int64_t dim,
                                      const nestpipe::Rows* out, int64_t add, int64_t threads);
// Whether every number of the rows lies at most `bound` from zero, which is finite; NaN does not.
NESTPIPE_API int nestpipe_within(const nestpipe::Rows* rows, int64_t count, int64_t dim,
                                 float bound, int64_t threads, int64_t* within);
