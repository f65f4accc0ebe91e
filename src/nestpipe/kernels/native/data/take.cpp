#include "data/take.h"

#include <cstring>

using nestpipe::Pieces;
using nestpipe::Source;
using nestpipe::Spans;
using nestpipe::Taken;

namespace {

constexpr int64_t kShort = 4;
constexpr int64_t kAhead = 8;
constexpr int64_t kLine = 64;

// As `STEP` and `scatter` of data/order.py.
constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;

uint64_t scatter(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

void prefetch(const void* from, int64_t bytes) {
  const char* line = static_cast<const char*>(from);
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(line + at, 0, 2);
}

// Samples are picked at random, which memory answers slowly: what was kept for long is fetched in
// its order first, so that the picking finds it in the cache. The last source was just decoded.
void prefetch_kept(int64_t num_sources, const Source* sources) {
  for (const Source* kept = sources; kept + 1 < sources + num_sources; ++kept) {
    prefetch(kept->offsets, (kept->num_samples + 1) * sizeof(int64_t));
    prefetch(kept->values, kept->num_values * sizeof(int64_t));
  }
}

// Most lists are short and no two alike: to copy four values, needed or not, is faster than to ask
// how many there are. What is written beyond a list's end, the next one overwrites.
int64_t* copy_list(const Source& from, int64_t begin, int64_t length, int64_t* to) {
  const int64_t* values = static_cast<const int64_t*>(from.values) + begin;
  if (length <= kShort && begin + kShort <= from.num_values) {
    std::memcpy(to, values, kShort * sizeof(int64_t));
  } else {
    std::memcpy(to, values, length * sizeof(int64_t));
  }
  return to + length;
}

void gather_lists(const Source* sources, int64_t size, const int64_t* source, const int64_t* row,
                  int64_t* to, int64_t* ends) {
  const int64_t* start = to;
  for (int64_t i = 0; i < size; ++i) {
    const Source& from = sources[source[i]];
    const int64_t* at = from.offsets + row[i];
    to = copy_list(from, at[0], at[1] - at[0], to);
    ends[i + 1] = to - start;
  }
}

// The same from one source alone, without looking up where it is.
void gather_lists_of_one(const Source& from, int64_t size, const int64_t* row, int64_t* to,
                         int64_t* ends) {
  const int64_t* start = to;
  const int64_t* values = static_cast<const int64_t*>(from.values);
  for (int64_t i = 0; i < size; ++i) {
    if (i + 2 * kAhead < size) {
      __builtin_prefetch(from.offsets + row[i + 2 * kAhead]);
      __builtin_prefetch(values + from.offsets[row[i + kAhead]]);
    }
    const int64_t* at = from.offsets + row[i];
    to = copy_list(from, at[0], at[1] - at[0], to);
    ends[i + 1] = to - start;
  }
}

const char* row_of(const Source& from, int64_t row) {
  return static_cast<const char*>(from.values) + row * from.stride;
}

// Neighbours from the first one of a source on.
void copy_lists(const Source& from, int64_t size, int64_t* to, int64_t* ends) {
  const int64_t begin = from.offsets[0];
  const int64_t* values = static_cast<const int64_t*>(from.values) + begin;
  std::memcpy(to, values, (from.offsets[size] - begin) * sizeof(int64_t));
  for (int64_t i = 0; i < size; ++i) ends[i + 1] = from.offsets[i + 1] - begin;
}

template <int64_t bytes>
void gather_numbers(const Source* sources, int64_t stride, int64_t size, const int64_t* source,
                    const int64_t* row, char* to) {
  if (source == nullptr) {
    const Source from = sources[0];
    for (int64_t i = 0; i < size; ++i) std::memcpy(to + i * stride, row_of(from, row[i]), bytes);
    return;
  }
  for (int64_t i = 0; i < size; ++i) {
    std::memcpy(to + i * stride, row_of(sources[source[i]], row[i]), bytes);
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
    int64_t* lengths = taken->lengths[column];
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

void nestpipe_gather_lists(int64_t num_sources, const Source* sources, int64_t num_samples,
                           const int64_t* source, const int64_t* row, int64_t* values,
                           int64_t* offsets) {
  offsets[0] = 0;
  if (row == nullptr) return copy_lists(sources[0], num_samples, values, offsets);
  if (num_sources == 1) {
    return gather_lists_of_one(sources[0], num_samples, row, values, offsets);
  }
  prefetch_kept(num_sources, sources);
  gather_lists(sources, num_samples, source, row, values, offsets);
}

void nestpipe_gather_rows(int64_t num_sources, const Source* sources, int64_t bytes,
                          int64_t stride, int64_t num_samples, const int64_t* source,
                          const int64_t* row, char* to) {
  if (num_sources == 1) source = nullptr;
  if (row == nullptr && bytes == stride) {
    std::memcpy(to, sources[0].values, num_samples * bytes);
    return;
  }
  if (row == nullptr) {
    for (int64_t i = 0; i < num_samples; ++i) {
      std::memcpy(to + i * stride, row_of(sources[0], i), bytes);
    }
    return;
  }
  if (bytes == 4) return gather_numbers<4>(sources, stride, num_samples, source, row, to);
  if (bytes == 8) return gather_numbers<8>(sources, stride, num_samples, source, row, to);
  for (int64_t i = 0; i < num_samples; ++i, to += stride) {
    std::memcpy(to, row_of(sources[source ? source[i] : 0], row[i]), bytes);
  }
}

void nestpipe_permutation(int64_t size, int64_t num_rounds, const uint64_t* salts, int64_t* to) {
  int bits = 2;
  while (size - 1 >= int64_t{1} << bits) ++bits;
  const int low_bits = bits / 2, high_bits = bits - low_bits;
  for (int64_t i = 0; i < size; ++i) {
    uint64_t number = i;
    do {
      uint64_t low = number & ((uint64_t{1} << low_bits) - 1), high = number >> low_bits;
      for (int64_t turn = 0; turn < num_rounds; ++turn) {
        const uint64_t mask = (uint64_t{1} << (turn % 2 == 0 ? high_bits : low_bits)) - 1;
        const uint64_t next = high ^ (scatter(low * kStep + salts[turn]) & mask);
        high = low;
        low = next;
      }
      number = (high << low_bits) | low;
    } while (number >= static_cast<uint64_t>(size));
    to[i] = static_cast<int64_t>(number);
  }
}
