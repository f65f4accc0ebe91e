// Storing and erasing rows: everything that can fail happens before the first row is written.
//
//   1. sort    keys by table and shard
//   2. look    find stored rows, count new ones, refuse repeated keys
//   3. reserve check limits, map chunks, grow shards
//   4. write   insert new keys, copy rows
//
// To erase, the keys that were found leave their shards, and their places can be used again.
//
// A piece (some shards of one table) belongs to one thread at a time, so shards need no locks
// among writers; readers are kept out by their epochs.
#include <algorithm>
#include <atomic>
#include <vector>

#include "store/store.h"

namespace nestpipe {
namespace {

constexpr int64_t kPart = 8192;   // keys that one thread sorts at a time
constexpr int64_t kPiece = 1024;  // keys that one thread writes at a time, or one shard's
constexpr int64_t kAhead = 12;    // keys between a prefetch and its use
constexpr uint32_t kFewKeys = 8;  // up to here, comparing all pairs is the quickest

class RowWriter {
 public:
  // `rows` is null where rows are erased.
  RowWriter(Store& store, const int64_t* keys, const int64_t* counts, const float* rows)
      : store_(store), scratch_(store.scratch), keys_(keys), rows_(rows) {
    split(counts);
  }

  Status scatter(Report& report) {
    if (!find(report)) return kRepeatedKey;
    if (!limits_hold(report)) return kTooManyRows;
    reserve();
    each_piece([this](const Piece& piece) { grow(piece); });
    each_piece([this](const Piece& piece) { write(piece); });
    for (size_t t = 0; t < store_.tables.size(); ++t) store_.tables[t]->take(new_rows_[t]);
    return kOk;
  }

  Status erase(Report& report, int64_t& erased) {
    if (!find(report)) return kRepeatedKey;
    for (size_t t = 0; t < store_.tables.size(); ++t) {
      store_.tables[t]->reserve_free(start(int64_t(t), kShards) - start(int64_t(t), 0));
    }
    each_piece([this](const Piece& piece) { remove(piece); });
    erased = 0;
    for (const Piece& piece : scratch_.pieces) {
      const uint32_t end = start(piece.table, piece.end);
      for (uint32_t i = start(piece.table, piece.begin); i < end; ++i) {
        if (scratch_.rows[i] == nullptr) continue;
        table(piece.table).give(scratch_.rows[i]);
        ++erased;
      }
    }
    return kOk;
  }

 private:
  Table& table(int64_t t) const { return *store_.tables[static_cast<size_t>(t)]; }
  // The shard's keys are order[start(t, s)] to order[start(t, s + 1) - 1].
  uint32_t start(int64_t t, uint64_t s) const {
    return scratch_.starts[static_cast<uint64_t>(t) * kShards + s];
  }
  uint64_t& first_new(int64_t t, uint64_t s) const {
    return scratch_.first_new[static_cast<uint64_t>(t) * kShards + s];
  }

  // Sorts the keys and finds their rows; false where a key comes twice.
  bool find(Report& report) {
    sort();
    cut();
    each_piece([this](const Piece& piece) { look(piece); });
    if (repeated_table_ < 0) return true;
    report.table = repeated_table_;
    report.key = repeated_key_;
    return false;
  }

  template <typename Work>
  void each_piece(const Work& work) {
    store_.threads.run(static_cast<int64_t>(scratch_.pieces.size()), [this, &work](int64_t i) {
      work(scratch_.pieces[static_cast<size_t>(i)]);
    });
  }

  void split(const int64_t* counts) {
    scratch_.parts.clear();
    for (size_t t = 0; t < store_.tables.size(); ++t) {
      for (int64_t done = 0; done < counts[t]; done += kPart) {
        const int64_t count = std::min(kPart, counts[t] - done);
        scratch_.parts.push_back({static_cast<int64_t>(t), total_, total_ + count});
        total_ += count;
      }
    }
    const size_t groups = store_.tables.size() * kShards;
    scratch_.part_starts.assign(scratch_.parts.size() * kShards, 0);
    scratch_.starts.assign(groups + 1, 0);
    scratch_.first_new.assign(groups, 0);
    scratch_.order.resize(static_cast<size_t>(total_));
    scratch_.rows.resize(static_cast<size_t>(total_));
    new_rows_.assign(store_.tables.size(), 0);
  }

  // A counting sort: each part counts, the counts become addresses, each part fills its addresses.
  void sort() {
    const auto num_parts = static_cast<int64_t>(scratch_.parts.size());
    store_.threads.run(num_parts, [this](int64_t p) {
      uint32_t* counts = &scratch_.part_starts[static_cast<uint64_t>(p) * kShards];
      const Part& part = scratch_.parts[static_cast<size_t>(p)];
      for (int64_t i = part.begin; i < part.end; ++i) ++counts[shard_of(hash_of(keys_[i]))];
    });
    place_parts();
    store_.threads.run(num_parts, [this](int64_t p) {
      uint32_t* addresses = &scratch_.part_starts[static_cast<uint64_t>(p) * kShards];
      const Part& part = scratch_.parts[static_cast<size_t>(p)];
      for (int64_t i = part.begin; i < part.end; ++i) {
        scratch_.order[addresses[shard_of(hash_of(keys_[i]))]++] = static_cast<uint32_t>(i);
      }
    });
  }

  void place_parts() {
    uint32_t place = 0;
    size_t first = 0;
    for (size_t t = 0; t < store_.tables.size(); ++t) {
      size_t end = first;
      while (end < scratch_.parts.size() && scratch_.parts[end].table == int64_t(t)) ++end;
      for (uint64_t s = 0; s < kShards; ++s) {
        scratch_.starts[t * kShards + s] = place;
        for (size_t p = first; p < end; ++p) {
          uint32_t& count = scratch_.part_starts[p * kShards + s];
          const uint32_t keys = count;
          count = place;
          place += keys;
        }
      }
      first = end;
    }
    scratch_.starts.back() = place;
  }

  void cut() {
    scratch_.pieces.clear();
    for (int64_t t = 0; t < static_cast<int64_t>(store_.tables.size()); ++t) {
      if (start(t, 0) == start(t, kShards)) continue;
      Piece piece{t, 0, 0};
      for (uint64_t s = 1; s <= kShards; ++s) {
        if (start(t, s) - start(t, piece.begin) < kPiece && s < kShards) continue;
        piece.end = s;
        scratch_.pieces.push_back(piece);
        piece.begin = s;
      }
    }
  }

  void look(const Piece& piece) {
    std::vector<uint32_t> seen;
    const uint32_t end = start(piece.table, piece.end);
    uint32_t ahead = start(piece.table, piece.begin);
    for (uint64_t s = piece.begin; s < piece.end; ++s) {
      const uint32_t stop = start(piece.table, s + 1);
      if (const uint32_t first = start(piece.table, s); repeats(first, stop, piece.table, seen)) {
        return;
      }
      const Shard& shard = table(piece.table).shards[s];
      for (uint32_t i = start(piece.table, s); i < stop; ++i) {
        for (; ahead < end && ahead < i + kAhead; ++ahead) prefetch_bucket(piece.table, ahead);
        const int64_t key = keys_[scratch_.order[i]];
        scratch_.rows[i] = shard.find(key, shard.home(hash_of(key)));
        first_new(piece.table, s) += scratch_.rows[i] == nullptr;
      }
    }
  }

  void prefetch_bucket(int64_t t, uint32_t i) const {
    const uint64_t hash = hash_of(keys_[scratch_.order[i]]);
    __builtin_prefetch(table(t).shards[shard_of(hash)].home(hash));
  }

  // Whether a key comes twice among those of one shard; remembers which.
  bool repeats(uint32_t begin, uint32_t end, int64_t t, std::vector<uint32_t>& seen) {
    for (uint32_t i = begin; end - begin <= kFewKeys && i < end; ++i) {
      for (uint32_t j = begin; j < i; ++j) {
        if (keys_[scratch_.order[i]] == keys_[scratch_.order[j]]) return note_repeat(i, t);
      }
    }
    if (end - begin <= kFewKeys) return false;
    uint64_t size = 1;
    while (size < 2 * uint64_t{end - begin}) size *= 2;
    seen.assign(size, 0);  // 0: empty, else 1 + index into order
    for (uint32_t i = begin; i < end; ++i) {
      const int64_t key = keys_[scratch_.order[i]];
      uint64_t at = hash_of(key) & (size - 1);
      for (; seen[at] != 0; at = (at + 1) & (size - 1)) {
        if (keys_[scratch_.order[seen[at] - 1]] == key) return note_repeat(i, t);
      }
      seen[at] = i + 1;
    }
    return false;
  }

  bool note_repeat(uint32_t i, int64_t t) {
    if (!repeated_.exchange(true)) {
      repeated_key_ = keys_[scratch_.order[i]];
      repeated_table_ = t;
    }
    return true;
  }

  bool limits_hold(Report& report) {
    for (size_t t = 0; t < store_.tables.size(); ++t) {
      const Table& table = *store_.tables[t];
      for (uint64_t s = 0; s < kShards; ++s) new_rows_[t] += first_new(int64_t(t), s);
      const uint64_t rows = table.num_rows + new_rows_[t];
      if (table.max_rows == 0 || new_rows_[t] == 0 || rows <= table.max_rows) continue;
      report.table = static_cast<int64_t>(t);
      report.asked = static_cast<int64_t>(rows);
      report.limit = static_cast<int64_t>(table.max_rows);
      return false;
    }
    return true;
  }

  void reserve() {
    for (size_t t = 0; t < store_.tables.size(); ++t) {
      uint64_t next = 0;
      store_.tables[t]->reserve(new_rows_[t]);
      for (uint64_t s = 0; s < kShards; ++s) {
        const uint64_t count = first_new(int64_t(t), s);
        first_new(int64_t(t), s) = next;
        next += count;
      }
    }
  }

  // New rows of a shard, once first_new holds numbers.
  uint64_t num_new(int64_t t, uint64_t s) const {
    const uint64_t end = s + 1 < kShards
                             ? first_new(t, s + 1)
                             : new_rows_[static_cast<size_t>(t)];
    return end - first_new(t, s);
  }

  void grow(const Piece& piece) {
    for (uint64_t s = piece.begin; s < piece.end; ++s) {
      Shard& shard = table(piece.table).shards[s];
      const uint64_t more = num_new(piece.table, s);
      if (more == 0 || shard.has_room(more)) continue;
      const Owned owned(store_.readers, &shard, &shard + 1);
      shard.grow(more, s, store_.arena);
    }
  }

  void write(const Piece& piece) {
    Table& table = this->table(piece.table);
    const Owned owned(store_.readers, &table.shards[piece.begin],
                      &table.shards[piece.begin] + (piece.end - piece.begin));
    const size_t bytes = store_.form.bytes();
    const bool stream = store_.form.type == kFloat32 && bytes % 64 == 0 &&
                        static_cast<size_t>(total_) * bytes >= kStreamFrom;
    const uint32_t end = start(piece.table, piece.end);
    for (uint64_t s = piece.begin; s < piece.end; ++s) {
      uint64_t next = first_new(piece.table, s);
      for (uint32_t i = start(piece.table, s); i < start(piece.table, s + 1); ++i) {
        if (i + kAhead < end) prefetch_row(i + kAhead, stream);
        const uint32_t source = scratch_.order[i];
        std::byte* row = scratch_.rows[i];
        if (row == nullptr) {
          row = table.place(next++);
          table.shards[s].insert(keys_[source], row);
        }
        store_.form.save(row, rows_ + source * store_.form.width(), stream);
      }
    }
    if (stream) end_stream();
  }

  void remove(const Piece& piece) {
    Table& table = this->table(piece.table);
    const Owned owned(store_.readers, &table.shards[piece.begin],
                      &table.shards[piece.begin] + (piece.end - piece.begin));
    for (uint64_t s = piece.begin; s < piece.end; ++s) {
      for (uint32_t i = start(piece.table, s); i < start(piece.table, s + 1); ++i) {
        if (scratch_.rows[i] != nullptr) table.shards[s].remove(keys_[scratch_.order[i]]);
      }
    }
  }

  void prefetch_row(uint32_t i, bool stream) const {
    const size_t width = store_.form.width();
    prefetch_lines<0>(rows_ + scratch_.order[i] * width, width * sizeof(float));
    if (!stream && scratch_.rows[i] != nullptr) {
      prefetch_lines<1>(scratch_.rows[i], store_.form.bytes());
    }
  }

  // While it lives, the shards and their rows belong to this thread.
  class Owned {
   public:
    Owned(const ReaderEpochs& readers, Shard* begin, Shard* end) : begin_(begin), end_(end) {
      for (Shard* s = begin_; s != end_; ++s) s->written.store(true, std::memory_order_seq_cst);
      readers.wait_for_readers();
    }
    ~Owned() {
      for (Shard* s = begin_; s != end_; ++s) s->written.store(false, std::memory_order_release);
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;

   private:
    Shard* begin_;
    Shard* end_;
  };

  Store& store_;
  Scratch& scratch_;
  const int64_t* keys_;
  const float* rows_;
  int64_t total_ = 0;
  std::vector<uint64_t> new_rows_;  // by table
  std::atomic<bool> repeated_{false};
  int64_t repeated_table_ = -1;
  int64_t repeated_key_ = 0;
};

}  // namespace

Status Store::scatter(const int64_t* keys, const int64_t* counts, const float* rows,
                      Report& report) {
  return RowWriter(*this, keys, counts, rows).scatter(report);
}

Status Store::erase(const int64_t* keys, const int64_t* counts, int64_t& erased, Report& report) {
  return RowWriter(*this, keys, counts, nullptr).erase(report, erased);
}

}  // namespace nestpipe
