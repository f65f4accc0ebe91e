// Samples of several pieces of a data set: neighbours of all columns, or any of one column.
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
  int64_t* const* values;  // of each column of lists
  int64_t* const* lengths;
  char* const* rows;
};

// One column of one piece.
struct Source {
  const int64_t* offsets;  // where a sample's values begin, and the end; null: rows
  const void* values;
  int64_t num_values;
  int64_t num_samples;
  int64_t stride;  // bytes from one row to the next
};

}  // namespace nestpipe

// How many values each column of lists has in all spans together.
NESTPIPE_API void nestpipe_take_sizes(const nestpipe::Pieces* pieces, const nestpipe::Spans* spans,
                                      int64_t* sizes);

// Neighbours: the samples of the spans behind each other.
NESTPIPE_API void nestpipe_take_spans(const nestpipe::Pieces* pieces, const nestpipe::Spans* spans,
                                      const nestpipe::Taken* taken);

// Lists of one column in any order: `row[i]` of source `source[i]`; without rows, the first ones of
// the first source. There is room for 4 values more behind the last, and for one offset more than
// samples.
NESTPIPE_API void nestpipe_gather_lists(int64_t num_sources, const nestpipe::Source* sources,
                                        int64_t num_samples, const int64_t* source,
                                        const int64_t* row, int64_t* values, int64_t* offsets);

// The same for `bytes` of each sample, to every `stride` bytes.
NESTPIPE_API void nestpipe_gather_rows(int64_t num_sources, const nestpipe::Source* sources,
                                       int64_t bytes, int64_t stride, int64_t num_samples,
                                       const int64_t* source, const int64_t* row, char* to);

// `Permutation` of data/order.py: what stands at each place.
NESTPIPE_API void nestpipe_permutation(int64_t size, int64_t num_rounds, const uint64_t* salts,
                                       int64_t* to);
