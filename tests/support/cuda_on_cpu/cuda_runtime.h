// A CUDA runtime for tests without a GPU: the threads of a block are fibers of one host thread.
//
// Blocks run one after the other. Inside a block the next fiber is drawn at random wherever real
// threads could overtake each other: at atomics, volatile accesses and barriers.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0;

inline int cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
inline int cudaGetLastError() { return cudaSuccess; }

struct dim3 {
  unsigned x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = size_t{64} << 10;

struct Warp {
  uint64_t values[2][kLanes] = {};
  int64_t meetings[kLanes] = {};
  unsigned alive = 0;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool done = false;
  int64_t barriers = 0;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  int current = 0, alive = 0;
  ucontext_t scheduler;
  std::function<void()> body;
  std::mt19937 random{12345};
};

inline Block& block() {
  static Block one;
  return one;
}

inline std::vector<float>& shared_memory() {
  static std::vector<float> one;
  return one;
}

inline void yield() { swapcontext(&block().fibers[block().current]->context, &block().scheduler); }
inline void may_yield() {
  if (block().random() % 4 == 0) yield();
}

inline int lane() { return block().current % kLanes; }
inline Warp& warp() { return block().warps[block().current / kLanes]; }

inline void run_fiber() {
  block().body();
  block().fibers[block().current]->done = true;
  warp().alive &= ~(1U << lane());
  --block().alive;
  yield();
}

inline void run_block(int threads) {
  Block& all = block();
  while (static_cast<int>(all.fibers.size()) < threads) {
    all.fibers.push_back(std::make_unique<Fiber>());
  }
  all.warps.assign((threads + kLanes - 1) / kLanes, Warp{});
  all.alive = threads;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *all.fibers[t];
    fiber.done = false, fiber.barriers = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
    all.warps[t / kLanes].alive |= 1U << (t % kLanes);
  }
  // Rounds from a random first fiber: fair, so what waits for others comes to its end.
  while (all.alive > 0) {
    const int first = static_cast<int>(all.random() % threads);
    for (int i = 0; i < threads; ++i) {
      all.current = (first + i) % threads;
      if (all.fibers[all.current]->done) continue;
      threadIdx = {static_cast<unsigned>(all.current), 0, 0};
      swapcontext(&all.scheduler, &all.fibers[all.current]->context);
    }
  }
}

// All lanes of the mask that still run leave a value and see those of the others.
template <typename T>
std::vector<T> meet(unsigned mask, T value) {
  static_assert(sizeof(T) <= 8);
  std::vector<T> seen(kLanes, value);
  if (mask == 1U << lane()) return seen;
  Warp& mine = warp();
  const int self = lane();
  const int64_t meeting = mine.meetings[self]++;
  std::memcpy(&mine.values[meeting % 2][self], &value, sizeof value);
  const auto here = [&] {
    for (int l = 0; l < kLanes; ++l) {
      if ((mask & mine.alive) >> l & 1 && mine.meetings[l] <= meeting) return false;
    }
    return true;
  };
  while (!here()) yield();
  for (int l = 0; l < kLanes; ++l) {
    std::memcpy(&seen[l], &mine.values[meeting % 2][l], sizeof value);
  }
  return seen;
}

}  // namespace emulated

inline void __syncthreads() {
  auto& all = emulated::block();
  const int64_t mine = ++all.fibers[all.current]->barriers;
  const auto here = [&] {
    for (size_t t = 0; t < all.warps.size() * emulated::kLanes && t < all.fibers.size(); ++t) {
      if (!all.fibers[t]->done && all.fibers[t]->barriers < mine) return false;
    }
    return true;
  };
  while (!here()) emulated::yield();
}

inline void __threadfence() {}
inline void __syncwarp(unsigned mask = ~0U) { emulated::meet(mask, 0); }
inline unsigned __activemask() { return 1U << emulated::lane(); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = emulated::lane();
  return emulated::meet(mask, value)[lane / width * width + source % width];
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width = 32) {
  const int lane = emulated::lane(), source = lane + distance;
  return emulated::meet(mask, value)[source / width == lane / width ? source : lane];
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int lane = emulated::lane();
  return emulated::meet(mask, value)[lane >= distance ? lane - distance : lane];
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const auto seen = emulated::meet(mask, value);
  unsigned same = 0;
  for (int l = 0; l < emulated::kLanes; ++l) same |= (seen[l] == value ? 1U : 0U) << l;
  return same & mask;
}

inline int __all_sync(unsigned mask, int value) {
  const auto seen = emulated::meet(mask, value);
  for (int l = 0; l < emulated::kLanes; ++l) {
    if ((mask >> l & 1U) && !seen[l]) return 0;
  }
  return 1;
}

inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float4 __ldcs(const float4* address) { return *address; }

template <typename T, typename F>
T changed(T* address, F change) {
  emulated::may_yield();
  const T before = *address;
  *address = change(before);
  return before;
}
template <typename T>
T atomicAdd(T* address, T value) {
  return changed(address, [&](T x) { return x + value; });
}
template <typename T>
T atomicMin(T* address, T value) {
  return changed(address, [&](T x) { return x < value ? x : value; });
}
template <typename T>
T atomicExch(T* address, T value) {
  return changed(address, [&](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  return changed(address, [&](T x) { return x == expected ? value : x; });
}

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

namespace nestpipe {

template <typename... Parameters, typename... Arguments>
int launch_shared(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
                  cudaStream_t, Arguments... arguments) {
  // Not zeros, which a kernel could take for granted.
  emulated::shared_memory().assign(shared_bytes / sizeof(float), -1e30F);
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  emulated::block().body = [&] { kernel(arguments...); };
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx = {static_cast<unsigned>(b), 0, 0};
    emulated::run_block(threads);
  }
  return cudaSuccess;
}

inline float* shared_floats() { return emulated::shared_memory().data(); }

template <typename T>
T load_whole(const T* address) {
  emulated::may_yield();
  return *address;
}

template <typename T>
T swap_whole(T* address, T expected, T wanted) {
  emulated::may_yield();
  const T before = *address;
  if (std::memcmp(&before, &expected, sizeof before) == 0) *address = wanted;
  return before;
}

inline float tanh_of(float x) { return std::tanh(x); }

template <typename Kernel>
int allow_shared(Kernel, size_t) {
  return cudaSuccess;
}

// A number of 16 bits: bfloat16, or half precision, of which tests use none that is tiny or inf.
inline float number_of(uint32_t bits, bool half) {
  uint32_t wide = bits << 16;
  if (half) {
    wide = (bits & 0x7FFF) ? (bits & 0x8000) << 16 | ((bits & 0x7FFF) << 13) + (112U << 23) : 0;
  }
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// What the tensor cores do: the lanes of a warp hold a, b and c together.
template <bool kHalf>
void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto pack = [](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; };
  const auto upper = emulated::meet(~0U, pack(a[0], a[1]));
  const auto lower = emulated::meet(~0U, pack(a[2], a[3]));
  const auto right = emulated::meet(~0U, pack(b[0], b[1]));
  const int lane = emulated::lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int shift = 16 * (k % 2), from = k % 8 / 2;
      const uint64_t left = (k < 8 ? upper : lower)[4 * row + from] >> (i < 2 ? 0 : 32);
      const uint64_t both = right[4 * column + from] >> (k < 8 ? 0 : 32);
      c[i] += number_of(left >> shift & 0xFFFF, kHalf) * number_of(both >> shift & 0xFFFF, kHalf);
    }
  }
}

}  // namespace nestpipe
