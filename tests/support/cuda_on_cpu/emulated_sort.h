// The one function of cub that the kernels call, for tests without a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace cub {

struct DeviceRadixSort {
  template <typename Key, typename Value>
  static int SortPairs(void* memory, size_t& bytes, const Key* keys, Key* sorted_keys,
                       const Value* values, Value* sorted_values, int count, int first_bit,
                       int end_bit, void* = nullptr) {
    if (memory == nullptr) {
      bytes = 1;
      return 0;
    }
    const auto digits = [&](Key key) {
      return (key >> first_bit) & ((uint64_t{1} << (end_bit - first_bit)) - 1);
    };
    std::vector<int> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return digits(keys[a]) < digits(keys[b]); });
    for (size_t i = 0; i < order.size(); ++i) {
      sorted_keys[i] = keys[order[i]];
      sorted_values[i] = values[order[i]];
    }
    return 0;
  }
};

}  // namespace cub
