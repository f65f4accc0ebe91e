// Reading rows: three steps per key, each a few keys behind the one before, so that the memory of
// many keys is on its way at once.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "store.h"

namespace nestpipe {
namespace {

constexpr int64_t kTask = 4096;  // keys that one thread takes at a time
constexpr int64_t kTurn = 256;   // keys between two looks at the gate: bounds a writer's wait
#ifndef NESTPIPE_AHEAD
#define NESTPIPE_AHEAD 12
#endif
constexpr int64_t kAhead = NESTPIPE_AHEAD;  // keys between one step and the next
// Larger results do not fit the caches anyway, so they are written past them.
constexpr size_t kStreamFrom = size_t{4} << 20;

enum class Found : uint8_t { kStored, kFresh, kLater };

struct Job {
  Store& store;
  const int64_t* keys;
  float* out;
  std::vector<int64_t> ends;  // by table: where its keys end
  bool stream;
  std::atomic<int64_t> fresh{0};
};

class Range {
 public:
  explicit Range(Job& job) : job_(job), store_(job.store), reader_(job.store.gate) {}
  ~Range() {
    if (job_.stream) end_stream();
    job_.fresh += fresh_;
  }

  // Keys [begin, end), of one table or several.
  void read(int64_t begin, int64_t end) {
    auto table = std::upper_bound(job_.ends.begin(), job_.ends.end(), begin) - job_.ends.begin();
    while (begin < end) {
      const int64_t stop = std::min(end, job_.ends[static_cast<size_t>(table)]);
      for (; begin < stop; begin += kTurn) {
        read_turn(*store_.tables[static_cast<size_t>(table)], begin, std::min(kTurn, stop - begin));
      }
      begin = stop;
      ++table;
    }
  }

 private:
  void read_turn(const Table& table, int64_t begin, int64_t count) {
    const int64_t* keys = job_.keys + begin;
    const Shard* shards[kTurn];
    const Bucket* buckets[kTurn];
    const std::byte* rows[kTurn];
    later_.clear();
    reader_.begin_turn();
    for (int64_t i = 0; i < count + 2 * kAhead; ++i) {
      if (i < count) {
        const uint64_t hash = hash_of(keys[i]);
        shards[i] = &table.shards[shard_of(hash)];
        buckets[i] = bucket_of(*shards[i], hash);
        __builtin_prefetch(buckets[i]);
      }
      if (const int64_t j = i - kAhead; j >= 0 && j < count) {
        rows[j] = shards[j]->find(keys[j], buckets[j]);
        if (rows[j] != nullptr) prefetch_lines<0>(rows[j], store_.form.bytes());
      }
      if (const int64_t j = i - 2 * kAhead; j >= 0) {
        if (rows[j] != nullptr) {
          store_.form.load(out(begin + j), rows[j], job_.stream);
        } else {
          miss(table, begin + j, *shards[j]);
        }
      }
    }
    reader_.end_turn();
    for (const int64_t i : later_) wait_and_read(table, i);
  }

  // Null where the shard is empty, or where a writer has it; `miss` tells them apart.
  static const Bucket* bucket_of(const Shard& shard, uint64_t hash) {
    if (shard.written.load(std::memory_order_seq_cst) || shard.buckets == nullptr) return nullptr;
    return shard.home(hash);
  }

  void miss(const Table& table, int64_t i, const Shard& shard) {
    // A writer that came after our look at the flag waits for the end of this turn; then reading
    // the key once more is only a waste of time.
    if (shard.written.load(std::memory_order_seq_cst)) {
      later_.push_back(i);
    } else {
      ++fresh_;
      store_.first_row(table, job_.keys[i], out(i));
    }
  }

  void wait_and_read(const Table& table, int64_t i) {
    const uint64_t hash = hash_of(job_.keys[i]);
    const Shard& shard = table.shards[shard_of(hash)];
    reader_.begin_turn();
    while (shard.written.load(std::memory_order_seq_cst)) {
      reader_.end_turn();
      std::this_thread::yield();
      reader_.begin_turn();
    }
    const Bucket* bucket = shard.buckets == nullptr ? nullptr : shard.home(hash);
    if (const std::byte* row = shard.find(job_.keys[i], bucket)) {
      store_.form.load(out(i), row, job_.stream);
    } else {
      ++fresh_;
      store_.first_row(table, job_.keys[i], out(i));
    }
    reader_.end_turn();
  }

  float* out(int64_t i) const { return job_.out + static_cast<size_t>(i) * store_.form.width(); }

  Job& job_;
  Store& store_;
  Gate::Reader reader_;
  int64_t fresh_ = 0;
  std::vector<int64_t> later_;
};

}  // namespace

int64_t Store::gather(const int64_t* keys, const int64_t* counts, float* out) {
  Job job{*this, keys, out, {}, false};
  int64_t total = 0;
  for (size_t t = 0; t < tables.size(); ++t) job.ends.push_back(total += counts[t]);
  const size_t row = form.width() * sizeof(float);
  job.stream = static_cast<size_t>(total) * row >= kStreamFrom && whole_lines(out, row);
  threads.run((total + kTask - 1) / kTask, [&job, total](int64_t task) {
    Range(job).read(task * kTask, std::min(total, (task + 1) * kTask));
  });
  return job.fresh;
}

}  // namespace nestpipe
