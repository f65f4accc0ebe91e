// Sums of rows into rows.
#include <cstdint>
#include <vector>

#include "common/threads.h"
#include "rows/segments.h"

NESTPIPE_API int nestpipe_segment_sum(const nestpipe::Rows* rows, const nestpipe::Segments* segments, int64_t sums,
                              int64_t dim, const nestpipe::Rows* out, int64_t add,
                              int64_t threads) {
  using namespace nestpipe;
  try {
    const int64_t last = sums ? segments->end(sums - 1) : 0;
    in_ranges(sums, threads, [&](int64_t begin, int64_t end) {
      std::vector<float> part(add ? static_cast<size_t>(dim) : 0);
      for (int64_t sum = begin; sum < end; ++sum) {
        if (!add) {
          sum_segment(*rows, *segments, sum, last, dim, out->row(sum));
        } else if (segments->begin(sum) < segments->end(sum)) {
          sum_segment(*rows, *segments, sum, last, dim, part.data());
          float* total = out->row(sum);
          for (int64_t i = 0; i < dim; ++i) total[i] += part[size_t(i)];
        }
      }
    });
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kDefect;
  }
}
