// Sums of rows in a fixed order: pooled lookups, and gradients that are summed and applied at once.
//
// A group of lanes has a row: each lane 16 bytes of it, or several times 16. Terms of a sum are
// added in the order of `sum_order.h`; every step rounds on its own (no contraction), so the plain
// twin, which has one operation per step, gives the same bits.
#include <cstddef>
#include <cstdint>

#include "../native/rows/row_math.h"
#include "../native/rows/sum_order.h"
#include "device.h"
#include "export.h"

namespace {

using namespace nestpipe;

constexpr int kThreads = 256;
constexpr int kMostDim = 512;
constexpr int64_t kMostBlocks = 132 * 16;
// Chosen by `tools/bench_device_index.py`: rows under way in a group, blocks on a multiprocessor.
constexpr int kMostAtOnce = 4;
constexpr int kLeastBlocks = 4;

// Lanes that share a row, numbers that a lane moves at once, and how often it does.
template <int kWideOf, int kLanesOf, int kPartsOf>
struct Form {
  static constexpr int kWide = kWideOf, kLanes = kLanesOf, kParts = kPartsOf;
  static constexpr int kNumbers = kWide * kParts, kGroups = kThreads / kLanes;
  // Rows that are on their way before the first is added.
  static constexpr int kAtOnce =
      kNumbers * kMostAtOnce <= 16 ? kMostAtOnce : kNumbers <= 16 ? 16 / kNumbers : 1;
  // Long rows need registers more than they need other warps.
  static constexpr int kBlocks = kWide == 4 && kParts == 1 ? kLeastBlocks : 1;
};

struct Lane {
  int in_group, group;  // of the block
  unsigned mask;        // the lanes of its group

  template <typename F>
  __device__ static Lane of_thread() {
    const int thread = static_cast<int>(threadIdx.x), first = thread % kWarp / F::kLanes * F::kLanes;
    const unsigned ones = F::kLanes == kWarp ? kAllLanes : (1U << (F::kLanes % kWarp)) - 1;
    return {thread % F::kLanes, thread / F::kLanes, ones << first};
  }
};

template <int kWide>
struct alignas(4 * kWide) Vector {
  float of[kWide];
};

// What a lane has of a row.
template <typename F>
struct Numbers {
  Vector<F::kWide> of[F::kParts];

  __device__ static int column(const Lane& lane, int part) {
    return (part * F::kLanes + lane.in_group) * F::kWide;
  }

  __device__ void clear() {
    for (int p = 0; p < F::kParts; ++p) {
      for (int k = 0; k < F::kWide; ++k) of[p].of[k] = 0.0F;
    }
  }

  __device__ void load(const float* row, int dim, const Lane& lane) {
#pragma unroll
    for (int p = 0; p < F::kParts; ++p) {
      const int at = column(lane, p);
      if (at < dim) of[p] = *reinterpret_cast<const Vector<F::kWide>*>(row + at);
    }
  }

  // Rows that are read once should not push others out of the cache.
  __device__ void load_once(const float* row, int dim, const Lane& lane) {
    if constexpr (F::kWide == 4) {
#pragma unroll
      for (int p = 0; p < F::kParts; ++p) {
        const int at = column(lane, p);
        if (at >= dim) continue;
        const float4 four = __ldcs(reinterpret_cast<const float4*>(row + at));
        of[p] = {four.x, four.y, four.z, four.w};
      }
    } else {
      load(row, dim, lane);
    }
  }

  __device__ void store(float* row, int dim, const Lane& lane) const {
#pragma unroll
    for (int p = 0; p < F::kParts; ++p) {
      const int at = column(lane, p);
      if (at < dim) *reinterpret_cast<Vector<F::kWide>*>(row + at) = of[p];
    }
  }

  template <typename Change>
  __device__ void each(Change change) {
#pragma unroll
    for (int p = 0; p < F::kParts; ++p) {
#pragma unroll
      for (int k = 0; k < F::kWide; ++k) change(of[p].of[k], p, k);
    }
  }

  __device__ void add(const Numbers& other) {
    each([&](float& x, int p, int k) { x += other.of[p].of[k]; });
  }
};

struct Rows {
  float* base;
  int64_t stride;  // numbers

  __device__ float* row(int64_t number) const { return base + number * stride; }
};

// One term of a sum: a row, divided and then multiplied. A negative row counts as zero.
struct Term {
  int32_t row;
  float divisor, weight;
};

// Adds terms [begin, end). Each lane fetches one of the next terms, then all share them.
template <typename F, bool kScaled, bool kOnce, typename Fetch>
__device__ void add_terms(Numbers<F>& sum, const Rows& rows, int dim, int32_t begin, int32_t end,
                          const Lane& lane, Fetch fetch) {
#pragma unroll 1
  for (int32_t tile = begin; tile < end; tile += F::kLanes) {
    const int terms = min(end - tile, F::kLanes);
    const Term mine = lane.in_group < terms ? fetch(tile + lane.in_group) : Term{-1, 1.0F, 1.0F};
#pragma unroll 1  // more rows at once would cost more in registers than they bring
    for (int t = 0; t < terms; t += F::kAtOnce) {
      Numbers<F> came[F::kAtOnce];
      int32_t row[F::kAtOnce];
#pragma unroll
      for (int u = 0; u < F::kAtOnce; ++u) {
        // Beyond the last term the first ones come round again; they are not added.
        row[u] = __shfl_sync(lane.mask, mine.row, t + u, F::kLanes);
        if (t + u >= terms) row[u] = -1;
        if (row[u] < 0) continue;
        if constexpr (kOnce) {
          came[u].load_once(rows.row(row[u]), dim, lane);
        } else {
          came[u].load(rows.row(row[u]), dim, lane);
        }
      }
#pragma unroll
      for (int u = 0; u < F::kAtOnce; ++u) {
        if constexpr (kScaled) {
          const float divisor = __shfl_sync(lane.mask, mine.divisor, t + u, F::kLanes);
          const float weight = __shfl_sync(lane.mask, mine.weight, t + u, F::kLanes);
          if (row[u] >= 0) came[u].each([&](float& x, int, int) { x = x / divisor * weight; });
        }
        if (row[u] >= 0) sum.add(came[u]);
      }
    }
  }
}

struct Lookup {
  Rows rows, out;
  const int32_t* slots;    // of each term
  const int32_t* ends;     // where each output's terms begin, then where the last ones end
  const float* weights;    // of each term; null: 1
  const float* divisors;   // of each output; null: 1
  int64_t outputs;
  int32_t dim;
};

// Every output is a row as it is, a negative zero too; one without a slot is zero.
template <typename F>
__global__ void __launch_bounds__(kThreads) look_up_rows(const Lookup task) {
  const Lane lane = Lane::of_thread<F>();
  const int64_t step = static_cast<int64_t>(gridDim.x) * F::kGroups * F::kAtOnce;
  for (int64_t o = (static_cast<int64_t>(blockIdx.x) * F::kGroups + lane.group) * F::kAtOnce;
       o < task.outputs; o += step) {
    Numbers<F> found[F::kAtOnce];
    int32_t slot[F::kAtOnce];
#pragma unroll
    for (int u = 0; u < F::kAtOnce; ++u) slot[u] = o + u < task.outputs ? task.slots[o + u] : -1;
#pragma unroll
    for (int u = 0; u < F::kAtOnce; ++u) {
      found[u].clear();
      if (slot[u] >= 0) found[u].load(task.rows.row(slot[u]), task.dim, lane);
    }
#pragma unroll
    for (int u = 0; u < F::kAtOnce; ++u) {
      if (o + u < task.outputs) found[u].store(task.out.row(o + u), task.dim, lane);
    }
  }
}

// Every output is the weighted sum of its terms, over its divisor.
template <typename F, bool kWeighted>
__global__ void __launch_bounds__(kThreads) look_up_bags(const Lookup task) {
  const Lane lane = Lane::of_thread<F>();
  const int64_t step = static_cast<int64_t>(gridDim.x) * F::kGroups;
  for (int64_t o = static_cast<int64_t>(blockIdx.x) * F::kGroups + lane.group; o < task.outputs;
       o += step) {
    Numbers<F> sum;
    const auto fetch = [&](int32_t t) {
      return Term{task.slots[t], 1.0F, kWeighted ? task.weights[t] : 1.0F};
    };
    const auto sum_piece = [&](int32_t begin, int32_t end, Numbers<F>& piece) {
      piece.clear();
      add_terms<F, kWeighted, false>(piece, task.rows, task.dim, begin, end, lane, fetch);
    };
    sum_in_order(task.ends[o], task.ends[o + 1], sum, sum_piece);
    if (task.divisors) {
      const float divisor = task.divisors[o];
      sum.each([&](float& x, int, int) { x /= divisor; });
    }
    sum.store(task.out.row(o), task.dim, lane);
  }
}

struct alignas(16) Piece {
  int32_t begin, count, id, partial;  // see segments.cu
};

struct alignas(16) LongSegment {
  int32_t begin, pieces, id, unused;
};

// Gradients of outputs, and what is done with the sums of a batch.
struct Update {
  Rows gradients;
  const int32_t* terms;     // sorted by row
  const int32_t* outputs;   // of each term; null: a term is the number of its output
  const float* weights;     // of each term; null: 1
  const float* divisors;    // of each output; null: 1
  const float* times;       // every sum is multiplied by it; null: by `factor`
  const Piece* pieces;
  const LongSegment* longs;
  const int32_t* counts;    // pieces, long segments
  float* partials;          // 2 x (terms / 32 + 1) rows
  float* group_partials;    // 2 x (terms / 1024 + 1) rows
  Rows rows;                // by id; their weights are updated, or become the sums
  int64_t num_terms;
  int32_t dim;
  int32_t add;              // without an optimizer: sums are added to the weights
  int32_t clip;             // of a sum with faults only those numbers are dropped
  int32_t* faults;          // counts sums with faults; null: nobody looks
  float factor;
};

// Larger numbers count as inf: their squares, which optimizers keep, would be.
constexpr float kLargest = 1e18F;

enum Does : int { kStores, kAdds, kSgds, kAdagrads, kRowwises, kAdams };

// The sum of squares: halves are added until one number is left, as the host and the plain twin do.
template <typename F>
__device__ float sum_of_squares(Numbers<F> squares, int dim, const Lane& lane) {
  squares.each([](float& x, int, int) { x *= x; });
  if (dim == F::kLanes * F::kNumbers) {
    for (int half = F::kParts / 2; half > 0; half /= 2) {
#pragma unroll
      for (int p = 0; p < F::kParts / 2; ++p) {
        for (int k = 0; k < F::kWide && p < half; ++k) {
          squares.of[p].of[k] += squares.of[p + half < F::kParts ? p + half : p].of[k];
        }
      }
    }
    auto& mine = squares.of[0].of;
    for (int distance = F::kLanes / 2; distance > 0; distance /= 2) {
      for (int k = 0; k < F::kWide; ++k) {
        mine[k] += __shfl_down_sync(lane.mask, mine[k], distance, F::kLanes);
      }
    }
    for (int half = F::kWide / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) mine[k] += mine[k + half];
    }
    return __shfl_sync(lane.mask, mine[0], 0, F::kLanes);
  }
  __shared__ float memory[F::kGroups][F::kLanes * F::kNumbers];
  float* const all = memory[lane.group];
  __syncwarp(lane.mask);  // all have read what was here before
  squares.store(all, dim, lane);
  for (int n = dim; n > 1;) {
    const int half = (n + 1) / 2;
    __syncwarp(lane.mask);
    for (int i = lane.in_group; i < n - half; i += F::kLanes) all[i] += all[half + i];
    n = half;
  }
  __syncwarp(lane.mask);
  return all[0];
}

// A row with what its optimizer keeps, on its way while the gradient is summed.
template <typename F, Does kDoes>
struct Target {
  float* row;
  Numbers<F> weights, state, more_state;
  float moment;

  __device__ void load(int dim, const Lane& lane) {
    if constexpr (kDoes != kStores) weights.load(row, dim, lane);
    if constexpr (kDoes == kAdagrads || kDoes == kAdams) state.load(row + dim, dim, lane);
    if constexpr (kDoes == kAdams) more_state.load(row + 2 * dim, dim, lane);
    if constexpr (kDoes == kRowwises) moment = row[dim];
  }

  __device__ void apply(const Optimizer& of, Numbers<F> g, int dim, const Lane& lane) {
    if constexpr (kDoes == kStores) {
      g.store(row, dim, lane);
      return;
    } else if constexpr (kDoes == kAdds) {
      weights.add(g);
    } else if constexpr (kDoes == kSgds) {
      g.each([&](float& x, int p, int k) { sgd(of, weights.of[p].of[k], x); });
    } else if constexpr (kDoes == kAdagrads) {
      g.each([&](float& x, int p, int k) {
        adagrad(of, weights.of[p].of[k], state.of[p].of[k], x);
      });
      state.store(row + dim, dim, lane);
    } else if constexpr (kDoes == kAdams) {
      g.each([&](float& x, int p, int k) {
        adam(of, weights.of[p].of[k], state.of[p].of[k], more_state.of[p].of[k], x);
      });
      state.store(row + dim, dim, lane);
      more_state.store(row + 2 * dim, dim, lane);
    } else {
      moment += sum_of_squares(g, dim, lane) / static_cast<float>(dim);
      const float rate = rowwise_rate(of, moment, divisor_of(of, row + dim));
      g.each([&](float& x, int p, int k) {
        weights.of[p].of[k] = weights.of[p].of[k] * of.keep - x * rate;
      });
      __syncwarp(lane.mask);  // all have read the moment
      if (lane.in_group == 0) row[dim] = moment;
    }
    weights.store(row, dim, lane);
  }
};

template <typename F, bool kScaled>
__device__ void sum_piece(const Update& task, const Piece& piece, const Lane& lane,
                          Numbers<F>& sum) {
  const auto fetch = [&](int32_t at) {
    const int32_t term = task.terms[at], output = task.outputs ? task.outputs[term] : term;
    if (!kScaled) return Term{output, 1.0F, 1.0F};
    return Term{output, task.divisors ? task.divisors[output] : 1.0F,
                task.weights ? task.weights[term] : 1.0F};
  };
  sum.clear();
  add_terms<F, kScaled, true>(sum, task.gradients, task.dim, piece.begin,
                              piece.begin + piece.count, lane, fetch);
}

template <typename F>
__device__ void scale(const Update& task, Numbers<F>& sum) {
  const float times = task.times ? *task.times : task.factor;
  sum.each([&](float& x, int, int) { x *= times; });
}

// A sum that is not finite is zero, or only its numbers that are not.
template <typename F>
__device__ void drop_faults(const Update& task, Numbers<F>& sum, const Lane& lane) {
  if (!task.faults) return;
  bool fine = true;
  sum.each([&](float& x, int p, int) {
    fine &= Numbers<F>::column(lane, p) >= task.dim || fabsf(x) <= kLargest;
  });
  if (__all_sync(lane.mask, fine)) return;
  if (lane.in_group == 0) atomicAdd(task.faults, 1);
  sum.each([&](float& x, int, int) {
    if (!task.clip || !(fabsf(x) <= kLargest)) x = 0.0F;
  });
}

// Sums every piece; one that is a whole segment is applied to its row.
template <typename F, Does kDoes, bool kScaled>
__global__ void __launch_bounds__(kThreads, F::kBlocks)
    sum_pieces(const Optimizer of, const Update task) {
  const Lane lane = Lane::of_thread<F>();
  const int step = static_cast<int>(gridDim.x) * F::kGroups, count = task.counts[0];
  for (int i = static_cast<int>(blockIdx.x) * F::kGroups + lane.group; i < count; i += step) {
    const Piece piece = task.pieces[i];
    const bool whole = piece.partial < 0;
    Target<F, kDoes> target{task.rows.row(piece.id)};
    Numbers<F> sum;
    if (whole) target.load(task.dim, lane);
    sum_piece<F, kScaled>(task, piece, lane, sum);
    if (whole) {
      drop_faults(task, sum, lane);
      scale(task, sum);
      target.apply(of, sum, task.dim, lane);
    } else {
      sum.store(task.partials + static_cast<int64_t>(piece.partial) * task.dim, task.dim, lane);
    }
  }
}

// Sums of `kPiece^level` terms each: where number i of those of a segment lies.
__device__ inline int64_t partial_of(int64_t begin, int64_t length, int64_t i) {
  return 2 * (begin / length + i) + (i == 0);
}

template <typename F>
__device__ void sum_partials(const float* partials, int64_t begin, int64_t length, int64_t first,
                             int64_t last, int dim, const Lane& lane, Numbers<F>& sum) {
  sum.clear();
#pragma unroll 1
  for (int64_t i = first; i < last; i += F::kAtOnce) {
    Numbers<F> came[F::kAtOnce];
#pragma unroll
    for (int u = 0; u < F::kAtOnce; ++u) {
      if (i + u < last) {
        came[u].load(partials + partial_of(begin, length, i + u) * dim, dim, lane);
      }
    }
#pragma unroll
    for (int u = 0; u < F::kAtOnce; ++u) {
      if (i + u < last) sum.add(came[u]);
    }
  }
}

// A block for each long segment: its pieces 32 by 32, then those sums, which are applied.
template <typename F, Does kDoes>
__global__ void __launch_bounds__(kThreads) sum_longs(const Optimizer of, const Update task) {
  const Lane lane = Lane::of_thread<F>();
  for (int64_t s = blockIdx.x; s < task.counts[1]; s += gridDim.x) {
    const LongSegment segment = task.longs[s];
    const int64_t sums = (segment.pieces + kPiece - 1) / kPiece;
    Numbers<F> sum;
    for (int64_t g = lane.group; g < sums; g += F::kGroups) {
      const int64_t last = min((g + 1) * kPiece, static_cast<int64_t>(segment.pieces));
      sum_partials(task.partials, segment.begin, kPiece, g * kPiece, last, task.dim, lane, sum);
      if (sums == 1) break;
      float* const to =
          task.group_partials + partial_of(segment.begin, kPiece * kPiece, g) * task.dim;
      sum.store(to, task.dim, lane);
    }
    __syncthreads();
    if (lane.group != 0) continue;
    Target<F, kDoes> target{task.rows.row(segment.id)};
    target.load(task.dim, lane);
    if (sums > 1) {
      sum_partials(task.group_partials, segment.begin, kPiece * kPiece, 0, sums, task.dim, lane,
                   sum);
    }
    drop_faults(task, sum, lane);
    scale(task, sum);
    target.apply(of, sum, task.dim, lane);
  }
}

bool is_whole(const Rows& rows, int64_t dim) {
  return reinterpret_cast<uintptr_t>(rows.base) % 16 == 0 && rows.stride % 4 == 0 && dim % 4 == 0;
}

// Calls `use` with the form for rows of `dim` numbers.
template <typename Use>
int with_form(int64_t dim, bool whole, Use use) {
  if (dim < 1 || dim > kMostDim) return kUnknownWidth;
  if (!whole) return dim <= 128 ? use(Form<1, 32, 4>{}) : use(Form<1, 32, 16>{});
  if (dim <= 16) return use(Form<4, 4, 1>{});
  if (dim <= 32) return use(Form<4, 8, 1>{});
  if (dim <= 64) return use(Form<4, 16, 1>{});
  if (dim <= 128) return use(Form<4, 32, 1>{});
  return dim <= 256 ? use(Form<4, 32, 2>{}) : use(Form<4, 32, 4>{});
}

template <typename F, Does kDoes>
int launch_update(const Optimizer& of, const Update& task, cudaStream_t stream) {
  const int64_t pieces = blocks_for(task.num_terms, F::kGroups, kMostBlocks);
  const auto kernel = task.weights || task.divisors ? sum_pieces<F, kDoes, true>
                                                    : sum_pieces<F, kDoes, false>;
  if (const int status = launch(kernel, pieces, kThreads, stream, of, task)) return status;
  // A long segment has more than 32 terms.
  const int64_t longs = blocks_for(task.num_terms / (kPiece + 1), 1, kMostBlocks);
  return launch(sum_longs<F, kDoes>, longs, kThreads, stream, of, task);
}

}  // namespace

// Rows of slots, one for each output, or sums of them; at most 512 numbers a row.
NESTPIPE_API int nestpipe_look_up(const Lookup* task, cudaStream_t stream) {
  const bool whole = is_whole(task->rows, task->dim) && is_whole(task->out, task->dim);
  return with_form(task->dim, whole, [&](auto form) {
    using F = decltype(form);
    if (task->ends) {
      const int64_t blocks = blocks_for(task->outputs, F::kGroups, kMostBlocks);
      const auto kernel = task->weights ? look_up_bags<F, true> : look_up_bags<F, false>;
      return launch(kernel, blocks, kThreads, stream, *task);
    }
    const int64_t blocks = blocks_for(task->outputs, F::kGroups * F::kAtOnce, kMostBlocks);
    return launch(look_up_rows<F>, blocks, kThreads, stream, *task);
  });
}

// Sums the gradients of every row and applies an optimizer; without one the sums themselves are
// written to the rows, or added to them.
NESTPIPE_API int nestpipe_update_segments(const Optimizer* of, const Update* task,
                                          cudaStream_t stream) {
  const bool whole = is_whole(task->rows, task->dim) && is_whole(task->gradients, task->dim) &&
                     is_whole({task->partials, task->dim}, task->dim) &&
                     is_whole({task->group_partials, task->dim}, task->dim);
  return with_form(task->dim, whole, [&](auto form) {
    using F = decltype(form);
    if (!of && task->add) return launch_update<F, kAdds>(Optimizer{}, *task, stream);
    if (!of) return launch_update<F, kStores>(Optimizer{}, *task, stream);
    switch (of->kind) {
      case kSgd:
        return launch_update<F, kSgds>(*of, *task, stream);
      case kAdagrad:
        return launch_update<F, kAdagrads>(*of, *task, stream);
      case kAdam:
      case kAdamW:
        return launch_update<F, kAdams>(*of, *task, stream);
      case kRowwiseAdagrad:
      case kMomentumScaledRowwiseAdagrad:
      case kTouchScaledRowwiseAdagrad:
        return launch_update<F, kRowwises>(*of, *task, stream);
      default:
        return kUnknownOptimizer;
    }
  });
}
