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
#include "data/pages.h"
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

void run(int64_t dim, int64_t state_dim, nestpipe::RowType type, int64_t batches) {
  const uint64_t seeds[kTables] = {1, 2, 3};
  const double stds[kTables] = {0.01, 0.1, 1.0};
  const int64_t limits[kTables] = {0, 0, 1 << 20};
  const nestpipe::Shape shape{kTables, dim, state_dim, type, -1.0f, seeds, stds, limits};
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
void run_ssd(int64_t dim, int64_t state_dim, nestpipe::RowType type, int64_t rows_in_memory) {
  const uint64_t seeds[kTables] = {1, 2, 3};
  const double stds[kTables] = {0.01, 0.1, 1.0};
  const int64_t limits[kTables] = {0, 0, 0};
  const nestpipe::Shape shape{kTables, dim, state_dim, type, -1.0f, seeds, stds, limits};
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

// Runs of `width` bits, packed and repeated, behind their length; some are cut short.
void add_runs(std::mt19937_64& random, int width, std::vector<uint8_t>& page) {
  std::vector<uint8_t> runs;
  for (uint64_t count = random() % 4; count > 0; --count) {
    const uint64_t groups = 1 + random() % 9;
    const bool packed = random() % 2;
    runs.push_back(static_cast<uint8_t>(groups << 1 | (packed ? 1 : 0)));
    const uint64_t bytes = packed ? groups * static_cast<uint64_t>(width) : (width + 7) / 8;
    const uint8_t fill = random() % 2 ? 0xFF : 0;
    for (uint64_t byte = 0; byte < bytes; ++byte) runs.push_back(random() % 9 ? fill : random());
  }
  const uint64_t said = random() % 8 ? runs.size() : random() % 40;
  for (int byte = 0; byte < 4; ++byte) page.push_back(static_cast<uint8_t>(said >> 8 * byte));
  page.insert(page.end(), runs.begin(), runs.end());
}

// Pages of any bytes, in memory that is not larger than they are: the answer is yes or no.
void decode(uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t rows = 1 + static_cast<int64_t>(random() % 50), room = rows + 20;
  std::vector<int64_t> offsets(static_cast<size_t>(rows + 1));
  std::vector<int64_t> values(static_cast<size_t>(room));
  std::vector<int64_t> dictionary(random() % 4 ? 1 + random() % 600 : 0);
  const int64_t most = 1 + static_cast<int64_t>(random() % 3);
  nestpipe::ListColumn column{most, most > 1, dictionary.data(),
                              static_cast<int64_t>(dictionary.size()), offsets.data(), rows,
                              values.data(), room, 0, 0};
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<uint8_t> page;
    add_runs(random, 1, page);
    add_runs(random, most > 1 ? 2 : 1, page);
    for (uint64_t byte = random() % 200; byte > 0; --byte) {
      page.push_back(static_cast<uint8_t>(random() % 3 ? random() % 12 : random()));
    }
    const std::vector<uint8_t> exact(page);
    const int64_t entries = static_cast<int64_t>(random() % 30), size = exact.size();
    const int64_t encoding = random() % 4 ? 8 : 0;
    nestpipe::PageHeader header;
    nestpipe_page_header(exact.data(), size, &header);
    require(header.header_bytes <= size, "a header is longer than the page");
    if (!nestpipe_decode_lists(&column, exact.data(), size, entries, encoding)) return;
    require(column.num_rows <= rows && column.num_values <= room, "a page has no room");
  }
}

}  // namespace

void check_routing();  // native_routing_driver.cpp

int main() {
  run(511, 1, nestpipe::kFloat32, 6);  // whole cache lines, enough of them to be written past the caches
  run(5, 2, nestpipe::kBfloat16, 20);
  run(19, 1, nestpipe::kFloat16, 20);  // two times eight, and an odd rest
  run(7, 1, nestpipe::kFloat32, 20);
  run_ssd(7, 1, nestpipe::kFloat32, 500);
  run_ssd(5, 2, nestpipe::kBfloat16, 0);
  run_ssd(19, 1, nestpipe::kFloat16, 0);
  for (const int64_t parts : {1, 7, 16, 33, 100}) {
    for (const int64_t samples : {0, 1, 60, 1100}) cluster(samples, parts);
  }
  for (uint64_t seed = 0; seed < 20'000; ++seed) decode(seed);
  check_routing();
  std::puts("done");
  return 0;
}
