// Row optimizers on a GPU: gradients are scaled and applied in one pass over rows and state.
#include <cstddef>
#include <cstdint>

#include "../native/rows/row_math.h"
#include "device.h"
#include "export.h"

namespace {

using namespace nestpipe;

constexpr int kWarps = 8, kMostBlocks = 2048;

struct Rows {
  float* rows;
  const int32_t* slots;  // the row that each gradient belongs to; null: gradient i to row i
  const float* gradients;
  const float* times;  // all gradients are multiplied by it
  int64_t row_stride, gradient_stride;  // numbers
  int64_t count;
  int dim;
};

// Halves are added until one number is left, as the host and the plain twin do.
__device__ float sum_of_squares(const float* g, float times, int dim, float* squares, int lane) {
  for (int i = lane; i < dim; i += kWarp) {
    const float scaled = g[i] * times;
    squares[i] = scaled * scaled;
  }
  for (int n = dim; n > 1;) {
    const int half = (n + 1) / 2;
    __syncwarp();
    for (int i = lane; i < n - half; i += kWarp) squares[i] += squares[half + i];
    n = half;
  }
  __syncwarp();
  return squares[0];
}

__device__ void apply(const Optimizer& of, float* row, const float* g, float times, int dim,
                      float* squares, int lane) {
  float* const state = row + dim;
  switch (of.kind) {
    case kSgd:
      for (int i = lane; i < dim; i += kWarp) sgd(of, row[i], g[i] * times);
      return;
    case kAdagrad:
      for (int i = lane; i < dim; i += kWarp) adagrad(of, row[i], state[i], g[i] * times);
      return;
    case kAdam:
    case kAdamW:
      for (int i = lane; i < dim; i += kWarp) {
        adam(of, row[i], state[i], state[dim + i], g[i] * times);
      }
      return;
    case kRowwiseAdagrad:
    case kMomentumScaledRowwiseAdagrad:
    case kTouchScaledRowwiseAdagrad: {
      const float squares_of = sum_of_squares(g, times, dim, squares, lane);
      const float moment = *state + squares_of / static_cast<float>(dim);
      const float rate = rowwise_rate(of, moment, divisor_of(of, state));
      for (int i = lane; i < dim; i += kWarp) row[i] = row[i] * of.keep - g[i] * times * rate;
      __syncwarp();  // all have read the state, and the squares
      if (lane == 0) *state = moment;
      return;
    }
  }
}

// A warp for each row.
__global__ void __launch_bounds__(kWarp* kWarps) update(const Optimizer of, const Rows all) {
  const int lane = lane_of_thread(), warp = static_cast<int>(threadIdx.x) / kWarp;
  float* const squares = shared_floats() + warp * all.dim;
  const float times = *all.times;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + warp; i < all.count; i += step) {
    const int64_t row = all.slots ? all.slots[i] : i;
    apply(of, all.rows + row * all.row_stride, all.gradients + i * all.gradient_stride, times,
          all.dim, squares, lane);
  }
}

}  // namespace

// Gradients of `count` rows with `dim` weights each; strides in numbers. Without slots, row i gets
// gradient i. Returns 0, a CUDA error, or kUnknownOptimizer before anything was changed.
NESTPIPE_API int nestpipe_update_rows(const Optimizer* of, float* rows, int64_t row_stride,
                                      const int32_t* slots, const float* gradients,
                                      int64_t gradient_stride, const float* times, int64_t count,
                                      int64_t dim, cudaStream_t stream) {
  if (!is_known(of->kind)) return kUnknownOptimizer;
  const Rows all{rows,       slots,           gradients, times,
                 row_stride, gradient_stride, count,     static_cast<int>(dim)};
  const bool by_weight = of->kind == kSgd || of->kind == kAdagrad || of->kind == kAdam ||
                         of->kind == kAdamW;
  const size_t shared = by_weight ? 0 : sizeof(float) * kWarps * static_cast<size_t>(dim);
  return launch_shared(update, blocks_for(count, kWarps, kMostBlocks), kWarp * kWarps, shared,
                       stream, *of, all);
}
