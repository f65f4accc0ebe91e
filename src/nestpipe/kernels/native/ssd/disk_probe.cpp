// How fast a disk is by itself: blocks of a file at given places, by as many threads as asked for.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "common/abi.h"
#include "common/threads.h"

// Reads or writes `count` blocks of `block` bytes. Returns kOk, or kFileFailed with errno in
// `report->asked`. seconds: how long it took, without starting threads.
NESTPIPE_API int nestpipe_ssd_probe(int64_t file, int64_t block, const int64_t* offsets,
                                    int64_t count, int64_t depth, int64_t write, double* seconds,
                                    nestpipe::Report* report);

int nestpipe_ssd_probe(int64_t file, int64_t block, const int64_t* offsets, int64_t count,
                       int64_t depth, int64_t write, double* seconds, nestpipe::Report* report) {
  try {
    const auto bytes = static_cast<size_t>(block);
    std::unique_ptr<char, void (*)(void*)> memory(
        static_cast<char*>(std::aligned_alloc(4096, (bytes * size_t(depth) + 4095) / 4096 * 4096)),
        std::free);
    if (memory == nullptr) return nestpipe::kNoMemory;
    std::memset(memory.get(), 1, bytes * size_t(depth));
    nestpipe::Threads threads(depth);
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};
    const auto began = std::chrono::steady_clock::now();
    threads.run(depth, [&](int64_t thread) {
      char* at = memory.get() + static_cast<size_t>(thread) * bytes;
      for (int64_t i = next++; i < count && failed == 0; i = next++) {
        const int descriptor = static_cast<int>(file);
        const ssize_t done = write != 0 ? pwrite(descriptor, at, bytes, offsets[i])
                                        : pread(descriptor, at, bytes, offsets[i]);
        if (done != static_cast<ssize_t>(bytes)) failed = done < 0 ? errno : EIO;
      }
    });
    *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    report->key = write;
    report->asked = failed;
    return failed == 0 ? nestpipe::kOk : nestpipe::kFileFailed;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}
