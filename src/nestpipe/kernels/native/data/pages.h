// Lists of 64-bit numbers from the pages of a Parquet column, decoded straight into offsets and
// values. It knows the usual forms alone, and says where something is unusual: Arrow reads it then.
#pragma once

#include <cstdint>

#include "common/abi.h"

namespace nestpipe {

// What stands before each page; numbers as in Parquet's own definition.
struct PageHeader {
  int64_t type;               // 0: data, 2: dictionary
  int64_t uncompressed_bytes;
  int64_t compressed_bytes;
  int64_t has_checksum;
  int64_t num_values;         // of lists: an entry for each value and each empty list
  int64_t encoding;           // 0: plain, 2 and 8: numbers of dictionary entries
  int64_t definition_encoding;  // 3: runs, as all writers do
  int64_t repetition_encoding;
  int64_t header_bytes;
};

// Where decoding stands; the arrays belong to the caller.
struct ListColumn {
  int64_t max_definition;     // the level of a value
  int64_t empty_definition;   // the level of an empty list
  const int64_t* dictionary;
  int64_t num_entries;
  int64_t* offsets;           // room for room_rows + 1
  int64_t room_rows;
  int64_t* values;
  int64_t room_values;
  int64_t num_rows;           // so far
  int64_t num_values;
};

}  // namespace nestpipe

// 1: the header was read; 0: it is cut off, or has an unknown form.
NESTPIPE_API int nestpipe_page_header(const uint8_t* bytes, int64_t size,
                                      nestpipe::PageHeader* header);

// Adds the lists of a decompressed data page; a list may go on in the next page. 0: the page is
// damaged or unusual (an empty entry, a null list), and what was decoded is of no use.
NESTPIPE_API int nestpipe_decode_lists(nestpipe::ListColumn* column, const uint8_t* page,
                                       int64_t size, int64_t num_values, int64_t encoding);
