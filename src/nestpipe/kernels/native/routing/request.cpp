// The requester's routing of one micro-batch: unique keys, or sums at the owner where those are
// fewer bytes; who owns what; how rows that come back make what the model sees.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "routing/routing.h"
#include "routing/unique.h"

namespace nestpipe {

namespace {

// 63 bits.
uint64_t mixed(int64_t key, int64_t table) {
  uint64_t x = static_cast<uint64_t>(key) +
               static_cast<uint64_t>(table + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return (x ^ (x >> 31)) & 0x7FFFFFFFFFFFFFFFULL;
}

uint64_t owner_of(uint64_t mixed, uint64_t ranks) {
  return (ranks & (ranks - 1)) == 0 ? mixed & (ranks - 1) : mixed % ranks;
}

// Kept between calls of one thread: fresh memory would cost more than the work in it.
struct Kept {
  Unique unique;
  std::vector<uint32_t> numbers;  // of each term: its unique key, or its owner
  std::vector<uint64_t> bitmap;
  std::vector<int64_t> unique_keys;
  std::vector<uint32_t> owners;  // beside unique_keys
  std::vector<int32_t> next;
};

// Not inlined: a thread's own variable would be looked up again for every key.
__attribute__((noinline)) Kept& kept() {
  static thread_local Kept mine;
  return mine;
}

class Route {
 public:
  Route(const WantedKeys& wanted, RoutedKeys& routed, Kept& kept)
      : in_(wanted),
        out_(routed),
        ranks_(static_cast<size_t>(wanted.ranks)),
        unique_(kept.unique),
        numbers_(kept.numbers),
        bitmap_(kept.bitmap),
        unique_keys_(kept.unique_keys),
        owners_(kept.owners),
        next_(kept.next) {}

  void run() {
    const int64_t terms = in_.tables ? in_.term_ends[in_.tables - 1] : 0;
    numbers_.resize(static_cast<size_t>(terms));
    unique_keys_.clear(), owners_.clear();
    unique_starts_.assign(1, 0);
    for (int64_t t = 0; t < in_.tables; ++t) look(t);
    set_starts();
    out_.seen_ends[0] = 0;
    for (int64_t t = 0; t < in_.tables; ++t) {
      out_.straight[t] = -1;
      summed_[size_t(t)] ? ask_sums(t) : ask_rows(t);
    }
    turn_back();
  }

 private:
  int64_t first_term(int64_t t) const { return t ? in_.term_ends[t - 1] : 0; }
  int64_t first_output(int64_t t) const { return t ? in_.output_ends[t - 1] : 0; }
  int64_t length(int64_t output) const { return in_.lengths ? in_.lengths[output] : 1; }
  size_t cell(size_t rank, int64_t t) const {
    return rank * static_cast<size_t>(in_.tables) + static_cast<size_t>(t);
  }

  // Chooses between rows and sums, and counts what each owner gets.
  void look(int64_t t) {
    summed_.push_back(in_.pooled[t] && !single(t) && sums_pay(t));
    if (summed_.back()) {
      unique_starts_.push_back(unique_keys_.size());
      return;
    }
    const int64_t begin = first_term(t), end = in_.term_ends[t];
    unique_.begin(end - begin);
    uint32_t* const numbers = numbers_.data() + begin;
    unique_.number_all(in_.keys + begin, end - begin,
                       [numbers](int64_t i, uint32_t number) { numbers[i] = number; });
    const auto& keys = unique_.keys();
    unique_keys_.insert(unique_keys_.end(), keys.begin(), keys.end());
    unique_starts_.push_back(unique_keys_.size());
    for (size_t r = 0; r < ranks_; ++r) out_.key_counts[cell(r, t)] = 0;
    for (const int64_t key : keys) {
      owners_.push_back(static_cast<uint32_t>(owner(t, mixed(key, t))));
      ++out_.key_counts[cell(owners_.back(), t)];
    }
    for (size_t r = 0; r < ranks_; ++r) out_.row_counts[cell(r, t)] = out_.key_counts[cell(r, t)];
  }

  uint64_t owner(int64_t t, uint64_t mixed) const {
    return in_.table_owners[t] >= 0 ? static_cast<uint64_t>(in_.table_owners[t]) : owner_of(mixed, ranks_);
  }

  bool single(int64_t t) const {
    if (in_.lengths == nullptr) return true;
    const int64_t* first = in_.lengths + first_output(t);
    const int64_t* last = in_.lengths + in_.output_ends[t];
    return std::all_of(first, last, [](int64_t length) { return length == 1; });
  }

  // Whether sums at the owners are fewer bytes, there and back, than unique rows.
  bool sums_pay(int64_t t) {
    in_.table_owners[t] >= 0 ? count_sums_of_one(t) : count_sums(t);
    int64_t sums = 0;
    for (size_t r = 0; r < ranks_; ++r) sums += out_.row_counts[cell(r, t)];
    // A row, its gradient, its key or length; sums need every key besides.
    const int64_t row = 2 * in_.row_bytes + 8;
    const int64_t begin = first_term(t), end = in_.term_ends[t];
    const int64_t limit = (sums * row + 8 * (end - begin)) / row;
    // Unique keys, a few too little, by the places of their hashes in a bitmap.
    uint64_t places = 1;
    while (places < 4 * static_cast<uint64_t>(end - begin)) places *= 2;
    bitmap_.assign((places + 63) / 64, 0);
    int64_t unique = 0;
    for (int64_t i = begin; i < end && unique <= limit; ++i) {
      const uint64_t place = (mixed(in_.keys[i], t) >> 20) & (places - 1);
      uint64_t& word = bitmap_[place / 64];
      const uint64_t bit = uint64_t{1} << (place % 64);
      unique += (word & bit) == 0;
      word |= bit;
    }
    return unique > limit;
  }

  // How many keys and sums each owner would get. Leaves the owner of each key in numbers_.
  void count_sums(int64_t t) {
    std::vector<int64_t> terms(ranks_, 0), sums(ranks_, 0), last(ranks_, -1);
    int64_t i = first_term(t);
    for (int64_t o = first_output(t); o < in_.output_ends[t]; ++o) {
      for (const int64_t stop = i + length(o); i < stop; ++i) {
        const uint64_t by = owner_of(mixed(in_.keys[i], t), ranks_);
        numbers_[size_t(i)] = static_cast<uint32_t>(by);
        ++terms[by];
        sums[by] += last[by] != o;
        last[by] = o;
      }
    }
    for (size_t r = 0; r < ranks_; ++r) {
      out_.key_counts[cell(r, t)] = terms[r];
      out_.row_counts[cell(r, t)] = sums[r];
    }
  }

  void count_sums_of_one(int64_t t) {
    for (size_t r = 0; r < ranks_; ++r) {
      out_.key_counts[cell(r, t)] = out_.row_counts[cell(r, t)] = 0;
    }
    const size_t c = cell(static_cast<size_t>(in_.table_owners[t]), t);
    out_.key_counts[c] = in_.term_ends[t] - first_term(t);
    for (int64_t o = first_output(t); o < in_.output_ends[t]; ++o) {
      out_.row_counts[c] += length(o) > 0;
    }
  }

  // Where the keys, lengths and rows of each rank and table begin, peer by peer.
  void set_starts() {
    const size_t cells = ranks_ * static_cast<size_t>(in_.tables);
    next_key_.resize(cells), next_length_.resize(cells), next_row_.resize(cells);
    int64_t key = 0, length = 0, row = 0;
    for (size_t peer = 0; peer < ranks_; ++peer) {
      const size_t self = static_cast<size_t>(in_.rank);
      const size_t rank = peer + 1 == ranks_ ? self : peer + (peer >= self);
      for (int64_t t = 0; t < in_.tables; ++t) {
        const size_t c = cell(rank, t);
        next_key_[c] = key, next_length_[c] = length, next_row_[c] = row;
        key += out_.key_counts[c], row += out_.row_counts[c];
        if (out_.row_counts[c] < out_.key_counts[c]) length += out_.row_counts[c];
      }
    }
    out_.num_lengths = length;
    out_.num_rows = row;
  }

  void ask_rows(int64_t t) {
    const size_t start = unique_starts_[size_t(t)], end = unique_starts_[size_t(t) + 1];
    rows_.resize(end - start);
    for (size_t u = start; u < end; ++u) {
      const size_t c = cell(owners_[u], t);
      rows_[u - start] = static_cast<int32_t>(next_row_[c]++);
      out_.keys[next_key_[c]++] = unique_keys_[u];
    }
    int64_t i = first_term(t);
    for (int64_t o = first_output(t); o < in_.output_ends[t]; ++o) {
      for (const int64_t last = i + length(o); i < last; ++i) {
        out_.seen_rows[num_seen_++] = rows_[numbers_[size_t(i)]];
      }
      out_.seen_ends[o + 1] = num_seen_;
    }
  }

  void ask_sums(int64_t t) {
    if (in_.table_owners[t] >= 0) return ask_sums_of_one(t, static_cast<size_t>(in_.table_owners[t]));
    std::vector<int64_t> last(ranks_, -1), lengths(ranks_, 0);
    std::vector<uint32_t> touched;
    int64_t i = first_term(t);
    for (int64_t o = first_output(t); o < in_.output_ends[t]; ++o) {
      touched.clear();
      for (const int64_t end = i + length(o); i < end; ++i) {
        const uint32_t owner = numbers_[size_t(i)];
        if (last[owner] != o) {
          last[owner] = o, lengths[owner] = 0;
          touched.push_back(owner);
        }
        ++lengths[owner];
        out_.keys[next_key_[cell(owner, t)]++] = in_.keys[i];
      }
      std::sort(touched.begin(), touched.end());
      for (const uint32_t owner : touched) {
        const size_t c = cell(owner, t);
        out_.seen_rows[num_seen_++] = static_cast<int32_t>(next_row_[c]++);
        if (out_.row_counts[c] < out_.key_counts[c]) {
          out_.lengths[next_length_[c]++] = lengths[owner];
        }
      }
      out_.seen_ends[o + 1] = num_seen_;
    }
  }

  // The same where one owner has the whole table: its keys go as they are.
  void ask_sums_of_one(int64_t t, size_t owner) {
    const size_t c = cell(owner, t);
    std::copy(in_.keys + first_term(t), in_.keys + in_.term_ends[t], out_.keys + next_key_[c]);
    const bool with_lengths = out_.row_counts[c] < out_.key_counts[c];
    if (out_.row_counts[c] == in_.output_ends[t] - first_output(t)) {
      out_.straight[t] = next_row_[c];
    }
    for (int64_t o = first_output(t); o < in_.output_ends[t]; ++o) {
      if (length(o) > 0) {
        out_.seen_rows[num_seen_++] = static_cast<int32_t>(next_row_[c]++);
        if (with_lengths) out_.lengths[next_length_[c]++] = length(o);
      }
      out_.seen_ends[o + 1] = num_seen_;
    }
  }

  // From rows of outputs to outputs of rows, in the order of the outputs.
  void turn_back() {
    out_.num_seen = num_seen_;
    int32_t* ends = out_.back_ends;
    std::fill(ends, ends + out_.num_rows + 1, 0);
    for (int32_t i = 0; i < num_seen_; ++i) ++ends[out_.seen_rows[i] + 1];
    for (int64_t row = 0; row < out_.num_rows; ++row) ends[row + 1] += ends[row];
    next_.assign(ends, ends + out_.num_rows);
    const int64_t outputs = in_.tables ? in_.output_ends[in_.tables - 1] : 0;
    for (int64_t o = 0; o < outputs; ++o) {
      for (int32_t i = out_.seen_ends[o]; i < out_.seen_ends[o + 1]; ++i) {
        out_.back_outputs[next_[size_t(out_.seen_rows[i])]++] = static_cast<int32_t>(o);
      }
    }
  }

  const WantedKeys& in_;
  RoutedKeys& out_;
  const size_t ranks_;
  int32_t num_seen_ = 0;
  Unique& unique_;
  std::vector<uint32_t>& numbers_;
  std::vector<uint64_t>& bitmap_;
  std::vector<int64_t>& unique_keys_;
  std::vector<uint32_t>& owners_;
  std::vector<int32_t>& next_;
  std::vector<size_t> unique_starts_;
  std::vector<bool> summed_;  // by table
  std::vector<int64_t> next_key_, next_length_, next_row_;  // by rank and table
  std::vector<int32_t> rows_;
};

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_request(const nestpipe::WantedKeys* wanted, nestpipe::RoutedKeys* routed) {
  try {
    nestpipe::Route(*wanted, *routed, nestpipe::kept()).run();
    return nestpipe::kOk;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}
