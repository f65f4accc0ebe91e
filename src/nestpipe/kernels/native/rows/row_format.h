// A row in memory (weights of a row type, then float32 state) and as it travels (float32).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "common/abi.h"

namespace nestpipe {

// Round to nearest, ties to even; nan stays nan.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
}

inline float from_bfloat16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// The same for float16: what rounds to 2^16 or more is inf; nan keeps its upper bits and is quiet,
// as F16C has it.
inline uint16_t to_float16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  const float positive = value < 0 ? -value : value;
  // Below 2^-14 the numbers are multiples of 2^-24, as floats from 0.5 on are: adding rounds.
  const float shifted = positive + 0.5f;
  uint32_t small;
  std::memcpy(&small, &shifted, sizeof small);
  const uint32_t rounded = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112U << 23)) >> 13;
  uint32_t half = magnitude < 0x38800000 ? small - 0x3f000000 : rounded;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;
  half = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : half;
  return static_cast<uint16_t>(sign | half);
}

inline float from_float16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16, magnitude = value & 0x7fff;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  uint32_t bits;
  std::memcpy(&bits, &small, sizeof bits);
  bits = magnitude < 0x400 ? bits : (magnitude << 13) + (112U << 23);
  bits = magnitude < 0x7c00 ? bits : magnitude << 13 | 0x7f800000;
  bits = magnitude <= 0x7c00 ? bits : bits | 0x400000;
  bits |= sign;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Many at once, eight by an instruction where the processor has it.
inline void to_float16(const float* in, uint16_t* out, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
#endif
  for (; i < count; ++i) out[i] = to_float16(in[i]);
}

inline void from_float16(const uint16_t* in, float* out, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
  }
#endif
  for (; i < count; ++i) out[i] = from_float16(in[i]);
}

// Batches of this many bytes do not fit the caches anyway: they are written past them.
constexpr size_t kStreamFrom = size_t{4} << 20;

// Copies whole cache lines past the caches: what is written will not be read soon, and the old
// content of the lines need not be fetched. Both `to` and `bytes` are multiples of 64.
inline void stream_lines(void* to, const void* from, size_t bytes) {
#if defined(__AVX512F__)
  for (size_t i = 0; i < bytes; i += 64) {
    const __m512i line = _mm512_loadu_si512(static_cast<const char*>(from) + i);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + i), line);
  }
#elif defined(__SSE2__)
  for (size_t i = 0; i < bytes; i += 16) {
    const auto* source = reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + i);
    const __m128i part = _mm_loadu_si128(source);
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + i), part);
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

// After stream_lines and before another thread may read what it wrote.
inline void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

inline bool whole_lines(const void* memory, size_t bytes) {
  return (reinterpret_cast<uintptr_t>(memory) | bytes) % 64 == 0;
}

template <int kWrite>
inline void prefetch_lines(const void* memory, size_t bytes) {
  const char* line = static_cast<const char*>(memory);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i, kWrite);
}

struct RowForm {
  int64_t dim;
  int64_t state_dim;
  RowType type;

  size_t width() const { return static_cast<size_t>(dim + state_dim); }
  // State is float32 and starts at a multiple of four bytes.
  size_t weight_bytes() const {
    return static_cast<size_t>(type == kFloat32 ? dim * 4 : (dim + dim % 2) * 2);
  }
  size_t bytes() const { return weight_bytes() + static_cast<size_t>(state_dim) * 4; }
  // From one row to the next.
  size_t stride() const { return (bytes() + 15) / 16 * 16; }

  void load(float* out, const std::byte* row, bool stream) const {
    if (type == kFloat32) {
      stream ? stream_lines(out, row, bytes()) : void(std::memcpy(out, row, bytes()));
      return;
    }
    const auto* weights = reinterpret_cast<const uint16_t*>(row);
    if (type == kFloat16) {
      from_float16(weights, out, dim);
    } else {
      for (int64_t i = 0; i < dim; ++i) out[i] = from_bfloat16(weights[i]);
    }
    std::memcpy(out + dim, row + weight_bytes(), static_cast<size_t>(state_dim) * 4);
  }

  void save(std::byte* row, const float* in, bool stream) const {
    if (type == kFloat32) {
      stream ? stream_lines(row, in, bytes()) : void(std::memcpy(row, in, bytes()));
      return;
    }
    auto* weights = reinterpret_cast<uint16_t*>(row);
    if (type == kFloat16) {
      to_float16(in, weights, dim);
    } else {
      for (int64_t i = 0; i < dim; ++i) weights[i] = to_bfloat16(in[i]);
    }
    std::memcpy(row + weight_bytes(), in + dim, static_cast<size_t>(state_dim) * 4);
  }

  // Weights, where they travel, as they would be kept.
  void round(float* weights) const {
    if (type == kFloat32) return;
    for (int64_t i = 0; i < dim; ++i) {
      weights[i] = type == kFloat16 ? from_float16(to_float16(weights[i]))
                                    : from_bfloat16(to_bfloat16(weights[i]));
    }
  }
};

}  // namespace nestpipe
