// From key to row: 256 small hash tables ("shards") per table, each growing on its own.
//
// A shard is an array of 64-byte buckets of four keys and four row pointers, so that a lookup
// touches one cache line most of the time. An empty place has no row, so every key is allowed.
// A search ends at the first empty place, so who removes a key closes the gap behind it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/arena.h"

namespace nestpipe {

constexpr int kShardBits = 8;
constexpr uint64_t kShards = uint64_t{1} << kShardBits;
constexpr int kPlaces = 4;

// Its own constants and salt: the hash that chooses a key's owner must not be the one that chooses
// its shard, else a rank would use only some of its shards.
inline uint64_t hash_of(int64_t key) {
  uint64_t x = static_cast<uint64_t>(key) ^ 0x5bf03635dd6c0f1bULL;
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

inline uint64_t shard_of(uint64_t hash) { return hash >> (64 - kShardBits); }

struct alignas(64) Bucket {
  int64_t keys[kPlaces];
  std::byte* rows[kPlaces];
};
static_assert(sizeof(Bucket) == 64);

// What a shard without rows points to: a search ends here without a special case.
inline Bucket no_rows{};

struct Shard {
  Bucket* buckets = &no_rows;
  uint64_t num_buckets = 0;
  uint64_t num_rows = 0;
  // True while one thread may change this shard and its rows; see gate.h.
  std::atomic<bool> written{false};

  // The bits below the shard's own, scaled to any number of buckets.
  Bucket* home(uint64_t hash) const {
    const auto wide = static_cast<unsigned __int128>(hash << kShardBits) * num_buckets;
    return buckets + static_cast<uint64_t>(wide >> 64);
  }

  // The row of a key, or null. `bucket` is home(hash).
  std::byte* find(int64_t key, const Bucket* bucket) const {
    while (true) {
      for (int i = 0; i < kPlaces; ++i) {
        if (bucket->rows[i] == nullptr) return nullptr;
        if (bucket->keys[i] == key) return bucket->rows[i];
      }
      if (++bucket == buckets + num_buckets) bucket = buckets;
    }
  }

  // The key must be absent, and there must be room.
  void insert(int64_t key, std::byte* row) {
    place(key, row);
    ++num_rows;
  }

  // The key must be present. Rows stay where they are; only places of the index move.
  void remove(int64_t key) {
    uint64_t gap = kPlaces * static_cast<uint64_t>(home(hash_of(key)) - buckets);
    while (key_at(gap) != key) gap = after(gap);
    for (uint64_t next = after(gap); row_at(next) != nullptr; next = after(next)) {
      // Whoever's way from home to here leads over the gap moves into it.
      const Bucket* first = home(hash_of(key_at(next)));
      const uint64_t start = kPlaces * static_cast<uint64_t>(first - buckets);
      if (distance(start, next) < distance(gap, next)) continue;
      key_at(gap) = key_at(next);
      row_at(gap) = row_at(next);
      gap = next;
    }
    row_at(gap) = nullptr;
    --num_rows;
  }

  bool has_room(uint64_t more) const { return fits(num_rows + more, num_buckets); }

  // Grows so that `more` rows fit. `number` is the shard's own: sizes are staggered by it, so that
  // shards of one table, which fill evenly, do not all grow at the same moment.
  void grow(uint64_t more, uint64_t number, Arena& arena) {
    uint64_t wanted = 0;
    for (int doubling = 0; !fits(num_rows + more, wanted); ++doubling) {
      wanted = std::max<uint64_t>(1, ((kShards + number) << doubling) >> kShardBits);
    }
    Bucket* old = buckets;
    const uint64_t num_old = num_buckets;
    auto* fresh = static_cast<Bucket*>(arena.take(wanted * sizeof(Bucket)));
    std::memset(static_cast<void*>(fresh), 0, wanted * sizeof(Bucket));
    buckets = fresh;
    num_buckets = wanted;
    for (uint64_t b = 0; b < num_old; ++b) {
      for (int i = 0; i < kPlaces && old[b].rows[i] != nullptr; ++i) {
        place(old[b].keys[i], old[b].rows[i]);
      }
    }
    if (num_old > 0) arena.give(old, num_old * sizeof(Bucket));
  }

 private:
  // Places of all buckets in one row, and round again.
  int64_t& key_at(uint64_t place) { return buckets[place / kPlaces].keys[place % kPlaces]; }
  std::byte*& row_at(uint64_t place) { return buckets[place / kPlaces].rows[place % kPlaces]; }
  uint64_t after(uint64_t place) const { return place + 1 < num_buckets * kPlaces ? place + 1 : 0; }
  uint64_t distance(uint64_t from, uint64_t to) const {
    return to >= from ? to - from : to + num_buckets * kPlaces - from;
  }

  // At most 70 of 100 places are used.
  static bool fits(uint64_t rows, uint64_t buckets) {
    return rows * 10 <= buckets * kPlaces * 7 && buckets > 0;
  }

  void place(int64_t key, std::byte* row) {
    Bucket* bucket = home(hash_of(key));
    while (true) {
      for (int i = 0; i < kPlaces; ++i) {
        if (bucket->rows[i] == nullptr) {
          bucket->keys[i] = key;
          bucket->rows[i] = row;
          return;
        }
      }
      if (++bucket == buckets + num_buckets) bucket = buckets;
    }
  }
};

}  // namespace nestpipe
