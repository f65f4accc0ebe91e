// What the kernels of rows and keys share: launches, counters, tables of keys, 16 bytes at once.
//
// Tests compile the same sources for the host: NESTPIPE_EMULATED then stands for a CUDA runtime in
// which threads are fibers, and which brings what it needs instead of the part below.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace nestpipe {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;
// Answers beside CUDA's own errors, which are not negative.
constexpr int kUnknownOptimizer = -1, kUnknownWidth = -2, kNoSort = -3;

inline int64_t blocks_for(int64_t items, int64_t per_block, int64_t most) {
  return std::min(most, (items + per_block - 1) / per_block);
}

#ifndef NESTPIPE_EMULATED

// Nothing is launched for no blocks.
template <typename... Parameters, typename... Arguments>
int launch_shared(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
                  cudaStream_t stream, Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream>>>(
      arguments...);
  return cudaGetLastError();
}

// The memory that the block's threads share, as many bytes as the launch says.
__device__ inline float* shared_floats() {
  extern __shared__ float memory[];
  return memory;
}

// 16 bytes that other threads may change meanwhile: all of them before a change, or all after it.
template <typename T>
__device__ inline T load_whole(const T* address) {
  static_assert(sizeof(T) == 16 && alignof(T) == 16);
  uint64_t half[2];
  asm volatile(
      "{ .reg .b128 whole;\n"
      "ld.relaxed.gpu.global.b128 whole, [%2];\n"
      "mov.b128 {%0, %1}, whole; }"
      : "=l"(half[0]), "=l"(half[1])
      : "l"(address)
      : "memory");
  T loaded;
  memcpy(&loaded, half, sizeof loaded);
  return loaded;
}

template <typename T>
__device__ inline T swap_whole(T* address, T expected, T wanted) {
  return atomicCAS(address, expected, wanted);
}

#endif

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
           Arguments... arguments) {
  return launch_shared(kernel, blocks, threads, 0, stream, arguments...);
}

template <typename T>
__device__ inline T load_now(const T* address) {
  return *reinterpret_cast<const volatile T*>(address);
}

template <typename T>
__device__ inline void store_now(T* address, T value) {
  *reinterpret_cast<volatile T*>(address) = value;
}

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x % kWarp); }

// Adds one and returns what was there; threads of a warp that come together share one addition.
__device__ inline int32_t count_one(int32_t* counter) {
  const unsigned together = __activemask();
  const int lane = lane_of_thread(), leader = __ffs(static_cast<int>(together)) - 1;
  int32_t first = 0;
  if (lane == leader) first = atomicAdd(counter, __popc(together));
  first = __shfl_sync(together, first, leader);
  return first + __popc(together & ((1U << lane) - 1));
}

// True in all threads of the last block that comes here; what the others wrote is then visible.
__device__ inline bool is_last_block(int32_t* blocks_done) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(blocks_done, 1) == static_cast<int32_t>(gridDim.x) - 1;
    if (last) *blocks_done = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

// Where each thread's items begin among those of its block, and how many the block has.
struct Begin {
  int32_t begin, total;
};

// All threads of the block call it.
template <int kThreads>
__device__ inline Begin begin_in_block(int32_t items) {
  __shared__ int32_t of_warps[kThreads / kWarp];
  const int lane = lane_of_thread(), warp = static_cast<int>(threadIdx.x) / kWarp;
  int32_t up_to = items;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, up_to, distance);
    if (lane >= distance) up_to += below;
  }
  __syncthreads();  // all have read what an earlier call left
  if (lane == kWarp - 1) of_warps[warp] = up_to;
  __syncthreads();
  Begin found{up_to - items, 0};
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp) found.begin += of_warps[w];
    found.total += of_warps[w];
  }
  return found;
}

// The table of each key: keys lie in cells one after the other, all of a cell in one table.
struct Cells {
  const int64_t* ends;    // where each cell ends
  const int32_t* tables;  // of each cell; null: cell c is table c
  int64_t count;

  // The number of the cell that holds position `at`.
  __device__ int64_t cell_of(int64_t at) const {
    int64_t low = 0, high = count - 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (at < ends[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  __device__ int32_t table_of(int64_t cell) const {
    return tables ? tables[cell] : static_cast<int32_t>(cell);
  }
};

// Chooses a key's place. It shares no constant with the hash that chooses the key's owner, else the
// keys of one owner would crowd into a part of the places.
__device__ inline uint64_t hash_of(int64_t key, uint32_t table) {
  uint64_t x = static_cast<uint64_t>(key) ^ (table * 0xD6E8FEB86659FD93ULL);
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ULL;
  x = (x ^ (x >> 32)) * 0xA0761D6478BD642FULL;
  return x ^ (x >> 32);
}

}  // namespace nestpipe
