// Sums of rows in a fixed order on a GPU: rows are read as they came and written as they leave.
//
// The rows of a segment are added in the order of `sum_order.h`, as the host and torch do. What
// travels between ranks as bfloat16 is neither widened before nor narrowed after by a pass of its
// own, and a segment without rows adds nothing, so it costs nothing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../native/rows/sum_order.h"
#include "device.h"
#include "export.h"

namespace {

using namespace nestpipe;

constexpr int kWarps = 8, kMostBlocks = 4096, kMostParts = 6, kAtOnce = 8;

enum Type : int32_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kRounded = 2,  // float32 that is rounded to bfloat16 on its way
};

// Rows in one piece of memory.
struct Part {
  std::byte* base;
  int64_t stride;  // numbers
  int64_t count;   // rows
  int32_t type;
};

// Rows of several parts, numbered one after the other.
struct Parts {
  Part of[kMostParts];
  int32_t count;
};

struct Task {
  Parts from, to;
  const int32_t* terms;   // the rows of the first segment, then those of the second, ...
  const int32_t* ends;    // where each segment starts, and where the last one ends; null: one row each
  const int32_t* positions;  // the row that each sum goes to; null: sum i is row i
  int64_t segments;
  int32_t dim;
  int32_t add;  // to what is there
};

template <typename T, int kWide>
struct alignas(sizeof(T) * kWide) Together {
  T of[kWide];
};

__device__ inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

__device__ inline float widened(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// To the nearest, of two to the even one.
__device__ inline uint16_t narrowed(float x) {
  if (x != x) return 0x7FC0;
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

struct Row {
  const Part* part;
  int64_t number;
};

__device__ inline Row row_of(const Parts& parts, int64_t number) {
  const Part* part = parts.of;
  for (; number >= part->count; ++part) number -= part->count;
  return {part, number};
}

template <int kWide>
__device__ void read(const Row& row, int column, float (&x)[kWide]) {
  const int64_t at = row.number * row.part->stride + column;
  if (row.part->type == kBfloat16) {
    const auto came = *reinterpret_cast<const Together<uint16_t, kWide>*>(row.part->base + at * 2);
    for (int i = 0; i < kWide; ++i) x[i] = widened(came.of[i]);
    return;
  }
  const auto came = *reinterpret_cast<const Together<float, kWide>*>(row.part->base + at * 4);
  const bool rounded = row.part->type == kRounded;
  for (int i = 0; i < kWide; ++i) x[i] = rounded ? widened(narrowed(came.of[i])) : came.of[i];
}

template <int kWide>
__device__ void write(const Row& row, int column, const float (&x)[kWide]) {
  const int64_t at = row.number * row.part->stride + column;
  if (row.part->type == kBfloat16) {
    Together<uint16_t, kWide> leaving;
    for (int i = 0; i < kWide; ++i) leaving.of[i] = narrowed(x[i]);
    *reinterpret_cast<Together<uint16_t, kWide>*>(row.part->base + at * 2) = leaving;
    return;
  }
  Together<float, kWide> leaving;
  const bool rounded = row.part->type == kRounded;
  for (int i = 0; i < kWide; ++i) leaving.of[i] = rounded ? widened(narrowed(x[i])) : x[i];
  *reinterpret_cast<Together<float, kWide>*>(row.part->base + at * 4) = leaving;
}

// What a lane has of a sum.
template <int kWide>
struct Columns {
  float of[kWide];

  __device__ void clear() {
    for (int i = 0; i < kWide; ++i) of[i] = 0.0F;
  }
  __device__ void add(const Columns& other) { add(other.of); }
  __device__ void add(const float (&more)[kWide]) {
    for (int i = 0; i < kWide; ++i) of[i] += more[i];
  }
};

// Several rows are on their way before the first is added.
template <int kWide>
__device__ void sum_piece(const Task& task, int32_t begin, int32_t end, int column,
                          Columns<kWide>& sum) {
  sum.clear();
  float x[kAtOnce][kWide];
  int32_t t = begin;
  for (; t + kAtOnce <= end; t += kAtOnce) {
    for (int u = 0; u < kAtOnce; ++u) read(row_of(task.from, task.terms[t + u]), column, x[u]);
    for (int u = 0; u < kAtOnce; ++u) sum.add(x[u]);
  }
  for (; t < end; ++t) {
    read(row_of(task.from, task.terms[t]), column, x[0]);
    sum.add(x[0]);
  }
}

// A warp for each segment.
template <int kWide>
__global__ void __launch_bounds__(kWarp* kWarps) segment_sum(const Task task) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + warp; i < task.segments; i += step) {
    const int32_t begin = task.ends ? task.ends[i] : 0, end = task.ends ? task.ends[i + 1] : 1;
    if (task.add && begin == end) continue;
    const Row to = row_of(task.to, task.positions ? task.positions[i] : i);
    for (int column = lane * kWide; column < task.dim; column += kWarp * kWide) {
      Columns<kWide> sum;
      if (task.ends) {
        sum_in_order(begin, end, sum, [&](int32_t first, int32_t last, Columns<kWide>& piece) {
          sum_piece(task, first, last, column, piece);
        });
      } else {
        read(row_of(task.from, task.terms[i]), column, sum.of);  // as it is, a negative zero too
      }
      if (task.add) {
        float before[kWide];
        read(to, column, before);
        sum.add(before);
      }
      write(to, column, sum.of);
    }
  }
}

bool fits(const Parts& parts, int dim, int wide) {
  for (int p = 0; p < parts.count; ++p) {
    const Part& part = parts.of[p];
    const size_t bytes = (part.type == kBfloat16 ? 2U : 4U) * static_cast<size_t>(wide);
    if (reinterpret_cast<uintptr_t>(part.base) % bytes || part.stride % wide) return false;
  }
  return dim % wide == 0;
}

Parts parts_of(const Part* parts, int64_t count) {
  Parts made{};
  std::copy(parts, parts + count, made.of);
  made.count = static_cast<int32_t>(count);
  return made;
}

}  // namespace

// At most six parts on each side; numbers of a row lie side by side.
NESTPIPE_API int nestpipe_segment_sum(const Part* from, int64_t num_from, const Part* to,
                                   int64_t num_to, const int32_t* terms, const int32_t* ends,
                                   const int32_t* positions, int64_t segments, int64_t dim, int add,
                                   cudaStream_t stream) {
  const Task task{parts_of(from, num_from), parts_of(to, num_to), terms, ends, positions, segments,
                  static_cast<int32_t>(dim), add};
  const auto fit = [&](int wide) {
    return fits(task.from, task.dim, wide) && fits(task.to, task.dim, wide);
  };
  const int64_t blocks = blocks_for(segments, kWarps, kMostBlocks);
  // As wide as keeps all lanes busy.
  const auto kernel = dim >= 128 && fit(4)  ? segment_sum<4>
                      : dim >= 64 && fit(2) ? segment_sum<2>
                                            : segment_sum<1>;
  return launch(kernel, blocks, kWarp * kWarps, stream, task);
}
