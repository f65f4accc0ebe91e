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

struct Spans {
  int64_t num_spans;
  const int64_t* piece;
  const int64_t* first;  // samples [first, end) of the piece
  const int64_t* end;
};

struct Taken {
  int64_t* const* values;  // of each column of lists, with room for 4 more behind the last
  int64_t* const* ends;    // lengths for neighbours, offsets (one more) for single samples
  char* const* rows;
};

}  // namespace nestpipe

// How many values each column of lists has in all spans together.
NESTPIPE_API void nestpipe_take_sizes(const nestpipe::Pieces* pieces, const nestpipe::Spans* spans,
                                      int64_t* sizes);

// Neighbours: the samples of the spans behind each other.
NESTPIPE_API void nestpipe_take_spans(const nestpipe::Pieces* pieces, const nestpipe::Spans* spans,
                                      const nestpipe::Taken* taken);

// The same samples in any order. `limits`: how many values a column of a piece has. Columns of one
// value each get no offsets.
NESTPIPE_API void nestpipe_take_samples(const nestpipe::Pieces* pieces,
                                        const nestpipe::Spans* spans, int64_t num_samples,
                                        const int64_t* piece, const int64_t* row,
                                        const int64_t* limits, const nestpipe::Taken* taken);
