#include "common/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include "common/abi.h"

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

// The path behind `controller` in a file like /proc/self/cgroup, of lines "number:controllers:path".
// The line of version 2 names no controller.
bool read_path(const char* file_name, const std::string& controller, std::string& path) {
  std::ifstream file(file_name);
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (names.find("," + controller + ",") == std::string::npos) continue;
    path = line.substr(second + 1);
    return true;
  }
  return false;
}

struct GroupFiles {
  const char* limit;
  const char* used;
  // Fields of memory.stat: what is cached of files, dropped before anything is killed. Files that
  // are read again in every epoch are active, and would fill a group up to its limit.
  const char* cached[2];
};
constexpr GroupFiles kVersion2{"/memory.max", "/memory.current", {"inactive_file ", "active_file "}};
constexpr GroupFiles kVersion1{"/memory.limit_in_bytes",
                               "/memory.usage_in_bytes",
                               {"total_inactive_file ", "total_active_file "}};

size_t left_in_group(const std::string& folder, const GroupFiles& files) {
  const size_t limit = read_number((folder + files.limit).c_str(), "");
  size_t used = read_number((folder + files.used).c_str(), "");
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  for (const char* field : files.cached) {
    const size_t cached = read_number((folder + "/memory.stat").c_str(), field);
    if (cached != kUnknown) used -= std::min(used, cached);
  }
  return limit > used ? limit - used : 0;
}

// The least that a group and those around it have left. A container sees its own group as the root,
// under a path that may not exist there: then the folders above count alone.
size_t left_up_from(const std::string& root, std::string path, const GroupFiles& files) {
  size_t left = left_in_group(root, files);
  while (path.size() > 1) {
    left = std::min(left, left_in_group(root + path, files));
    path.resize(path.rfind('/'));
  }
  return left;
}

bool has_room(size_t bytes) {
  const size_t kilobytes = read_number("/proc/meminfo", "MemAvailable:");
  const size_t machine = kilobytes == kUnknown ? kUnknown : kilobytes * 1024;
  const size_t left = std::min(machine, left_in_groups("/proc/self/cgroup", "/sys/fs/cgroup"));
  return left == kUnknown || left >= bytes + kReserve;
}

}  // namespace

size_t left_in_groups(const char* groups, const char* root) {
  size_t left = kUnknown;
  std::string path;
  if (!read_path(groups, "", path)) path = "/";
  left = std::min(left, left_up_from(root, path, kVersion2));
  left = std::min(left, left_up_from(std::string(root) + "/unified", path, kVersion2));
  if (!read_path(groups, "memory", path)) path = "/";
  return std::min(left, left_up_from(std::string(root) + "/memory", path, kVersion1));
}

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

int64_t nestpipe_memory_left(const char* groups, const char* root) {
  try {
    const size_t left = nestpipe::left_in_groups(groups, root);
    return left == std::numeric_limits<size_t>::max() ? -1 : static_cast<int64_t>(left);
  } catch (...) {
    return -1;
  }
}
