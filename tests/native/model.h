// A model of the kernels' arithmetic in ordinary operations: bfloat16, fused sums, and the sums of ARM's bfloat16 instructions.
//
// BFDOT adds a0 b0 + a1 b1 to a sum. Each product, their sum and the total are rounded to odd: cut, with the last bit set where
// something was cut off. Denormal operands and results are 0. BFMMLA is two BFDOT in order for each of 2 x 2 sums. (This holds
// with FPCR.EBF = 0, in which systems start programs.)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

template <class To, class From> To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &x, sizeof to);
    return to;
}

inline float from_bf16(uint16_t x) { return bits_as<float>(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_bf16(float x) {  // to nearest even; a NaN stays one
    const uint32_t w = bits_as<uint32_t>(x);
    return static_cast<uint16_t>((std::isnan(x) ? w | 0x400000u : w + ((w >> 16 & 1) + 0x7fff)) >> 16);
}

inline float without_denormals(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// A number rounded to odd: `nearest` is that number rounded to a double, and `rest` what was cut off.
inline float to_odd(double nearest, double rest) {
    constexpr uint32_t DEFAULT_NAN = 0x7fc00000;
    constexpr uint64_t BELOW_FLOAT = (uint64_t{1} << 29) - 1;  // bits of a double that a float has not
    if (std::isnan(nearest)) return bits_as<float>(DEFAULT_NAN);
    if (std::isinf(nearest)) return static_cast<float>(nearest);
    const bool is_even = !(bits_as<uint64_t>(nearest) & 1);
    if (rest != 0 && is_even) nearest = std::nextafter(nearest, rest > 0 ? INFINITY : -INFINITY);
    if (nearest != 0 && std::fabs(nearest) < 0x1p-126) return std::copysign(0.0f, static_cast<float>(nearest));
    const double cut = bits_as<double>(bits_as<uint64_t>(nearest) & ~BELOW_FLOAT);
    if (std::fabs(cut) >= 0x1p128) return static_cast<float>(std::copysign(INFINITY, nearest));
    return bits_as<float>(bits_as<uint32_t>(static_cast<float>(cut)) | (cut != nearest ? 1u : 0u));
}

inline float multiply_to_odd(float a, float b) {  // of two bfloat16: exact in a double
    return to_odd(static_cast<double>(without_denormals(a)) * without_denormals(b), 0);
}

inline float add_to_odd(float x, float y) {
    const double a = without_denormals(x), b = without_denormals(y), sum = a + b;
    if (std::isnan(sum) || std::isinf(sum)) return to_odd(sum, 0);
    const double of_b = sum - a;
    return to_odd(sum, (a - (sum - of_b)) + (b - of_b));
}

// sum + a[0] b[0] + a[1] b[1], as BFDOT computes it.
inline float dot_to_odd(float sum, const uint16_t* a, const uint16_t* b) {
    const float first = multiply_to_odd(from_bf16(a[0]), from_bf16(b[0]));
    return add_to_odd(sum, add_to_odd(first, multiply_to_odd(from_bf16(a[1]), from_bf16(b[1]))));
}

// The same by two fused operations.
inline float dot_fused(float sum, const uint16_t* a, const uint16_t* b) {
    return std::fma(from_bf16(a[1]), from_bf16(b[1]), std::fma(from_bf16(a[0]), from_bf16(b[0]), sum));
}
