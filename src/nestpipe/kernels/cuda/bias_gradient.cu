// Gradients of attention's bias tables, of those tiles whose pairs have many buckets.
//
// A block has 64 queries of one head at a time. It computes scores and their gradients again, a
// few keys at a time, and sums each gradient by bucket: of time in a column of shared memory that
// no other thread has, of distance in one that a warp has. So nothing is added by atomics, and
// every sum has one order. Blocks write parts; their number is the caller's, never the GPU's.
#include <cstdint>
#include <cstring>

#include "device.h"
#include "export.h"

namespace {

using namespace nestpipe;

constexpr int kThreads = 128, kWarps = kThreads / kWarp, kQueries = 16 * kWarps;
constexpr int kStep = 16;     // columns of a product of the tensor cores
constexpr int kBetween = 8;   // numbers between rows, so that a warp's rows are in different banks
constexpr int kMostBytes = 227 << 10;

struct Rows {
  const uint16_t* base;
  int64_t row, head;  // numbers from one row to the next, from one head to the next
  int32_t width;
};

struct Task {
  Rows q, k, v, grad;
  const int64_t* offsets;
  const int64_t* targets;  // candidates of each sample; null: none
  const int8_t* hard;      // (samples, query tiles, key tiles)
  const float* position;   // (heads, positions) halved; null: none
  const float* time;       // (heads, buckets) halved; null: none
  const int64_t* times;
  float* position_parts;  // (heads, parts, positions)
  float* time_parts;      // (heads, parts, buckets)
  int32_t samples, parts, positions, buckets;
  int32_t tile_queries, tile_keys, query_tiles, key_tiles;
  int32_t window;  // negative: none
  float half_scale;
};

struct Sample {
  int64_t start;
  int32_t length, history;
};

__host__ __device__ inline int padded(int width) { return (width + kStep - 1) / kStep * kStep; }
__host__ __device__ inline int stride_of(int width) { return padded(width) + kBetween; }

// The block's shared memory.
struct Memory {
  float *time_sums, *position_sums, *time, *position;
  int64_t *query_times, *key_times;
  uint16_t *q, *grad, *k, *v;
};

__host__ __device__ inline int floats_of(const Task& task) {
  const int sums = (task.time ? task.buckets * (kThreads + 1) : 0) +
                   (task.position ? task.positions * (kWarps + 1) : 0);
  return (sums + 3) / 4 * 4;  // what follows begins at 16 bytes
}

template <int kKeys>
size_t bytes_of(const Task& task) {
  const int columns = stride_of(task.q.width) + stride_of(task.v.width);
  return floats_of(task) * sizeof(float) + (kQueries + kKeys) * sizeof(int64_t) +
         static_cast<size_t>(kQueries + kKeys) * columns * sizeof(uint16_t);
}

template <int kKeys>
__device__ Memory memory_of(const Task& task) {
  Memory m;
  const int time = task.time ? task.buckets : 0, position = task.position ? task.positions : 0;
  m.time_sums = shared_floats();
  m.time = m.time_sums + time * kThreads;
  m.position_sums = m.time + time;
  m.position = m.position_sums + position * kWarps;
  m.query_times = reinterpret_cast<int64_t*>(shared_floats() + floats_of(task));
  m.key_times = m.query_times + kQueries;
  m.q = reinterpret_cast<uint16_t*>(m.key_times + kKeys);
  m.grad = m.q + kQueries * stride_of(task.q.width);
  m.k = m.grad + kQueries * stride_of(task.v.width);
  m.v = m.k + kKeys * stride_of(task.q.width);
  return m;
}

// Rows of a head from `first` on into shared memory; zeros past the sample's end and its width.
__device__ void load_rows(const Rows& rows, int head, const Sample& sample, int first, int count,
                          uint16_t* to) {
  constexpr int kWide = 8;
  const int chunks = padded(rows.width) / kWide, stride = stride_of(rows.width);
  for (int i = threadIdx.x; i < count * chunks; i += kThreads) {
    const int row = i / chunks, column = i % chunks * kWide;
    const uint16_t* from =
        rows.base + (sample.start + first + row) * rows.row + head * rows.head + column;
    uint16_t* place = to + row * stride + column;
    const int left = first + row < sample.length ? rows.width - column : 0;
    if (left >= kWide) {
      *reinterpret_cast<float4*>(place) = *reinterpret_cast<const float4*>(from);
    } else {
      for (int c = 0; c < kWide; ++c) place[c] = c < left ? from[c] : 0;
    }
  }
}

__device__ void load_times(const Task& task, const Sample& sample, int first, int count,
                           int64_t* to) {
  if (!task.time) return;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    to[i] = task.times[sample.start + min(first + i, sample.length - 1)];
  }
}

__device__ inline uint32_t two(const uint16_t* from) {
  uint32_t both;
  memcpy(&both, from, sizeof both);
  return both;
}

#ifndef NESTPIPE_EMULATED

__device__ inline float tanh_of(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// c += a b: 16 rows, 8 columns, 16 terms.
template <bool kHalf>
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

template <typename Kernel>
int allow_shared(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

#endif

// (16, kKeys) products of a warp's rows with keys; c as the tensor cores hold it: a lane has rows
// lane / 4 and 8 more, columns lane % 4 * 2 and 1 more of every 8.
template <bool kHalf, int kKeys>
__device__ void multiply_rows(const uint16_t* rows, const uint16_t* keys, int width,
                              float (&c)[kKeys / 8][4]) {
  const int lane = lane_of_thread(), stride = stride_of(width), at = lane / 4 * stride + lane % 4 * 2;
  for (int j = 0; j < kKeys / 8; ++j) {
    for (int i = 0; i < 4; ++i) c[j][i] = 0.0F;
  }
#pragma unroll 2
  for (int column = 0; column < padded(width); column += kStep) {
    const uint16_t* row = rows + at + column;
    const uint32_t a[4] = {two(row), two(row + 8 * stride), two(row + 8), two(row + 8 * stride + 8)};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const uint16_t* key = keys + at + 8 * j * stride + column;
      const uint32_t b[2] = {two(key), two(key + 8)};
      multiply<kHalf>(c[j], a, b);
    }
  }
}

// Bits of the time that has passed, without a loop over them.
__device__ inline int bucket_of(int64_t passed, int buckets) {
  const int high = static_cast<int>(passed >> 32);
  if (high < 0) return 0;
  const int bits = high ? 64 - __clz(high) : 32 - __clz(static_cast<int>(passed));
  return min(bits, buckets - 1);
}

// What a warp does with 16 queries.
struct Warp {
  const Task& task;
  const Memory& memory;
  const Sample& sample;
  int first_query, first_key;
  float* sums;         // by distance
  float &far, &own;    // of the last column, and of candidates with themselves

  __device__ bool sees(int query, int key) const {
    bool seen = (key <= query && key < sample.history) || key == query;
    if (task.window >= 0) {
      seen &= min(query, sample.history) - min(key, sample.history) <= task.window;
    }
    return seen && query < sample.length;
  }

  __device__ int distance(int query, int key) const {
    return min(query, sample.history) - min(key, sample.history);
  }

  // The gradient of a score, by bucket of time added up right here.
  __device__ float gradient(float score, float grad, int row, int column) {
    const int query = first_query + row, key = first_key + column;
    float half = score * task.half_scale;
    if (task.position) {
      half += memory.position[min(max(distance(query, key), 0), task.positions - 1)];
    }
    int bucket = 0;
    if (task.time) {
      const int in_block = first_query % kQueries + row;
      bucket = bucket_of(memory.query_times[in_block] - memory.key_times[column], task.buckets);
      half += memory.time[bucket];
    }
    const float tanh = tanh_of(half), slope = fmaf(half, fmaf(-tanh, tanh, 1.0F), 1.0F + tanh);
    const float found = sees(query, key) ? grad * slope : 0.0F;
    if (task.time) memory.time_sums[bucket * kThreads + threadIdx.x] += found;
    return found;
  }

  // Adds what lanes have at distance `base` + lane / 4 - lane % 4 * 2. Lanes of one distance are 9
  // apart; the first of them has the sum.
  __device__ void add_line(float value, int base) {
    const int lane = lane_of_thread(), row = lane / 4, pair = lane % 4;
    float sum = value;
    for (int more = 1; more < 4; ++more) {
      const float other = __shfl_down_sync(kAllLanes, value, 9 * more);
      if (row + 2 * more < 8 && pair + more < 4) sum += other;
    }
    const int distance = base + row - 2 * pair;
    if (pair == 0 || row < 2) {
      if (distance >= task.positions - 1) {
        far += sum;
      } else if (distance >= 0) {
        sums[distance] += sum;
      }
    }
    __syncwarp();
  }

  // Candidates stand at one position: their distance is the key's alone.
  __device__ void add_column(float value, int column) {
    const int lane = lane_of_thread();
    for (int apart = 4; apart < kWarp; apart *= 2) {
      value += __shfl_sync(kAllLanes, value, lane ^ apart);
    }
    const int distance = sample.history - (first_key + column);
    if (lane < 4) {
      if (distance <= 0) {
        own += value;
      } else if (distance >= task.positions - 1) {
        far += value;
      } else {
        sums[distance] += value;
      }
    }
    __syncwarp();
  }

  // Gradients of 16 queries and kKeys keys by distance. Rows 8 apart and columns 8 apart lie on one
  // line, so they are added before lanes are.
  template <int kKeys>
  __device__ void add_by_distance(float (&grad)[kKeys / 8][4]) {
    const int lane = lane_of_thread(), pair = lane % 4, row = first_query + lane / 4;
    const bool candidates = first_query + 15 >= sample.history;
    if (candidates) {
      const bool upper = row >= sample.history, lower = row + 8 >= sample.history;
      for (int j = 0; j < kKeys / 8; ++j) {
        for (int e = 0; e < 2; ++e) {
          const float both = (upper ? grad[j][e] : 0.0F) + (lower ? grad[j][2 + e] : 0.0F);
          add_column(both, 8 * j + 2 * pair + e);
          if (upper) grad[j][e] = 0.0F;
          if (lower) grad[j][2 + e] = 0.0F;
        }
      }
    }
    for (int e = 0; e < 2; ++e) {
      float before = 0.0F;
      const int base = first_query + 8 - first_key - e;
      for (int j = 0; j < kKeys / 8; ++j) {
        add_line(before + grad[j][2 + e], base - 8 * j);
        before = grad[j][e];
      }
      add_line(before, base - kKeys);
    }
  }
};

template <bool kHalf, int kKeys>
__device__ void add_tile(Warp& warp, int row) {
  const Task& task = warp.task;
  const Memory& memory = warp.memory;
  float score[kKeys / 8][4], grad[kKeys / 8][4];
  multiply_rows<kHalf, kKeys>(memory.q + row * stride_of(task.q.width), memory.k, task.q.width,
                              score);
  multiply_rows<kHalf, kKeys>(memory.grad + row * stride_of(task.v.width), memory.v, task.v.width,
                              grad);
  const int lane = lane_of_thread();
  float all = 0.0F;
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 8 * j + lane % 4 * 2 + i % 2;
      grad[j][i] = warp.gradient(score[j][i], grad[j][i], lane / 4 + i / 2 * 8, column);
      all += grad[j][i];
    }
  }
  if (!task.position) return;
  const int nearest = warp.distance(warp.first_query, warp.first_key + kKeys - 1);
  if (nearest >= task.positions - 1) {
    warp.far += all;
  } else {
    warp.template add_by_distance<kKeys>(grad);
  }
}

__device__ inline float sum_of_lanes(float value) {
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    value += __shfl_down_sync(kAllLanes, value, apart);
  }
  return value;
}

// This block's part: columns of a bucket in order.
__device__ void write_part(const Task& task, const Memory& memory, int head, int part, float far,
                           float own) {
  const int lane = lane_of_thread(), warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t number = static_cast<int64_t>(head) * task.parts + part;
  far = sum_of_lanes(far);
  own = sum_of_lanes(own);
  if (task.position && lane == 0) {
    float* sums = memory.position_sums + warp * task.positions;
    sums[task.positions - 1] += far;
    sums[0] += own;
  }
  __syncthreads();
  if (task.position) {
    for (int p = threadIdx.x; p < task.positions; p += kThreads) {
      float sum = 0.0F;
      for (int w = 0; w < kWarps; ++w) sum += memory.position_sums[w * task.positions + p];
      task.position_parts[number * task.positions + p] = sum;
    }
  }
  if (!task.time) return;
  for (int bucket = warp; bucket < task.buckets; bucket += kWarps) {
    float sum = 0.0F;
    for (int w = 0; w < kWarps; ++w) sum += memory.time_sums[bucket * kThreads + w * kWarp + lane];
    sum = sum_of_lanes(sum);
    if (lane == 0) task.time_parts[number * task.buckets + bucket] = sum;
  }
}

__device__ void begin_sums(const Task& task, const Memory& memory, int head) {
  if (task.time) {
    for (int i = threadIdx.x; i < task.buckets * kThreads; i += kThreads) memory.time_sums[i] = 0.0F;
    for (int i = threadIdx.x; i < task.buckets; i += kThreads) {
      memory.time[i] = task.time[head * task.buckets + i];
    }
  }
  if (task.position) {
    for (int i = threadIdx.x; i < task.positions * kWarps; i += kThreads) {
      memory.position_sums[i] = 0.0F;
    }
    for (int i = threadIdx.x; i < task.positions; i += kThreads) {
      memory.position[i] = task.position[head * task.positions + i];
    }
  }
}

__device__ inline Sample sample_of(const Task& task, int number) {
  const int64_t start = task.offsets[number];
  const int length = static_cast<int>(task.offsets[number + 1] - start);
  const int targets = task.targets ? static_cast<int>(task.targets[number]) : 0;
  return {start, length, length - targets};
}

template <bool kHalf, int kKeys>
__global__ void __launch_bounds__(kThreads) sum_hard_tiles(const Task task) {
  const int head = static_cast<int>(blockIdx.x) / task.parts;
  const int part = static_cast<int>(blockIdx.x) % task.parts;
  const int row = static_cast<int>(threadIdx.x) / kWarp * 16;
  const Memory memory = memory_of<kKeys>(task);
  begin_sums(task, memory, head);
  float far = 0.0F, own = 0.0F;
  const int blocks = task.query_tiles * (task.tile_queries / kQueries);
  for (int item = part; item < task.samples * blocks; item += task.parts) {
    const int number = item % task.samples, first = item / task.samples * kQueries;
    const Sample sample = sample_of(task, number);
    if (first >= sample.length) continue;
    __syncthreads();  // all have used the rows of the item before
    load_rows(task.q, head, sample, first, kQueries, memory.q);
    load_rows(task.grad, head, sample, first, kQueries, memory.grad);
    load_times(task, sample, first, kQueries, memory.query_times);
    const int8_t* hard =
        task.hard + (static_cast<int64_t>(number) * task.query_tiles + first / task.tile_queries) *
                        task.key_tiles;
    const int end = min(first + kQueries, sample.length);
    for (int key = 0; key < end; key += kKeys) {
      if (!hard[key / task.tile_keys]) continue;
      __syncthreads();  // all have used the keys before
      load_rows(task.k, head, sample, key, kKeys, memory.k);
      load_rows(task.v, head, sample, key, kKeys, memory.v);
      load_times(task, sample, key, kKeys, memory.key_times);
      __syncthreads();
      Warp warp{task,
                memory,
                sample,
                first + row,
                key,
                memory.position_sums + row / 16 * task.positions,
                far,
                own};
      add_tile<kHalf, kKeys>(warp, row);
    }
  }
  __syncthreads();
  write_part(task, memory, head, part, far, own);
}

template <bool kHalf, int kKeys>
int run(const Task& task, int64_t heads, cudaStream_t stream) {
  const size_t bytes = bytes_of<kKeys>(task);
  if (bytes > kMostBytes) return kUnknownWidth;
  const auto kernel = sum_hard_tiles<kHalf, kKeys>;
  if (const int status = allow_shared(kernel, bytes); status != cudaSuccess) return status;
  return launch_shared(kernel, heads * task.parts, kThreads, bytes, stream, task);
}

}  // namespace

// Tiles have a multiple of 64 queries and of 32 keys. Rows and heads begin at 16 bytes.
NESTPIPE_API int nestpipe_bias_gradient(const Task* task, int64_t heads, int half,
                                     cudaStream_t stream) {
  const bool wide = task->q.width > 128 || task->v.width > 128 || task->tile_keys % 64;
  if (wide) return half ? run<true, 32>(*task, heads, stream) : run<false, 32>(*task, heads, stream);
  return half ? run<true, 64>(*task, heads, stream) : run<false, 64>(*task, heads, stream);
}
