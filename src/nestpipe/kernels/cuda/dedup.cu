// The requester's routing: unique keys of a micro-batch by owner, and which of them each term is.
//
// The lists are those of the host's native routing: by owner, peers first and this rank last, then
// by table, then in the order of first appearance. Keys come table by table, so that is the order
// of positions inside an owner. Only counts leave for the host, and nothing here waits for it.
//
// `order` is an owner's position among "peers, then self".
#include <cstdint>

#include "device.h"
#include "export.h"

namespace {

using namespace nestpipe;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kRounds = 8, kOfWarp = kRounds * kWarp, kOfBlock = kWarps * kOfWarp;
constexpr int kScanThreads = 1024;
constexpr int kMostRanks = 512;
constexpr int64_t kMostBlocks = INT32_MAX;
constexpr int32_t kEmpty = -1;

struct Wanted {
  const int64_t* keys;
  int64_t count;
  Cells tables;
  const int32_t* table_owners;  // by table: its one owner; -1: each key has its own; null: all have
  int32_t ranks, rank;
};

struct Deduped {
  int32_t* places;    // 2^n: the first position of a key, in the end -2 - its number; begins as -1
  int64_t num_places;
  int32_t* place_of;  // of each term
  int32_t* starts;    // by owner and block: how many keys, then the number of the first
  int64_t* keys;      // unique
  int32_t* inverse;   // of each term: the number of its key
  int32_t* counts;    // by rank and table, then the sum of all
};

// 63 bits, as the host mixes them.
__device__ inline uint64_t mixed(int64_t key, int64_t table) {
  uint64_t x = static_cast<uint64_t>(key) +
               static_cast<uint64_t>(table + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return (x ^ (x >> 31)) & 0x7FFFFFFFFFFFFFFFULL;
}

__device__ inline int32_t owner_of(const Wanted& wanted, int64_t key, int64_t table) {
  if (wanted.table_owners && wanted.table_owners[table] >= 0) return wanted.table_owners[table];
  const auto ranks = static_cast<uint64_t>(wanted.ranks);
  const uint64_t hash = mixed(key, table);
  return static_cast<int32_t>((ranks & (ranks - 1)) == 0 ? hash & (ranks - 1) : hash % ranks);
}

// The other ranks in order, then this one.
__device__ inline int32_t order_of(const Wanted& wanted, int32_t owner) {
  return owner == wanted.rank ? wanted.ranks - 1 : owner - (owner > wanted.rank);
}

__device__ inline int32_t owner_at(const Wanted& wanted, int32_t order) {
  return order == wanted.ranks - 1 ? wanted.rank : order + (order >= wanted.rank);
}

// Terms with the same key meet in one place, which ends up with the first of their positions. All
// positions that a place ever has are of one key, so it can be compared by any of them.
__global__ void __launch_bounds__(kThreads) meet(const Wanted wanted, const Deduped to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= wanted.count) return;
  const int64_t key = wanted.keys[i], cell = wanted.tables.cell_of(i);
  const int64_t begin = cell ? wanted.tables.ends[cell - 1] : 0, end = wanted.tables.ends[cell];
  const auto mask = static_cast<uint64_t>(to.num_places) - 1;
  const auto own = static_cast<int32_t>(i);
  uint64_t at = hash_of(key, static_cast<uint32_t>(cell)) & mask;
  for (;; at = (at + 1) & mask) {
    int32_t seen = load_now(&to.places[at]);
    if (seen == kEmpty) seen = atomicCAS(&to.places[at], kEmpty, own);
    if (seen == kEmpty) break;
    if (seen >= begin && seen < end && wanted.keys[seen] == key) {
      if (own < seen) atomicMin(&to.places[at], own);
      break;
    }
  }
  to.place_of[i] = static_cast<int32_t>(at);
}

// The terms of a lane, round by round: the order of the owner of each that is the first with its
// key, else -1.
struct Firsts {
  int32_t orders[kRounds], tables[kRounds];

  __device__ Firsts(const Wanted& wanted, const Deduped& to, int64_t begin) {
    int32_t place[kRounds], first[kRounds];
    for (int r = 0; r < kRounds; ++r) {
      const int64_t i = begin + r * kWarp;
      place[r] = i < wanted.count ? to.place_of[i] : 0;
    }
    for (int r = 0; r < kRounds; ++r) first[r] = to.places[place[r]];
    for (int r = 0; r < kRounds; ++r) {
      const int64_t i = begin + r * kWarp;
      orders[r] = -1;
      if (i >= wanted.count || first[r] != i) continue;
      tables[r] = static_cast<int32_t>(wanted.tables.cell_of(i));
      orders[r] = order_of(wanted, owner_of(wanted, wanted.keys[i], tables[r]));
    }
  }
};

__device__ inline int64_t first_of_lane() {
  return static_cast<int64_t>(blockIdx.x) * kOfBlock +
         static_cast<int64_t>(threadIdx.x) / kWarp * kOfWarp + lane_of_thread();
}

// The number of a term among those of its owner and warp so far; `counts` are the warp's.
__device__ inline int32_t number_in_warp(int32_t order, int32_t* counts) {
  const unsigned peers = __match_any_sync(kAllLanes, order);
  const unsigned before = peers & ((1U << lane_of_thread()) - 1);
  const int32_t number = order >= 0 ? counts[order] + __popc(before) : 0;
  __syncwarp();
  if (order >= 0 && before == 0) counts[order] += __popc(peers);
  __syncwarp();
  return number;
}

__device__ inline void clear_counts(int32_t (&counts)[kWarps][kMostRanks], int32_t ranks) {
  for (int s = lane_of_thread(); s < ranks; s += kWarp) counts[threadIdx.x / kWarp][s] = 0;
  __syncwarp();
}

// Counts first terms by owner for each block, and by rank and table for all.
__global__ void __launch_bounds__(kThreads) count_firsts(const Wanted wanted, const Deduped to) {
  __shared__ int32_t counts[kWarps][kMostRanks];
  clear_counts(counts, wanted.ranks);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kOfBlock;
  const int64_t last = min(begin + kOfBlock, wanted.count) - 1;
  const int64_t table = wanted.tables.cell_of(begin);
  const bool one_table = last < wanted.tables.ends[table];
  const Firsts firsts(wanted, to, first_of_lane());
  for (int r = 0; r < kRounds; ++r) {
    number_in_warp(firsts.orders[r], counts[threadIdx.x / kWarp]);
    if (firsts.orders[r] >= 0 && !one_table) {
      const int64_t owner = owner_at(wanted, firsts.orders[r]);
      atomicAdd(&to.counts[owner * wanted.tables.count + firsts.tables[r]], 1);
    }
  }
  __syncthreads();
  for (auto s = static_cast<int32_t>(threadIdx.x); s < wanted.ranks; s += kThreads) {
    int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += counts[w][s];
    to.starts[static_cast<int64_t>(s) * gridDim.x + blockIdx.x] = sum;
    if (one_table && sum > 0) {
      const int64_t owner = owner_at(wanted, s);
      atomicAdd(&to.counts[owner * wanted.tables.count + table], sum);
    }
  }
}

// From counts to where each begins, by one block.
__global__ void __launch_bounds__(kScanThreads)
    turn_into_starts(int32_t* starts, int64_t count, int32_t* sum) {
  int32_t before = 0;
  for (int64_t tile = 0; tile < count; tile += kScanThreads) {
    const int64_t i = tile + threadIdx.x;
    const Begin found = begin_in_block<kScanThreads>(i < count ? starts[i] : 0);
    if (i < count) starts[i] = before + found.begin;
    before += found.total;
  }
  if (threadIdx.x == 0) *sum = before;
}

// Numbers the first terms, and leaves each number in the place of its key.
__global__ void __launch_bounds__(kThreads) number_firsts(const Wanted wanted, const Deduped to) {
  __shared__ int32_t counts[kWarps][kMostRanks];
  clear_counts(counts, wanted.ranks);
  const int64_t begin = first_of_lane();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Firsts firsts(wanted, to, begin);
  int32_t numbers[kRounds];
  for (int r = 0; r < kRounds; ++r) numbers[r] = number_in_warp(firsts.orders[r], counts[warp]);
  __syncthreads();
  for (auto s = static_cast<int32_t>(threadIdx.x); s < wanted.ranks; s += kThreads) {
    int32_t start = to.starts[static_cast<int64_t>(s) * gridDim.x + blockIdx.x];
    for (int w = 0; w < kWarps; ++w) {
      const int32_t of_warp = counts[w][s];
      counts[w][s] = start;
      start += of_warp;
    }
  }
  __syncthreads();
  for (int r = 0; r < kRounds; ++r) {
    if (firsts.orders[r] < 0) continue;
    const int64_t i = begin + r * kWarp;
    const int32_t number = counts[warp][firsts.orders[r]] + numbers[r];
    to.keys[number] = wanted.keys[i];
    to.places[to.place_of[i]] = -2 - number;
  }
}

__global__ void __launch_bounds__(kThreads) turn_around(const Wanted wanted, const Deduped to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < wanted.count) to.inverse[i] = -2 - to.places[to.place_of[i]];
}

}  // namespace

// How many numbers `starts` has room for.
NESTPIPE_API int64_t nestpipe_dedup_starts(int64_t count, int64_t ranks) {
  return blocks_for(count, kOfBlock, kMostBlocks) * ranks;
}

// At most 512 ranks and 2^30 terms; at least as many places as twice the terms.
NESTPIPE_API int nestpipe_dedup(const Wanted* wanted, const Deduped* to, cudaStream_t stream) {
  const int64_t cells = wanted->ranks * wanted->tables.count;
  const int64_t blocks = blocks_for(wanted->count, kOfBlock, kMostBlocks);
  const int64_t each = blocks_for(wanted->count, kThreads, kMostBlocks);
  const auto room = static_cast<size_t>(to->num_places) * sizeof(int32_t);
  const auto counts = static_cast<size_t>(cells + 1) * sizeof(int32_t);
  int status = cudaMemsetAsync(to->counts, 0, counts, stream);
  if (wanted->count == 0) return status;
  if (!status) status = cudaMemsetAsync(to->places, 0xFF, room, stream);
  if (!status) status = launch(meet, each, kThreads, stream, *wanted, *to);
  if (!status) status = launch(count_firsts, blocks, kThreads, stream, *wanted, *to);
  if (!status) {
    status = launch(turn_into_starts, 1, kScanThreads, stream, to->starts,
                    blocks * wanted->ranks, to->counts + cells);
  }
  if (!status) status = launch(number_firsts, blocks, kThreads, stream, *wanted, *to);
  if (!status) status = launch(turn_around, each, kThreads, stream, *wanted, *to);
  return status;
}
