// What Python hands to a row optimizer.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bags.h"

namespace nestpipe {

enum Kind : int64_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3 };

struct Optimizer {
  int64_t kind;
  float lr;
  float eps;
  float beta1;
  float rest1;  // 1 - beta1
  float beta2;
  float rest2;
  float scale;  // Adam's learning rate with the bias correction of the step
};

// The gradient rows of one micro-batch, and which of them each row gets.
struct Part {
  Rows gradients;
  Bags bags;
};

}  // namespace nestpipe

// Row i: its gradients are summed over the parts in order, multiplied by `scale`, and applied.
NESTPIPE_API int nestpipe_update(const nestpipe::Optimizer* optimizer, const nestpipe::Rows* rows,
                                 int64_t count, int64_t dim, const nestpipe::Part* parts,
                                 int64_t num_parts, float scale, int64_t threads);
