// What Python hands to a row optimizer.
#pragma once

#include <cstdint>

#include "common/abi.h"
#include "rows/row_math.h"
#include "rows/segments.h"

namespace nestpipe {

// The gradient rows of one micro-batch, and which of them each row gets.
struct Part {
  Rows gradients;
  Segments segments;
};

}  // namespace nestpipe

// Row i: its gradients are summed over the parts in order, multiplied by `times`, and applied.
NESTPIPE_API int nestpipe_update(const nestpipe::Optimizer* optimizer, const nestpipe::Rows* rows,
                                 int64_t count, int64_t dim, const nestpipe::Part* parts,
                                 int64_t num_parts, float times, int64_t threads);
