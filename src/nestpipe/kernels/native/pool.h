// Threads that all kernels of a process share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "threads.h"

namespace nestpipe {

constexpr int64_t kRowsPerTask = 2048;

// Calls work(begin, end) for ranges that cover [0, count), on up to `threads` threads.
inline void in_ranges(int64_t count, int64_t threads,
                      const std::function<void(int64_t, int64_t)>& work) {
  if (threads <= 1 || count <= kRowsPerTask) {
    if (count > 0) work(0, count);
    return;
  }
  // Never destroyed: a process may end while a caller is still inside.
  static auto* pools = new std::map<int64_t, std::unique_ptr<Threads>>;
  static auto* mutex = new std::mutex;
  Threads* pool = nullptr;
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    auto& place = (*pools)[threads];
    if (!place) place = std::make_unique<Threads>(threads);
    pool = place.get();
  }
  const int64_t tasks = (count + kRowsPerTask - 1) / kRowsPerTask;
  pool->run(tasks, [&](int64_t task) {
    work(task * kRowsPerTask, std::min(count, (task + 1) * kRowsPerTask));
  });
}

}  // namespace nestpipe
