#include "common/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>

namespace nestpipe {
namespace {

constexpr size_t kUnknown = std::numeric_limits<size_t>::max();
// Left to everything else on the machine.
constexpr size_t kReserve = size_t{128} << 20;
// Smaller requests are not worth a look at the system's files.
constexpr size_t kWorthChecking = size_t{1} << 20;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// The number behind `field` in a file of lines "field number", or the file's only number where
// field is empty; kUnknown where there is none ("max" is none too).
size_t read_number(const char* path, const char* field) {
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return kUnknown;
  size_t found = kUnknown;
  char line[256];
  const size_t length = std::strlen(field);
  while (found == kUnknown && std::fgets(line, sizeof line, file) != nullptr) {
    unsigned long long number = 0;
    if (std::strncmp(line, field, length) == 0 &&
        std::sscanf(line + length, "%llu", &number) == 1) {
      found = static_cast<size_t>(number);
    }
  }
  std::fclose(file);
  return found;
}

// What a container may still take, by control groups version 2 or 1.
size_t left_in_container() {
  size_t limit = read_number("/sys/fs/cgroup/memory.max", "");
  size_t used = read_number("/sys/fs/cgroup/memory.current", "");
  size_t files = read_number("/sys/fs/cgroup/memory.stat", "inactive_file ");
  if (limit == kUnknown) {
    limit = read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes", "");
    used = read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes", "");
    files = read_number("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file ");
  }
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  if (files == kUnknown) files = 0;
  used -= std::min(used, files);  // file pages are dropped before anything is killed
  return limit > used ? limit - used : 0;
}

bool has_room(size_t bytes) {
  const size_t kilobytes = read_number("/proc/meminfo", "MemAvailable:");
  const size_t machine = kilobytes == kUnknown ? kUnknown : kilobytes * 1024;
  const size_t left = std::min(machine, left_in_container());
  return left == kUnknown || left >= bytes + kReserve;
}

}  // namespace

size_t mapped_size(size_t bytes) {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return round_up(bytes, bytes >= kHugePage ? kHugePage : page);
}

void* map_memory(size_t bytes) {
  const size_t size = mapped_size(bytes);
  if (size >= kWorthChecking && !has_room(size)) throw std::bad_alloc();
  const bool huge = size >= kHugePage;
  // Huge pages start at multiples of their size: map more and give back what sticks out.
  const size_t extra = huge ? kHugePage : 0;
  void* raw = mmap(nullptr, size + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                   -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  if (!huge) return raw;
  const auto start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = round_up(start, kHugePage);
  const size_t before = aligned - start;
  if (before > 0) munmap(raw, before);
  if (extra > before) munmap(reinterpret_cast<void*>(aligned + size), extra - before);
  void* memory = reinterpret_cast<void*>(aligned);
#ifdef MADV_HUGEPAGE
  madvise(memory, size, MADV_HUGEPAGE);  // a wish; small pages work too
#endif
  return memory;
}

void unmap_memory(void* memory, size_t bytes) noexcept { munmap(memory, mapped_size(bytes)); }

}  // namespace nestpipe
