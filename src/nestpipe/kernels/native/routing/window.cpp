// The requester's routing of a whole batch, split into micro-batches: each asks for the rows that no
// earlier one has, and each gradient leaves after the last use of its row.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "routing/routing.h"

namespace nestpipe {

namespace {

// Kept between calls of one thread: fresh memory would cost more than the work in it.
struct Kept {
  std::vector<int32_t> first, last;   // of each row: the micro-batches of its uses
  std::vector<int32_t> numbers;       // of each row: its number in the window
  std::vector<int32_t> lasts, peers;  // of each row of the window
  std::vector<int32_t> reused;        // ... and 1 + its place among those used again, or 0
  std::vector<int32_t> next;
};

// Not inlined: a thread's own variable would be looked up again for every key.
__attribute__((noinline)) Kept& kept() {
  static thread_local Kept mine;
  return mine;
}

class SplitWindow {
 public:
  SplitWindow(const WholeBatch& whole, WindowSlices& slices, Kept& kept)
      : in_(whole),
        out_(slices),
        micros_(static_cast<size_t>(whole.micros)),
        ranks_(static_cast<size_t>(whole.ranks)),
        tables_(static_cast<size_t>(whole.tables)),
        cells_(ranks_ * tables_),
        first_(kept.first),
        last_(kept.last),
        numbers_(kept.numbers),
        reused_(kept.reused),
        lasts_(kept.lasts),
        peers_(kept.peers),
        next_(kept.next) {}

  void run() {
    rows_ = static_cast<size_t>(
        std::accumulate(in_.row_counts, in_.row_counts + cells_, int64_t{0}));
    find_uses();
    count();
    ask();
    reused_.assign(rows_, 0);
    for (size_t m = 0; m < micros_; ++m) use(m);
    leave();
  }

 private:
  // Outputs of a table in a micro-batch.
  int64_t first_output(size_t t, size_t m) const {
    return t + m ? in_.output_ends[t * micros_ + m - 1] : 0;
  }
  int64_t end_output(size_t t, size_t m) const { return in_.output_ends[t * micros_ + m]; }
  int64_t first_term(int64_t output) const { return in_.seen_ends ? in_.seen_ends[output] : output; }
  size_t rank_of(size_t peer) const {
    const auto self = static_cast<size_t>(in_.rank);
    return peer + 1 == ranks_ ? self : peer + (peer >= self);
  }

  void find_uses() {
    first_.assign(rows_, -1);
    last_.resize(rows_);
    for (size_t m = 0; m < micros_; ++m) {
      for (size_t t = 0; t < tables_; ++t) {
        const int64_t end = first_term(end_output(t, m));
        for (int64_t i = first_term(first_output(t, m)); i < end; ++i) {
          const auto row = static_cast<size_t>(in_.seen_rows[i]);
          if (first_[row] < 0) first_[row] = static_cast<int32_t>(m);
          last_[row] = static_cast<int32_t>(m);
        }
      }
    }
  }

  // Calls each(row, peer, rank, table, number of keys), row by row as they were routed.
  template <typename Each>
  void every_row(Each each) const {
    size_t row = 0;
    const int64_t* length = in_.lengths;
    for (size_t peer = 0; peer < ranks_; ++peer) {
      for (size_t t = 0; t < tables_; ++t) {
        const size_t rank = rank_of(peer), cell = rank * tables_ + t;
        const bool sums = in_.row_counts[cell] < in_.key_counts[cell];
        for (int64_t i = 0; i < in_.row_counts[cell]; ++i) {
          each(row++, peer, rank, t, sums ? *length++ : 1);
        }
      }
    }
  }

  void count() {
    std::fill(out_.key_counts, out_.key_counts + micros_ * cells_, 0);
    std::fill(out_.row_counts, out_.row_counts + micros_ * cells_, 0);
    every_row([this](size_t row, size_t, size_t rank, size_t t, int64_t keys) {
      const size_t c = static_cast<size_t>(first_[row]) * cells_ + rank * tables_ + t;
      out_.key_counts[c] += keys;
      ++out_.row_counts[c];
    });
    starts_.assign(micros_ + 1, 0);
    for (size_t m = 0; m < micros_; ++m) {
      const int64_t* counts = out_.row_counts + m * cells_;
      starts_[m + 1] = starts_[m] + std::accumulate(counts, counts + cells_, int64_t{0});
    }
  }

  // What each micro-batch sends; the order by peer and table is kept.
  void ask() {
    std::vector<int64_t> next_key(micros_, 0), next_length(micros_, 0), next_last(micros_, 0);
    std::vector<int64_t> next_row(starts_.begin(), starts_.end() - 1);
    int64_t key = 0, length = 0, last = 0;
    for (size_t m = 0; m < micros_; ++m) {
      next_key[m] = key, next_length[m] = length, next_last[m] = last;
      for (size_t c = m * cells_; c < (m + 1) * cells_; ++c) {
        key += out_.key_counts[c];
        (sums(c) ? length : last) += out_.row_counts[c];
      }
      out_.num_lengths[m] = length - next_length[m];
      out_.num_lasts[m] = last - next_last[m];
    }
    numbers_.resize(rows_), lasts_.resize(rows_), peers_.resize(rows_);
    const int64_t* keys = in_.keys;
    every_row([&](size_t row, size_t peer, size_t rank, size_t t, int64_t count) {
      const auto m = static_cast<size_t>(first_[row]);
      const auto number = static_cast<size_t>(next_row[m]++);
      numbers_[row] = static_cast<int32_t>(number);
      lasts_[number] = last_[row];
      peers_[number] = static_cast<int32_t>(peer);
      std::copy(keys, keys + count, out_.keys + next_key[m]);
      keys += count, next_key[m] += count;
      if (sums(m * cells_ + rank * tables_ + t)) {
        out_.lengths[next_length[m]++] = count;
      } else {
        out_.lasts[next_last[m]++] = last_[row];
      }
    });
  }

  bool sums(size_t cell) const { return out_.row_counts[cell] < out_.key_counts[cell]; }

  // What a micro-batch does with rows: new ones stand first in `back`, then those used again.
  void use(size_t m) {
    const auto start = static_cast<int32_t>(starts_[m]);
    const auto fresh = static_cast<int32_t>(starts_[m + 1]) - start;
    int32_t* const seen = out_.seen_rows + term_;
    int32_t* const seen_ends = out_.seen_ends + output_ + static_cast<int64_t>(m);
    int32_t* const ends = out_.back_ends + starts_[m] + num_again_ + static_cast<int64_t>(m);
    int32_t* const reused_rows = out_.reused_rows + num_again_;
    int32_t terms = 0, outputs = 0, num_reused = 0;
    ends[0] = 0;
    std::fill(ends + 1, ends + 1 + fresh, 0);
    seen_ends[0] = 0;
    for (size_t t = 0; t < tables_; ++t) {
      for (int64_t o = first_output(t, m); o < end_output(t, m); ++o) {
        for (int64_t i = first_term(o); i < first_term(o + 1); ++i) {
          const int32_t number = numbers_[size_t(in_.seen_rows[i])];
          seen[terms++] = number;
          if (number >= start) {
            ++ends[1 + number - start];
          } else {
            if (reused_[size_t(number)] == 0) {
              reused_rows[num_reused] = number;
              reused_[size_t(number)] = ++num_reused;
              ends[fresh + num_reused] = 0;
            }
            ++ends[fresh + reused_[size_t(number)]];
          }
        }
        seen_ends[++outputs] = terms;
      }
    }
    turn_back(m, ends, fresh + num_reused, start, fresh);
    term_ += terms, output_ += outputs, num_again_ += num_reused;
    out_.num_seen[m] = terms;
    out_.num_reused[m] = num_reused;
  }

  // From rows of outputs to outputs of rows, in the order of the outputs.
  void turn_back(size_t m, int32_t* ends, int32_t count, int32_t start, int32_t fresh) {
    for (int32_t i = 0; i < count; ++i) ends[i + 1] += ends[i];
    next_.assign(ends, ends + count);
    int32_t output = 0;
    for (size_t t = 0; t < tables_; ++t) {
      for (int64_t o = first_output(t, m); o < end_output(t, m); ++o, ++output) {
        for (int64_t i = first_term(o); i < first_term(o + 1); ++i) {
          const int32_t number = numbers_[size_t(in_.seen_rows[i])];
          const int32_t at = number >= start ? number - start : fresh + reused_[size_t(number)] - 1;
          out_.back_outputs[term_ + next_[size_t(at)]++] = output;
        }
      }
    }
    // Only after all terms: the next micro-batch counts its own.
    for (int64_t i = 0; i < count - fresh; ++i) {
      reused_[size_t(out_.reused_rows[num_again_ + i])] = 0;
    }
  }

  // Gradients in the order in which they are sent: by peer, then by number.
  void leave() {
    std::vector<int64_t> next(micros_ * ranks_ + 1, 0);
    const auto bucket = [this](size_t number) {
      return static_cast<size_t>(lasts_[number]) * ranks_ + static_cast<size_t>(peers_[number]);
    };
    for (size_t n = 0; n < rows_; ++n) ++next[bucket(n) + 1];
    for (size_t m = 0; m < micros_; ++m) {
      for (size_t peer = 0; peer < ranks_; ++peer) {
        out_.leaving_counts[m * ranks_ + rank_of(peer)] = next[m * ranks_ + peer + 1];
      }
    }
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (size_t n = 0; n < rows_; ++n) {
      out_.leaving[next[bucket(n)]++] = static_cast<int32_t>(n);
    }
  }

  const WholeBatch& in_;
  WindowSlices& out_;
  const size_t micros_, ranks_, tables_, cells_;
  size_t rows_ = 0;
  std::vector<int64_t> starts_;  // of each micro-batch: its first row of the window
  int64_t term_ = 0, output_ = 0, num_again_ = 0;  // written for the micro-batches before
  std::vector<int32_t>&first_, &last_, &numbers_, &reused_, &lasts_, &peers_, &next_;
};

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_window(const nestpipe::WholeBatch* whole, nestpipe::WindowSlices* slices) {
  try {
    nestpipe::SplitWindow(*whole, *slices, nestpipe::kept()).run();
    return nestpipe::kOk;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}
