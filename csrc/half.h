// Numbers in float16, which scales of groups have.
#pragma once

#include "encoding.h"
#include "simd.h"

namespace longdraft::LONGDRAFT_VARIANT {

// Sixteen numbers, register by register.
template <class V> INLINED V from_halves_as(const uint16_t* p) {
    if constexpr (IS_PAIR<V>) {
        using Half = typename V::HalfType;
        return {from_halves_as<Half>(p), from_halves_as<Half>(p + sizeof(Half) / 4)};
    } else {
#if defined(__AVX512F__)
        return (V)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__)
        return (V)_mm256_cvtph_ps(load_as<__m128i>(p));
#elif defined(__ARM_NEON)
        return (V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
        V x;
        for (size_t i = 0; i < sizeof x / 4; i++) x[i] = from_half(p[i]);
        return x;
#endif
    }
}

inline Floats from_halves(const uint16_t* p) { return from_halves_as<Floats>(p); }

}  // namespace
