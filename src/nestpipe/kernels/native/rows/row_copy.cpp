// Rows copied between a buffer and where a store keeps them: no hash, no order, only copies.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/abi.h"
#include "common/threads.h"
#include "rows/row_format.h"

namespace nestpipe {
namespace {

constexpr int64_t kAheadRows = 8;

struct Copy {
  std::byte* const* pointers;
  std::byte* rows;
  int64_t stride;
  const int64_t* positions;  // of each row in the buffer; null: in order
  size_t bytes;

  std::byte* row(int64_t i) const { return rows + (positions ? positions[i] : i) * stride; }
};

template <bool kToStore>
void copy_range(const Copy& copy, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAheadRows < end) {
      prefetch_lines<kToStore>(copy.pointers[i + kAheadRows], copy.bytes);
    }
    std::byte* const pointer = copy.pointers[i];
    std::memcpy(kToStore ? pointer : copy.row(i), kToStore ? copy.row(i) : pointer, copy.bytes);
  }
}

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_copy_rows(void* const* pointers, int64_t count, int64_t bytes, void* rows,
                                    int64_t stride, const int64_t* positions, int64_t to_store,
                                    int64_t threads) {
  using namespace nestpipe;
  try {
    const Copy copy{reinterpret_cast<std::byte* const*>(pointers), static_cast<std::byte*>(rows),
                    stride, positions, static_cast<size_t>(bytes)};
    const auto range = to_store ? copy_range<true> : copy_range<false>;
    in_ranges(count, threads, [&](int64_t begin, int64_t end) { range(copy, begin, end); });
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kDefect;
  }
}
