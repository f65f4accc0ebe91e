// Reading rows: three steps per key, each a few keys behind the one before, so that the memory of
// many keys is on its way at once.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "store/store.h"

namespace nestpipe {
namespace {

constexpr int64_t kTask = 4096;  // keys that one thread takes at a time
constexpr int64_t kEpoch = 256;   // keys of one epoch: bounds a writer's wait
constexpr int64_t kAhead = 12;   // keys between one step and the next
constexpr int64_t kAheadAlone = 32;  // the same where only their addresses are asked for

struct Job {
  Store& store;
  const int64_t* keys;
  float* out;         // null: only say where rows are
  std::byte** addresses;
  std::vector<int64_t> ends;  // by table: where its keys end
  const int32_t* key_tables;  // instead, the table of each key
  bool stream;
  std::atomic<int64_t> num_new{0};
};

class Range {
 public:
  explicit Range(Job& job) : job_(job), store_(job.store), reader_(job.store.readers) {
    later_.reserve(kEpoch);  // nothing may throw inside an epoch
  }
  ~Range() {
    if (job_.stream) end_stream();
    job_.num_new += fresh_;
  }

  // Keys [begin, end), each with its table.
  void read_each(int64_t begin, int64_t end) {
    const auto table = [this](int64_t i) -> const Table& {
      return *store_.tables[static_cast<size_t>(job_.key_tables[i])];
    };
    for (; begin < end; begin += kEpoch) read_epoch(table, begin, std::min(kEpoch, end - begin));
  }

  // Keys [begin, end), of one table or several.
  void read(int64_t begin, int64_t end) {
    auto table = std::upper_bound(job_.ends.begin(), job_.ends.end(), begin) - job_.ends.begin();
    while (begin < end) {
      const int64_t stop = std::min(end, job_.ends[static_cast<size_t>(table)]);
      const auto same = [&of = *store_.tables[static_cast<size_t>(table)]](int64_t) -> const Table& {
        return of;
      };
      for (; begin < stop; begin += kEpoch) {
        read_epoch(same, begin, std::min(kEpoch, stop - begin));
      }
      begin = stop;
      ++table;
    }
  }

 private:
  // `table`: that of a key by its place in the batch.
  template <typename TableOf>
  void read_epoch(const TableOf& table, int64_t begin, int64_t count) {
    const int64_t* keys = job_.keys + begin;
    const Shard* shards[kEpoch];
    const Bucket* buckets[kEpoch];
    std::byte* rows[kEpoch];
    const int64_t ahead = job_.out == nullptr ? kAheadAlone : kAhead;
    later_.clear();
    reader_.enter();
    for (int64_t i = 0; i < count + 2 * ahead; ++i) {
      if (i < count) {
        const uint64_t hash = hash_of(keys[i]);
        shards[i] = &table(begin + i).shards[shard_of(hash)];
        buckets[i] = bucket_of(*shards[i], hash);
        __builtin_prefetch(buckets[i]);
      }
      if (const int64_t j = i - ahead; j >= 0 && j < count) {
        rows[j] = buckets[j] == nullptr ? nullptr : shards[j]->find(keys[j], buckets[j]);
        if (rows[j] != nullptr && job_.out != nullptr) {
          prefetch_lines<0>(rows[j], store_.form.bytes());
        }
      }
      if (const int64_t j = i - 2 * ahead; j >= 0) {
        if (buckets[j] == nullptr) {
          later_.push_back(begin + j);
        } else {
          finish(table(begin + j), begin + j, rows[j]);
        }
      }
    }
    reader_.leave();
    for (const int64_t i : later_) wait_and_read(table(i), i);
  }

  // Null where a writer has the shard. One that comes after this look waits for the epoch's end.
  static const Bucket* bucket_of(const Shard& shard, uint64_t hash) {
    return shard.written.load(std::memory_order_seq_cst) ? nullptr : shard.home(hash);
  }

  void wait_and_read(const Table& table, int64_t i) {
    const uint64_t hash = hash_of(job_.keys[i]);
    const Shard& shard = table.shards[shard_of(hash)];
    reader_.enter();
    while (shard.written.load(std::memory_order_seq_cst)) {
      reader_.leave();
      std::this_thread::yield();
      reader_.enter();
    }
    finish(table, i, shard.find(job_.keys[i], shard.home(hash)));
    reader_.leave();
  }

  void finish(const Table& table, int64_t i, std::byte* row) {
    if (job_.out == nullptr) {
      job_.addresses[i] = row;
      fresh_ += row == nullptr;
      return;
    }
    float* out = job_.out + static_cast<size_t>(i) * store_.form.width();
    if (row != nullptr) {
      store_.form.load(out, row, job_.stream);
    } else {
      ++fresh_;
      store_.first_row(table, job_.keys[i], out);
    }
  }

  Job& job_;
  Store& store_;
  ReaderEpochs::Reader reader_;
  int64_t fresh_ = 0;
  std::vector<int64_t> later_;
};

}  // namespace

int64_t Store::gather(const int64_t* keys, const int64_t* counts, float* out, std::byte** addresses) {
  Job job{*this, keys, out, addresses, {}, nullptr, false};
  int64_t total = 0;
  for (size_t t = 0; t < tables.size(); ++t) job.ends.push_back(total += counts[t]);
  const size_t row = form.width() * sizeof(float);
  job.stream = out != nullptr && static_cast<size_t>(total) * row >= kStreamFrom &&
               whole_lines(out, row);
  threads.run((total + kTask - 1) / kTask, [&job, total](int64_t task) {
    Range(job).read(task * kTask, std::min(total, (task + 1) * kTask));
  });
  return job.num_new;
}

int64_t Store::locate_each(const int64_t* keys, const int32_t* key_tables, int64_t count,
                           std::byte** addresses) {
  Job job{*this, keys, nullptr, addresses, {}, key_tables, false};
  threads.run((count + kTask - 1) / kTask, [this, &job, count](int64_t task) {
    const int64_t begin = task * kTask, end = std::min(count, begin + kTask);
    for (int64_t i = begin; i < end; ++i) {
      if (static_cast<uint64_t>(job.key_tables[i]) >= tables.size()) {
        throw std::out_of_range("no such table");
      }
    }
    Range(job).read_each(begin, end);
  });
  return job.num_new;
}

}  // namespace nestpipe
