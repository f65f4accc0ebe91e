// What Python hands to routing and gets back; all memory is the caller's. T, O, A: numbers of keys,
// of outputs (rows that the model sees) and of keys that travel.
//
// What is "by peer" has the other ranks in order first and this rank itself last, so that all that
// travels lies in one piece. Sums are always carried in the order of the ranks.
#pragma once

#include <cstdint>

#include "common/abi.h"

namespace nestpipe {

struct WantedKeys {
  int64_t tables;
  int64_t ranks;
  int64_t rank;  // this one
  int64_t row_bytes;  // of a row on its way, and of its gradient
  const int64_t* term_ends;    // by table: where its keys end
  const int64_t* output_ends;  // by table: where what the model sees of it ends
  const int64_t* keys;         // T, by table
  const int64_t* lengths;      // O: keys of each output; null: one each
  const uint8_t* pooled;       // by table: whether the owner may sum
  const int64_t* table_owners;        // by table: its one owner; -1: each key has its own
};

struct RoutedKeys {
  int64_t* keys;        // T: what is sent, by peer and table
  int64_t* lengths;     // T: keys of each sum, where a peer and table have fewer rows than keys
  int64_t* key_counts;  // rank x table
  int64_t* row_counts;  // rank x table: rows that come back
  int32_t* seen_rows;   // T: rows of each output, by rank of the owner
  int32_t* seen_ends;   // 1 + O
  int32_t* back_outputs;  // T: outputs of each row
  int32_t* back_ends;     // 1 + rows, room for 1 + T
  int64_t* straight;      // by table: the row of its first output, where output i is row i; or -1
  int64_t num_lengths;
  int64_t num_rows;
  int64_t num_seen;
};

// A routed batch that is to be split into micro-batches; its outputs come by table and micro-batch.
struct WholeBatch {
  int64_t tables;
  int64_t ranks;
  int64_t rank;  // this one
  int64_t micros;
  const int64_t* output_ends;  // table x micro
  // As in RoutedKeys; seen_ends null: one row for each output.
  const int64_t* keys;
  const int64_t* lengths;
  const int64_t* key_counts;
  const int64_t* row_counts;
  const int32_t* seen_rows;
  const int32_t* seen_ends;
};

// Rows are numbered over the whole window: by the micro-batch that asks for them, peer, table. What
// comes by micro-batch lies behind each other; `num_` says how much there is of it in each.
struct WindowSlices {
  int64_t* keys;        // by micro, peer, table
  int64_t* lengths;     // ... of sums
  int64_t* lasts;       // ... of the other rows: the last micro-batch that uses each
  int64_t* key_counts;  // micro x rank x table
  int64_t* row_counts;  // micro x rank x table: new rows
  int32_t* seen_rows;   // by micro: rows of each output
  int32_t* seen_ends;   // by micro: 1 + its outputs
  int32_t* back_outputs;  // by micro: outputs of each new row, then of each row used again
  int32_t* back_ends;     // by micro: 1 + those rows
  int32_t* reused_rows;    // by micro: rows used again
  int32_t* leaving;       // by micro, peer: rows whose last use this is
  int64_t* leaving_counts;  // micro x rank
  int64_t* num_lengths;     // by micro
  int64_t* num_lasts;
  int64_t* num_seen;
  int64_t* num_reused;
};

struct OwnerRequests {
  int64_t tables;
  int64_t ranks;
  int64_t rank;  // this one, whose own keys come last
  int64_t micros;
  const int64_t* key_counts;  // rank x micro x table
  const int64_t* row_counts;  // rank x micro x table
  const int64_t* keys;        // A, by peer, micro, table
  const int64_t* lengths;     // keys of each sum, where there are fewer rows than keys
  // Of every other row the micro-batch with whose gradients its own comes; null: its own.
  const int64_t* lasts;
};

struct KeyUnion {
  int64_t* keys;          // unique, by table; room for A
  int64_t* table_counts;  // unique keys of each table
  int32_t* serve_rows;    // A: positions among the unique keys, by micro, peer, table
  int32_t* serve_ends;    // micros + all rows: per micro where each sum ends, a zero before them
  int32_t* back_served;   // A: gradients of each unique key, by micro, rank of the requester
  int32_t* back_ends;     // micros x (1 + unique keys), room for micros x (1 + A)
};

// The unique keys of an earlier batch, and what `nestpipe_index` made of them.
struct KnownKeys {
  const int64_t* keys;  // by table
  const int64_t* counts;
  const uint32_t* index;
};

// Room for all keys of the batch in each list.
struct Neighbours {
  int64_t* shared;         // positions of keys that the batch before has too ...
  int64_t* shared_before;  // ... and where they stand there
  int64_t* carried;          // those that only the batch before that one has ...
  int64_t* carried_older;    // ... and where they stand there
  int64_t num_shared;
  int64_t num_carried;
};

}  // namespace nestpipe

// The requester's side, for one micro-batch or a whole batch.
NESTPIPE_API int nestpipe_request(const nestpipe::WantedKeys* wanted, nestpipe::RoutedKeys* routed);
// The same for a window: what was made of a whole batch, micro-batch by micro-batch.
NESTPIPE_API int nestpipe_window(const nestpipe::WholeBatch* whole, nestpipe::WindowSlices* slices);
// The owner's side, for all micro-batches of a batch.
NESTPIPE_API int nestpipe_union(const nestpipe::OwnerRequests* asked, nestpipe::KeyUnion* made);
// An index of unique keys, by table: how many numbers it has, and the index itself.
NESTPIPE_API int64_t nestpipe_index_size(int64_t tables, const int64_t* counts);
NESTPIPE_API void nestpipe_index(int64_t tables, const int64_t* keys, const int64_t* counts,
                                 uint32_t* index);
// Unique keys that a batch shares with the one before, and where `older` is not null, with the one
// before that.
NESTPIPE_API int nestpipe_neighbours(int64_t tables, const int64_t* now, const int64_t* counts,
                                     const nestpipe::KnownKeys* before,
                                     const nestpipe::KnownKeys* older,
                                     nestpipe::Neighbours* neighbours);
// All positions of some tables but the given ones, and how many of each table; returns how many,
// -1: no memory.
NESTPIPE_API int64_t nestpipe_others(int64_t tables, const int64_t* table_counts,
                                     const int64_t* positions, int64_t count, int64_t* others,
                                     int64_t* other_counts);
