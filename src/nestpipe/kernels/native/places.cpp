// Rows between a buffer and the places where a store keeps them: no hash, no order, only copies.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "abi.h"
#include "pool.h"
#include "row.h"

namespace nestpipe {
namespace {

constexpr int64_t kAheadPlaces = 8;

struct Copy {
  std::byte* const* places;
  std::byte* rows;
  int64_t stride;
  const int64_t* positions;  // of each row in the buffer; null: in order
  size_t bytes;

  std::byte* row(int64_t i) const { return rows + (positions ? positions[i] : i) * stride; }
};

template <bool kToPlaces>
void copy_range(const Copy& copy, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAheadPlaces < end) {
      prefetch_lines<kToPlaces>(copy.places[i + kAheadPlaces], copy.bytes);
    }
    std::byte* const place = copy.places[i];
    std::memcpy(kToPlaces ? place : copy.row(i), kToPlaces ? copy.row(i) : place, copy.bytes);
  }
}

}  // namespace
}  // namespace nestpipe

NESTPIPE_API int nestpipe_copy_rows(void* const* places, int64_t count, int64_t bytes, void* rows,
                                    int64_t stride, const int64_t* positions, int64_t to_places,
                                    int64_t threads) {
  using namespace nestpipe;
  try {
    const Copy copy{reinterpret_cast<std::byte* const*>(places), static_cast<std::byte*>(rows),
                    stride, positions, static_cast<size_t>(bytes)};
    const auto range = to_places ? copy_range<true> : copy_range<false>;
    in_ranges(count, threads, [&](int64_t begin, int64_t end) { range(copy, begin, end); });
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kDefect;
  }
}
