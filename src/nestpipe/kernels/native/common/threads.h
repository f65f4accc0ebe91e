// Threads that stay: several callers may hand them work at the same time.
//
// The caller works too. A forked child has no other threads, and does all by itself.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace nestpipe {

class Threads {
 public:
  // `count` threads in all, the caller included.
  explicit Threads(int64_t count) {
    try {
      for (int64_t i = 1; i < count; ++i) workers_.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Threads() { stop(); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int64_t count() const { return static_cast<int64_t>(workers_.size()) + 1; }

  // Calls work(0) to work(tasks - 1), each once, in any order; rethrows the first exception.
  void run(int64_t tasks, const std::function<void(int64_t)>& work) {
    Job job{&work, tasks};
    const bool shared = tasks > 1 && !workers_.empty() && getpid() == process_;
    if (shared) {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(&job);
    }
    if (shared) wake_.notify_all();
    job.work_on();
    if (shared) {
      std::unique_lock<std::mutex> lock(mutex_);
      retire(&job);
      done_.wait(lock, [&job] { return job.helpers == 0; });
    }
    if (job.failed) std::rethrow_exception(job.failure);
  }

 private:
  struct Job {
    const std::function<void(int64_t)>* work;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    int64_t helpers = 0;  // guarded by mutex_
    std::atomic<bool> failed{false};
    std::exception_ptr failure{};

    void work_on() {
      for (int64_t task = next++; task < tasks; task = next++) {
        try {
          (*work)(task);
        } catch (...) {
          next = tasks;
          if (!failed.exchange(true)) failure = std::current_exception();
        }
      }
    }
  };

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      Job* job = jobs_.front();
      ++job->helpers;
      lock.unlock();
      job->work_on();
      lock.lock();
      retire(job);
      if (--job->helpers == 0) done_.notify_all();
    }
  }

  // Nothing is left to take: nobody new should come.
  void retire(Job* job) { jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end()); }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<Job*> jobs_;
  std::vector<std::thread> workers_;
  bool stopping_ = false;
};

// Threads that all kernels of a process share.
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
