// Segments: the terms of a batch sorted by the row they belong to, cut into pieces of fixed length.
//
// A piece has at most 32 terms, counted from the start of its segment; `sum_order.h` says how
// pieces are summed. The order of terms alone decides, and not the slots that rows happen to have.
#include <cstddef>
#include <cstdint>

#include "../native/rows/sum_order.h"
#include "device.h"
#include "export.h"

#ifndef NESTPIPE_EMULATED
#if __has_include(<cub/device/device_radix_sort.cuh>)
#include <cub/device/device_radix_sort.cuh>
#define NESTPIPE_SORT
#endif
#else
#include "emulated_sort.h"
#define NESTPIPE_SORT
#endif

namespace {

using namespace nestpipe;

constexpr int kThreads = 256;

struct alignas(16) Piece {
  int32_t begin, count;  // sorted terms
  int32_t id;
  int32_t partial;  // where its sum goes; -1: the piece is all there is of its segment
};

struct alignas(16) LongSegment {
  int32_t begin, pieces;
  int32_t id;
  int32_t unused;
};

struct Cut {
  const int32_t* ids;  // sorted
  int64_t count;
  Piece* pieces;
  LongSegment* longs;
  int32_t* counts;  // pieces, long segments
};

// The first position in [low, high) whose id is `id` or more, or more only. Ids are sorted by their
// bits: negative ones come last.
__device__ inline int64_t bound(const int32_t* ids, int32_t id, bool more, int64_t low,
                                int64_t high) {
  const auto wanted = static_cast<uint32_t>(id);
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    const auto seen = static_cast<uint32_t>(ids[middle]);
    if (seen < wanted || (more && seen == wanted)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Doubles its distance until it has left the segment: most segments end soon.
__device__ inline int64_t start_of(const Cut& cut, int64_t at) {
  const int32_t id = cut.ids[at];
  int64_t distance = kPiece;
  while (at >= distance && cut.ids[at - distance] == id) distance *= 2;
  const int64_t low = at >= distance ? at - distance + 1 : 0;
  return bound(cut.ids, id, false, low, at - distance / 2);
}

__device__ inline int64_t end_of(const Cut& cut, int64_t at) {
  const int32_t id = cut.ids[at];
  int64_t distance = kPiece;
  while (at + distance < cut.count && cut.ids[at + distance] == id) distance *= 2;
  return bound(cut.ids, id, true, at + distance / 2, min(at + distance, cut.count));
}

// Where the sum of a piece of a long segment goes. Two such pieces begin in the same 32 positions
// only where one segment ends and the next one begins.
__device__ inline int32_t partial_of(int64_t at, bool is_head) {
  return static_cast<int32_t>(2 * (at / kPiece) + is_head);
}

struct Found {
  bool piece, is_long;  // a piece begins here, a long segment does
  int64_t start;
};

__device__ Found look(const Cut& cut, int64_t at) {
  const int32_t id = cut.ids[at];
  if (id < 0) return {false, false, 0};
  if (at == 0 || cut.ids[at - 1] != id) {
    return {true, at + kPiece < cut.count && cut.ids[at + kPiece] == id, at};
  }
  if (at < kPiece || cut.ids[at - kPiece] != id) return {false, false, 0};
  const int64_t start = start_of(cut, at);
  return {(at - start) % kPiece == 0, false, start};
}

__global__ void __launch_bounds__(kThreads) cut_segments(const Cut cut) {
  __shared__ int32_t first;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const Found found = at < cut.count ? look(cut, at) : Found{false, false, 0};
  const Begin place = begin_in_block<kThreads>(found.piece);
  if (threadIdx.x == 0) first = atomicAdd(&cut.counts[0], place.total);
  __syncthreads();
  if (!found.piece) return;
  const int32_t id = cut.ids[at];
  const bool is_head = found.start == at, whole = is_head && !found.is_long;
  const int64_t end = bound(cut.ids, id, true, at, min(at + kPiece, cut.count));
  cut.pieces[first + place.begin] = {static_cast<int32_t>(at), static_cast<int32_t>(end - at), id,
                                     whole ? -1 : partial_of(at, is_head)};
  if (found.is_long) {
    const auto pieces = static_cast<int32_t>((end_of(cut, at) - at + kPiece - 1) / kPiece);
    cut.longs[count_one(&cut.counts[1])] = {static_cast<int32_t>(at), pieces, id, 0};
  }
}

}  // namespace

// Memory that sorting needs beside its lists; negative: there is no sort in this library.
NESTPIPE_API int64_t nestpipe_sort_bytes(int64_t count, int bits) {
#ifdef NESTPIPE_SORT
  size_t bytes = 0;
  const auto* const no_keys = static_cast<const uint32_t*>(nullptr);
  const auto* const no_values = static_cast<const int32_t*>(nullptr);
  const int status = cub::DeviceRadixSort::SortPairs(
      nullptr, bytes, no_keys, static_cast<uint32_t*>(nullptr), no_values,
      static_cast<int32_t*>(nullptr), static_cast<int>(count), 0, bits);
  return status ? -1 - status : static_cast<int64_t>(bytes);
#else
  return kNoSort;
#endif
}

// Sorts values by the lowest bits of their ids; equal ids keep their order.
NESTPIPE_API int nestpipe_sort(void* memory, int64_t bytes, const uint32_t* ids,
                               uint32_t* sorted_ids, const int32_t* values, int32_t* sorted_values,
                               int64_t count, int bits, cudaStream_t stream) {
#ifdef NESTPIPE_SORT
  auto room = static_cast<size_t>(bytes);
  return cub::DeviceRadixSort::SortPairs(memory, room, ids, sorted_ids, values, sorted_values,
                                         static_cast<int>(count), 0, bits, stream);
#else
  return kNoSort;
#endif
}

// Cuts sorted ids, of which negative ones count for nothing, into pieces: room for `count` of them
// and for count / 32 long segments.
NESTPIPE_API int nestpipe_cut_segments(const Cut* cut, cudaStream_t stream) {
  const int status = cudaMemsetAsync(cut->counts, 0, 2 * sizeof(int32_t), stream);
  if (status) return status;
  return launch(cut_segments, blocks_for(cut->count, kThreads, INT32_MAX), kThreads, stream, *cut);
}
