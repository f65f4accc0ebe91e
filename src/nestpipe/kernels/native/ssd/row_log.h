// Rows in a file: packed into segments that are written whole and never changed.
//
// A row that changes is written again elsewhere, and its old slot is released. A segment without
// rows is used again. So a write that fails harms no row that is there, and small rows make large
// writes. Each row carries its key and a sum of its bytes; a read compares both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/threads.h"

namespace nestpipe {

enum class FileCall : int64_t { kRead = 0, kWrite = 1, kGrow = 2 };

// A call to the file system that failed, or a row that is not what was written (error 0).
struct FileError {
  FileCall call;
  int error;
};

struct LogRow {
  int64_t key;
  uint32_t table;
  const std::byte* bytes;
  uint64_t slot;  // where it was written
};

// A row to read. Rows of one call come in the order of their slots, each once.
struct LogRead {
  uint64_t slot;
  int64_t key;
  uint32_t table;
};

struct LogTraffic {
  int64_t rows_read = 0;
  int64_t bytes_read = 0;
  int64_t rows_written = 0;
  int64_t bytes_written = 0;
};

class RowLog {
 public:
  // `file` stays the caller's; reads and writes begin and end at multiples of `align`.
  RowLog(int file, size_t align, size_t row_bytes, size_t segment_bytes, int64_t depth);
  RowLog(const RowLog&) = delete;
  RowLog& operator=(const RowLog&) = delete;

  // Writes rows and fills in their slots. Throws FileError; then nothing has changed.
  void write(LogRow* rows, size_t count);
  // Calls take(i, bytes) for each row, from several threads. Throws FileError.
  void read(const std::vector<LogRead>& rows,
            const std::function<void(size_t, const std::byte*)>& take);
  // The row there is needed no longer.
  void release(uint64_t slot);

  // Segments to empty before `count` rows are written, so that at most a third of the file holds
  // nothing of use; mostly none.
  std::vector<uint64_t> sparse_segments(size_t count) const;
  // Calls each(key, table, slot, bytes) for everything that may be a row of these segments, by one
  // thread. `room` keeps the bytes. It answers whether the row is one; where the number of those is
  // wrong, the segment is damaged.
  void scan(const std::vector<uint64_t>& segments, std::vector<std::byte>& room,
            const std::function<bool(int64_t, uint32_t, uint64_t, const std::byte*)>& each);

  size_t rows_per_segment() const { return per_segment_; }
  size_t file_bytes() const { return live_.size() * segment_bytes_; }
  size_t num_bytes() const;
  const LogTraffic& traffic() const { return traffic_; }

 private:
  struct Header {
    int64_t key;
    uint32_t table;
    uint32_t sum;
  };
  struct Request {
    size_t first;
    size_t last;
    uint64_t begin;
    uint64_t end;
  };
  class Buffer;

  // Slots without a row, of segments that have one.
  uint64_t unused() const { return (live_.size() - free_.size()) * per_segment_ - num_live_; }
  bool is_sparse() const { return 2 * unused() > num_live_; }
  uint32_t sum_of(int64_t key, uint32_t table, const std::byte* bytes) const;
  uint64_t offset_of(uint64_t slot) const;
  std::vector<Request> requests_of(const std::vector<LogRead>& rows) const;
  std::vector<uint64_t> take_segments(size_t count);
  void grow(size_t count);
  void pack(std::byte* to, const LogRow* rows, size_t count) const;
  void read_bytes(std::byte* to, uint64_t begin, uint64_t end) const;
  void write_bytes(const std::byte* from, uint64_t begin, size_t bytes) const;
  std::byte* take_buffer();
  void give_buffer(std::byte* buffer);

  const int file_;
  const size_t align_;
  const size_t row_bytes_;
  const size_t slot_bytes_;
  const size_t segment_bytes_;
  const size_t per_segment_;
  const size_t buffer_bytes_;
  std::vector<uint32_t> live_;  // rows of each segment
  std::vector<uint64_t> free_;  // segments without rows
  uint64_t num_live_ = 0;
  LogTraffic traffic_;
  mutable std::mutex mutex_;  // of the buffers
  std::vector<std::byte*> buffers_;
  std::vector<std::unique_ptr<std::byte[], void (*)(void*)>> owned_;
  Threads threads_;
};

}  // namespace nestpipe
