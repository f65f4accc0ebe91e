// What Python hands to a row optimizer.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bags.h"

namespace nestpipe {

// And the state behind the weights of a row.
enum Kind : int64_t {
  kSgd = 0,                           // none
  kAdagrad = 1,                       // a sum of squares for each weight
  kRowwiseAdagrad = 2,                // one moment
  kAdam = 3,                          // a mean for each weight, then a square for each
  kMomentumScaledRowwiseAdagrad = 4,  // one moment
  kTouchScaledRowwiseAdagrad = 5,     // one moment, then how many groups beyond one touch the row
};

struct Optimizer {
  int64_t kind;
  float lr;
  float eps;
  float beta1;
  float rest1;  // 1 - beta1
  float beta2;
  float rest2;
  float adam_scale;  // Adam's learning rate with the bias correction of the step
  float scale;       // 1 or more: what the scaled AdaGrads divide a moment by, or the most of it
};

// The gradient rows of one micro-batch, and which of them each row gets.
struct Part {
  Rows gradients;
  Bags bags;
};

}  // namespace nestpipe

// Row i: its gradients are summed over the parts in order, multiplied by `times`, and applied.
NESTPIPE_API int nestpipe_update(const nestpipe::Optimizer* optimizer, const nestpipe::Rows* rows,
                                 int64_t count, int64_t dim, const nestpipe::Part* parts,
                                 int64_t num_parts, float times, int64_t threads);
