// First values of a row: a function of (table seed, key, position) alone.
//
// Only 64-bit integer arithmetic and single float64 additions and multiplications, each rounded
// on its own (-ffp-contract=off), so that numpy gives the same bits (embedding/store/protocol.py).
// Four 16-bit numbers are added up; an odd polynomial bends their sum into a normal variate:
// distribution function within 2e-4 of the normal one, variance and fourth moment within 2e-5,
// largest value 5.2 standard deviations.
#pragma once

#include <cstdint>

namespace nestpipe {

constexpr uint64_t kStep = 0x9e3779b97f4a7c15ULL;

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Standard normal, from 64 random bits.
inline double normal_of(uint64_t bits) {
  const auto sum = static_cast<int32_t>((bits & 0xffff) + ((bits >> 16) & 0xffff) +
                                        ((bits >> 32) & 0xffff) + (bits >> 48));
  const double x = static_cast<double>(sum - 131070) * (1.0 / 65536.0);
  const double s = x * x;
  double p = 0.005411906108740816;
  p = p * s + -0.017329680146971713;
  p = p * s + 0.02863321968706253;
  p = p * s + 0.04776074440493899;
  p = p * s + 1.6668930519836869;
  return p * x;
}

inline void first_weights(uint64_t seed, int64_t key, double spread, int64_t dim, float* out) {
  const uint64_t start = mix(mix(seed + kStep) ^ static_cast<uint64_t>(key));
  for (int64_t i = 0; i < dim; ++i) {
    const uint64_t bits = mix(start + static_cast<uint64_t>(i + 1) * kStep);
    out[i] = static_cast<float>(normal_of(bits) * spread);
  }
}

}  // namespace nestpipe
