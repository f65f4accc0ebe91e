// The order in which the terms of a segment are added, on the host and on a GPU.
//
// From its first term on, a segment is cut into pieces of 32 terms. The terms of a piece are added
// from zero, one after the other; so are the sums of 32 consecutive pieces; and so are those sums.
// The result depends on the order of terms alone, and pieces of a long segment can be summed side
// by side. A segment of one piece is a plain loop: sums that begin with zero are never -0, so zero
// added to them changes no bit.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define NESTPIPE_SUM __device__ inline
#else
#define NESTPIPE_SUM inline
#endif

namespace nestpipe {

constexpr int32_t kPiece = 32;

// sum = terms [begin, end). `sum_piece(begin, end, sum)` sums the terms of one piece from zero, one
// after the other. A `Sum` can be copied and has `clear()` and `add(other)`.
template <typename Index, typename Sum, typename SumPiece>
NESTPIPE_SUM void sum_in_order(Index begin, Index end, Sum& sum, SumPiece sum_piece) {
  if (end - begin <= kPiece) {
    sum_piece(begin, end, sum);
    return;
  }
  sum.clear();
  Sum of_group = sum, of_piece = sum;
  for (Index group = begin; group < end; group += kPiece * kPiece) {
    const Index last = end - group < kPiece * kPiece ? end : group + kPiece * kPiece;
    of_group.clear();
    for (Index piece = group; piece < last; piece += kPiece) {
      sum_piece(piece, last - piece < kPiece ? last : piece + kPiece, of_piece);
      of_group.add(of_piece);
    }
    sum.add(of_group);
  }
}

}  // namespace nestpipe
