// The way of a batch through routing, sums and updates, for the sanitizers: several worlds at once,
// each on a thread of its own, with kernels that share their threads.
//
// Rows are whole numbers that depend on table and key alone, so every sum has one right answer.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "rows/segments.h"
#include "routing/routing.h"
#include "rows/update.h"

namespace {

using nestpipe::Segments;
using nestpipe::Rows;

constexpr int64_t kTables = 3;
constexpr int64_t kThreads = 3;
constexpr uint8_t kPooled[kTables] = {1, 0, 1};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

template <typename T>
std::vector<T> numbers(int64_t count, T value = 0) {
  return std::vector<T>(static_cast<size_t>(count), value);
}

Rows rows_of(std::vector<float>& numbers, int64_t dim, int64_t first = 0) {
  auto* base = reinterpret_cast<std::byte*>(numbers.data() + first * dim);
  return {base, dim * static_cast<int64_t>(sizeof(float)), nullptr};
}

float value_of(int64_t table, int64_t key) { return static_cast<float>((key * 7 + table) % 100); }

// What one rank wants, and what it makes of it.
struct Requester {
  std::vector<int64_t> keys, lengths, term_ends, output_ends;
  std::vector<int64_t> sent, sums, key_counts, row_counts, straight;
  std::vector<int32_t> seen_rows, seen_ends, back_outputs, back_ends;
  nestpipe::RoutedKeys routed{};

  void draw(std::mt19937_64& random, int64_t samples, int64_t vocabulary) {
    for (int64_t t = 0; t < kTables; ++t) {
      for (int64_t s = 0; s < samples; ++s) {
        lengths.push_back(kPooled[t] ? static_cast<int64_t>(random() % 9) : 1);
        for (int64_t k = 0; k < lengths.back(); ++k) {
          keys.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(vocabulary)));
        }
      }
      term_ends.push_back(static_cast<int64_t>(keys.size()));
      output_ends.push_back(static_cast<int64_t>(lengths.size()));
    }
  }

  void ask(int64_t rank, int64_t ranks, int64_t dim, const std::vector<int64_t>& table_owners) {
    const auto terms = static_cast<int64_t>(keys.size());
    const auto outputs = static_cast<int64_t>(lengths.size());
    sent = sums = numbers<int64_t>(terms);
    key_counts = row_counts = numbers<int64_t>(ranks * kTables);
    straight = numbers<int64_t>(kTables);
    seen_rows = back_outputs = numbers<int32_t>(terms);
    seen_ends = numbers<int32_t>(outputs + 1);
    back_ends = numbers<int32_t>(terms + 1);
    const nestpipe::WantedKeys wanted{kTables,           ranks,
                                  rank,              4 * dim,
                                  term_ends.data(),  output_ends.data(),
                                  keys.data(),       lengths.data(),
                                  kPooled,           table_owners.data()};
    routed = {sent.data(),         sums.data(),      key_counts.data(),
              row_counts.data(),   seen_rows.data(), seen_ends.data(),
              back_outputs.data(), back_ends.data(), straight.data(), 0, 0, 0};
    require(nestpipe_request(&wanted, &routed) == nestpipe::kOk, "a request failed");
    require(routed.num_rows <= terms && routed.num_seen <= terms, "a request is too large");
  }

  // Where the part of an owner begins among keys, lengths and rows.
  struct Start {
    int64_t key = 0, length = 0, row = 0;
  };
  Start start_of(int64_t owner, int64_t rank, int64_t ranks) const {
    Start start;
    for (int64_t peer = 0; peer < ranks; ++peer) {
      const int64_t other = peer + 1 == ranks ? rank : peer + (peer >= rank);
      if (other == owner) break;
      add(start, other);
    }
    return start;
  }
  void add(Start& start, int64_t owner) const {
    for (int64_t t = 0; t < kTables; ++t) {
      const auto cell = static_cast<size_t>(owner * kTables + t);
      start.key += key_counts[cell], start.row += row_counts[cell];
      if (row_counts[cell] < key_counts[cell]) start.length += row_counts[cell];
    }
  }
};

class World {
 public:
  World(uint64_t seed, int64_t ranks, int64_t samples, int64_t dim, int64_t vocabulary)
      : ranks_(ranks), dim_(dim), requesters_(static_cast<size_t>(ranks)) {
    std::mt19937_64 random(seed);
    const std::vector<int64_t> table_owners{-1, -1, static_cast<int64_t>(seed) % ranks};
    for (int64_t r = 0; r < ranks; ++r) {
      of(r).draw(random, r == 1 ? 0 : samples, vocabulary);  // one rank has no samples
      of(r).ask(r, ranks, dim, table_owners);
      came_.push_back(numbers<float>(of(r).routed.num_rows * dim));
      gradients_.push_back(numbers<float>(of(r).routed.num_rows * dim));
    }
  }

  void run() {
    for (int64_t owner = 0; owner < ranks_; ++owner) serve(owner);
    for (int64_t rank = 0; rank < ranks_; ++rank) look(rank);
    for (int64_t owner = 0; owner < ranks_; ++owner) update(owner);
    for (const Requester& one : requesters_) wanted_ += static_cast<int64_t>(one.keys.size());
    require(updated_ == wanted_, "gradients are missing");
  }

 private:
  struct Owner {
    std::vector<int64_t> keys, key_counts, row_counts, lengths, unique, table_counts;
    std::vector<int32_t> serve_rows, serve_ends, back_served, back_ends;
    std::vector<float> rows;
    int64_t num_unique = 0, num_served = 0;
  };

  Requester& of(int64_t rank) { return requesters_[static_cast<size_t>(rank)]; }
  int64_t rank_at(int64_t peer, int64_t self) const {
    return peer + 1 == ranks_ ? self : peer + (peer >= self);
  }

  void read_letters(Owner& owner, int64_t self) {
    owner.key_counts = owner.row_counts = numbers<int64_t>(ranks_ * kTables);
    for (int64_t peer = 0; peer < ranks_; ++peer) {
      const int64_t rank = rank_at(peer, self);
      const Requester& from = of(rank);
      const auto begin = from.start_of(self, rank, ranks_);
      auto end = begin;
      from.add(end, self);
      owner.keys.insert(owner.keys.end(), from.sent.begin() + begin.key,
                        from.sent.begin() + end.key);
      owner.lengths.insert(owner.lengths.end(), from.sums.begin() + begin.length,
                           from.sums.begin() + end.length);
      owner.num_served += end.row - begin.row;
      for (int64_t t = 0; t < kTables; ++t) {
        const auto here = static_cast<size_t>(rank * kTables + t);
        const auto there = static_cast<size_t>(self * kTables + t);
        owner.key_counts[here] = from.key_counts[there];
        owner.row_counts[here] = from.row_counts[there];
      }
    }
  }

  void serve(int64_t self) {
    Owner& owner = owners_.emplace_back();
    read_letters(owner, self);
    const auto total = static_cast<int64_t>(owner.keys.size());
    owner.unique = numbers<int64_t>(total);
    owner.table_counts = numbers<int64_t>(kTables);
    owner.serve_rows = owner.back_served = numbers<int32_t>(total);
    owner.serve_ends = numbers<int32_t>(owner.num_served + 1);
    owner.back_ends = numbers<int32_t>(total + 1);
    const nestpipe::OwnerRequests asked{kTables,
                                ranks_,
                                self,
                                1,
                                owner.key_counts.data(),
                                owner.row_counts.data(),
                                owner.keys.data(),
                                owner.lengths.data()};
    nestpipe::KeyUnion made{owner.unique.data(),     owner.table_counts.data(),
                            owner.serve_rows.data(), owner.serve_ends.data(),
                            owner.back_served.data(), owner.back_ends.data()};
    require(nestpipe_union(&asked, &made) == nestpipe::kOk, "a union failed");
    int64_t next = 0;
    for (int64_t t = 0; t < kTables; ++t) {
      for (int64_t i = 0; i < owner.table_counts[static_cast<size_t>(t)]; ++i, ++next) {
        const float value = value_of(t, owner.unique[static_cast<size_t>(next)]);
        owner.rows.insert(owner.rows.end(), static_cast<size_t>(dim_), value);
      }
    }
    owner.num_unique = next;
    check_neighbours(owner);
    std::vector<float> served(static_cast<size_t>(owner.num_served * dim_));
    sum(owner.rows, {owner.serve_rows.data(), owner.serve_ends.data()}, owner.num_served, served,
        0);
    hand_over(self, served, true);
  }

  // The unique keys shared with themselves are all of them; and where the batch before has none,
  // all are carried from the one before it.
  void check_neighbours(const Owner& owner) {
    const int64_t* const counts = owner.table_counts.data();
    const std::vector<int64_t> nothing(kTables, 0);
    std::vector<uint32_t> index(static_cast<size_t>(nestpipe_index_size(kTables, counts)));
    std::vector<uint32_t> empty(static_cast<size_t>(nestpipe_index_size(kTables, nothing.data())));
    nestpipe_index(kTables, owner.unique.data(), counts, index.data());
    nestpipe_index(kTables, owner.unique.data(), nothing.data(), empty.data());
    const nestpipe::KnownKeys all{owner.unique.data(), counts, index.data()};
    const nestpipe::KnownKeys none{owner.unique.data(), nothing.data(), empty.data()};
    std::vector<int64_t> a(owner.unique.size()), b(a), c(a), d(a);
    nestpipe::Neighbours found{a.data(), b.data(), c.data(), d.data(), 0, 0};
    require(nestpipe_neighbours(kTables, owner.unique.data(), counts, &all, &none, &found) ==
                nestpipe::kOk,
            "a comparison failed");
    require(found.num_shared == owner.num_unique && found.num_carried == 0 && a == b,
            "shared keys are missing");
    require(nestpipe_neighbours(kTables, owner.unique.data(), counts, &none, &all, &found) ==
                nestpipe::kOk,
            "a comparison failed");
    require(found.num_carried == owner.num_unique && found.num_shared == 0 && c == d,
            "older keys are missing");
  }

  // Between the rows that an owner serves and those that each requester has.
  void hand_over(int64_t self, std::vector<float>& served, bool out) {
    size_t next = 0;
    for (int64_t peer = 0; peer < ranks_; ++peer) {
      const int64_t rank = rank_at(peer, self);
      const auto begin = of(rank).start_of(self, rank, ranks_);
      auto end = begin;
      of(rank).add(end, self);
      auto& theirs = out ? came_[static_cast<size_t>(rank)] : gradients_[static_cast<size_t>(rank)];
      for (int64_t i = begin.row * dim_; i < end.row * dim_; ++i, ++next) {
        float& mine = served[next];
        float& other = theirs[static_cast<size_t>(i)];
        out ? other = mine : mine = other;
      }
    }
  }

  // What a model sees, and a gradient of one for each of it.
  void look(int64_t rank) {
    Requester& one = of(rank);
    const auto outputs = static_cast<int64_t>(one.lengths.size());
    std::vector<float> seen(static_cast<size_t>(outputs * dim_), -1.0F);
    sum(came_[static_cast<size_t>(rank)], {one.seen_rows.data(), one.seen_ends.data()}, outputs,
        seen, 0);
    size_t key = 0;
    for (int64_t o = 0, t = 0; o < outputs; ++o) {
      while (o == one.output_ends[static_cast<size_t>(t)]) ++t;
      float expected = 0.0F;
      for (int64_t k = 0; k < one.lengths[static_cast<size_t>(o)]; ++k) {
        expected += value_of(t, one.keys[key++]);
      }
      for (int64_t d = 0; d < dim_; ++d) {
        require(seen[static_cast<size_t>(o * dim_ + d)] == expected, "a wrong sum is seen");
      }
    }
    std::vector<float> ones(seen.size(), 1.0F);
    sum(ones, {one.back_outputs.data(), one.back_ends.data()}, one.routed.num_rows,
        gradients_[static_cast<size_t>(rank)], 1);
  }

  // Plain descent by one: a row loses the number of its uses.
  void update(int64_t self) {
    Owner& owner = owners_[static_cast<size_t>(self)];
    std::vector<float> gradients(static_cast<size_t>(owner.num_served * dim_));
    hand_over(self, gradients, false);
    const std::vector<float> before = owner.rows;
    const nestpipe::Optimizer descent{nestpipe::kSgd, 1.0F, 0, 0, 0, 0, 0, 0, 1.0F, 1.0F};
    const nestpipe::Part part{rows_of(gradients, dim_),
                              {owner.back_served.data(), owner.back_ends.data()}};
    const nestpipe::Part parts[] = {part, part};
    const Rows rows = rows_of(owner.rows, dim_);
    require(nestpipe_update(&descent, &rows, owner.num_unique, dim_, parts, 2, 0.5F, kThreads) ==
                nestpipe::kOk,
            "an update failed");
    for (int64_t i = 0; i < owner.num_unique; ++i) {
      const auto at = static_cast<size_t>(i * dim_);
      updated_ += static_cast<int64_t>(before[at] - owner.rows[at]);
    }
    other_optimizers(owner, part);
  }

  // Addresses instead of a stride, and every state at the end of its row.
  void other_optimizers(const Owner& owner, const nestpipe::Part& part) {
    for (const int64_t kind : {nestpipe::kAdagrad, nestpipe::kRowwiseAdagrad, nestpipe::kAdam}) {
      const int64_t width = dim_ + (kind == nestpipe::kAdagrad ? dim_ : 1) +
                            (kind == nestpipe::kAdam ? 2 * dim_ - 1 : 0);
      std::vector<std::vector<float>> rows(static_cast<size_t>(owner.num_unique),
                                           numbers<float>(width, 1.0F));
      std::vector<std::byte*> pointers;
      for (auto& row : rows) pointers.push_back(reinterpret_cast<std::byte*>(row.data()));
      const nestpipe::Optimizer optimizer{kind,   0.1F,   1e-8F, 0.9F, 0.1F,
                                          0.999F, 0.001F, 0.1F,  1.0F, 1.0F};
      const Rows there{nullptr, 0, pointers.data()};
      require(nestpipe_update(&optimizer, &there, owner.num_unique, dim_, &part, 1, 1.0F,
                              kThreads) == nestpipe::kOk,
              "an update in pointer failed");
      for (const auto& row : rows) require(row[0] < 1.0F, "a row was not updated");
    }
  }

  void sum(std::vector<float>& from, const Segments& segments, int64_t sums, std::vector<float>& to,
           int64_t add) {
    const Rows rows = rows_of(from, dim_), out = rows_of(to, dim_);
    require(nestpipe_segment_sum(&rows, &segments, sums, dim_, &out, add, kThreads) == nestpipe::kOk,
            "a sum failed");
  }

  const int64_t ranks_, dim_;
  std::vector<Requester> requesters_;
  std::vector<std::vector<float>> came_, gradients_;  // by rank
  std::vector<Owner> owners_;
  int64_t wanted_ = 0, updated_ = 0;
};

}  // namespace

void check_routing() {
  std::vector<std::thread> threads;
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    threads.emplace_back([ranks] {
      const auto seed = static_cast<uint64_t>(ranks);
      World(seed, ranks, 1500, 3, 1 << 20).run();  // owners add up
      World(seed, ranks, 1500, 72, 500).run();     // unique rows; a block of vectors and one more
      World(seed, ranks, 0, 8, 10).run();
    });
  }
  for (auto& thread : threads) thread.join();
}
