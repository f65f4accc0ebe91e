#include "ssd/ssd_store.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <new>

#include "common/memory.h"

namespace nestpipe {
namespace {

constexpr int64_t kTask = 4096;  // keys that one thread takes at a time
constexpr int64_t kAhead = 12;   // keys between a prefetch and its use
constexpr size_t kChunk = size_t{32} << 20;
constexpr uint64_t kMark = uint64_t{1} << 63;  // of a slot: seen in this call

// The index: rows of four numbers, which are no numbers but a place.
Shape index_shape(const Shape& shape) {
  Shape index = shape;
  index.dim = 4;
  index.state_dim = 0;
  index.row_type = kFloat32;
  return index;
}

template <typename T>
size_t bytes_of(const std::vector<T>& values) {
  return values.capacity() * sizeof(T);
}

}  // namespace

SsdStore::SsdStore(const Shape& shape, const SsdShape& ssd, int64_t threads)
    : index(index_shape(shape), threads),
      form_{shape.dim, shape.state_dim, shape.row_type},
      state_init_(shape.state_init),
      log_(static_cast<int>(ssd.file), static_cast<size_t>(ssd.align), form_.stride(),
           static_cast<size_t>(ssd.segment_bytes), ssd.depth),
      chunk_frames_(std::max<uint64_t>(1, kChunk / form_.stride())),
      most_frames_(std::min<uint64_t>(
          UINT32_MAX, static_cast<uint64_t>(ssd.cache_bytes) / (form_.stride() + sizeof(Frame)))) {
  static_assert(sizeof(Place) == 16 && sizeof(Frame) == 24);
}

SsdStore::~SsdStore() {
  for (size_t i = 0; i < chunks_.size(); ++i) unmap_memory(chunks_[i], chunk_bytes_[i]);
}

// Reading

int64_t SsdStore::gather(const int64_t* keys, const int64_t* counts, float* out, bool admit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  locate(keys, counts);
  int64_t num_new = 0;
  std::vector<Miss> misses = copy_cached(keys, out, num_new);
  rows_hit_ += static_cast<int64_t>(places_.size() - misses.size()) - num_new;
  if (!misses.empty()) read_misses(misses, keys, out, admit);
  return num_new;
}

void SsdStore::locate(const int64_t* keys, const int64_t* counts) {
  ++stamp_;
  ends_.clear();
  int64_t total = 0;
  for (size_t t = 0; t < index.tables.size(); ++t) ends_.push_back(total += counts[t]);
  places_.resize(static_cast<size_t>(total));
  index.gather(keys, counts, nullptr, reinterpret_cast<std::byte**>(places_.data()));
}

void SsdStore::in_parallel(const std::function<void(int64_t, int64_t)>& work) {
  const auto total = static_cast<int64_t>(places_.size());
  index.threads.run((total + kTask - 1) / kTask, [&](int64_t task) {
    work(task * kTask, std::min(total, (task + 1) * kTask));
  });
}

// Rows in memory and first values to their outputs; returns what the file has.
std::vector<SsdStore::Miss> SsdStore::copy_cached(const int64_t* keys, float* out,
                                                  int64_t& num_new) {
  const size_t width = form_.width();
  const bool stream = places_.size() * width * sizeof(float) >= kStreamFrom &&
                      whole_lines(out, width * sizeof(float));
  std::vector<std::vector<Miss>> found(places_.size() / kTask + 1);
  std::atomic<int64_t> all_new{0};
  in_parallel([&](int64_t begin, int64_t end) {
    std::vector<Miss>& misses = found[static_cast<size_t>(begin / kTask)];
    int64_t fresh = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) __builtin_prefetch(places_[static_cast<size_t>(i + kAhead)]);
      Place* place = places_[static_cast<size_t>(i)];
      float* to = out + static_cast<size_t>(i) * width;
      if (place == nullptr) {
        make_first_row(form_, state_init_, *index.tables[table_of(i)], keys[i], to);
        ++fresh;
      } else if (place->frame != 0) {
        touch(frames_[place->frame - 1]);
        form_.load(to, memory_of(place->frame - 1), stream);
      } else {
        misses.push_back({place->slot, i, place, table_of(i)});
      }
    }
    if (stream) end_stream();
    all_new += fresh;
  });
  num_new = all_new;
  for (size_t i = 1; i < found.size(); ++i) {
    found[0].insert(found[0].end(), found[i].begin(), found[i].end());
  }
  return std::move(found[0]);
}

void SsdStore::read_misses(std::vector<Miss>& misses, const int64_t* keys, float* out,
                           bool admit) {
  sort_by_slot(misses);
  size_t num_rows = 0;  // keys may repeat
  for (size_t i = 0; i < misses.size(); ++i) {
    num_rows += i == 0 || misses[i].place != misses[i - 1].place;
  }
  const int64_t moved = rows_moved_;
  std::vector<uint32_t> frames;
  if (admit) frames = make_room(num_rows);
  if (moved != rows_moved_) sort_by_slot(misses);  // to make room, others may have moved in the file
  std::vector<size_t> firsts;  // of each row: its first miss
  std::vector<LogRead> reads;
  for (size_t i = 0; i < misses.size(); ++i) {
    const Miss& miss = misses[i];
    if (i > 0 && miss.place == misses[i - 1].place) continue;
    firsts.push_back(i);
    reads.push_back({miss.slot - 1, keys[miss.position], miss.table});
  }
  firsts.push_back(misses.size());
  try {
    log_.read(reads, [&](size_t r, const std::byte* bytes) {
      for (size_t i = firsts[r]; i < firsts[r + 1]; ++i) {
        form_.load(out + static_cast<size_t>(misses[i].position) * form_.width(), bytes, false);
      }
      if (r < frames.size()) std::memcpy(memory_of(frames[r]), bytes, form_.stride());
    });
  } catch (...) {
    free_frames_.insert(free_frames_.end(), frames.begin(), frames.end());
    throw;
  }
  for (size_t r = 0; r < frames.size(); ++r) {
    const Miss& miss = misses[firsts[r]];
    frames_[frames[r]] = {miss.place, reads[r].key, miss.table, 0, stamp_};
    miss.place->frame = uint64_t{frames[r]} + 1;
  }
}

void SsdStore::sort_by_slot(std::vector<Miss>& misses) const {
  for (Miss& miss : misses) miss.slot = miss.place->slot;
  std::sort(misses.begin(), misses.end(), [](const Miss& a, const Miss& b) {
    return a.slot != b.slot ? a.slot < b.slot : a.position < b.position;
  });
}

// Writing: everything that can fail happens before the first row is placed.

Status SsdStore::scatter(const int64_t* keys, const int64_t* counts, const float* rows,
                         Report& report) {
  const std::lock_guard<std::mutex> lock(mutex_);
  locate(keys, counts);
  if (repeats(keys, report)) return kRepeatedKey;
  std::vector<int64_t> homeless;  // positions of rows that have no frame
  for (size_t i = 0; i < places_.size(); ++i) {
    if (i + kAhead < places_.size()) __builtin_prefetch(places_[i + kAhead]);
    if (places_[i] != nullptr && places_[i]->frame != 0) {
      touch(frames_[places_[i]->frame - 1]);
    } else {
      homeless.push_back(static_cast<int64_t>(i));
    }
  }
  std::vector<uint32_t> frames = make_room(homeless.size());
  std::vector<std::byte> staging;  // rows for which there is no frame go to the file at once
  std::vector<LogRow> direct;
  std::vector<int64_t> fresh;
  std::vector<Place> fresh_places;
  Status status = kOk;
  bool written = false;
  const auto undo = [&] {
    free_frames_.insert(free_frames_.end(), frames.begin(), frames.end());
    for (const LogRow& row : direct) {
      if (written) log_.release(row.slot);
    }
  };
  try {
    staging.resize((homeless.size() - frames.size()) * form_.stride());
    for (size_t h = frames.size(); h < homeless.size(); ++h) {
      const int64_t i = homeless[h];
      std::byte* bytes = staging.data() + (h - frames.size()) * form_.stride();
      form_.save(bytes, rows + static_cast<size_t>(i) * form_.width(), false);
      direct.push_back({keys[i], table_of(i), bytes, 0});
    }
    spill(direct);
    written = true;
    for (size_t h = 0; h < homeless.size(); ++h) {
      if (places_[static_cast<size_t>(homeless[h])] != nullptr) continue;
      fresh.push_back(homeless[h]);
      fresh_places.push_back(h < frames.size() ? Place{uint64_t{frames[h]} + 1, 0}
                                               : Place{0, direct[h - frames.size()].slot + 1});
    }
    if (!fresh.empty()) status = insert(keys, fresh, fresh_places, report);
  } catch (...) {
    undo();
    throw;
  }
  if (status != kOk) {
    undo();
    return status;
  }
  if (!fresh.empty()) {
    index.gather(keys, counts, nullptr, reinterpret_cast<std::byte**>(places_.data()));
  }
  place_rows(homeless, frames, direct, keys);
  in_parallel([&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Place& place = *places_[static_cast<size_t>(i)];
      if (place.frame == 0) continue;
      form_.save(memory_of(place.frame - 1), rows + static_cast<size_t>(i) * form_.width(), false);
    }
  });
  return kOk;
}

// Whether a stored key comes twice; new ones are compared by the index.
bool SsdStore::repeats(const int64_t* keys, Report& report) {
  std::atomic<int64_t> again{-1};
  in_parallel([&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Place* place = places_[static_cast<size_t>(i)];
      if (place == nullptr) continue;
      if (__atomic_fetch_or(&place->slot, kMark, __ATOMIC_RELAXED) & kMark) again = i;
    }
  });
  in_parallel([&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Place* place = places_[static_cast<size_t>(i)];
      if (place != nullptr) __atomic_fetch_and(&place->slot, ~kMark, __ATOMIC_RELAXED);
    }
  });
  if (again < 0) return false;
  report.table = table_of(again);
  report.key = keys[again];
  return true;
}

Status SsdStore::insert(const int64_t* keys, const std::vector<int64_t>& positions,
                        const std::vector<Place>& places, Report& report) {
  std::vector<int64_t> new_keys;
  std::vector<int64_t> new_counts(index.tables.size(), 0);
  for (const int64_t i : positions) {
    new_keys.push_back(keys[i]);
    ++new_counts[table_of(i)];
  }
  const std::lock_guard<std::mutex> lock(index.writing);
  return index.scatter(new_keys.data(), new_counts.data(),
                       reinterpret_cast<const float*>(places.data()), report);
}

// What is in memory is dirty from now on, so its slot in the file is free.
void SsdStore::place_rows(const std::vector<int64_t>& homeless,
                          const std::vector<uint32_t>& frames, const std::vector<LogRow>& direct,
                          const int64_t* keys) {
  for (Place* place : places_) {
    if (place->frame != 0) forget_slot(*place);
  }
  for (size_t h = 0; h < homeless.size(); ++h) {
    const int64_t i = homeless[h];
    Place& place = *places_[static_cast<size_t>(i)];
    if (h < frames.size()) {
      forget_slot(place);
      place.frame = uint64_t{frames[h]} + 1;
      frames_[frames[h]] = {&place, keys[i], table_of(i), 0, stamp_};
    } else if (const uint64_t slot = direct[h - frames.size()].slot + 1; place.slot != slot) {
      forget_slot(place);
      place.slot = slot;
    }
  }
}

void SsdStore::forget_slot(Place& place) {
  if (place.slot != 0) log_.release(place.slot - 1);
  place.slot = 0;
}

Status SsdStore::erase(const int64_t* keys, const int64_t* counts, int64_t& erased,
                       Report& report) {
  const std::lock_guard<std::mutex> lock(mutex_);
  locate(keys, counts);
  const std::lock_guard<std::mutex> writing(index.writing);
  const Status status = index.erase(keys, counts, erased, report);
  if (status != kOk) return status;
  // The index forgets a place; what it says stays there until the next scatter.
  for (Place* place : places_) {
    if (place == nullptr) continue;
    if (place->frame != 0) {
      frames_[place->frame - 1].place = nullptr;
      free_frames_.push_back(static_cast<uint32_t>(place->frame - 1));
    }
    forget_slot(*place);
  }
  return kOk;
}

// Room in memory

// Up to `count` free frames: fewer where all others are in use by this call.
std::vector<uint32_t> SsdStore::make_room(size_t count) {
  add_frames(count);
  std::vector<uint32_t> victims;
  size_t dirty = 0;
  const auto pass = [&](size_t steps, bool only_dirty, const std::function<bool()>& enough) {
    for (size_t step = 0; step < steps && !enough(); ++step) {
      const auto number = static_cast<uint32_t>(hand_ % frames_.size());
      hand_ = number + 1;
      Frame& frame = frames_[number];
      if (frame.place == nullptr || frame.stamp == stamp_) continue;
      if (only_dirty && frame.place->slot != 0) continue;
      if (frame.used != 0 && !only_dirty) {
        frame.used = 0;
        continue;
      }
      if (frame.used != 0) continue;
      frame.stamp = stamp_;
      dirty += frame.place->slot == 0;
      victims.push_back(number);
    }
  };
  if (free_frames_.size() < count) {
    const size_t wanted = count - free_frames_.size();
    pass(2 * frames_.size(), false, [&] { return victims.size() >= wanted; });
    // Segments are written whole: a few more rows may leave with the last of them.
    const size_t whole = log_.rows_per_segment();
    pass(std::min(frames_.size(), 4 * whole), true, [&] { return dirty % whole == 0; });
    give_up(victims);
  }
  const size_t taken = std::min(count, free_frames_.size());
  std::vector<uint32_t> frames(free_frames_.end() - static_cast<ptrdiff_t>(taken),
                               free_frames_.end());
  free_frames_.resize(free_frames_.size() - taken);
  return frames;
}

// Maps memory for more frames, up to the limit; where the machine has no more, that is the limit.
void SsdStore::add_frames(size_t count) {
  while (free_frames_.size() < count && frames_.size() < most_frames_) {
    const uint64_t more = std::min(chunk_frames_, most_frames_ - frames_.size());
    const size_t bytes = more * form_.stride();
    const size_t total = frames_.size() + more;
    try {
      chunks_.reserve(chunks_.size() + 1);
      chunk_bytes_.reserve(chunk_bytes_.size() + 1);
      if (frames_.capacity() < total) {
        const size_t room = std::min<size_t>(most_frames_, std::max(total, 2 * frames_.size()));
        frames_.reserve(room);
        free_frames_.reserve(room);
      }
      chunks_.push_back(static_cast<std::byte*>(map_memory(bytes)));
      chunk_bytes_.push_back(bytes);
    } catch (const std::bad_alloc&) {
      most_frames_ = frames_.size();
      return;
    }
    const uint64_t first = frames_.size();
    frames_.resize(total, Frame{});
    for (uint64_t f = total; f > first; --f) free_frames_.push_back(static_cast<uint32_t>(f - 1));
  }
}

void SsdStore::give_up(const std::vector<uint32_t>& victims) {
  std::vector<LogRow> rows;
  for (const uint32_t number : victims) {
    const Frame& frame = frames_[number];
    if (frame.place->slot == 0) rows.push_back({frame.key, frame.table, memory_of(number), 0});
  }
  spill(rows);
  size_t next = 0;
  for (const uint32_t number : victims) {
    Frame& frame = frames_[number];
    if (frame.place->slot == 0) frame.place->slot = rows[next++].slot + 1;
    frame.place->frame = 0;
    frame.place = nullptr;
    free_frames_.push_back(number);
  }
}

// Writes rows to the file, together with those of segments that are mostly empty.
void SsdStore::spill(std::vector<LogRow>& rows) {
  const size_t count = rows.size();
  if (count == 0) return;
  std::vector<std::byte> room;
  std::vector<Place*> moved;
  const std::vector<uint64_t> sparse = log_.sparse_segments(count);
  if (!sparse.empty()) {
    log_.scan(sparse, room, [&](int64_t key, uint32_t table, uint64_t slot, const std::byte* row) {
      Place* place = find(key, table);
      if (place == nullptr || place->slot != slot + 1) return false;
      rows.push_back({key, table, row, 0});
      moved.push_back(place);
      return true;
    });
  }
  log_.write(rows.data(), rows.size());
  for (size_t m = 0; m < moved.size(); ++m) {
    log_.release(moved[m]->slot - 1);
    moved[m]->slot = rows[count + m].slot + 1;
  }
  rows_moved_ += static_cast<int64_t>(moved.size());
  rows.resize(count);
}

// Several threads may touch one frame.
void SsdStore::touch(Frame& frame) const {
  __atomic_store_n(&frame.used, uint16_t{1}, __ATOMIC_RELAXED);
  __atomic_store_n(&frame.stamp, stamp_, __ATOMIC_RELAXED);
}

std::byte* SsdStore::memory_of(uint64_t frame) const {
  return chunks_[frame / chunk_frames_] + frame % chunk_frames_ * form_.stride();
}

uint32_t SsdStore::table_of(int64_t position) const {
  const auto after = std::upper_bound(ends_.begin(), ends_.end(), position);
  return static_cast<uint32_t>(after - ends_.begin());
}

SsdStore::Place* SsdStore::find(int64_t key, uint32_t table) const {
  if (table >= index.tables.size()) return nullptr;
  const uint64_t hash = hash_of(key);
  const Shard& shard = index.tables[table]->shards[shard_of(hash)];
  return reinterpret_cast<Place*>(shard.find(key, shard.home(hash)));
}

int64_t SsdStore::num_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t total = sizeof(SsdStore) - sizeof(Store) - sizeof(RowLog) + log_.num_bytes() +
                 bytes_of(frames_) + bytes_of(chunks_) + bytes_of(chunk_bytes_) +
                 bytes_of(free_frames_) + bytes_of(places_) + bytes_of(ends_);
  for (const size_t bytes : chunk_bytes_) total += mapped_size(bytes);
  return static_cast<int64_t>(total) + nestpipe_store_num_bytes(&index);
}

SsdCounters SsdStore::counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const LogTraffic& traffic = log_.traffic();
  return {rows_hit_,
          traffic.rows_read,
          traffic.bytes_read,
          traffic.rows_written,
          traffic.bytes_written,
          rows_moved_,
          static_cast<int64_t>(log_.file_bytes()),
          static_cast<int64_t>(frames_.size() - free_frames_.size()),
          static_cast<int64_t>(most_frames_)};
}

}  // namespace nestpipe

using nestpipe::Report;
using nestpipe::SsdStore;

namespace {

// Runs a call and turns what it throws into a status.
template <typename Call>
int guarded(Report* report, const Call& call) {
  try {
    return call();
  } catch (const nestpipe::FileError& error) {
    report->key = static_cast<int64_t>(error.call);
    report->asked = error.error;
    return error.error == 0 ? nestpipe::kFileDamaged : nestpipe::kFileFailed;
  } catch (const std::bad_alloc&) {
    return nestpipe::kNoMemory;
  } catch (...) {
    return nestpipe::kDefect;
  }
}

}  // namespace

SsdStore* nestpipe_ssd_open(const nestpipe::Shape* shape, const nestpipe::SsdShape* ssd,
                            int64_t threads) {
  try {
    return new SsdStore(*shape, *ssd, threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void nestpipe_ssd_close(SsdStore* store) { delete store; }

nestpipe::Store* nestpipe_ssd_index(SsdStore* store) { return &store->index; }

int nestpipe_ssd_gather(SsdStore* store, const int64_t* keys, const int64_t* counts, float* out,
                        int64_t admit, int64_t* num_new, Report* report) {
  return guarded(report, [&] {
    *num_new = store->gather(keys, counts, out, admit != 0);
    return static_cast<int>(nestpipe::kOk);
  });
}

int nestpipe_ssd_scatter(SsdStore* store, const int64_t* keys, const int64_t* counts,
                         const float* rows, Report* report) {
  return guarded(report, [&] {
    return static_cast<int>(store->scatter(keys, counts, rows, *report));
  });
}

int nestpipe_ssd_erase(SsdStore* store, const int64_t* keys, const int64_t* counts,
                       int64_t* erased, Report* report) {
  return guarded(report, [&] {
    return static_cast<int>(store->erase(keys, counts, *erased, *report));
  });
}

int64_t nestpipe_ssd_num_bytes(SsdStore* store) { return store->num_bytes(); }

void nestpipe_ssd_counters(SsdStore* store, nestpipe::SsdCounters* counters) {
  *counters = store->counters();
}
