#include "data/take.h"

#include <cstring>

using nestpipe::Pieces;
using nestpipe::Spans;
using nestpipe::Taken;

namespace {

constexpr int64_t kShort = 4;
constexpr int64_t kAhead = 8;
constexpr int64_t kLine = 64;

void prefetch(const void* from, int64_t bytes) {
  const char* line = static_cast<const char*>(from);
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(line + at, 0, 2);
}

// Samples are picked at random, which memory answers slowly: a column is fetched in its order
// first, so that the picking finds it in the cache.
void prefetch_lists(const int64_t* const* offsets, const int64_t* const* values,
                    const Spans* spans) {
  for (int64_t span = 0; span < spans->num_spans; ++span) {
    const int64_t piece = spans->piece[span], first = spans->first[span];
    const int64_t* at = offsets[piece] + first;
    const int64_t size = spans->end[span] - first;
    prefetch(at, (size + 1) * sizeof(int64_t));
    prefetch(values[piece] + at[0], (at[size] - at[0]) * sizeof(int64_t));
  }
}

// Most lists are short and no two alike: to copy four values, needed or not, is faster than to ask
// how many there are. What is written beyond a list's end, the next one overwrites.
int64_t* copy_list(const int64_t* values, int64_t begin, int64_t length, int64_t limit,
                   int64_t* to) {
  if (length <= kShort && begin + kShort <= limit) {
    std::memcpy(to, values + begin, kShort * sizeof(int64_t));
  } else {
    std::memcpy(to, values + begin, length * sizeof(int64_t));
  }
  return to + length;
}

void take_lists(const int64_t* const* offsets, const int64_t* const* values, int64_t size,
                const int64_t* piece, const int64_t* row, const int64_t* limits, int64_t* to,
                int64_t* ends) {
  const int64_t* start = to;
  ends[0] = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (i + kAhead < size) {
      const int64_t next = piece[i + kAhead];
      __builtin_prefetch(values[next] + offsets[next][row[i + kAhead]]);
    }
    const int64_t* at = offsets[piece[i]] + row[i];
    to = copy_list(values[piece[i]], at[0], at[1] - at[0], limits[piece[i]], to);
    ends[i + 1] = to - start;
  }
}

// The same from one piece alone, without looking up where it is.
void take_lists_of_one(const int64_t* offsets, const int64_t* values, int64_t size,
                       const int64_t* row, int64_t limit, int64_t* to, int64_t* ends) {
  const int64_t* start = to;
  ends[0] = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (i + kAhead < size) __builtin_prefetch(values + offsets[row[i + kAhead]]);
    const int64_t* at = offsets + row[i];
    to = copy_list(values, at[0], at[1] - at[0], limit, to);
    ends[i + 1] = to - start;
  }
}

template <typename T>
void take_numbers(const char* const* values, int64_t size, const int64_t* piece,
                  const int64_t* row, char* out) {
  T* to = reinterpret_cast<T*>(out);
  for (int64_t i = 0; i < size; ++i) to[i] = reinterpret_cast<const T*>(values[piece[i]])[row[i]];
}

void take_rows(const char* const* values, int64_t bytes, int64_t size, const int64_t* piece,
               const int64_t* row, char* to) {
  if (bytes == 4) return take_numbers<int32_t>(values, size, piece, row, to);
  if (bytes == 8) return take_numbers<int64_t>(values, size, piece, row, to);
  for (int64_t i = 0; i < size; ++i, to += bytes) {
    if (i + kAhead < size) __builtin_prefetch(values[piece[i + kAhead]] + row[i + kAhead] * bytes);
    std::memcpy(to, values[piece[i]] + row[i] * bytes, bytes);
  }
}

}  // namespace

void nestpipe_take_sizes(const Pieces* pieces, const Spans* spans, int64_t* sizes) {
  for (int64_t column = 0; column < pieces->num_lists; ++column) {
    const int64_t* const* offsets = pieces->offsets + column * pieces->num_pieces;
    sizes[column] = 0;
    for (int64_t span = 0; span < spans->num_spans; ++span) {
      const int64_t* at = offsets[spans->piece[span]];
      const int64_t first = spans->first[span], end = spans->end[span];
      sizes[column] += at ? at[end] - at[first] : end - first;
    }
  }
}

void nestpipe_take_spans(const Pieces* pieces, const Spans* spans, const Taken* taken) {
  for (int64_t column = 0; column < pieces->num_lists; ++column) {
    const int64_t* const* offsets = pieces->offsets + column * pieces->num_pieces;
    const int64_t* const* values = pieces->values + column * pieces->num_pieces;
    int64_t* to = taken->values[column];
    int64_t* lengths = taken->ends[column];
    for (int64_t span = 0; span < spans->num_spans; ++span) {
      const int64_t piece = spans->piece[span], first = spans->first[span], end = spans->end[span];
      const int64_t* at = offsets[piece];
      const int64_t begin = at ? at[first] : first, stop = at ? at[end] : end;
      std::memcpy(to, values[piece] + begin, (stop - begin) * sizeof(int64_t));
      to += stop - begin;
      const int64_t* row = at ? at + first : nullptr;
      for (int64_t i = 0; i < end - first; ++i) lengths[i] = row ? row[i + 1] - row[i] : 1;
      lengths += end - first;
    }
  }
  for (int64_t column = 0; column < pieces->num_rows; ++column) {
    const char* const* values = pieces->rows + column * pieces->num_pieces;
    const int64_t bytes = pieces->row_bytes[column];
    char* to = taken->rows[column];
    for (int64_t span = 0; span < spans->num_spans; ++span) {
      const int64_t size = (spans->end[span] - spans->first[span]) * bytes;
      std::memcpy(to, values[spans->piece[span]] + spans->first[span] * bytes, size);
      to += size;
    }
  }
}

void nestpipe_take_samples(const Pieces* pieces, const Spans* spans, int64_t num_samples,
                           const int64_t* piece, const int64_t* row, const int64_t* limits,
                           const Taken* taken) {
  for (int64_t column = 0; column < pieces->num_lists; ++column) {
    const int64_t begin = column * pieces->num_pieces;
    const int64_t* const* offsets = pieces->offsets + begin;
    const int64_t* const* values = pieces->values + begin;
    int64_t* to = taken->values[column];
    int64_t* ends = taken->ends[column];
    if (offsets[0] == nullptr) {
      for (int64_t i = 0; i < num_samples; ++i) to[i] = values[piece[i]][row[i]];
      continue;
    }
    prefetch_lists(offsets, values, spans);
    if (pieces->num_pieces == 1) {
      take_lists_of_one(offsets[0], values[0], num_samples, row, limits[begin], to, ends);
    } else {
      take_lists(offsets, values, num_samples, piece, row, limits + begin, to, ends);
    }
  }
  for (int64_t column = 0; column < pieces->num_rows; ++column) {
    take_rows(pieces->rows + column * pieces->num_pieces, pieces->row_bytes[column], num_samples,
              piece, row, taken->rows[column]);
  }
}
