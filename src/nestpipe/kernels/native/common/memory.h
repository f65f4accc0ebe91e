// Memory straight from the system: zeroed, aligned for huge pages, counted to the byte.
#pragma once

#include <cstddef>

namespace nestpipe {

constexpr size_t kHugePage = size_t{2} << 20;

// Rounds up to what map_memory takes from the system: pages, or huge pages from 2 MiB on.
size_t mapped_size(size_t bytes);

// Zeroed memory of mapped_size(bytes). Throws std::bad_alloc, also where the system would grant
// the addresses but has not the memory behind them: better an error now than a kill later.
void* map_memory(size_t bytes);

// Bytes that the control groups of this process may still take, by version 1 and 2, those around them
// included; the largest number where nothing limits them. `groups` is a file like
// /proc/self/cgroup, `root` a folder like /sys/fs/cgroup.
size_t left_in_groups(const char* groups, const char* root);

void unmap_memory(void* memory, size_t bytes) noexcept;

}  // namespace nestpipe
