#include "store/store.h"

#include <algorithm>
#include <exception>
#include <new>

#include "store/first_values.h"

namespace nestpipe {
namespace {

template <typename T>
size_t bytes_of(const std::vector<T>& values) {
  return values.capacity() * sizeof(T);
}

}  // namespace

size_t Scratch::num_bytes() const {
  return bytes_of(parts) + bytes_of(pieces) + bytes_of(part_starts) + bytes_of(starts) +
         bytes_of(order) + bytes_of(rows) + bytes_of(first_new);
}

Store::Store(const Shape& shape, int64_t num_threads)
    : form{shape.dim, shape.state_dim, shape.row_type},
      state_init(shape.state_init),
      threads(num_threads) {
  for (int64_t t = 0; t < shape.num_tables; ++t) {
    const auto limit = static_cast<uint64_t>(shape.max_rows[t]);
    tables.push_back(
        std::make_unique<Table>(shape.seeds[t], shape.stds[t], limit, form.stride()));
  }
}

void make_first_row(const RowForm& form, float state_init, const Table& table, int64_t key,
                    float* out) {
  first_weights(table.seed, key, table.spread, form.dim, out);
  form.round(out);
  std::fill(out + form.dim, out + form.width(), state_init);
}

void Store::first_row(const Table& table, int64_t key, float* out) const {
  make_first_row(form, state_init, table, key, out);
}

}  // namespace nestpipe

using nestpipe::Report;
using nestpipe::Store;

nestpipe::Store* nestpipe_store_open(const nestpipe::Shape* shape, int64_t threads) {
  try {
    return new Store(*shape, threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void nestpipe_store_close(Store* store) { delete store; }

int nestpipe_store_gather(Store* store, const int64_t* keys, const int64_t* counts, float* out,
                          int64_t* num_new) {
  try {
    *num_new = store->gather(keys, counts, out, nullptr);
    return nestpipe::kOk;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}

int nestpipe_store_locate(Store* store, const int64_t* keys, const int64_t* counts, void** addresses,
                          int64_t* num_new) {
  try {
    *num_new = store->gather(keys, counts, nullptr, reinterpret_cast<std::byte**>(addresses));
    return nestpipe::kOk;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}

int nestpipe_store_locate_each(Store* store, const int64_t* keys, const int32_t* key_tables,
                               int64_t count, void** addresses, int64_t* num_new) {
  try {
    *num_new =
        store->locate_each(keys, key_tables, count, reinterpret_cast<std::byte**>(addresses));
    return nestpipe::kOk;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}

int nestpipe_store_scatter(Store* store, const int64_t* keys, const int64_t* counts,
                           const float* rows, Report* report) {
  try {
    const std::lock_guard<std::mutex> lock(store->writing);
    return store->scatter(keys, counts, rows, *report);
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}

int nestpipe_store_erase(Store* store, const int64_t* keys, const int64_t* counts, int64_t* erased,
                         Report* report) {
  try {
    const std::lock_guard<std::mutex> lock(store->writing);
    return store->erase(keys, counts, *erased, *report);
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}

int64_t nestpipe_store_num_rows(Store* store, int64_t table) {
  const std::lock_guard<std::mutex> lock(store->writing);
  return static_cast<int64_t>(store->tables[static_cast<size_t>(table)]->num_rows);
}

int64_t nestpipe_store_chunks(Store* store, int64_t table, int64_t first, void** memory,
                              int64_t* bytes, int64_t room) {
  const std::lock_guard<std::mutex> lock(store->writing);
  const auto& chunks = store->tables[static_cast<size_t>(table)]->chunks();
  const auto count = static_cast<int64_t>(chunks.size());
  for (int64_t i = first; i < count && i - first < room; ++i) {
    memory[i - first] = chunks[static_cast<size_t>(i)].memory;
    bytes[i - first] = static_cast<int64_t>(chunks[static_cast<size_t>(i)].bytes);
  }
  return count;
}

int64_t nestpipe_store_num_bytes(Store* store) {
  const std::lock_guard<std::mutex> lock(store->writing);
  size_t total = sizeof(Store) + store->arena.num_bytes() + store->scratch.num_bytes();
  for (const auto& table : store->tables) total += sizeof(*table) + table->num_bytes();
  return static_cast<int64_t>(total);
}

int64_t nestpipe_store_keys(Store* store, int64_t table, int64_t* keys, int64_t room) {
  const std::lock_guard<std::mutex> lock(store->writing);
  const nestpipe::Table& source = *store->tables[static_cast<size_t>(table)];
  int64_t found = 0;
  for (uint64_t s = 0; s < nestpipe::kShards; ++s) {
    const nestpipe::Shard& shard = source.shards[s];
    for (uint64_t b = 0; b < shard.num_buckets; ++b) {
      const nestpipe::Bucket& bucket = shard.buckets[b];
      for (int i = 0; i < nestpipe::kPlaces && bucket.rows[i] != nullptr; ++i, ++found) {
        if (found < room) keys[found] = bucket.keys[i];
      }
    }
  }
  return found;
}
