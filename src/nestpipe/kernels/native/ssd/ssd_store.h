// A store whose rows live in a file, with the hot ones in memory.
//
// The index (all keys, in memory) is a host store of its own, whose rows say where a row is: in
// a frame of the cache, in a slot of the file, or in both. A row that is only in a frame is dirty.
// Frames are given up by second chance (CLOCK): dirty rows go to the file, others are forgotten.
// Calls take turns; each works with several threads, and reads and writes the file with more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "common/abi.h"
#include "rows/row_format.h"
#include "ssd/row_log.h"
#include "store/store.h"

namespace nestpipe {

struct SsdShape {
  int64_t file;           // an open file, empty, of the caller's
  int64_t align;          // reads and writes begin and end at multiples of this
  int64_t cache_bytes;    // memory for rows, with 24 bytes beside each
  int64_t segment_bytes;  // what is written at once
  int64_t depth;          // reads and writes at the same time
};

struct SsdCounters {
  int64_t rows_hit;   // asked for and in memory
  int64_t rows_read;  // from the file, for whoever asked
  int64_t bytes_read;
  int64_t rows_written;
  int64_t bytes_written;
  int64_t rows_moved;  // of those written: only to empty a segment
  int64_t file_bytes;
  int64_t cached_rows;
  int64_t cache_rows;  // at most
};

class SsdStore {
 public:
  SsdStore(const Shape& shape, const SsdShape& ssd, int64_t threads);
  ~SsdStore();
  SsdStore(const SsdStore&) = delete;
  SsdStore& operator=(const SsdStore&) = delete;

  // `admit`: rows from the file stay in memory.
  int64_t gather(const int64_t* keys, const int64_t* counts, float* out, bool admit);
  Status scatter(const int64_t* keys, const int64_t* counts, const float* rows, Report& report);
  Status erase(const int64_t* keys, const int64_t* counts, int64_t& erased, Report& report);
  int64_t num_bytes();
  SsdCounters counters();

  Store index;

 private:
  // What the index has of a row: 1 + its number, 0 where it is not there.
  struct Place {
    uint64_t frame;
    uint64_t slot;
  };
  struct Frame {
    Place* place;  // null: free
    int64_t key;
    uint32_t table;
    uint16_t used;   // since the hand last came by
    uint16_t stamp;  // the last call that uses it; that call does not give it up
  };
  // A row that a gather reads from the file, and the output that it is for.
  struct Miss {
    uint64_t slot;
    int64_t position;
    Place* place;
    uint32_t table;
  };
  // Begins a call: where the rows of its keys are.
  void locate(const int64_t* keys, const int64_t* counts);
  void in_parallel(const std::function<void(int64_t, int64_t)>& work);
  std::vector<Miss> copy_cached(const int64_t* keys, float* out, int64_t& num_new);
  void read_misses(std::vector<Miss>& misses, const int64_t* keys, float* out, bool admit);
  void sort_by_slot(std::vector<Miss>& misses) const;
  bool repeats(const int64_t* keys, Report& report);
  Status insert(const int64_t* keys, const std::vector<int64_t>& positions,
                const std::vector<Place>& places, Report& report);
  void place_rows(const std::vector<int64_t>& homeless, const std::vector<uint32_t>& frames,
                  const std::vector<LogRow>& direct, const int64_t* keys);
  void touch(Frame& frame) const;
  std::vector<uint32_t> make_room(size_t count);
  void add_frames(size_t count);
  void give_up(const std::vector<uint32_t>& victims);
  void spill(std::vector<LogRow>& rows);
  void forget_slot(Place& place);
  std::byte* memory_of(uint64_t frame) const;
  uint32_t table_of(int64_t position) const;
  Place* find(int64_t key, uint32_t table) const;

  const RowForm form_;
  const float state_init_;
  std::mutex mutex_;  // of everything
  RowLog log_;
  std::vector<Frame> frames_;
  std::vector<std::byte*> chunks_;
  std::vector<size_t> chunk_bytes_;
  const uint64_t chunk_frames_;
  uint64_t most_frames_;
  std::vector<uint32_t> free_frames_;
  uint64_t hand_ = 0;
  uint16_t stamp_ = 0;
  std::vector<Place*> places_;  // by position in the batch
  std::vector<int64_t> ends_;   // by table: where its keys end
  int64_t rows_hit_ = 0;
  int64_t rows_moved_ = 0;
};

}  // namespace nestpipe

// A new store that belongs to the caller, or null where memory or threads ran out.
NESTPIPE_API nestpipe::SsdStore* nestpipe_ssd_open(const nestpipe::Shape* shape,
                                                   const nestpipe::SsdShape* ssd, int64_t threads);
NESTPIPE_API void nestpipe_ssd_close(nestpipe::SsdStore* store);
// Its keys: a store to ask for numbers of rows and for keys, never to be changed.
NESTPIPE_API nestpipe::Store* nestpipe_ssd_index(nestpipe::SsdStore* store);
NESTPIPE_API int nestpipe_ssd_gather(nestpipe::SsdStore* store, const int64_t* keys,
                                     const int64_t* counts, float* out, int64_t admit,
                                     int64_t* num_new, nestpipe::Report* report);
NESTPIPE_API int nestpipe_ssd_scatter(nestpipe::SsdStore* store, const int64_t* keys,
                                      const int64_t* counts, const float* rows,
                                      nestpipe::Report* report);
NESTPIPE_API int nestpipe_ssd_erase(nestpipe::SsdStore* store, const int64_t* keys,
                                    const int64_t* counts, int64_t* erased,
                                    nestpipe::Report* report);
NESTPIPE_API int64_t nestpipe_ssd_num_bytes(nestpipe::SsdStore* store);
NESTPIPE_API void nestpipe_ssd_counters(nestpipe::SsdStore* store, nestpipe::SsdCounters* counters);
