// Numbers for keys in the order of their first appearance: a small hash that is used and forgotten.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/hash.h"

namespace nestpipe {

class Unique {
 public:
  struct Keys {
    const int64_t* first;
    size_t count;

    const int64_t* begin() const { return first; }
    const int64_t* end() const { return first + count; }
    size_t size() const { return count; }
  };

  // Forgets all keys; so many will follow, of which about as large a part is different as was
  // before.
  void begin(int64_t count) {
    if (asked_ > 0) different_ = static_cast<double>(num_) / static_cast<double>(asked_);
    asked_ = count;
    const auto expected = static_cast<uint64_t>(static_cast<double>(count) * different_);
    uint64_t size = 16;
    while (size <= 2 * expected) size *= 2;
    if (size <= kSmall) size *= 2;
    num_ = 0;
    resize(size);
  }

  // Numbers many keys: `use(i, number)` for each; one that has no number yet gets a new one.
  template <typename Use>
  void number_all(const int64_t* keys, int64_t count, Use use) {
    uint32_t numbers[kAtOnce];
    for (int64_t first = 0; first < count; first += kAtOnce) {
      const int64_t here = std::min(kAtOnce, count - first);
      number_some(keys + first, here, numbers);
      for (int64_t j = 0; j < here; ++j) use(first + j, numbers[j]);
    }
  }

  Keys keys() const { return {keys_.data(), num_}; }

 private:
  static constexpr int64_t kAtOnce = 64;
  // So many places stay in a core's cache when they are twice as many, and fewer keys collide.
  static constexpr uint64_t kSmall = 32768;

  void number_some(const int64_t* some, int64_t count, uint32_t* numbers) {
    while (2 * (num_ + static_cast<uint64_t>(count)) > mask_) resize(2 * (mask_ + 1));
    uint32_t* const places = places_.data();
    int64_t* const keys = keys_.data();
    const uint64_t mask = mask_;
    uint64_t hashes[kAtOnce];
    for (int64_t j = 0; j < count; ++j) hashes[j] = hash_of(some[j]);
    for (int64_t j = 0; j < count; ++j) __builtin_prefetch(&places[hashes[j] & mask], 1);
    auto num = static_cast<uint32_t>(num_);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t key = some[j];
      uint64_t at = hashes[j] & mask;
      // Nobody can guess whether a key is new, so there is no branch on it: it is noted as the next
      // one, which counts only where its place was empty.
      uint32_t number;
      for (;; at = (at + 1) & mask) {
        const uint32_t place = places[at];
        const bool fresh = place == 0;
        number = fresh ? num : place - 1;
        keys[num] = key;
        places[at] = number + 1;
        num += fresh;
        if (keys[number] == key) break;
      }
      numbers[j] = number;
    }
    num_ = num;
  }

  void resize(uint64_t size) {
    if (places_.size() < size) places_.resize(size);
    if (keys_.size() <= size / 2) keys_.resize(size / 2 + 1);
    std::fill(places_.begin(), places_.begin() + static_cast<int64_t>(size), 0U);
    mask_ = size - 1;
    for (uint32_t number = 0; number < num_; ++number) {
      uint64_t at = hash_of(keys_[number]) & mask_;
      while (places_[at] != 0) at = (at + 1) & mask_;
      places_[at] = number + 1;
    }
  }

  std::vector<uint32_t> places_;  // 1 + number, 0: empty
  std::vector<int64_t> keys_;     // by number; one more may be written
  uint64_t num_ = 0;
  uint64_t mask_ = 0;
  int64_t asked_ = 0;
  double different_ = 1.0;
};

}  // namespace nestpipe
