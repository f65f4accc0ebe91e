// One table: its shards, and chunks of rows that never move.
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

  // Makes place for rows up to `rows` in all. Throws std::bad_alloc; what it had mapped by then
  // stays, to be used later.
  void reserve(uint64_t rows) {
    while (room_ < rows) {
      const size_t doubled = chunks_.empty() ? kFirstChunk : chunks_.back().bytes * 2;
      const size_t bytes = mapped_size(std::max(std::min(doubled, kLargestChunk), stride_));
      chunks_.reserve(chunks_.size() + 1);
      chunks_.push_back({static_cast<std::byte*>(map_memory(bytes)), bytes, room_});
      room_ += bytes / stride_;
    }
  }

  // Where row number `row` lives. It must be reserved.
  std::byte* place(uint64_t row) const {
    const auto after =
        std::upper_bound(chunks_.begin(), chunks_.end(), row,
                         [](uint64_t wanted, const Chunk& chunk) { return wanted < chunk.first; });
    const Chunk& chunk = *(after - 1);
    return chunk.memory + (row - chunk.first) * stride_;
  }

  const std::vector<Chunk>& chunks() const { return chunks_; }

  size_t num_bytes() const {
    size_t total = kShards * sizeof(Shard) + chunks_.capacity() * sizeof(Chunk);
    for (const Chunk& chunk : chunks_) total += chunk.bytes;
    return total;
  }

 private:
  const size_t stride_;
  std::vector<Chunk> chunks_;
  uint64_t room_ = 0;
};

}  // namespace nestpipe
