// Several kernels of a batch by one call each: a host with Python pays for calls, not for kernels.
//
// The entries that are called here stand in `index.cu`, `segments.cu` and `row_sums.cu`, which say
// what their arguments are.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device.h"
#include "export.h"

NESTPIPE_API int nestpipe_index_find_or_insert(const void* index, const void* keys, int32_t batch,
                                               int32_t* slots, int32_t* new_slots,
                                               cudaStream_t stream);
NESTPIPE_API int nestpipe_index_first_rows(const void* index, const void* to, const int32_t* slots,
                                           const int32_t* count, int64_t most,
                                           cudaStream_t stream);
NESTPIPE_API int nestpipe_sort(void* memory, int64_t bytes, const uint32_t* ids,
                               uint32_t* sorted_ids, const int32_t* values, int32_t* sorted_values,
                               int64_t count, int bits, cudaStream_t stream);
NESTPIPE_API int nestpipe_cut_segments(const void* cut, cudaStream_t stream);
NESTPIPE_API int nestpipe_update_segments(const void* of, const void* task, cudaStream_t stream);

namespace {

using namespace nestpipe;

constexpr int kThreads = 256;
constexpr int kOfThread = 8;  // outputs that a thread looks at

// Terms of a batch: their slots, first values of new rows, and segments by slot.
struct Admission {
  const void* index;
  const void* keys;
  const void* first;
  const void* cut;
  int32_t* slots;
  int32_t* new_slots;
  const int32_t* num_new;
  const int32_t* values;  // the output of each term
  uint32_t* sorted_slots;
  int32_t* sorted_values;
  void* memory;  // for sorting
  int64_t bytes;
  int64_t count;
  int32_t bits;
};

// How many terms each output has, what is made of it, and room for one number a block.
struct Outputs {
  const int64_t* lengths;
  int64_t outputs;
  int64_t terms;
  int32_t* ends;     // where the terms of each output begin, then where the last ones end
  int32_t* numbers;  // the output of each term
  int32_t* sums;     // of blocks
};

struct Mine {
  int64_t first;
  int32_t lengths[kOfThread];
  int32_t sum;
};

__device__ Mine lengths_of_thread(const Outputs& task) {
  Mine mine{(static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kOfThread, {}, 0};
  for (int i = 0; i < kOfThread; ++i) {
    const int64_t o = mine.first + i;
    mine.lengths[i] = o < task.outputs ? static_cast<int32_t>(task.lengths[o]) : 0;
    mine.sum += mine.lengths[i];
  }
  return mine;
}

__global__ void __launch_bounds__(kThreads) sum_lengths(const Outputs task) {
  const Begin found = begin_in_block<kThreads>(lengths_of_thread(task).sum);
  if (threadIdx.x == 0) task.sums[blockIdx.x] = found.total;
}

// Blocks before this one are few: each block adds their sums by itself.
__global__ void __launch_bounds__(kThreads) write_outputs(const Outputs task) {
  int32_t before = 0;
  for (int64_t b = threadIdx.x; b < blockIdx.x; b += kThreads) before += task.sums[b];
  const int32_t begin = begin_in_block<kThreads>(before).total;
  const Mine mine = lengths_of_thread(task);
  int32_t at = begin + begin_in_block<kThreads>(mine.sum).begin;
  if (mine.first == 0) task.ends[0] = 0;
  for (int i = 0; i < kOfThread; ++i) {
    const int64_t o = mine.first + i;
    if (o >= task.outputs) return;
    for (int32_t t = 0; t < mine.lengths[i]; ++t, ++at) {
      if (at < task.terms) task.numbers[at] = static_cast<int32_t>(o);
    }
    task.ends[o + 1] = at;
  }
}

// What the host learns of a step, in memory of the host.
struct Told {
  const float* loss;
  const uint8_t* dense_fault;   // null: nobody looked
  const int32_t* counts;        // of rows, by group of tables
  int64_t num_counts;
  float* out;  // the loss, whether dense gradients were not finite, the counts
};

__global__ void tell(const Told told) {
  if (threadIdx.x == 0) {
    told.out[0] = *told.loss;
    told.out[1] = told.dense_fault && *told.dense_fault ? 1.0F : 0.0F;
  }
  for (int64_t c = threadIdx.x; c < told.num_counts; c += blockDim.x) {
    told.out[2 + c] = static_cast<float>(told.counts[c]);
  }
}

}  // namespace

// Finds the slots of a batch's terms, makes first values of new rows, and sorts terms by slot. Only
// where every slot that is given away was never used.
NESTPIPE_API int nestpipe_admit(const Admission* task, int32_t batch, cudaStream_t stream) {
  int status = nestpipe_index_find_or_insert(task->index, task->keys, batch, task->slots,
                                             task->new_slots, stream);
  if (status) return status;
  status = nestpipe_index_first_rows(task->index, task->first, task->new_slots, task->num_new,
                                     task->count, stream);
  if (status) return status;
  status = nestpipe_sort(task->memory, task->bytes, reinterpret_cast<const uint32_t*>(task->slots),
                         task->sorted_slots, task->values, task->sorted_values, task->count,
                         task->bits, stream);
  if (status) return status;
  return nestpipe_cut_segments(task->cut, stream);
}

// The blocks of `nestpipe_outputs`, each of which needs a sum.
NESTPIPE_API int64_t nestpipe_outputs_sums(int64_t outputs) {
  return blocks_for(outputs, kThreads * kOfThread, INT32_MAX);
}

// Where the terms of each output begin, and the output of each term.
NESTPIPE_API int nestpipe_outputs(const Outputs* task, cudaStream_t stream) {
  const int64_t blocks = std::max<int64_t>(1, nestpipe_outputs_sums(task->outputs));
  if (const int status = launch(sum_lengths, blocks, kThreads, stream, *task)) return status;
  return launch(write_outputs, blocks, kThreads, stream, *task);
}

// Sums gradients by row and applies an optimizer, with the number of faults counted from zero.
NESTPIPE_API int nestpipe_update_terms(const void* of, const void* task, int32_t* faults,
                                       cudaStream_t stream) {
  if (const int status = cudaMemsetAsync(faults, 0, sizeof(int32_t), stream)) return status;
  return nestpipe_update_segments(of, task, stream);
}

// Writes to the host's memory what it wants to know of a step; read it when the stream is past it.
NESTPIPE_API int nestpipe_tell(const Told* told, cudaStream_t stream) {
  return launch(tell, 1, kWarp, stream, *told);
}
