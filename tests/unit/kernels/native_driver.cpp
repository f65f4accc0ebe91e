// Random work on a store from several threads at once, for the sanitizers.
//
// Each writer owns keys that no other writer touches and stores rows whose numbers are all the
// same, so that a torn row shows even where no sanitizer looks. Readers read everybody's keys.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "common/abi.h"
#include "clustering/cluster.h"
#include "ssd/ssd_store.h"

namespace {

constexpr int64_t kTables = 3;
constexpr int64_t kWriters = 2;
constexpr int64_t kReaders = 2;
constexpr int64_t kKeys = 3000;

struct World {
  nestpipe::Store* store;
  int64_t width;
  int64_t batches;
  std::atomic<bool> stop{false};
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Distinct keys of each table, of writer `writer` only; both signs.
std::vector<int64_t> draw(std::mt19937_64& random, int64_t writer, std::vector<int64_t>& counts) {
  std::vector<int64_t> keys;
  for (int64_t t = 0; t < kTables; ++t) {
    counts[static_cast<size_t>(t)] = 0;
    for (int64_t k = -kKeys; k < kKeys; ++k) {
      if (random() % 8 != 0) continue;
      keys.push_back(k * kWriters + writer);
      ++counts[static_cast<size_t>(t)];
    }
  }
  return keys;
}

void write(World& world, int64_t writer) {
  std::mt19937_64 random(static_cast<uint64_t>(writer));
  std::vector<int64_t> counts(kTables);
  for (int64_t b = 1; b <= world.batches; ++b) {
    const auto keys = draw(random, writer, counts);
    const std::vector<float> rows(keys.size() * static_cast<size_t>(world.width), float(b));
    nestpipe::Report report{};
    const int status = nestpipe_store_scatter(world.store, keys.data(), counts.data(), rows.data(),
                                              &report);
    require(status == nestpipe::kOk, "scatter failed");
    if (b % 3 != 0) continue;
    int64_t erased = 0;
    const int answer = nestpipe_store_erase(world.store, keys.data(), counts.data(), &erased, &report);
    require(answer == nestpipe::kOk, "erase failed");
    require(erased == static_cast<int64_t>(keys.size()), "rows that were just stored were not erased");
  }
}

void read(World& world, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> counts(kTables);
  while (!world.stop) {
    const auto keys = draw(random, static_cast<int64_t>(random() % kWriters), counts);
    const auto width = static_cast<size_t>(world.width);
    std::vector<float> rows(keys.size() * width);
    int64_t fresh = 0;
    const int status =
        nestpipe_store_gather(world.store, keys.data(), counts.data(), rows.data(), &fresh);
    require(status == nestpipe::kOk, "gather failed");
    for (size_t i = 0; i < keys.size(); ++i) {
      const float* row = &rows[i * width];
      if (row[width - 1] == -1.0f) continue;  // state of a row that was never stored
      for (size_t j = 0; j < width; ++j) require(row[j] == row[0], "a torn row");
    }
  }
}

void refuse(World& world) {
  std::vector<int64_t> counts(kTables, 0);
  counts[0] = 2;
  const int64_t keys[] = {7, 7};
  const std::vector<float> rows(2 * static_cast<size_t>(world.width));
  nestpipe::Report report{};
  require(nestpipe_store_scatter(world.store, keys, counts.data(), rows.data(), &report) ==
              nestpipe::kRepeatedKey,
          "a repeated key was taken");
  require(report.table == 0 && report.key == 7, "the wrong key was named");
}

void run(int64_t dim, int64_t state_dim, int64_t bfloat16, int64_t batches) {
  const uint64_t seeds[kTables] = {1, 2, 3};
  const double stds[kTables] = {0.01, 0.1, 1.0};
  const int64_t limits[kTables] = {0, 0, 1 << 20};
  const nestpipe::Shape shape{kTables, dim, state_dim, bfloat16, -1.0f, seeds, stds, limits};
  World world{nestpipe_store_open(&shape, 2), dim + state_dim, batches};
  require(world.store != nullptr, "no store");
  std::vector<std::thread> readers;
  std::vector<std::thread> writers;
  for (int64_t r = 0; r < kReaders; ++r) {
    readers.emplace_back([&world, r] { read(world, static_cast<uint64_t>(100 + r)); });
  }
  for (int64_t w = 0; w < kWriters; ++w) writers.emplace_back([&world, w] { write(world, w); });
  for (auto& writer : writers) writer.join();
  world.stop = true;
  for (auto& reader : readers) reader.join();
  refuse(world);
  const int64_t rows = nestpipe_store_num_rows(world.store, 0);
  require(rows > kKeys, "rows are missing");
  std::vector<int64_t> keys(static_cast<size_t>(rows));
  require(nestpipe_store_keys(world.store, 0, keys.data(), rows) == rows, "keys are missing");
  require(nestpipe_store_num_bytes(world.store) > rows * dim, "bytes are missing");
  nestpipe_store_close(world.store);
}

// The same for a store with a file: few rows fit into memory, so they leave it all the time.
void run_ssd(int64_t dim, int64_t state_dim, int64_t bfloat16, int64_t rows_in_memory) {
  const uint64_t seeds[kTables] = {1, 2, 3};
  const double stds[kTables] = {0.01, 0.1, 1.0};
  const int64_t limits[kTables] = {0, 0, 0};
  const nestpipe::Shape shape{kTables, dim, state_dim, bfloat16, -1.0f, seeds, stds, limits};
  std::FILE* file = std::tmpfile();
  require(file != nullptr, "no file");
  const int64_t width = dim + state_dim;
  const nestpipe::SsdShape ssd{fileno(file), 4096, rows_in_memory * (width * 4 + 40), 8192, 3};
  nestpipe::SsdStore* store = nestpipe_ssd_open(&shape, &ssd, 2);
  require(store != nullptr, "no store");
  std::vector<std::thread> threads;
  for (int64_t w = 0; w < kWriters; ++w) {
    threads.emplace_back([=] {
      std::mt19937_64 random(static_cast<uint64_t>(w));
      std::vector<int64_t> counts(kTables);
      for (int64_t b = 1; b <= 6; ++b) {
        const auto keys = draw(random, w, counts);
        std::vector<float> rows(keys.size() * static_cast<size_t>(width), float(b));
        nestpipe::Report report{};
        int64_t number = 0;
        require(nestpipe_ssd_scatter(store, keys.data(), counts.data(), rows.data(), &report) ==
                    nestpipe::kOk,
                "scatter failed");
        require(nestpipe_ssd_gather(store, keys.data(), counts.data(), rows.data(), b % 2,
                                    &number, &report) == nestpipe::kOk,
                "gather failed");
        require(number == 0, "a row was lost");
        for (const float value : rows) require(value == float(b), "a row of somebody else");
        if (b % 3 != 0) continue;
        require(nestpipe_ssd_erase(store, keys.data(), counts.data(), &number, &report) ==
                    nestpipe::kOk,
                "erase failed");
        require(number == static_cast<int64_t>(keys.size()), "rows were not erased");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  nestpipe::SsdCounters counters{};
  nestpipe_ssd_counters(store, &counters);
  require(counters.rows_written > 0 && counters.rows_read > 0, "no row left memory");
  require(nestpipe_ssd_num_bytes(store) > 0, "bytes are missing");
  nestpipe_ssd_close(store);
  std::fclose(file);
}

// Samples with few, many and no keys, cut into parts of which some are empty.
void cluster(int64_t samples, int64_t parts) {
  std::mt19937_64 random(static_cast<uint64_t>(samples + parts));
  std::vector<int64_t> offsets{0};
  std::vector<int64_t> keys;
  std::vector<int64_t> tokens;
  std::vector<int64_t> sizes(static_cast<size_t>(parts), 0);
  for (int64_t s = 0; s < samples; ++s) {
    for (uint64_t k = random() % 30; k > 0; --k) {
      keys.push_back(static_cast<int64_t>(random() % 200) - 100);
    }
    tokens.push_back(static_cast<int64_t>(keys.size()) - offsets.back());
    offsets.push_back(static_cast<int64_t>(keys.size()));
    ++sizes[random() % sizes.size()];
  }
  const std::vector<int64_t> least(sizes.size(), 0);
  const std::vector<int64_t> most(sizes.size(), offsets.back());
  const nestpipe::ClusterTask task{samples,       parts,        offsets.data(), keys.data(),
                                   tokens.data(), sizes.data(), least.data(),   most.data()};
  std::vector<int64_t> part_of(static_cast<size_t>(samples));
  require(nestpipe_cluster(&task, part_of.data()) == nestpipe::kOk, "clustering failed");
  for (const int64_t part : part_of) --sizes[static_cast<size_t>(part)];
  for (const int64_t left : sizes) require(left == 0, "a part has the wrong size");
}

}  // namespace

void check_routing();  // native_routing_driver.cpp

int main() {
  run(511, 1, 0, 6);  // whole cache lines, enough of them to be written past the caches
  run(5, 2, 1, 20);   // bfloat16, odd
  run(7, 1, 0, 20);
  run_ssd(7, 1, 0, 500);
  run_ssd(5, 2, 1, 0);
  for (const int64_t parts : {1, 7, 16, 33, 100}) {
    for (const int64_t samples : {0, 1, 60, 1100}) cluster(samples, parts);
  }
  check_routing();
  std::puts("done");
  return 0;
}
