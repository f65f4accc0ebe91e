// Where the index arrays live: large mapped regions cut into pieces of any size.
//
// An index array of one shard is too small for a huge page of its own, so shards share regions.
// What a growing shard leaves behind is joined with free neighbours and used again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "common/memory.h"

namespace nestpipe {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  ~Arena() {
    for (auto& [memory, size] : regions_) unmap_memory(memory, size);
  }

  // `bytes` is a multiple of 64, and so is the address. Not zeroed. Throws std::bad_alloc.
  void* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = by_size_.lower_bound({bytes, nullptr});
    if (best == by_size_.end()) {
      add_region(bytes);
      best = by_size_.lower_bound({bytes, nullptr});
    }
    const auto [size, start] = *best;
    // Inserting may throw: do it first, so that nothing is lost.
    if (size > bytes) insert(start + bytes, size - bytes);
    by_size_.erase({size, start});
    by_start_.erase(start);
    return start;
  }

  void give(void* memory, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* start = static_cast<std::byte*>(memory);
    auto after = by_start_.lower_bound(start);
    if (after != by_start_.end() && start + bytes == after->first) {
      bytes += after->second;
      by_size_.erase({after->second, after->first});
      after = by_start_.erase(after);
    }
    if (after != by_start_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == start) {
        start = before->first;
        bytes += before->second;
        by_size_.erase({before->second, before->first});
        by_start_.erase(before);
      }
    }
    insert(start, bytes);
  }

  size_t num_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return total_;
  }

 private:
  static constexpr size_t kFirstRegion = size_t{64} << 10;
  static constexpr size_t kLargestRegion = size_t{32} << 20;

  void add_region(size_t bytes) {
    const size_t size = mapped_size(std::max(bytes, next_));
    regions_.reserve(regions_.size() + 1);
    auto* memory = static_cast<std::byte*>(map_memory(size));
    regions_.emplace_back(memory, size);
    total_ += size;
    next_ = std::min(kLargestRegion, next_ * 2);
    insert(memory, size);
  }

  void insert(std::byte* start, size_t bytes) {
    by_start_.emplace(start, bytes);
    by_size_.emplace(bytes, start);
  }

  mutable std::mutex mutex_;
  std::vector<std::pair<void*, size_t>> regions_;
  std::map<std::byte*, size_t> by_start_;
  std::set<std::pair<size_t, std::byte*>> by_size_;
  size_t next_ = kFirstRegion;
  size_t total_ = 0;
};

}  // namespace nestpipe
