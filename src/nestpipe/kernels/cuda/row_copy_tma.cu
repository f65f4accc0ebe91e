// Rows between GPU memory and pinned host memory, copied by the GPU's engine for bulk copies.
//
// A thread only says what goes where: a row travels from its source into shared memory, and from
// there to its destination, without passing through a register. So a block of one warp has as much
// under way as a link needs, and leaves a multiprocessor to dense compute.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "export.h"

namespace {

constexpr int kLanes = 32;
constexpr size_t kSharedBytes = 96 * 1024;

__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void load_row(std::byte* slot, const std::byte* from, uint32_t bytes, uint64_t* barrier) {
  const uint32_t at = shared_address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(slot)),
      "l"(from), "r"(bytes), "r"(at)
      : "memory");
}

__device__ void wait_until_loaded(uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  }
}

__device__ void store_row(std::byte* to, const std::byte* slot, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(slot)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All stores of this thread but the last `kLater` have left their slots.
template <int kLater>
__device__ void wait_for_slots() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLater) : "memory");
}

__device__ void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

struct Task {
  const int64_t* addresses;  // of every row of the buffer, where it lives on the host
  const int64_t* positions;  // of the rows to move
  std::byte* rows;
  int64_t count;
  int64_t stride;  // bytes from a row of the buffer to the next
  uint32_t bytes;  // of a row; a multiple of 16, as every address is
  bool to_store;
};

struct Route {
  const std::byte* from;
  std::byte* to;
};

__device__ Route route_of(const Task& task, int64_t number) {
  if (number >= task.count) return {};
  const int64_t at = task.positions[number];
  auto* there = reinterpret_cast<std::byte*>(task.addresses[at]);
  auto* here = task.rows + at * task.stride;
  return task.to_store ? Route{here, there} : Route{there, here};
}

// Each thread has slots of its own. It asks for row k, then hands on row k - kLoads + 1.
template <int kLoads, int kSlots>
__global__ void __launch_bounds__(kLanes) copy_rows(const Task task) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ uint64_t barriers[kLanes * kSlots];
  __shared__ std::byte* destinations[kLanes * kSlots];
  const int mine = threadIdx.x * kSlots;
  for (int s = 0; s < kSlots; ++s) init_barrier(&barriers[mine + s]);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");

  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  Route next = route_of(task, number);
  for (uint32_t asked = 0, handed = 0; number < task.count || handed < asked;) {
    if (number < task.count) {
      const int slot = mine + asked % kSlots;
      wait_for_slots<kSlots - kLoads>();
      destinations[slot] = next.to;
      load_row(memory + static_cast<size_t>(slot) * task.bytes, next.from, task.bytes,
               &barriers[slot]);
      ++asked;
      number += step;
      next = route_of(task, number);
      if (asked < kLoads) continue;
    }
    const int slot = mine + handed % kSlots;
    wait_until_loaded(&barriers[slot], handed / kSlots % 2);
    store_row(destinations[slot], memory + static_cast<size_t>(slot) * task.bytes, task.bytes);
    ++handed;
  }
  wait_until_stored();
}

template <int kLoads, int kSlots>
cudaError_t start(const Task& task, int blocks, cudaStream_t stream) {
  const size_t row = kSlots * task.bytes;
  const int lanes = static_cast<int>(std::min<size_t>(kLanes, kSharedBytes / row));
  if (lanes == 0) return cudaErrorInvalidValue;
  copy_rows<kLoads, kSlots><<<blocks, lanes, lanes * row, stream>>>(task);
  return cudaGetLastError();
}

template <int kLoads, int kSlots>
cudaError_t allow_shared_memory() {
  return cudaFuncSetAttribute(copy_rows<kLoads, kSlots>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kSharedBytes);
}

}  // namespace

// Once for each device, before rows are copied there; 0, or why the driver cannot.
NESTPIPE_API int nestpipe_row_copy_begin() {
  const cudaError_t writing = allow_shared_memory<2, 4>();
  return writing != cudaSuccess ? writing : allow_shared_memory<4, 4>();
}

// Reading waits for the link, so four loads are under way; writing does, so two stores are too.
NESTPIPE_API int nestpipe_row_copy(const int64_t* addresses, const int64_t* positions, void* rows,
                                int64_t count, int64_t stride, int64_t bytes, int to_store,
                                int blocks, cudaStream_t stream) {
  const Task task{addresses, positions, static_cast<std::byte*>(rows), count, stride,
                  static_cast<uint32_t>(bytes), to_store != 0};
  return to_store ? start<2, 4>(task, blocks, stream) : start<4, 4>(task, blocks, stream);
}
