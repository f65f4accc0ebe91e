#include "data/take.h"

#include <cstring>

using nestpipe::Pieces;
using nestpipe::Taken;

namespace {

constexpr int64_t kShort = 4;

void take_single(const int64_t* const* values, int64_t size, const int64_t* piece,
                 const int64_t* row, int64_t* to, int64_t* lengths, int64_t* ends) {
  for (int64_t i = 0; i < size; ++i) to[i] = values[piece[i]][row[i]];
  for (int64_t i = 0; i < size; ++i) lengths[i] = 1;
  for (int64_t i = 0; i <= size; ++i) ends[i] = i;
}

// Most lists are short and no two alike: to copy four values, needed or not, is faster than to ask
// how many there are. What is written beyond a list's end, the next one overwrites.
void take_lists(const int64_t* const* offsets, const int64_t* const* values, int64_t size,
                const int64_t* piece, const int64_t* row, const int64_t* limits, int64_t* to,
                int64_t* lengths, int64_t* ends) {
  const int64_t* start = to;
  ends[0] = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t* at = offsets[piece[i]] + row[i];
    const int64_t begin = at[0], length = at[1] - begin;
    const int64_t* from = values[piece[i]] + begin;
    lengths[i] = length;
    if (length <= kShort && begin + kShort <= limits[piece[i]]) {
      std::memcpy(to, from, kShort * sizeof(int64_t));
    } else {
      std::memcpy(to, from, length * sizeof(int64_t));
    }
    to += length;
    ends[i + 1] = to - start;
  }
}

// The same from one piece alone, without looking up where it is.
void take_lists_of_one(const int64_t* offsets, const int64_t* values, int64_t size,
                       const int64_t* row, int64_t limit, int64_t* to, int64_t* lengths,
                       int64_t* ends) {
  const int64_t* start = to;
  ends[0] = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t begin = offsets[row[i]], length = offsets[row[i] + 1] - begin;
    lengths[i] = length;
    if (length <= kShort && begin + kShort <= limit) {
      std::memcpy(to, values + begin, kShort * sizeof(int64_t));
    } else {
      std::memcpy(to, values + begin, length * sizeof(int64_t));
    }
    to += length;
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
    std::memcpy(to, values[piece[i]] + row[i] * bytes, bytes);
  }
}

}  // namespace

void nestpipe_take_spans(const Pieces* pieces, int64_t num_spans, const int64_t* piece,
                         const int64_t* first, const int64_t* end, const Taken* taken) {
  for (int64_t column = 0; column < pieces->num_lists; ++column) {
    const int64_t* const* offsets = pieces->offsets + column * pieces->num_pieces;
    const int64_t* const* values = pieces->values + column * pieces->num_pieces;
    int64_t* to = taken->values[column];
    int64_t* lengths = taken->lengths[column];
    for (int64_t span = 0; span < num_spans; ++span) {
      const int64_t* at = offsets[piece[span]];
      const int64_t size = end[span] - first[span];
      const int64_t begin = at ? at[first[span]] : first[span];
      const int64_t stop = at ? at[end[span]] : end[span];
      std::memcpy(to, values[piece[span]] + begin, (stop - begin) * sizeof(int64_t));
      to += stop - begin;
      const int64_t* row = at ? at + first[span] : nullptr;
      for (int64_t i = 0; i < size; ++i) lengths[i] = row ? row[i + 1] - row[i] : 1;
      lengths += size;
    }
  }
  for (int64_t column = 0; column < pieces->num_rows; ++column) {
    const char* const* values = pieces->rows + column * pieces->num_pieces;
    const int64_t bytes = pieces->row_bytes[column];
    char* to = taken->rows[column];
    for (int64_t span = 0; span < num_spans; ++span) {
      const int64_t size = (end[span] - first[span]) * bytes;
      std::memcpy(to, values[piece[span]] + first[span] * bytes, size);
      to += size;
    }
  }
}

void nestpipe_take_samples(const Pieces* pieces, int64_t num_samples, const int64_t* piece,
                           const int64_t* row, const int64_t* limits, const Taken* taken) {
  for (int64_t column = 0; column < pieces->num_lists; ++column) {
    const int64_t begin = column * pieces->num_pieces;
    const int64_t* const* offsets = pieces->offsets + begin;
    const int64_t* const* values = pieces->values + begin;
    int64_t* to = taken->values[column];
    int64_t* lengths = taken->lengths[column];
    int64_t* ends = taken->offsets[column];
    if (offsets[0] == nullptr) {
      take_single(values, num_samples, piece, row, to, lengths, ends);
    } else if (pieces->num_pieces == 1) {
      take_lists_of_one(offsets[0], values[0], num_samples, row, limits[begin], to, lengths, ends);
    } else {
      take_lists(offsets, values, num_samples, piece, row, limits + begin, to, lengths, ends);
    }
  }
  for (int64_t column = 0; column < pieces->num_rows; ++column) {
    take_rows(pieces->rows + column * pieces->num_pieces, pieces->row_bytes[column], num_samples,
              piece, row, taken->rows[column]);
  }
}
