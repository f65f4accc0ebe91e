// A store: tables of the same row form, the threads that serve them, the epochs of their readers.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/abi.h"
#include "common/arena.h"
#include "common/threads.h"
#include "rows/row_format.h"
#include "store/reader_epochs.h"
#include "store/table.h"

namespace nestpipe {

// Keys of one table that one thread sorts at a time.
struct Part {
  int64_t table;
  int64_t begin;
  int64_t end;
};

// Shards [begin, end) of one table: what one thread writes at a time.
struct Piece {
  int64_t table;
  uint64_t begin;
  uint64_t end;
};

// What a scatter or an erase needs for the time it runs; kept, because the next one needs as much.
struct Scratch {
  std::vector<Part> parts;
  std::vector<Piece> pieces;
  std::vector<uint32_t> part_starts;  // [part][shard]: keys, then where they go
  std::vector<uint32_t> starts;       // [table][shard]: first of the shard's keys in `order`
  std::vector<uint32_t> order;        // position in the batch, by table and shard
  std::vector<std::byte*> rows;       // beside `order`: where the row lives, null where new
  std::vector<uint64_t> first_new;    // [table][shard]: how many are new, then their first number

  size_t num_bytes() const;
};

// Weights and state of a row that was never stored, as the store would give them back.
void make_first_row(const RowForm& form, float state_init, const Table& table, int64_t key,
                    float* out);

struct Store {
  Store(const Shape& shape, int64_t num_threads);

  const RowForm form;
  const float state_init;
  Arena arena;  // outlives the tables' shards, which live in it
  std::vector<std::unique_ptr<Table>> tables;
  ReaderEpochs readers;
  std::mutex writing;  // one scatter or erase at a time; also guards what it changes: sizes, scratch
  Scratch scratch;
  Threads threads;

  // Rows into `out`, or, where that is null, their addresses into `addresses` (null: never stored).
  // Returns the number of keys that were never stored.
  int64_t gather(const int64_t* keys, const int64_t* counts, float* out, std::byte** addresses);
  // The same addresses for keys in any order, each with its table.
  int64_t locate_each(const int64_t* keys, const int32_t* tables, int64_t count,
                      std::byte** addresses);
  Status scatter(const int64_t* keys, const int64_t* counts, const float* rows, Report& report);
  Status erase(const int64_t* keys, const int64_t* counts, int64_t& erased, Report& report);
  void first_row(const Table& table, int64_t key, float* out) const;
};

}  // namespace nestpipe
