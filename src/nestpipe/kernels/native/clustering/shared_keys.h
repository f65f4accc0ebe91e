// What a batch is clustered by: the keys that several of its samples have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "clustering/cluster.h"

namespace nestpipe {

// The keys that at least two samples have, as small numbers: no other key can be saved.
struct SharedKeys {
  std::vector<size_t> starts;  // one per sample, and the end
  std::vector<uint32_t> keys;  // of a sample: each once
  size_t num_keys = 0;

  size_t length(size_t sample) const { return starts[sample + 1] - starts[sample]; }
};

// Numbers 0, 1, 2, ... for keys, in order of first appearance.
class Numbering {
 public:
  uint32_t number_of(int64_t key) {
    if (2 * known_.size() >= slots_.size()) grow();
    uint32_t& slot = find(key);
    if (slot == kFree) {
      slot = static_cast<uint32_t>(known_.size());
      known_.push_back(key);
    }
    return slot;
  }
  size_t size() const { return known_.size(); }

 private:
  static constexpr uint32_t kFree = std::numeric_limits<uint32_t>::max();

  uint32_t& find(int64_t key) {
    const auto mixed = static_cast<uint64_t>(key) * 0x9e3779b97f4a7c15ULL;
    size_t at = static_cast<size_t>(mixed ^ (mixed >> 32)) & (slots_.size() - 1);
    while (slots_[at] != kFree && known_[slots_[at]] != key) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }

  void grow() {
    slots_.assign(std::max<size_t>(1024, 4 * slots_.size()), kFree);
    for (uint32_t i = 0; i < known_.size(); ++i) find(known_[i]) = i;
  }

  std::vector<uint32_t> slots_;
  std::vector<int64_t> known_;
};

inline SharedKeys shared_keys(const ClusterTask& task) {
  const auto samples = static_cast<size_t>(task.num_samples);
  SharedKeys all;
  all.starts.assign(1, 0);
  all.keys.reserve(static_cast<size_t>(task.offsets[samples]));
  Numbering numbering;
  std::vector<size_t> seen_by;      // one more than the latest sample that has the key
  std::vector<uint32_t> frequency;  // samples that have it
  for (size_t sample = 0; sample < samples; ++sample) {
    for (int64_t i = task.offsets[sample]; i < task.offsets[sample + 1]; ++i) {
      const uint32_t key = numbering.number_of(task.keys[i]);
      if (key == seen_by.size()) {
        seen_by.push_back(0);
        frequency.push_back(0);
      }
      if (seen_by[key] == sample + 1) continue;
      seen_by[key] = sample + 1;
      ++frequency[key];
      all.keys.push_back(key);
    }
    all.starts.push_back(all.keys.size());
  }
  std::vector<uint32_t> renumbered(numbering.size());
  for (size_t key = 0; key < numbering.size(); ++key) {
    renumbered[key] = static_cast<uint32_t>(all.num_keys);
    all.num_keys += frequency[key] > 1;
  }
  size_t kept = 0;
  size_t begin = 0;
  for (size_t sample = 0; sample < samples; ++sample) {
    const size_t end = all.starts[sample + 1];
    for (size_t i = begin; i < end; ++i) {
      if (frequency[all.keys[i]] > 1) all.keys[kept++] = renumbered[all.keys[i]];
    }
    begin = end;
    all.starts[sample + 1] = kept;
  }
  all.keys.resize(kept);
  return all;
}

}  // namespace nestpipe
