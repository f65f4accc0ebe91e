// An index in device memory: from (table, key) to the slot of a row, by open addressing.
//
// A place is 16 bytes and changes as a whole, so one access finds both key and slot. An empty place
// has no table, so every 64-bit key is allowed. An erased key keeps its place without a slot until
// the next rebuild: searches that passed over it must go on. A search looks at so many places and
// no more; keys are only ever put where that search finds them, so a full index answers "no slot"
// and never hangs.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "device.h"
#include "export.h"

namespace {

using namespace nestpipe;

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 132 * 16;
constexpr int kMostProbes = 4096;
constexpr int kAges = 2048;  // older slots count as this old
// How a use fades: each counts 2 % less with every batch. Nothing gets warmer than what is used in
// every batch, 194 batches ahead of its last one.
constexpr float kFading = 0.02020271F;  // -ln 0.98
constexpr int32_t kWarmest = 256, kForgotten = 4096;

enum Slot : int32_t { kNone = -1, kPending = -2 };
constexpr int32_t kFreeStamp = INT32_MIN;

struct alignas(16) Place {
  int64_t key;
  uint32_t tag;  // 1 + table; 0: empty
  int32_t slot;
};
constexpr int kTogether = 2;  // places in the 32 bytes that memory hands out at once

struct Counters {
  int32_t free;         // slots in the list of free ones
  int32_t used;         // places that are not empty
  int32_t num_new;      // of the last call: keys that got a slot
  int32_t num_missing;  // of the last call: keys, repeats included, that got none
  int32_t num_victims;  // of the last choice
  int32_t hand;         // the slot where the next choice begins
  int32_t num_urgent;   // of the last choice for keys that got no slot
  // While a kernel runs; zero between kernels.
  int32_t taken, claimed, missing, blocks_done;
};

struct Index {
  Place* places;
  int64_t num_places;  // even
  int64_t* slot_keys;
  int32_t* slot_tables;
  int32_t* stamps;  // the last batch that uses a slot
  int32_t* heats;   // the batch whose single use would count as much now as all uses of a slot
  int32_t* free_slots;
  int64_t num_slots;
  Counters* counters;
};

struct Keys {
  const int64_t* keys;
  int64_t count;
  Cells cells;
};

__device__ inline Place* home_of(const Index& index, int64_t key, uint32_t tag) {
  const auto pairs = static_cast<uint64_t>(index.num_places) / kTogether;
  return index.places + kTogether * __umul64hi(hash_of(key, tag), pairs);
}

// Adds what the threads of a block have counted; one counter for every thread of a GPU is slow.
__device__ inline void add_of_block(int32_t* counter, int32_t mine) {
  const int32_t all = begin_in_block<kThreads>(mine).total;
  if (threadIdx.x == 0 && all > 0) atomicAdd(counter, all);
}

// A slot for a new key, or none where all are taken.
__device__ int32_t take_slot(const Index& index, int32_t free, int64_t key, uint32_t tag,
                             int32_t* new_slots) {
  const int32_t number = count_one(&index.counters->taken);
  if (number >= free) return kNone;
  const int32_t slot = index.free_slots[free - 1 - number];
  index.slot_keys[slot] = key;
  index.slot_tables[slot] = static_cast<int32_t>(tag) - 1;
  new_slots[number] = slot;
  return slot;
}

// What a look at one place says.
struct Look {
  bool ends;   // the search is over
  bool again;  // another thread is about to give the place its slot
  int32_t slot;
  bool claims = false;  // an empty place was taken
};

__device__ Look look(const Index& index, Place* at, Place seen, int64_t key, uint32_t tag,
                     int32_t free, int32_t* new_slots) {
  const bool insert = new_slots != nullptr;
  const auto full = [&] { return load_now(&index.counters->taken) >= free; };
  if (seen.tag == 0) {
    if (!insert) return {true, false, kNone};
    // Another thread may have put this very key here, with the last slot, since this one looked.
    const bool none_left = full();
    seen = none_left ? load_whole(at)
                     : swap_whole(at, Place{0, 0, 0}, Place{key, tag, kPending});
    if (seen.tag == 0) {
      if (none_left) return {true, false, kNone};
      const int32_t slot = take_slot(index, free, key, tag, new_slots);
      store_now(&at->slot, slot);
      return {true, false, slot, true};
    }
  }
  if (seen.key != key || seen.tag != tag) return {false, false, kNone};
  if (seen.slot >= 0) return {true, false, seen.slot};
  if (seen.slot == kPending) return {false, true, kNone};
  if (!insert) return {true, false, kNone};
  if (full()) {
    const int32_t now = load_now(&at->slot);
    return {now != kPending, now == kPending, now};
  }
  if (atomicCAS(&at->slot, static_cast<int32_t>(kNone), static_cast<int32_t>(kPending)) != kNone) {
    return {false, true, kNone};
  }
  const int32_t slot = take_slot(index, free, key, tag, new_slots);
  store_now(&at->slot, slot);
  return {true, false, slot};
}

// The slot of a key. Where `new_slots` is not null, a key that has none gets one, if there is one;
// `claimed` counts the empty places that were taken for such keys.
__device__ int32_t search(const Index& index, int64_t key, uint32_t tag, int32_t free,
                          int32_t* new_slots, int32_t& claimed) {
  Place* at = home_of(index, key, tag);
  for (int probed = 0; probed < kMostProbes && probed < index.num_places;) {
    const Place seen[kTogether] = {load_whole(at), load_whole(at + 1)};
    bool again = false;
    for (int i = 0; i < kTogether && !again; ++i) {
      const Look found = look(index, at + i, seen[i], key, tag, free, new_slots);
      claimed += found.claims;
      if (found.ends) return found.slot;
      again = found.again;
    }
    if (again) continue;
    probed += kTogether;
    at += kTogether;
    if (at == index.places + index.num_places) at = index.places;
  }
  return kNone;
}

// The heat of a slot that is used once more: with h batches since its heat the uses before count
// 0.98^h of one.
__device__ inline int32_t warmer(int32_t heat, int32_t batch) {
  const auto since = static_cast<float>(max(-kForgotten, min(kForgotten, batch - heat)));
  return batch + static_cast<int32_t>(rintf(log1pf(expf(-kFading * since)) / kFading));
}

// Only a few keys of a kernel have no slot, so the counter is not crowded. Of several threads that
// use a slot in the same batch one alone finds an older stamp.
__device__ void use_slot(const Index& index, int32_t slot, int32_t batch) {
  if (slot == kNone) {
    count_one(&index.counters->missing);
  } else if (index.stamps[slot] != batch) {
    const int32_t before = atomicExch(&index.stamps[slot], batch);
    if (before == batch) return;
    index.heats[slot] = before == kFreeStamp ? batch : warmer(index.heats[slot], batch);
  }
}

__global__ void __launch_bounds__(kThreads)
    find_or_insert(const Index index, const Keys keys, int32_t batch, int32_t* slots,
                   int32_t* new_slots) {
  Counters& counters = *index.counters;
  const int32_t free = counters.free;
  int32_t claimed = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < keys.count;
       i += step) {
    const auto tag = static_cast<uint32_t>(keys.cells.table_of(keys.cells.cell_of(i))) + 1;
    const int32_t slot = search(index, keys.keys[i], tag, free, new_slots, claimed);
    slots[i] = slot;
    use_slot(index, slot, batch);
  }
  add_of_block(&counters.claimed, claimed);
  if (is_last_block(&counters.blocks_done) && threadIdx.x == 0) {
    counters.num_new = min(counters.taken, free);
    counters.num_missing = counters.missing;
    counters.free = free - counters.num_new;
    counters.used += counters.claimed;
    counters.taken = counters.claimed = counters.missing = 0;
  }
}

// The same for keys that got no slot, now that more are free; new slots go behind those before.
__global__ void __launch_bounds__(kThreads)
    insert_missing(const Index index, const Keys keys, int32_t batch, int32_t* slots,
                   int32_t* new_slots) {
  Counters& counters = *index.counters;
  if (counters.num_missing == 0) return;
  const int32_t free = counters.free, before = counters.num_new;
  int32_t claimed = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < keys.count;
       i += step) {
    if (slots[i] != kNone) continue;
    const auto tag = static_cast<uint32_t>(keys.cells.table_of(keys.cells.cell_of(i))) + 1;
    const int32_t slot = search(index, keys.keys[i], tag, free, new_slots + before, claimed);
    slots[i] = slot;
    use_slot(index, slot, batch);
  }
  add_of_block(&counters.claimed, claimed);
  if (is_last_block(&counters.blocks_done) && threadIdx.x == 0) {
    const int32_t more = min(counters.taken, free);
    counters.num_new = before + more;
    counters.num_missing = counters.missing;
    counters.free = free - more;
    counters.used += counters.claimed;
    counters.taken = counters.claimed = counters.missing = 0;
  }
}

// The keys and tables of some slots, as they are now.
__global__ void __launch_bounds__(kThreads)
    list_keys(const Index index, const int32_t* slots, const int32_t* count, int64_t* keys,
              int32_t* tables) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < *count;
       i += step) {
    keys[i] = index.slot_keys[slots[i]];
    tables[i] = index.slot_tables[slots[i]];
  }
}

__global__ void __launch_bounds__(kThreads)
    find(const Index index, const Keys keys, int32_t* slots) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < keys.count;
       i += step) {
    const auto tag = static_cast<uint32_t>(keys.cells.table_of(keys.cells.cell_of(i))) + 1;
    int32_t claimed = 0;
    slots[i] = search(index, keys.keys[i], tag, 0, nullptr, claimed);
  }
}

// The place that holds a key with a slot.
__device__ Place* place_of(const Index& index, int64_t key, uint32_t tag) {
  Place* at = home_of(index, key, tag);
  for (int probed = 0; probed < kMostProbes; ++probed) {
    const Place seen = load_whole(at);
    if (seen.tag == 0) return nullptr;
    if (seen.key == key && seen.tag == tag) return at;
    if (++at == index.places + index.num_places) at = index.places;
  }
  return nullptr;
}

// Gives slots back; a slot that is free already stays so.
__global__ void __launch_bounds__(kThreads)
    erase(const Index index, const int32_t* slots, const int32_t* count) {
  Counters& counters = *index.counters;
  const int32_t free = counters.free;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < *count;
       i += step) {
    const int32_t slot = slots[i];
    if (atomicExch(&index.stamps[slot], kFreeStamp) == kFreeStamp) continue;
    const auto tag = static_cast<uint32_t>(index.slot_tables[slot]) + 1;
    Place* const at = place_of(index, index.slot_keys[slot], tag);
    if (at) store_now(&at->slot, static_cast<int32_t>(kNone));
    index.free_slots[free + count_one(&counters.taken)] = slot;
  }
  if (is_last_block(&counters.blocks_done) && threadIdx.x == 0) {
    counters.free = free + counters.taken;
    counters.taken = 0;
  }
}

// Whether places would be more than that in use, were all free slots given to new keys.
__device__ bool is_crowded(const Index& index, int64_t most_used) {
  return static_cast<int64_t>(index.counters->used) + index.counters->free > most_used;
}

__global__ void __launch_bounds__(kThreads) clear_places(const Index index, int64_t most_used) {
  if (!is_crowded(index, most_used)) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < index.num_places;
       i += step) {
    index.places[i] = Place{0, 0, 0};
  }
}

// Every key that has a slot gets a place; there are more places than slots, so all find one.
__global__ void __launch_bounds__(kThreads) fill_places(const Index index, int64_t most_used) {
  if (!is_crowded(index, most_used)) return;
  Counters& counters = *index.counters;
  int32_t claimed = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; s < index.num_slots;
       s += step) {
    if (index.stamps[s] == kFreeStamp) continue;
    const auto tag = static_cast<uint32_t>(index.slot_tables[s]) + 1;
    const Place wanted{index.slot_keys[s], tag, static_cast<int32_t>(s)};
    Place* at = home_of(index, wanted.key, tag);
    while (swap_whole(at, Place{0, 0, 0}, wanted).tag != 0) {
      if (++at == index.places + index.num_places) at = index.places;
    }
    ++claimed;
  }
  add_of_block(&counters.claimed, claimed);
  if (is_last_block(&counters.blocks_done) && threadIdx.x == 0) {
    counters.used = counters.claimed;
    counters.claimed = 0;
  }
}

// Slots whose batch is over are candidates: those of `window` slots from the hand on.
struct Candidates {
  int32_t oldest_in_flight;
  int32_t least_free;  // so many slots are to be free in the end
  int64_t window;
  bool urgent;  // instead, as many as the last call had keys without a slot
};

__device__ inline int32_t least_free_of(const Index& index, const Candidates& among) {
  return among.urgent ? index.counters->num_missing : among.least_free;
}

__device__ inline int age_of(const Index& index, const Candidates& among, int64_t slot) {
  const int32_t stamp = index.stamps[slot];
  if (stamp == kFreeStamp || stamp >= among.oldest_in_flight) return 0;
  const int64_t age = static_cast<int64_t>(among.oldest_in_flight) + kWarmest - index.heats[slot];
  return static_cast<int>(age < 1 ? 1 : age < kAges ? age : kAges - 1);
}

__device__ inline int64_t slot_of(const Index& index, int64_t number) {
  const int64_t slot = index.counters->hand + number;
  return slot < index.num_slots ? slot : slot - index.num_slots;
}

__global__ void __launch_bounds__(kThreads)
    count_ages(const Index index, const Candidates among, int32_t* ages) {
  __shared__ int32_t counts[kAges];
  if (index.counters->free >= least_free_of(index, among)) return;
  for (int a = static_cast<int>(threadIdx.x); a < kAges; a += kThreads) counts[a] = 0;
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; n < among.window;
       n += step) {
    const int age = age_of(index, among, slot_of(index, n));
    if (age > 0) atomicAdd(&counts[age], 1);
  }
  __syncthreads();
  for (int a = static_cast<int>(threadIdx.x); a < kAges; a += kThreads) {
    if (counts[a] > 0) atomicAdd(&ages[a], counts[a]);
  }
}

// The age from which on all go, and how many go of those that are one younger.
struct Limit {
  int age;
  int32_t more;
};

// Every thread looks at a few ages, the first threads at the oldest; the one where `wanted` are
// passed knows the limit.
__device__ void set_limit(const int32_t* ages, int32_t wanted, Limit* limit) {
  constexpr int kOfThread = kAges / kThreads;
  const int oldest = kAges - 1 - static_cast<int>(threadIdx.x) * kOfThread;
  int32_t counts[kOfThread], sum = 0;
  for (int a = 0; a < kOfThread; ++a) sum += counts[a] = ages[oldest - a];
  const Begin found = begin_in_block<kThreads>(sum);
  if (threadIdx.x == 0 && found.total <= wanted) *limit = {1, 0};
  int32_t older = found.begin;
  for (int a = 0; a < kOfThread; ++a) {
    if (older <= wanted && older + counts[a] > wanted) *limit = {oldest - a + 1, wanted - older};
    older += counts[a];
  }
  __syncthreads();
}

// The coldest go; of those of one heat, whoever comes first.
__global__ void __launch_bounds__(kThreads)
    choose_victims(const Index index, const Candidates among, const int32_t* ages,
                   int32_t* victims) {
  __shared__ Limit limit;
  Counters& counters = *index.counters;
  const int32_t wanted = max(0, least_free_of(index, among) - counters.free);
  if (wanted > 0) set_limit(ages, wanted, &limit);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       wanted > 0 && n < among.window; n += step) {
    const int64_t slot = slot_of(index, n);
    const int age = age_of(index, among, slot);
    const bool goes = age >= limit.age || (limit.more > 0 && age > 0 && age == limit.age - 1 &&
                                           count_one(&counters.claimed) < limit.more);
    if (goes) victims[count_one(&counters.taken)] = static_cast<int32_t>(slot);
  }
  if (is_last_block(&counters.blocks_done) && threadIdx.x == 0) {
    (among.urgent ? counters.num_urgent : counters.num_victims) = counters.taken;
    const int64_t next = slot_of(index, wanted > 0 ? among.window % index.num_slots : 0);
    counters.hand = static_cast<int32_t>(next);
    counters.taken = counters.claimed = 0;
  }
}

// First values: a function of (table seed, key, column) alone, bit for bit `native/store/first_values.h`, whose
// functions are the host's: single float64 operations, each rounded on its own.
constexpr uint64_t kStep = 0x9E3779B97F4A7C15ULL;

__device__ inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

__device__ inline double normal_of(uint64_t bits) {
  const auto sum = static_cast<int32_t>((bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) +
                                        ((bits >> 32) & 0xFFFF) + (bits >> 48));
  const double x = static_cast<double>(sum - 131070) * (1.0 / 65536.0);
  const double s = x * x;
  double p = 0.005411906108740816;
  p = p * s + -0.017329680146971713;
  p = p * s + 0.02863321968706253;
  p = p * s + 0.04776074440493899;
  p = p * s + 1.6668930519836869;
  return p * x;
}

struct FirstRows {
  float* rows;
  int64_t stride;  // numbers
  int32_t dim, state_dim;
  float state_init;
  const uint64_t* seeds;  // by table
  const double* stds;
  const int64_t* keys;    // of the slots listed; null: those that the index has now
  const int32_t* tables;
};

// A warp for each new slot.
__global__ void __launch_bounds__(kThreads)
    write_first(const Index index, const FirstRows to, const int32_t* slots,
                const int32_t* count) {
  const int lane = lane_of_thread();
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
       i < *count; i += step) {
    const int32_t slot = slots[i], table = to.tables ? to.tables[i] : index.slot_tables[slot];
    const auto key = static_cast<uint64_t>(to.keys ? to.keys[i] : index.slot_keys[slot]);
    const uint64_t start = mix(mix(to.seeds[table] + kStep) ^ key);
    const double std = to.stds[table];
    float* const row = to.rows + slot * to.stride;
    for (int c = lane; c < to.dim; c += kWarp) {
      const uint64_t bits = mix(start + static_cast<uint64_t>(c + 1) * kStep);
      row[c] = static_cast<float>(normal_of(bits) * std);
    }
    for (int c = lane; c < to.state_dim; c += kWarp) row[to.dim + c] = to.state_init;
  }
}

}  // namespace

// Finds the slot of every key; one without a slot gets one and goes on the list of new slots,
// which has room for all keys. Batches must not go back in number.
NESTPIPE_API int nestpipe_index_find_or_insert(const Index* index, const Keys* keys, int32_t batch,
                                               int32_t* slots, int32_t* new_slots,
                                               cudaStream_t stream) {
  // One block at least: it settles the counts.
  const int64_t blocks = std::max<int64_t>(1, blocks_for(keys->count, kThreads, kMostBlocks));
  return launch(find_or_insert, blocks, kThreads, stream, *index, *keys, batch, slots, new_slots);
}

// Gives slots to keys that `find_or_insert` left without one, where there are some by now. Nothing
// happens where no key is without.
NESTPIPE_API int nestpipe_index_insert_missing(const Index* index, const Keys* keys, int32_t batch,
                                               int32_t* slots, int32_t* new_slots,
                                               cudaStream_t stream) {
  const int64_t blocks = blocks_for(keys->count, kThreads, kMostBlocks);
  return launch(insert_missing, blocks, kThreads, stream, *index, *keys, batch, slots, new_slots);
}

// The keys and tables of some slots; `most` bounds their number, which stands in device memory.
NESTPIPE_API int nestpipe_index_list(const Index* index, const int32_t* slots, const int32_t* count,
                                     int64_t most, int64_t* keys, int32_t* tables,
                                     cudaStream_t stream) {
  const int64_t blocks = blocks_for(most, kThreads, kMostBlocks);
  return launch(list_keys, blocks, kThreads, stream, *index, slots, count, keys, tables);
}

// The slot of every key, -1 where it has none.
NESTPIPE_API int nestpipe_index_find(const Index* index, const Keys* keys, int32_t* slots,
                                     cudaStream_t stream) {
  const int64_t blocks = blocks_for(keys->count, kThreads, kMostBlocks);
  return launch(find, blocks, kThreads, stream, *index, *keys, slots);
}

// Erases the keys of some slots; `most` bounds their number, which stands in device memory.
NESTPIPE_API int nestpipe_index_erase(const Index* index, const int32_t* slots,
                                      const int32_t* count, int64_t most, cudaStream_t stream) {
  const int64_t blocks = blocks_for(most, kThreads, kMostBlocks);
  return launch(erase, blocks, kThreads, stream, *index, slots, count);
}

// Makes erased places empty, where those in use and the free slots together are more than that.
NESTPIPE_API int nestpipe_index_rebuild(const Index* index, int64_t most_used,
                                        cudaStream_t stream) {
  const int64_t clear = blocks_for(index->num_places, kThreads, kMostBlocks);
  const int64_t fill = blocks_for(index->num_slots, kThreads, kMostBlocks);
  if (const int status = launch(clear_places, clear, kThreads, stream, *index, most_used)) {
    return status;
  }
  return launch(fill_places, fill, kThreads, stream, *index, most_used);
}

// Chooses slots to erase, so that `least_free` are free then; never one of a batch in flight.
// `ages` is room for 2,048 counts, `victims` for `least_free` slots. With `urgent` as many are to
// be free as keys of the last call are without a slot, and `num_urgent` says how many are chosen.
NESTPIPE_API int nestpipe_index_choose(const Index* index, int32_t oldest_in_flight,
                                       int32_t least_free, int64_t window, int32_t urgent,
                                       int32_t* ages, int32_t* victims, cudaStream_t stream) {
  const Candidates among{oldest_in_flight, least_free, std::min(window, index->num_slots),
                         urgent != 0};
  if (const int status = cudaMemsetAsync(ages, 0, sizeof(int32_t) * kAges, stream)) return status;
  const int64_t blocks = blocks_for(among.window, kThreads * 4, kMostBlocks);
  if (const int status = launch(count_ages, blocks, kThreads, stream, *index, among, ages)) {
    return status;
  }
  return launch(choose_victims, blocks, kThreads, stream, *index, among,
                static_cast<const int32_t*>(ages), victims);
}

// Writes the first weights and state of the rows in some slots; `count` is in device memory.
NESTPIPE_API int nestpipe_index_first_rows(const Index* index, const FirstRows* to,
                                           const int32_t* slots, const int32_t* count,
                                           int64_t most, cudaStream_t stream) {
  const int64_t blocks = blocks_for(most, kThreads / kWarp, kMostBlocks);
  return launch(write_first, blocks, kThreads, stream, *index, *to, slots, count);
}
