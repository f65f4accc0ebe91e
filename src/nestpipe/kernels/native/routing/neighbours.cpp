// What a batch shares with the ones before it, and which rows are left.
#include <cstdint>
#include <vector>

#include "routing/key_index.h"
#include "routing/routing.h"

namespace nestpipe {

namespace {

// Room for two lists of so many keys, and one number more in each. Kept between calls of one
// thread: fresh memory would cost more than the work in it.
int64_t* room_for(int64_t count) {
  static thread_local std::vector<int64_t> mine;
  const auto wanted = 2 * static_cast<size_t>(count) + 2;
  if (mine.size() < wanted) mine.resize(wanted);
  return mine.data();
}

void compare(int64_t tables, const int64_t* now, const int64_t* counts, const KnownKeys& before,
             const KnownKeys* older, Neighbours& out) {
  int64_t start = 0, start_before = 0, start_older = 0;
  const uint32_t* index = before.index;
  const uint32_t* older_index = older ? older->index : nullptr;
  out.num_shared = out.num_carried = 0;
  for (int64_t t = 0; t < tables; ++t) {
    const int64_t* const keys = now + start;
    int64_t* const missed = room_for(counts[t]);
    const KeyIndex known(before.keys + start_before, before.counts[t], index);
    const int64_t num_missed = known.find_all(
        counts[t], [keys](int64_t i) { return keys[i]; },
        [&](int64_t i, int64_t number) {
          out.shared[out.num_shared] = start + i;
          out.shared_before[out.num_shared++] = start_before + number;
        },
        missed);
    if (older != nullptr) {
      const KeyIndex known_older(older->keys + start_older, older->counts[t], older_index);
      known_older.find_all(
          num_missed, [keys, missed](int64_t i) { return keys[missed[i]]; },
          [&](int64_t i, int64_t number) {
            out.carried[out.num_carried] = start + missed[i];
            out.carried_older[out.num_carried++] = start_older + number;
          },
          missed + counts[t] + 1);
      older_index += index_size(older->counts[t]);
      start_older += older->counts[t];
    }
    index += index_size(before.counts[t]);
    start += counts[t], start_before += before.counts[t];
  }
}

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int64_t nestpipe_index_size(int64_t tables, const int64_t* counts) {
  uint64_t size = 0;
  for (int64_t t = 0; t < tables; ++t) size += nestpipe::index_size(counts[t]);
  return static_cast<int64_t>(size);
}

NESTPIPE_API void nestpipe_index(int64_t tables, const int64_t* keys, const int64_t* counts,
                                 uint32_t* index) {
  for (int64_t t = 0; t < tables; ++t) {
    nestpipe::KeyIndex::make(keys, counts[t], index);
    keys += counts[t], index += nestpipe::index_size(counts[t]);
  }
}

NESTPIPE_API int nestpipe_neighbours(int64_t tables, const int64_t* now, const int64_t* counts,
                                     const nestpipe::KnownKeys* before,
                                     const nestpipe::KnownKeys* older,
                                     nestpipe::Neighbours* neighbours) {
  try {
    nestpipe::compare(tables, now, counts, *before, older, *neighbours);
    return nestpipe::kOk;
  } catch (...) {
    return nestpipe::kNoMemory;
  }
}

NESTPIPE_API int64_t nestpipe_others(int64_t tables, const int64_t* table_counts,
                                     const int64_t* positions, int64_t count, int64_t* others,
                                     int64_t* other_counts) {
  try {
    int64_t total = 0;
    for (int64_t t = 0; t < tables; ++t) total += table_counts[t];
    std::vector<bool> given(static_cast<size_t>(total), false);
    for (int64_t i = 0; i < count; ++i) given[static_cast<size_t>(positions[i])] = true;
    int64_t found = 0, position = 0;
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t before = found, end = position + table_counts[t];
      for (; position < end; ++position) {
        if (!given[static_cast<size_t>(position)]) others[found++] = position;
      }
      other_counts[t] = found - before;
    }
    return found;
  } catch (...) {
    return -1;
  }
}
