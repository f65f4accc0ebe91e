// What a row optimizer does to one weight, on the host and on a GPU.
//
// Every step rounds on its own (both builds forbid contraction), so the plain twin in torch, which
// has one operation per step, gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define NESTPIPE_ANYWHERE __host__ __device__ inline
#else
#define NESTPIPE_ANYWHERE inline
#endif

namespace nestpipe {

// And the state behind the weights of a row.
enum Kind : int64_t {
  kSgd = 0,                           // none
  kAdagrad = 1,                       // a sum of squares for each weight
  kRowwiseAdagrad = 2,                // one moment
  kAdam = 3,                          // a mean for each weight, then a square for each
  kMomentumScaledRowwiseAdagrad = 4,  // one moment
  kTouchScaledRowwiseAdagrad = 5,     // one moment, then how many groups beyond one touch the row
  kAdamW = 6,                         // as Adam; what differs is its eps, and that is given
};

// Whether a number names one of them: others must be refused, never taken for a known one.
NESTPIPE_ANYWHERE bool is_known(int64_t kind) {
  return kind >= kSgd && kind <= kAdamW;
}

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
  float keep;        // what weight decay leaves of a weight; 1 changes no bit
};

NESTPIPE_ANYWHERE void sgd(const Optimizer& of, float& weight, float g) {
  weight = weight * of.keep - g * of.lr;
}

NESTPIPE_ANYWHERE void adagrad(const Optimizer& of, float& weight, float& sum, float g) {
  sum += g * g;
  weight = weight * of.keep - g / (sqrtf(sum) + of.eps) * of.lr;
}

NESTPIPE_ANYWHERE void adam(const Optimizer& of, float& weight, float& mean, float& square,
                            float g) {
  mean = mean * of.beta1 + g * of.rest1;
  square = square * of.beta2 + g * g * of.rest2;
  weight = weight * of.keep - mean / (sqrtf(square) + of.eps) * of.adam_scale;
}

// From the whole scale, for a row that one group touches, down to 1.
NESTPIPE_ANYWHERE float touch_scale(float scale, float groups_beyond_one) {
  const float c = scale / (groups_beyond_one + 1.0F);
  return c < 1.0F ? 1.0F : c > scale ? scale : c;
}

// What a row's moment is divided by, given the state behind it; by 1 changes no bit.
NESTPIPE_ANYWHERE float divisor_of(const Optimizer& of, const float* state) {
  if (of.kind == kTouchScaledRowwiseAdagrad) return touch_scale(of.scale, state[1]);
  return of.kind == kMomentumScaledRowwiseAdagrad ? of.scale : 1.0F;
}

// By how much of its gradient a row with one moment for all weights moves.
NESTPIPE_ANYWHERE float rowwise_rate(const Optimizer& of, float moment, float divisor) {
  return 1.0F / (sqrtf(moment / divisor) + of.eps) * of.lr;
}

}  // namespace nestpipe
