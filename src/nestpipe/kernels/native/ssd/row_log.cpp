#include "ssd/row_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "store/first_values.h"

namespace nestpipe {
namespace {

constexpr size_t kLongestRead = size_t{128} << 10;  // neighbours that are read at once
constexpr size_t kGrowth = size_t{64} << 20;        // what a file grows by, where it may
constexpr size_t kMostScanned = 64;                 // segments emptied at a time: 16 MiB

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

// One of the buffers, for as long as it lives.
class RowLog::Buffer {
 public:
  explicit Buffer(RowLog& log) : bytes(log.take_buffer()), log_(log) {}
  ~Buffer() { log_.give_buffer(bytes); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* const bytes;

 private:
  RowLog& log_;
};

RowLog::RowLog(int file, size_t align, size_t row_bytes, size_t segment_bytes, int64_t depth)
    : file_(file),
      align_(align),
      row_bytes_(row_bytes),
      slot_bytes_(sizeof(Header) + row_bytes),
      segment_bytes_(round_up(std::max(segment_bytes, slot_bytes_), align)),
      per_segment_(segment_bytes_ / slot_bytes_),
      buffer_bytes_(round_up(std::max(segment_bytes_, kLongestRead) + 2 * align, align)),
      threads_(depth) {
  for (int64_t i = 0; i < depth; ++i) {
    void* memory = std::aligned_alloc(std::max<size_t>(align, 64), buffer_bytes_);
    if (memory == nullptr) throw std::bad_alloc();
    owned_.emplace_back(static_cast<std::byte*>(memory), std::free);
    buffers_.push_back(owned_.back().get());
  }
}

void RowLog::write(LogRow* rows, size_t count) {
  const size_t num_segments = (count + per_segment_ - 1) / per_segment_;
  const std::vector<uint64_t> segments = take_segments(num_segments);
  std::atomic<int64_t> bytes{0};
  try {
    threads_.run(static_cast<int64_t>(num_segments), [&](int64_t s) {
      const size_t first = static_cast<size_t>(s) * per_segment_;
      const size_t here = std::min(per_segment_, count - first);
      const size_t length = round_up(here * slot_bytes_, align_);
      const Buffer buffer(*this);
      pack(buffer.bytes, rows + first, here);
      const uint64_t segment = segments[static_cast<size_t>(s)];
      write_bytes(buffer.bytes, segment * segment_bytes_, length);
      for (size_t i = 0; i < here; ++i) rows[first + i].slot = segment * per_segment_ + i;
      bytes += static_cast<int64_t>(length);
    });
  } catch (...) {
    free_.insert(free_.end(), segments.rbegin(), segments.rend());
    throw;
  }
  for (size_t s = 0; s < num_segments; ++s) {
    live_[segments[s]] =
        static_cast<uint32_t>(std::min(per_segment_, count - s * per_segment_));
  }
  num_live_ += count;
  traffic_.rows_written += static_cast<int64_t>(count);
  traffic_.bytes_written += bytes;
}

void RowLog::read(const std::vector<LogRead>& rows,
                  const std::function<void(size_t, const std::byte*)>& take) {
  const std::vector<Request> requests = requests_of(rows);
  threads_.run(static_cast<int64_t>(requests.size()), [&](int64_t r) {
    const Request& request = requests[static_cast<size_t>(r)];
    const Buffer buffer(*this);
    read_bytes(buffer.bytes, request.begin, request.end);
    for (size_t i = request.first; i < request.last; ++i) {
      const std::byte* at = buffer.bytes + (offset_of(rows[i].slot) - request.begin);
      Header header;
      std::memcpy(&header, at, sizeof header);
      const std::byte* bytes = at + sizeof header;
      if (header.key != rows[i].key || header.table != rows[i].table ||
          header.sum != sum_of(header.key, header.table, bytes)) {
        throw FileError{FileCall::kRead, 0};
      }
      take(i, bytes);
    }
  });
  traffic_.rows_read += static_cast<int64_t>(rows.size());
  for (const Request& request : requests) {
    traffic_.bytes_read += static_cast<int64_t>(request.end - request.begin);
  }
}

void RowLog::release(uint64_t slot) {
  const uint64_t segment = slot / per_segment_;
  --num_live_;
  if (--live_[segment] == 0) free_.push_back(segment);
}

std::vector<uint64_t> RowLog::sparse_segments(size_t count) const {
  const size_t needed = (count + per_segment_ - 1) / per_segment_;
  // Rows are moved while there are still free segments to move them to.
  const size_t reserve = 1 + std::min(kMostScanned, (live_.size() - free_.size()) / 8);
  if (needed + reserve <= free_.size() || !is_sparse()) return {};
  // Those with the fewest rows: by the number of segments with so many rows, then in their order.
  std::vector<uint64_t> of_count(per_segment_ + 1, 0);
  for (const uint32_t live : live_) ++of_count[live];
  const uint64_t wanted = std::max<uint64_t>(2 * count, unused() / 2);
  uint64_t gained = 0;
  uint32_t most = 0;
  while (gained < wanted && most + 1 < per_segment_) {
    ++most;
    gained += of_count[most] * (per_segment_ - most);
  }
  uint64_t room = std::max(free_.size(), needed + reserve) * per_segment_ - count;
  std::vector<uint64_t> found;
  for (uint64_t s = 0; s < live_.size() && found.size() < kMostScanned; ++s) {
    if (live_[s] == 0 || live_[s] > most || live_[s] > room) continue;
    found.push_back(s);
    room -= live_[s];
  }
  return found;
}

void RowLog::scan(const std::vector<uint64_t>& segments, std::vector<std::byte>& room,
                  const std::function<bool(int64_t, uint32_t, uint64_t, const std::byte*)>& each) {
  const size_t packed = per_segment_ * slot_bytes_;
  room.resize(segments.size() * packed);
  threads_.run(static_cast<int64_t>(segments.size()), [&](int64_t s) {
    const auto at = static_cast<size_t>(s);
    const uint64_t begin = segments[at] * segment_bytes_;
    const Buffer buffer(*this);
    read_bytes(buffer.bytes, begin, begin + segment_bytes_);
    std::memcpy(room.data() + at * packed, buffer.bytes, packed);
  });
  for (size_t s = 0; s < segments.size(); ++s) {
    uint32_t found = 0;
    for (size_t i = 0; i < per_segment_; ++i) {
      const std::byte* at = room.data() + s * packed + i * slot_bytes_;
      Header header;
      std::memcpy(&header, at, sizeof header);
      const std::byte* bytes = at + sizeof header;
      const uint64_t slot = segments[s] * per_segment_ + i;
      if (!each(header.key, header.table, slot, bytes)) continue;
      if (header.sum != sum_of(header.key, header.table, bytes)) break;
      ++found;
    }
    if (found != live_[segments[s]]) throw FileError{FileCall::kRead, 0};
  }
  traffic_.bytes_read += static_cast<int64_t>(segments.size() * segment_bytes_);
}

size_t RowLog::num_bytes() const {
  return sizeof(RowLog) + live_.capacity() * sizeof(uint32_t) +
         free_.capacity() * sizeof(uint64_t) + owned_.size() * buffer_bytes_;
}

uint32_t RowLog::sum_of(int64_t key, uint32_t table, const std::byte* bytes) const {
  uint64_t sum = mix(static_cast<uint64_t>(key) + (uint64_t{table} + 1) * kStep);
  for (size_t i = 0; i < row_bytes_; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, sizeof word);
    sum = (sum ^ word) * kStep;
    sum ^= sum >> 29;
  }
  return static_cast<uint32_t>(mix(sum) >> 32);
}

uint64_t RowLog::offset_of(uint64_t slot) const {
  return slot / per_segment_ * segment_bytes_ + slot % per_segment_ * slot_bytes_;
}

// What lies in the same block or in the next one is read at once.
std::vector<RowLog::Request> RowLog::requests_of(const std::vector<LogRead>& rows) const {
  std::vector<Request> requests;
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint64_t from = offset_of(rows[i].slot);
    const uint64_t begin = from / align_ * align_;
    const uint64_t end = round_up(from + slot_bytes_, align_);
    if (!requests.empty() && begin <= requests.back().end &&
        end - requests.back().begin <= kLongestRead) {
      requests.back().last = i + 1;
      requests.back().end = end;
    } else {
      requests.push_back({i, i + 1, begin, end});
    }
  }
  return requests;
}

std::vector<uint64_t> RowLog::take_segments(size_t count) {
  if (free_.size() < count) grow(count - free_.size());
  std::vector<uint64_t> taken(free_.rbegin(), free_.rbegin() + static_cast<ptrdiff_t>(count));
  free_.resize(free_.size() - count);
  return taken;
}

void RowLog::grow(size_t count) {
  const size_t before = live_.size();
  const size_t spare = is_sparse() ? 0 : std::min(kGrowth / segment_bytes_, before / 4);
  const size_t wished = std::max(count, spare);
  // The last bit of a disk is still used.
  for (const size_t more : {wished, count}) {
    const auto from = static_cast<off_t>(before * segment_bytes_);
    const auto bytes = static_cast<off_t>(more * segment_bytes_);
    int error;
    do {
      error = fallocate(file_, 0, from, bytes) == 0 ? 0 : errno;
    } while (error == EINTR);  // a signal to the process says nothing of the disk
    // Some file systems cannot reserve: then a write may find the disk full.
    if (error == EOPNOTSUPP || error == ENOSYS) {
      error = ftruncate(file_, from + bytes) == 0 ? 0 : errno;
    }
    if (error == 0) {
      live_.resize(before + more, 0);
      std::vector<uint64_t> free;  // the last is taken first: old ones, then new ones in order
      for (size_t s = before + more; s > before; --s) free.push_back(s - 1);
      free.insert(free.end(), free_.begin(), free_.end());
      free.reserve(live_.size());  // giving one back never fails
      free_.swap(free);
      return;
    }
    if (more == count) throw FileError{FileCall::kGrow, error};
  }
}

void RowLog::pack(std::byte* to, const LogRow* rows, size_t count) const {
  for (size_t i = 0; i < count; ++i) {
    const LogRow& row = rows[i];
    const Header header{row.key, row.table, sum_of(row.key, row.table, row.bytes)};
    std::memcpy(to + i * slot_bytes_, &header, sizeof header);
    std::memcpy(to + i * slot_bytes_ + sizeof header, row.bytes, row_bytes_);
  }
  const size_t used = count * slot_bytes_;
  std::memset(to + used, 0, round_up(used, align_) - used);
}

void RowLog::read_bytes(std::byte* to, uint64_t begin, uint64_t end) const {
  while (begin < end) {
    const ssize_t got = pread(file_, to, end - begin, static_cast<off_t>(begin));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw FileError{FileCall::kRead, errno};
    if (got == 0) throw FileError{FileCall::kRead, 0};  // the file has become shorter
    to += got;
    begin += static_cast<uint64_t>(got);
  }
}

void RowLog::write_bytes(const std::byte* from, uint64_t begin, size_t bytes) const {
  while (bytes > 0) {
    const ssize_t done = pwrite(file_, from, bytes, static_cast<off_t>(begin));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw FileError{FileCall::kWrite, done < 0 ? errno : EIO};
    from += done;
    begin += static_cast<uint64_t>(done);
    bytes -= static_cast<size_t>(done);
  }
}

std::byte* RowLog::take_buffer() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::byte* buffer = buffers_.back();  // as many as there are threads
  buffers_.pop_back();
  return buffer;
}

void RowLog::give_buffer(std::byte* buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  buffers_.push_back(buffer);
}

}  // namespace nestpipe
