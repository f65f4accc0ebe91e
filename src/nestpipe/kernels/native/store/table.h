// One table: its shards, and chunks of rows that never move. Places of erased rows are used again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/hash.h"
#include "common/memory.h"

namespace nestpipe {

constexpr size_t kFirstChunk = size_t{64} << 10;
constexpr size_t kLargestChunk = size_t{32} << 20;

struct Chunk {
  std::byte* memory;
  size_t bytes;
  uint64_t first;  // number of its first row in the table
};

class Table {
 public:
  Table(uint64_t seed, double spread, uint64_t max_rows, size_t stride)
      : seed(seed),
        spread(spread),
        max_rows(max_rows),
        shards(new Shard[kShards]),
        stride_(stride) {}
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  ~Table() {
    for (const Chunk& chunk : chunks_) unmap_memory(chunk.memory, chunk.bytes);
  }

  const uint64_t seed;
  const double spread;  // standard deviation of first weights
  const uint64_t max_rows;  // 0: no limit
  const std::unique_ptr<Shard[]> shards;
  uint64_t num_rows = 0;

  // Makes place for `more` rows. Throws std::bad_alloc; what it had mapped by then stays, to be used
  // later.
  void reserve(uint64_t more) {
    while (room_ - used_ + free_.size() < more) {
      const size_t doubled = chunks_.empty() ? kFirstChunk : chunks_.back().bytes * 2;
      const size_t bytes = mapped_size(std::max(std::min(doubled, kLargestChunk), stride_));
      chunks_.reserve(chunks_.size() + 1);
      chunks_.push_back({static_cast<std::byte*>(map_memory(bytes)), bytes, room_});
      room_ += bytes / stride_;
    }
  }

  // Where the n-th of the reserved rows is to live.
  std::byte* place(uint64_t n) const {
    return n < free_.size() ? free_[free_.size() - 1 - n] : row(used_ + n - free_.size());
  }

  // The first `more` of the reserved places are taken.
  void take(uint64_t more) {
    const uint64_t again = std::min<uint64_t>(more, free_.size());
    free_.resize(free_.size() - again);
    used_ += more - again;
    num_rows += more;
  }

  // Makes room to note `count` places more; throws std::bad_alloc. Then `give` cannot.
  void reserve_free(uint64_t count) { free_.reserve(free_.size() + count); }
  void give(std::byte* place) {
    free_.push_back(place);
    --num_rows;
  }

  const std::vector<Chunk>& chunks() const { return chunks_; }

  size_t num_bytes() const {
    size_t total = kShards * sizeof(Shard) + chunks_.capacity() * sizeof(Chunk);
    total += free_.capacity() * sizeof(std::byte*);
    for (const Chunk& chunk : chunks_) total += chunk.bytes;
    return total;
  }

 private:
  // Where row number `row` lives, counted from the first that was ever placed.
  std::byte* row(uint64_t row) const {
    const auto after =
        std::upper_bound(chunks_.begin(), chunks_.end(), row,
                         [](uint64_t wanted, const Chunk& chunk) { return wanted < chunk.first; });
    const Chunk& chunk = *(after - 1);
    return chunk.memory + (row - chunk.first) * stride_;
  }

  const size_t stride_;
  std::vector<Chunk> chunks_;
  std::vector<std::byte*> free_;  // places of erased rows
  uint64_t used_ = 0;             // rows that ever had a place of their own
  uint64_t room_ = 0;
};

}  // namespace nestpipe
