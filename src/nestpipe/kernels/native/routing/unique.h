// Numbers for keys in the order of their first appearance: a small hash that is used and forgotten.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/hash.h"

namespace nestpipe {

class Unique {
 public:
  // Forgets all keys; about so many different ones will follow.
  void begin(int64_t different) {
    uint64_t size = 16;
    while (size <= 2 * static_cast<uint64_t>(different)) size *= 2;
    keys_.clear();
    resize(size);
  }

  // The number of a key, a new one where it has none yet.
  uint32_t number(int64_t key) {
    uint64_t at = hash_of(key) & mask_;
    for (; places_[at] != 0; at = (at + 1) & mask_) {
      if (keys_[places_[at] - 1] == key) return places_[at] - 1;
    }
    keys_.push_back(key);
    const auto number = static_cast<uint32_t>(keys_.size());
    places_[at] = number;
    if (2 * keys_.size() > mask_) resize(2 * (mask_ + 1));
    return number - 1;
  }

  // Numbers many keys: `use(i, number)` for each.
  template <typename Use>
  void number_all(const int64_t* keys, int64_t count, Use use) {
    for (int64_t i = 0; i < count; ++i) {
      fetch(keys, i, count);
      use(i, number(keys[i]));
    }
  }

  const std::vector<int64_t>& keys() const { return keys_; }

 private:
  static constexpr int64_t kAhead = 16, kHalfWay = 8;

  // Memory that keys will need after the one at `i`: first their places, then what stands there.
  void fetch(const int64_t* keys, int64_t i, int64_t count) const {
    if (i + kAhead < count) __builtin_prefetch(&places_[hash_of(keys[i + kAhead]) & mask_]);
    if (i + kHalfWay < count) {
      const uint32_t place = places_[hash_of(keys[i + kHalfWay]) & mask_];
      if (place != 0) __builtin_prefetch(&keys_[place - 1]);
    }
  }

  void resize(uint64_t size) {
    if (places_.size() < size) places_.resize(size);
    std::fill(places_.begin(), places_.begin() + static_cast<int64_t>(size), 0U);
    mask_ = size - 1;
    for (uint32_t number = 0; number < keys_.size(); ++number) {
      uint64_t at = hash_of(keys_[number]) & mask_;
      while (places_[at] != 0) at = (at + 1) & mask_;
      places_[at] = number + 1;
    }
  }

  std::vector<uint32_t> places_;  // 1 + number, 0: empty
  std::vector<int64_t> keys_;
  uint64_t mask_ = 0;
};

}  // namespace nestpipe
