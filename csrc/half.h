// Numbers in float16, which scales of groups have.
#pragma once

#include "encoding.h"
#include "simd.h"

namespace longdraft::LONGDRAFT_VARIANT {

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
