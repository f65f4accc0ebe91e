// A batch to be split into micro-batches ("parts"), and the call that does it.
#pragma once

#include <cstdint>

#include "common/abi.h"

namespace nestpipe {

struct ClusterTask {
  int64_t num_samples;
  int64_t num_parts;
  const int64_t* offsets;  // one per sample, and the end: where its keys are
  const int64_t* keys;     // of all tables, made distinct before
  const int64_t* tokens;   // one per sample, less than 2^30
  const int64_t* sizes;    // samples of each part; they add up to num_samples
  const int64_t* least;    // tokens that a part must have at least
  const int64_t* most;     // and at most; where the start is further out, no further than that
};

}  // namespace nestpipe

// The part of each sample, a function of the task alone; runs on the calling thread.
NESTPIPE_API int nestpipe_cluster(const nestpipe::ClusterTask* task, int64_t* part_of);
