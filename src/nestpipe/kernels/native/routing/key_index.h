// The keys of a batch as an index that later batches are compared with: made once, never changed.
//
// Most keys of a batch are in no other, so what counts is how fast a key is found missing: a bit
// map that fits into a core's cache says so at once for nine of ten.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/hash.h"

namespace nestpipe {

// Places for so many keys: a power of two, at most half of them in use.
inline uint64_t index_places(int64_t count) {
  uint64_t size = 16;
  while (size <= 2 * static_cast<uint64_t>(count)) size *= 2;
  return size;
}

constexpr uint64_t kBitsOfPlace = 4;  // of the bit map, for each place
constexpr uint64_t kBitsOfWord = 32;

// Numbers in the whole index: the places, then the words of the bit map.
inline uint64_t index_size(int64_t count) {
  const uint64_t places = index_places(count);
  return places + places * kBitsOfPlace / kBitsOfWord;
}

// One table's keys and their index; a place is 1 + the number of its key, 0: empty.
class KeyIndex {
 public:
  KeyIndex(const int64_t* keys, int64_t count, const uint32_t* index)
      : keys_(keys), places_(index), mask_(index_places(count) - 1), bits_(index + mask_ + 1) {}

  // `found(i, number)` for each of some keys that is known; the others are written to `missing`.
  // Returns how many those are.
  template <typename KeyAt, typename Found>
  int64_t find_all(int64_t count, KeyAt key_at, Found found, int64_t* missing) const {
    int64_t missed = 0;
    uint64_t hashes[kAtOnce];
    int64_t likely[kAtOnce];
    for (int64_t first = 0; first < count; first += kAtOnce) {
      const int64_t here = std::min(kAtOnce, count - first);
      int64_t num = 0;
      for (int64_t j = 0; j < here; ++j) {  // without a branch that depends on the key
        hashes[j] = hash_of(key_at(first + j));
        const bool may = may_have(hashes[j]);
        likely[num] = j;
        num += may;
        missing[missed] = first + j;
        missed += !may;
      }
      for (int64_t n = 0; n < num; ++n) __builtin_prefetch(&places_[hashes[likely[n]] & mask_]);
      for (int64_t n = 0; n < num; ++n) {
        const int64_t i = first + likely[n];
        const int64_t number = find(key_at(i), hashes[likely[n]]);
        if (number >= 0) {
          found(i, number);
        } else {
          missing[missed++] = i;
        }
      }
    }
    return missed;
  }

  static void make(const int64_t* keys, int64_t count, uint32_t* index) {
    const uint64_t size = index_places(count), mask = size - 1;
    uint32_t* const bits = index + size;
    std::fill(index, index + index_size(count), 0U);
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) __builtin_prefetch(&index[hash_of(keys[i + kAhead]) & mask], 1);
      const uint64_t hash = hash_of(keys[i]), bit = bit_of(hash, mask);
      uint64_t at = hash & mask;
      while (index[at] != 0) at = (at + 1) & mask;
      index[at] = static_cast<uint32_t>(i + 1);
      bits[bit / kBitsOfWord] |= 1U << bit % kBitsOfWord;
    }
  }

 private:
  static constexpr int64_t kAhead = 16, kAtOnce = 64;

  // Other bits of the hash than those that choose the place.
  static uint64_t bit_of(uint64_t hash, uint64_t mask) {
    return (hash >> 32) & (mask * kBitsOfPlace + kBitsOfPlace - 1);
  }

  bool may_have(uint64_t hash) const {
    const uint64_t bit = bit_of(hash, mask_);
    return bits_[bit / kBitsOfWord] >> bit % kBitsOfWord & 1U;
  }

  int64_t find(int64_t key, uint64_t hash) const {
    for (uint64_t at = hash & mask_; places_[at] != 0; at = (at + 1) & mask_) {
      if (keys_[places_[at] - 1] == key) return static_cast<int64_t>(places_[at]) - 1;
    }
    return -1;
  }

  const int64_t* const keys_;
  const uint32_t* const places_;
  const uint64_t mask_;
  const uint32_t* const bits_;
};

}  // namespace nestpipe
