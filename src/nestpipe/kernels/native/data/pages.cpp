#include "data/pages.h"

#include <cstring>
#include <vector>

using nestpipe::ListColumn;
using nestpipe::PageHeader;

namespace {

// Thrift's compact form: each field's number as a step from the one before, its type, its value.

struct Reader {
  const uint8_t* at;
  const uint8_t* end;
  bool good = true;

  uint8_t byte() {
    if (at >= end) return good = false, 0;
    return *at++;
  }

  uint64_t number() {
    uint64_t found = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t next = byte();
      found |= uint64_t(next & 0x7F) << shift;
      if (!(next & 0x80)) return found;
    }
    good = false;
    return 0;
  }

  int64_t signed_number() {
    const uint64_t found = number();
    return static_cast<int64_t>(found >> 1) ^ -static_cast<int64_t>(found & 1);
  }

  void skip(int64_t bytes) {
    if (bytes < 0 || bytes > end - at) {
      good = false;
    } else {
      at += bytes;
    }
  }
};

enum ThriftType { kTrue = 1, kFalse, kByte, kI16, kI32, kI64, kDouble, kBinary, kList, kSet, kMap,
                  kStruct };
constexpr int kDeepest = 4;

bool skip_value(Reader& in, int type, int depth);

// Calls `use(field, type)` for each field until one is not used, which is skipped.
template <typename Use>
bool read_struct(Reader& in, int depth, Use use) {
  int64_t field = 0;
  while (in.good) {
    const uint8_t head = in.byte();
    if (head == 0) return in.good;
    field = head >> 4 ? field + (head >> 4) : static_cast<int16_t>(in.signed_number());
    if (!use(field, head & 15) && !skip_value(in, head & 15, depth)) return false;
  }
  return false;
}

bool skip_value(Reader& in, int type, int depth) {
  if (depth > kDeepest) return in.good = false;
  switch (type) {
    case kTrue:
    case kFalse: return in.good;
    case kByte: in.skip(1); return in.good;
    case kI16:
    case kI32:
    case kI64: in.number(); return in.good;
    case kDouble: in.skip(8); return in.good;
    case kBinary: in.skip(static_cast<int64_t>(in.number() & 0x7FFFFFFF)); return in.good;
    case kStruct: return read_struct(in, depth + 1, [](int64_t, int) { return false; });
    default: return in.good = false;  // page headers have no lists and no maps
  }
}

// Runs of numbers of `width` bits: one number repeated, or groups of eight packed.
struct Runs {
  Reader in;
  int width;
  int64_t left = 0;            // numbers left of this run
  bool packed = false;
  uint64_t repeated = 0;
  const uint8_t* bits = nullptr;

  bool next() {
    const uint64_t head = in.number();
    if (!in.good) return false;
    packed = head & 1;
    left = static_cast<int64_t>(head >> 1);
    if (left <= 0 || left > (int64_t{1} << 40)) return false;
    if (packed) {
      bits = in.at;
      in.skip(left * width);
      left *= 8;
      return in.good;
    }
    repeated = 0;
    for (int byte = 0; byte < (width + 7) / 8; ++byte) repeated |= uint64_t(in.byte()) << 8 * byte;
    return in.good;
  }
};

// Number i of a packed run; the eight bytes from there on may end behind the page.
inline uint64_t packed_number(const Runs& runs, int64_t i, uint64_t mask) {
  const int64_t bit = i * runs.width;
  const uint8_t* from = runs.bits + (bit >> 3);
  uint64_t word = 0;
  if (runs.in.end - from >= 8) {
    std::memcpy(&word, from, 8);
  } else {
    std::memcpy(&word, from, runs.in.end - from);
  }
  return word >> (bit & 7) & mask;
}

// All of `size` numbers, each handed on; false where there are too few, or `use` refuses a run.
template <typename Packed, typename Repeated>
bool each_run(Runs runs, int64_t size, Packed use_packed, Repeated use_repeated) {
  for (int64_t done = 0; done < size;) {
    if (!runs.next()) return false;
    const int64_t count = runs.left < size - done ? runs.left : size - done;
    const bool good = runs.packed ? use_packed(runs, done, count)
                                  : use_repeated(runs.repeated, done, count);
    if (!good) return false;
    done += count;
  }
  return true;
}

bool decode_levels(const Runs& runs, int64_t size, uint8_t* to) {
  const uint64_t mask = (uint64_t{1} << runs.width) - 1;
  return each_run(
      runs, size,
      [&](const Runs& of, int64_t at, int64_t count) {
        for (int64_t i = 0; i < count; ++i) to[at + i] = packed_number(of, i, mask);
        return true;
      },
      [&](uint64_t value, int64_t at, int64_t count) {
        std::memset(to + at, static_cast<int>(value), count);
        return true;
      });
}

// A bit for each entry: whether it goes on in the list before.
bool decode_bits(const Runs& runs, int64_t size, uint8_t* to) {
  return each_run(
      runs, size,
      [&](const Runs& of, int64_t at, int64_t count) {
        if (at % 8 == 0) {
          std::memcpy(to + at / 8, of.bits, (count + 7) / 8);
          return true;
        }
        for (int64_t i = 0; i < count; ++i) {
          const int64_t place = at + i;
          const uint8_t bit = of.bits[i >> 3] >> (i & 7) & 1;
          to[place >> 3] = (to[place >> 3] & ~(1 << (place & 7))) | bit << (place & 7);
        }
        return true;
      },
      [&](uint64_t bit, int64_t at, int64_t count) {
        if (bit > 1) return false;
        for (int64_t place = at; place < at + count; ++place) {
          to[place >> 3] = (to[place >> 3] & ~(1 << (place & 7))) | bit << (place & 7);
        }
        return true;
      });
}

bool is_one_run(Runs runs, int64_t size, uint64_t value) {
  return runs.next() && !runs.packed && runs.left >= size && runs.repeated == value;
}

// Where lists begin, with every entry a value.
bool begin_lists(ListColumn* column, const std::vector<uint8_t>& goes_on, int64_t size) {
  int64_t row = column->num_rows;
  for (int64_t first = 0; first < size; first += 64) {
    uint64_t begins;
    std::memcpy(&begins, goes_on.data() + first / 8, 8);
    begins = ~begins;
    if (size - first < 64) begins &= (uint64_t{1} << (size - first)) - 1;
    if (row + __builtin_popcountll(begins) > column->room_rows) return false;
    for (; begins; begins &= begins - 1) {
      column->offsets[row++] = column->num_values + first + __builtin_ctzll(begins);
    }
  }
  column->num_rows = row;
  return true;
}

// The same where some lists are empty; how many values there are, or -1.
int64_t begin_some_lists(ListColumn* column, const std::vector<uint8_t>& goes_on,
                         const std::vector<uint8_t>& level, int64_t size) {
  int64_t row = column->num_rows, values = 0;
  for (int64_t i = 0; i < size; ++i) {
    const bool begins = !(goes_on[i >> 3] >> (i & 7) & 1);
    const bool is_value = level[i] == column->max_definition;
    if (!is_value && (level[i] != column->empty_definition || !begins)) return -1;
    if (begins) {
      if (row >= column->room_rows) return -1;
      column->offsets[row++] = column->num_values + values;
    }
    values += is_value;
  }
  column->num_rows = row;
  return values;
}

bool look_up(const ListColumn* column, Reader in, int64_t size, int64_t* to) {
  if (size == 0) return true;
  const int width = in.byte();
  if (!in.good || width > 32) return false;
  const uint64_t mask = (uint64_t{1} << width) - 1;
  const uint64_t entries = column->num_entries;
  const int64_t* dictionary = column->dictionary;
  return each_run(
      Runs{in, width}, size,
      [&](const Runs& of, int64_t at, int64_t count) {
        const int64_t ample = of.width ? ((of.in.end - of.bits - 8) * 8) / of.width : 0;
        const int64_t fast = ample < 0 ? 0 : ample < count ? ample : count;
        uint64_t beyond = 0;
        for (int64_t i = 0; i < fast; ++i) {
          uint64_t word;
          const int64_t bit = i * of.width;
          std::memcpy(&word, of.bits + (bit >> 3), 8);
          const uint64_t entry = word >> (bit & 7) & mask;
          const bool known = entry < entries;
          beyond |= !known;
          to[at + i] = dictionary[known ? entry : 0];
        }
        for (int64_t i = fast; i < count; ++i) {
          const uint64_t entry = packed_number(of, i, mask);
          if (entry >= entries) return false;
          to[at + i] = dictionary[entry];
        }
        return beyond == 0;
      },
      [&](uint64_t entry, int64_t at, int64_t count) {
        if (entry >= entries) return false;
        for (int64_t i = 0; i < count; ++i) to[at + i] = dictionary[entry];
        return true;
      });
}

bool level_runs(Reader& in, int width, Runs* runs) {
  uint32_t bytes = 0;
  for (int byte = 0; byte < 4; ++byte) bytes |= uint32_t(in.byte()) << 8 * byte;
  const uint8_t* begin = in.at;
  in.skip(bytes);
  *runs = Runs{Reader{begin, in.at}, width};
  return in.good;
}

bool decode_page(ListColumn* column, Reader in, int64_t size, int64_t encoding) {
  Runs repetition, definition;
  const int width = column->max_definition > 1 ? 2 : 1;
  if (!level_runs(in, 1, &repetition) || !level_runs(in, width, &definition)) return false;
  std::vector<uint8_t> goes_on((size / 64 + 2) * 8);
  if (!decode_bits(repetition, size, goes_on.data())) return false;
  if (column->num_rows == 0 && goes_on[0] & 1) return false;
  int64_t values = size;
  if (is_one_run(definition, size, column->max_definition)) {
    if (!begin_lists(column, goes_on, size)) return false;
  } else {
    std::vector<uint8_t> level(size);
    if (!decode_levels(definition, size, level.data())) return false;
    values = begin_some_lists(column, goes_on, level, size);
  }
  if (values < 0 || values > column->room_values - column->num_values) return false;
  int64_t* to = column->values + column->num_values;
  column->num_values += values;
  if (encoding == 0) {
    if (in.end - in.at != values * int64_t{8}) return false;
    std::memcpy(to, in.at, values * sizeof(int64_t));
    return true;
  }
  return (encoding == 2 || encoding == 8) && column->num_entries > 0
             ? look_up(column, in, values, to)
             : values == 0;
}

}  // namespace

int nestpipe_page_header(const uint8_t* bytes, int64_t size, PageHeader* header) {
  Reader in{bytes, bytes + size};
  *header = PageHeader{-1, -1, -1, 0, -1, -1, 3, 3, 0};
  int64_t* const of_page[] = {nullptr, &header->type, &header->uncompressed_bytes,
                              &header->compressed_bytes};
  int64_t* const of_data[] = {nullptr, &header->num_values, &header->encoding,
                              &header->definition_encoding, &header->repetition_encoding};
  const bool good = read_struct(in, 0, [&](int64_t field, int type) {
    if (field >= 1 && field <= 3 && type == kI32) return *of_page[field] = in.signed_number(), true;
    if (field == 4) header->has_checksum = 1;
    if ((field != 5 && field != 7) || type != kStruct) return false;
    return read_struct(in, 1, [&](int64_t inner, int of) {
      const int64_t most = field == 5 ? 4 : 2;
      if (inner < 1 || inner > most || of != kI32) return false;
      return *of_data[inner] = in.signed_number(), true;
    });
  });
  header->header_bytes = in.at - bytes;
  return good && header->compressed_bytes >= 0 && header->uncompressed_bytes >= 0;
}

int nestpipe_decode_lists(ListColumn* column, const uint8_t* page, int64_t size,
                          int64_t num_values, int64_t encoding) {
  if (num_values < 0 || num_values > (int64_t{1} << 31)) return 0;
  return decode_page(column, Reader{page, page + size}, num_values, encoding);
}
