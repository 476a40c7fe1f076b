// Numbers in float16, which scales of groups have.
#pragma once

#include "simd.h"

namespace longdraft::LONGDRAFT_VARIANT {

inline float from_half(uint16_t h) {
    // Exponent and mantissa shifted into place, then scaled by 2^112; infinities and NaN keep their exponent of ones.
    const uint32_t rest = (h & 0x7fffu) << 13;
    uint32_t bits;
    const float scaled = as_float(rest) * as_float(0x77800000u);
    std::memcpy(&bits, &scaled, 4);
    if ((h & 0x7c00u) == 0x7c00u) bits = rest | 0x7f800000u;
    return as_float(bits | (h & 0x8000u) << 16);
}

inline uint16_t to_half(float x) {  // nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00u;
    if (bits >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above: infinity
    if (bits < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
        const float magic = as_float(0x3f000000u);   // 0.5: its last place is 2^-24
        const float shifted = as_float(bits) + magic;
        uint32_t whole;
        std::memcpy(&whole, &shifted, 4);
        return static_cast<uint16_t>(sign | (whole - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13));
}

inline Floats from_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    Floats x;
    for (int half = 0; half < 2; half++) {
        const __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + half));
        std::memcpy(reinterpret_cast<char*>(&x) + 32 * half, &eight, sizeof eight);
    }
    return x;
#else
    Floats x;
    for (int i = 0; i < LANES; i++) x[i] = from_half(p[i]);
    return x;
#endif
}

}  // namespace
