// Samples picked from several pieces of a data set, column by column.
#pragma once

#include <cstdint>

#include "common/abi.h"

namespace nestpipe {

// Tables have an entry for each column and piece, those of a column behind each other.
struct Pieces {
  int64_t num_pieces;
  int64_t num_lists;              // columns of lists ...
  int64_t num_rows;               // ... and of so many bytes per sample
  const int64_t* const* offsets;  // where a sample's values begin, and the end; null: one each
  const int64_t* const* values;
  const char* const* rows;
  const int64_t* row_bytes;       // of each column of rows
};

struct Taken {
  int64_t* const* values;  // of each column of lists, with room for 4 more behind the last
  int64_t* const* lengths;
  int64_t* const* offsets;  // as those of pieces; written by nestpipe_take_samples alone
  char* const* rows;
};

}  // namespace nestpipe

// Neighbours: samples [first, end) of pieces, span by span.
NESTPIPE_API void nestpipe_take_spans(const nestpipe::Pieces* pieces, int64_t num_spans,
                                      const int64_t* piece, const int64_t* first,
                                      const int64_t* end, const nestpipe::Taken* taken);

// Single samples in any order. `limits`: how many values a column of a piece has.
NESTPIPE_API void nestpipe_take_samples(const nestpipe::Pieces* pieces, int64_t num_samples,
                                        const int64_t* piece, const int64_t* row,
                                        const int64_t* limits, const nestpipe::Taken* taken);
