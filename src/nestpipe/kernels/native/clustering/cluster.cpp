// Key-centric clustering: which micro-batch each sample of a batch goes to.
//
// What is made small is the sum over micro-batches of their distinct keys; sizes are given, tokens
// stay within bounds. docs/clustering.md has the algorithm. kernels/clustering.py is the slow
// twin and must give the same answer: hence whole numbers, float64 only where every step rounds
// once, and a rule for every tie.
#include "clustering/cluster.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "clustering/shared_keys.h"

namespace nestpipe {
namespace {

// The twin has the same numbers.
constexpr int64_t kSweeps = 16;      // visits of every sample
constexpr int64_t kFewSweeps = 12;   // the same where a visit is dear, with more parts than
constexpr int64_t kManyParts = 16;   // this
constexpr int64_t kDescents = 2;     // the last of them, in which keys sent can only get fewer
constexpr int64_t kSteepness = 4;    // a swap of the first may cost this part of a sample's keys
constexpr int64_t kWindow = 1024;    // places among which a sample looks for a partner
constexpr int32_t kNever = 1 << 30;  // a swap that is not allowed; more tokens than any sample has

// Part p owns the places [first[p], first[p + 1]); a place holds a sample.
struct Seats {
  std::vector<size_t> first;
  std::vector<size_t> sample_at;
  std::vector<size_t> place_of;
  std::vector<size_t> part_at;
  std::vector<int64_t> tokens;  // of each part
};

// Samples by falling tokens, each to the part whose free places have the most tokens to come.
Seats seat_by_tokens(const ClusterTask& task) {
  const auto samples = static_cast<size_t>(task.num_samples);
  const auto parts = static_cast<size_t>(task.num_parts);
  Seats seats;
  seats.first.assign(1, 0);
  for (size_t p = 0; p < parts; ++p) {
    const auto size = static_cast<size_t>(task.sizes[p]);
    seats.first.push_back(seats.first.back() + size);
    seats.part_at.insert(seats.part_at.end(), size, p);
  }
  seats.sample_at.resize(samples);
  seats.place_of.resize(samples);
  seats.tokens.assign(parts, 0);
  const auto total =
      static_cast<double>(std::accumulate(task.tokens, task.tokens + samples, int64_t{0}));
  std::vector<size_t> order(samples);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return task.tokens[a] > task.tokens[b]; });
  std::vector<size_t> next(seats.first.begin(), seats.first.end() - 1);
  for (const size_t sample : order) {
    size_t chosen = parts;
    double most = 0.0;
    for (size_t p = 0; p < parts; ++p) {
      const size_t room = seats.first[p + 1] - next[p];
      if (room == 0) continue;
      const double due = total * static_cast<double>(task.sizes[p]) / static_cast<double>(samples);
      const double each = (due - static_cast<double>(seats.tokens[p])) / static_cast<double>(room);
      if (chosen == parts || each > most) {
        chosen = p;
        most = each;
      }
    }
    seats.place_of[sample] = next[chosen];
    seats.sample_at[next[chosen]++] = sample;
    seats.tokens[chosen] += task.tokens[sample];
  }
  return seats;
}

// Swaps samples of two parts while that saves keys. `Count` holds the samples of a part and the
// keys of a sample, L parts are counted at once.
template <typename Count, size_t L>
class Swaps {
 public:
  Swaps(const ClusterTask& task, const SharedKeys& shared, Seats& seats)
      : shared_(shared),
        seats_(seats),
        samples_(static_cast<size_t>(task.num_samples)),
        parts_(static_cast<size_t>(task.num_parts)),
        width_((parts_ + L - 1) / L * L),
        counts_(shared.num_keys * width_ + kLine / sizeof(Count)),
        holders_(first_line(counts_.data())),
        absent_(parts_ * samples_),
        alone_(samples_),
        weight_(samples_),
        change_(samples_),
        marked_(shared.num_keys),
        least_(task.least, task.least + parts_),
        most_(task.most, task.most + parts_) {
    for (size_t p = 0; p < parts_; ++p) {
      least_[p] = std::min(least_[p], seats_.tokens[p]);
      most_[p] = std::max(most_[p], seats_.tokens[p]);
    }
    for (size_t place = 0; place < samples_; ++place) {
      add(seats_.sample_at[place], seats_.part_at[place], 1);
      weight_[place] = static_cast<int32_t>(task.tokens[seats_.sample_at[place]]);
    }
  }

  void run() {
    const auto mean = static_cast<int64_t>(shared_.keys.size() / std::max<size_t>(1, samples_));
    const int64_t sweeps = parts_ > kManyParts ? kFewSweeps : kSweeps;
    const int64_t falls = sweeps - kDescents;
    for (int64_t sweep = 0; sweep < sweeps; ++sweep) {
      const int64_t left = std::max<int64_t>(0, falls - sweep);
      const int64_t limit = mean * left * left / (kSteepness * falls * falls);
      const bool changed = visit_all(sweep, static_cast<int32_t>(limit));
      if (limit == 0 && !changed) return;
    }
  }

 private:
  typedef Count Lanes __attribute__((vector_size(L * sizeof(Count))));
  static constexpr size_t kLine = 64;

  // Counts of one key must not lie across two cache lines: that costs a tenth of the time.
  static Count* first_line(Count* counts) {
    const auto past = reinterpret_cast<uintptr_t>(counts) % kLine;
    return counts + (past == 0 ? 0 : (kLine - past) / sizeof(Count));
  }

  void add(size_t sample, size_t part, int by) {
    for (size_t i = shared_.starts[sample]; i < shared_.starts[sample + 1]; ++i) {
      Count& count = holders_[shared_.keys[i] * width_ + part];
      count = static_cast<Count>(count + by);
    }
  }

  // What the sample at a place would bring to each part, and takes along when it goes.
  void count_keys(size_t place) {
    const size_t sample = seats_.sample_at[place];
    const uint32_t* begin = shared_.keys.data() + shared_.starts[sample];
    const uint32_t* end = shared_.keys.data() + shared_.starts[sample + 1];
    const size_t part = seats_.part_at[place];
    for (size_t stripe = 0; stripe < width_; stripe += L) {
      Lanes without{};
      Lanes with_one{};
      for (const uint32_t* key = begin; key != end; ++key) {
        Lanes counts;
        std::memcpy(&counts, &holders_[*key * width_ + stripe], sizeof counts);
        without -= (Lanes)(counts == 0);  // true is -1
        with_one -= (Lanes)(counts == 1);
      }
      const size_t stop = std::min(L, parts_ - stripe);
      for (size_t p = 0; p < stop; ++p) {
        absent_[(stripe + p) * samples_ + place] = static_cast<int32_t>(without[p]);
      }
      if (stripe <= part && part < stripe + L) {
        alone_[place] = static_cast<int32_t>(with_one[part - stripe]);
      }
    }
  }

  bool visit_all(int64_t sweep, int32_t limit) {
    for (size_t place = 0; place < samples_; ++place) count_keys(place);
    const size_t window = std::min<size_t>(samples_, kWindow);
    bool changed = false;
    for (size_t sample = 0; sample < samples_; ++sample) {
      const size_t place = seats_.place_of[sample];
      const size_t begin = (sample + static_cast<size_t>(sweep) * window) % (samples_ - window + 1);
      count_keys(place);
      const size_t other = best_partner(place, begin, begin + window, limit);
      if (other == samples_) continue;
      count_keys(other);
      if (exact_change(place, other, limit) >= limit) continue;
      swap(place, other);
      changed = true;
    }
    return changed;
  }

  // The place in [begin, end) whose sample would make the best swap by the counts at hand, or
  // `samples_` where none changes the keys by less than `limit`.
  size_t best_partner(size_t place, size_t begin, size_t end, int32_t limit) {
    const size_t part = seats_.part_at[place];
    const int32_t* comes = &absent_[part * samples_];
    int32_t best = limit;
    for (size_t q = seats_.part_at[begin]; q < parts_ && seats_.first[q] < end; ++q) {
      const size_t from = std::max(begin, seats_.first[q]);
      const size_t to = std::min(end, seats_.first[q + 1]);
      if (q == part) {
        std::fill(change_.begin() + from, change_.begin() + to, kNever);
        continue;
      }
      const int32_t goes = absent_[q * samples_ + place] - alone_[place];
      const auto [least, most] = partner_tokens(place, part, q);
      for (size_t y = from; y < to; ++y) {
        const bool fits = (weight_[y] >= least) & (weight_[y] <= most);
        const int32_t change = fits ? goes + comes[y] - alone_[y] : kNever;
        change_[y] = change;
        best = std::min(best, change);
      }
    }
    if (best >= limit) return samples_;
    const auto found = std::find(change_.begin() + begin, change_.begin() + end, best);
    return static_cast<size_t>(found - change_.begin());
  }

  static int32_t clamp(int64_t tokens) {
    return static_cast<int32_t>(std::clamp<int64_t>(tokens, -1, kNever));
  }

  // Tokens that a sample of part q may have to change places with this one.
  std::pair<int32_t, int32_t> partner_tokens(size_t place, size_t p, size_t q) const {
    const int64_t rest_p = seats_.tokens[p] - weight_[place];
    const int64_t all_q = seats_.tokens[q] + weight_[place];
    return {clamp(std::max(least_[p] - rest_p, all_q - most_[q])),
            clamp(std::min(most_[p] - rest_p, all_q - least_[q]))};
  }

  // Keys sent after a swap less those before, exact where that is less than `limit`; the counts of
  // both places must be current.
  int32_t exact_change(size_t x, size_t y, int32_t limit) {
    const size_t p = seats_.part_at[x];
    const size_t q = seats_.part_at[y];
    const size_t a = seats_.sample_at[x];
    const size_t b = seats_.sample_at[y];
    int32_t change = absent_[q * samples_ + x] - alone_[x] + absent_[p * samples_ + y] - alone_[y];
    if (change >= limit) return change;
    // A key of both stays in both parts, but counts as leaving where nobody else has it.
    for (size_t i = shared_.starts[a]; i < shared_.starts[a + 1]; ++i) {
      marked_[shared_.keys[i]] = 1;
    }
    for (size_t i = shared_.starts[b]; i < shared_.starts[b + 1]; ++i) {
      const Count* counts = &holders_[shared_.keys[i] * width_];
      change += marked_[shared_.keys[i]] & (counts[p] == 1);
      change += marked_[shared_.keys[i]] & (counts[q] == 1);
    }
    for (size_t i = shared_.starts[a]; i < shared_.starts[a + 1]; ++i) {
      marked_[shared_.keys[i]] = 0;
    }
    return change;
  }

  void swap(size_t x, size_t y) {
    const size_t p = seats_.part_at[x];
    const size_t q = seats_.part_at[y];
    size_t& a = seats_.sample_at[x];
    size_t& b = seats_.sample_at[y];
    add(a, p, -1);
    add(a, q, 1);
    add(b, q, -1);
    add(b, p, 1);
    seats_.tokens[p] += weight_[y] - weight_[x];
    seats_.tokens[q] += weight_[x] - weight_[y];
    std::swap(a, b);
    std::swap(weight_[x], weight_[y]);
    seats_.place_of[a] = x;
    seats_.place_of[b] = y;
    count_keys(x);
    count_keys(y);
  }

  const SharedKeys& shared_;
  Seats& seats_;
  const size_t samples_;
  const size_t parts_;
  const size_t width_;
  std::vector<Count> counts_;
  Count* const holders_;         // [key][part]: samples of the part that have the key
  std::vector<int32_t> absent_;  // [part][place]: keys of the sample there that the part lacks
  std::vector<int32_t> alone_;   // [place]: keys that its part has from nobody else
  std::vector<int32_t> weight_;  // [place]: tokens
  std::vector<int32_t> change_;  // [place]: keys sent by a swap with it, as far as is known
  std::vector<uint8_t> marked_;
  std::vector<int64_t> least_;  // as asked for, or as far out as the start already was
  std::vector<int64_t> most_;
};

template <typename Count>
void swap_samples(const ClusterTask& task, const SharedKeys& shared, Seats& seats) {
  if (task.num_parts <= 8) {
    Swaps<Count, 8>(task, shared, seats).run();
  } else if (task.num_parts <= 16) {
    Swaps<Count, 16>(task, shared, seats).run();
  } else {
    Swaps<Count, 32>(task, shared, seats).run();
  }
}

void cluster(const ClusterTask& task, int64_t* part_of) {
  const auto samples = static_cast<size_t>(task.num_samples);
  const SharedKeys shared = shared_keys(task);
  Seats seats = seat_by_tokens(task);
  size_t longest = samples;
  for (size_t sample = 0; sample < samples; ++sample) {
    longest = std::max(longest, shared.length(sample));
  }
  if (longest <= std::numeric_limits<uint16_t>::max()) {
    swap_samples<uint16_t>(task, shared, seats);
  } else {
    swap_samples<uint32_t>(task, shared, seats);
  }
  for (size_t sample = 0; sample < samples; ++sample) {
    part_of[sample] = static_cast<int64_t>(seats.part_at[seats.place_of[sample]]);
  }
}

}  // namespace
}  // namespace nestpipe

int nestpipe_cluster(const nestpipe::ClusterTask* task, int64_t* part_of) {
  try {
    nestpipe::cluster(*task, part_of);
    return nestpipe::kOk;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}
