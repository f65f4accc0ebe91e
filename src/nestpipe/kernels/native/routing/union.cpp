// The owner's routing: the rows that it needs for a batch, whom each goes to, and how gradients
// come back to it.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "routing/routing.h"
#include "routing/unique.h"

namespace nestpipe {

namespace {

// Kept between calls of one thread: fresh memory would cost more than the work in it.
struct Kept {
  Unique unique;
  std::vector<uint32_t> next;       // of each unique key: its gradients, then where the next goes
};

// Not inlined: a thread's own variable would be looked up again for every key.
__attribute__((noinline)) Kept& kept() {
  static thread_local Kept mine;
  return mine;
}

class Union {
 public:
  Union(const OwnerRequests& asked, KeyUnion& made, Kept& kept)
      : in_(asked),
        out_(made),
        unique_(kept.unique),
        next_(kept.next) {}

  void run() {
    place_cells();
    number_keys();
    int64_t row = 0, term = 0;
    for (int64_t m = 0; m < in_.micros; ++m) serve(m, row, term);
    if (in_.lasts != nullptr) turn_window_back();
  }

 private:
  struct Cell {
    int64_t first_key = 0, keys = 0, first_length = 0, first_last = 0, rows = 0;
    int64_t first_term = 0;  // where its keys' positions stand in serve_rows
    bool sums() const { return rows < keys; }
  };

  Cell& cell(int64_t rank, int64_t m, int64_t t) {
    return cells_[size_t((rank * in_.micros + m) * in_.tables + t)];
  }
  int64_t rank_of(int64_t peer) const {
    return peer + 1 == in_.ranks ? in_.rank : peer + (peer >= in_.rank);
  }

  void place_cells() {
    cells_.resize(size_t(in_.ranks * in_.micros * in_.tables));
    int64_t key = 0, length = 0, last = 0;
    for (int64_t peer = 0; peer < in_.ranks; ++peer) {
      for (int64_t m = 0; m < in_.micros; ++m) {
        for (int64_t t = 0; t < in_.tables; ++t) {
          Cell& s = cell(rank_of(peer), m, t);
          const int64_t c = (rank_of(peer) * in_.micros + m) * in_.tables + t;
          s = {key, in_.key_counts[c], length, last, in_.row_counts[c], 0};
          key += s.keys;
          (s.sums() ? length : last) += s.rows;
        }
      }
    }
    int64_t term = 0;
    for (int64_t m = 0; m < in_.micros; ++m) {
      for (int64_t peer = 0; peer < in_.ranks; ++peer) {
        for (int64_t t = 0; t < in_.tables; ++t) {
          Cell& s = cell(rank_of(peer), m, t);
          s.first_term = term;
          term += s.keys;
        }
      }
    }
  }

  void number_keys() {
    num_unique_ = 0;
    for (int64_t t = 0; t < in_.tables; ++t) {
      int64_t most = 0;
      for (int64_t r = 0; r < in_.ranks; ++r) {
        for (int64_t m = 0; m < in_.micros; ++m) most += cell(r, m, t).keys;
      }
      unique_.begin(most);
      const auto first = static_cast<int32_t>(num_unique_);
      for (int64_t r = 0; r < in_.ranks; ++r) {
        for (int64_t m = 0; m < in_.micros; ++m) {
          const Cell& s = cell(r, m, t);
          int32_t* const positions = out_.serve_rows + s.first_term;
          unique_.number_all(in_.keys + s.first_key, s.keys,
                             [positions, first](int64_t i, uint32_t number) {
                               positions[i] = first + static_cast<int32_t>(number);
                             });
        }
      }
      std::copy(unique_.keys().begin(), unique_.keys().end(), out_.keys + num_unique_);
      out_.table_counts[t] = static_cast<int64_t>(unique_.keys().size());
      num_unique_ += out_.table_counts[t];
    }
  }

  const int32_t* positions_of(const Cell& s) const { return out_.serve_rows + s.first_term; }

  // One micro-batch; `row` and `term` are how many were written for those before.
  void serve(int64_t m, int64_t& row, int64_t& term) {
    int32_t* const ends = out_.serve_ends + row + m;
    first_served_.resize(size_t(in_.ranks * in_.tables));
    int64_t served = 0, num = 0;
    ends[0] = 0;
    next_.assign(size_t(num_unique_), 0);  // how many gradients each row will get
    for (int64_t peer = 0; peer < in_.ranks; ++peer) {
      for (int64_t t = 0; t < in_.tables; ++t) {
        const Cell& s = cell(rank_of(peer), m, t);
        first_served_[size_t(rank_of(peer) * in_.tables + t)] = served;
        const int32_t* const positions = positions_of(s);
        for (int64_t i = 0; i < s.keys; ++i) ++next_[size_t(positions[i])];
        for (int64_t r = 0; r < s.rows; ++r) {
          num += s.sums() ? in_.lengths[s.first_length + r] : 1;
          ends[++served] = static_cast<int32_t>(num);
        }
      }
    }
    if (in_.lasts == nullptr) turn_back(m, out_.back_served + term);
    row += served;
    term += num;
  }

  void turn_back(int64_t m, int32_t* back) {
    int32_t* const ends = out_.back_ends + m * (num_unique_ + 1);
    uint32_t total = 0;
    for (int64_t k = 0; k < num_unique_; ++k) {
      ends[k] = static_cast<int32_t>(total);
      total += next_[size_t(k)];
      next_[size_t(k)] = static_cast<uint32_t>(ends[k]);
    }
    ends[num_unique_] = static_cast<int32_t>(total);
    for (int64_t rank = 0; rank < in_.ranks; ++rank) {
      for (int64_t t = 0; t < in_.tables; ++t) {
        const Cell& s = cell(rank, m, t);
        auto served = static_cast<int32_t>(first_served_[size_t(rank * in_.tables + t)]);
        const int32_t* position = positions_of(s);
        for (int64_t r = 0; r < s.rows; ++r, ++served) {
          const int64_t terms = s.sums() ? in_.lengths[s.first_length + r] : 1;
          for (int64_t i = 0; i < terms; ++i) back[next_[size_t(*position++)]++] = served;
        }
      }
    }
  }

  // The micro-batch with whose gradients that of a row comes, in a window.
  int64_t last_of(const Cell& s, int64_t m, int64_t row) const {
    return s.sums() ? m : in_.lasts[s.first_last + row];
  }

  // Calls each(micro of its gradient, positions, how many) for every row of a requester, in order.
  template <typename Each>
  void every_row(int64_t rank, Each each) {
    for (int64_t m = 0; m < in_.micros; ++m) {
      for (int64_t t = 0; t < in_.tables; ++t) {
        const Cell& s = cell(rank, m, t);
        const int32_t* position = positions_of(s);
        for (int64_t r = 0; r < s.rows; ++r) {
          const int64_t terms = s.sums() ? in_.lengths[s.first_length + r] : 1;
          each(last_of(s, m, r), position, terms);
          position += terms;
        }
      }
    }
  }

  // The same for gradients that come after the last use of their row in a window.
  void turn_window_back() {
    const auto wide = static_cast<size_t>(num_unique_ + 1);
    const auto micros = static_cast<size_t>(in_.micros);
    int32_t* const ends = out_.back_ends;
    std::fill(ends, ends + micros * wide, 0);
    first_served_.assign(size_t(in_.ranks) * micros, 0);
    std::vector<int64_t> arrived(micros, 0);
    for (int64_t peer = 0; peer < in_.ranks; ++peer) {
      const int64_t rank = rank_of(peer);
      std::copy(arrived.begin(), arrived.end(), first_served_.begin() + rank * in_.micros);
      every_row(rank, [&](int64_t m, const int32_t* position, int64_t terms) {
        ++arrived[size_t(m)];
        for (int64_t i = 0; i < terms; ++i) ++ends[size_t(m) * wide + size_t(position[i]) + 1];
      });
    }
    // Where the gradients of each unique key go next; all micro-batches behind each other.
    next_.resize(micros * wide);
    uint32_t start = 0;
    for (size_t m = 0; m < micros; ++m) {
      int32_t* const of = ends + m * wide;
      for (size_t k = 0; k < wide; ++k) {
        if (k) of[k] += of[k - 1];
        next_[m * wide + k] = start + static_cast<uint32_t>(of[k]);
      }
      start += static_cast<uint32_t>(of[wide - 1]);
    }
    for (int64_t rank = 0; rank < in_.ranks; ++rank) {
      int64_t* const number = first_served_.data() + rank * in_.micros;
      every_row(rank, [&](int64_t m, const int32_t* position, int64_t terms) {
        const auto gradient = static_cast<int32_t>(number[m]++);
        for (int64_t i = 0; i < terms; ++i) {
          out_.back_served[next_[size_t(m) * wide + size_t(position[i])]++] = gradient;
        }
      });
    }
  }

  const OwnerRequests& in_;
  KeyUnion& out_;
  int64_t num_unique_ = 0;
  std::vector<Cell> cells_;
  std::vector<int64_t> first_served_;  // by rank and table, or rank and micro
  Unique& unique_;
  std::vector<uint32_t>& next_;
};

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_union(const nestpipe::OwnerRequests* asked, nestpipe::KeyUnion* made) {
  try {
    nestpipe::Union(*asked, *made, nestpipe::kept()).run();
    return nestpipe::kOk;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}
