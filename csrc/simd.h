// Functions of vectors of sixteen floats, and the multiply-accumulate that differs between processors.
//
// All data consists of 32-bit *words*: a word is one float, or two bfloat16 that are multiplied and added in order.
// In weights, keys and values, one 64-byte load reads a word for each of 16 lanes, and `mac` adds lane * word to 16
// running sums. The order of each lane's sum is fixed, whatever is computed in other lanes: this is row invariance.
//
// Each variant compiles this file with its own compiler flags, in the namespace LONGDRAFT_VARIANT. Fast-math is never
// used and -ffp-contract=off always is, so the only fused operations are the explicit ones.
#pragma once

#include "vectors.h"

#include <cstdint>
#include <cstring>

namespace longdraft::LONGDRAFT_VARIANT {

// 2^x for x <= 126, with an error of about 2 ulp: the Taylor series of 2^f for f in [-1/2, 1/2], whose coefficients are
// ln(2)^k / k!. Far below 0 the result is exactly 0, so that masked lanes have no weight. NaN stays NaN: damaged model
// weights must not turn into plausible text.
inline Floats exp2(Floats x) {
    const Floats lowest = broadcast(-160.0f);
    x = select(lowest > x, lowest, x);  // with the operands in this order, NaN stays NaN
#if defined(__AVX512F__)
    Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    Floats shifted = x + shifter, whole = shifted - shifter;
#endif
    Floats f = x - whole;
    Floats p = fma(broadcast(1.54035304e-4f), f, broadcast(1.33335581e-3f));
    p = fma(p, f, broadcast(9.61812911e-3f));
    p = fma(p, f, broadcast(5.55041087e-2f));
    p = fma(p, f, broadcast(2.40226507e-1f));
    p = fma(p, f, broadcast(6.93147181e-1f));
    p = fma(p, f, broadcast(1.0f));
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    Floats power = as<Floats>(as<Ints>(p) + (as<Ints>(shifted) << 23));  // the low bits of `shifted` are the whole number
    power = select(whole < -126.0f, Floats{}, power);
    return select(x == x, power, x);
#endif
}

inline float exp2(float x) { return exp2(broadcast(x))[0]; }

// 1 + exp(-x), with the power of two within the range of exp2. Of NaN: 1.
inline Floats one_plus_exp_minus(Floats x) {
    Floats power = x * -1.44269504f;
    power = select(power > 126.0f, broadcast(126.0f), max(power, broadcast(-126.0f)));
    return 1.0f + exp2(power);
}

// cap * tanh(x / cap): about x where it is small, and never beyond the cap. NaN stays NaN.
inline Floats soft_cap(Floats x, float cap) {
    const Floats capped = cap * (2.0f / one_plus_exp_minus(x * (2.0f / cap)) - 1.0f);
    return select(x == x, capped, x);
}

// The bits of x rounded to bfloat16, to nearest even; what lies below them is left over.
inline Words bf16_bits(Floats x) {
    const Words w = as<Words>(x);
    return select(x == x, w + (((w >> 16) & 1u) + 0x7fffu), w | 0x400000u);  // a NaN stays one
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <class To, class V> INLINED To bf16_by_hardware(V x) {
    if constexpr (IS_PAIR<V>) {
        using Half = typename To::HalfType;
        return {bf16_by_hardware<Half>(x.low), bf16_by_hardware<Half>(x.high)};
    } else {
        return (To)vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x));
    }
}
#endif

// Round to nearest even, as PyTorch does. (The instruction of x86 also flushes denormals to 0.)
inline Halves to_bf16(Floats x) {
#if defined(__AVX512BF16__)
    __m256bh rounded_by_hardware = _mm512_cvtneps_pbh((__m512)x);
    Halves h;
    std::memcpy(&h, &rounded_by_hardware, sizeof h);
    return h;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return bf16_by_hardware<Halves>(x);  // which keeps denormals
#else
    return convert<Halves>(bf16_bits(x) >> 16);
#endif
}

inline uint16_t to_bf16(float x) { return to_bf16(broadcast(x))[0]; }

inline float from_bf16(uint16_t x) {
    uint32_t w = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &w, 4);
    return f;
}

inline Floats from_bf16(Halves x) { return as<Floats>(convert<Words>(x) << 16); }

inline Floats from_int8(const int8_t* p) { return convert<Floats>(convert<Ints>(load_as<Bytes>(p))); }

inline float as_float(uint32_t word) { float f; std::memcpy(&f, &word, 4); return f; }

// Element types: how many elements a word holds, and the multiply-accumulate of 16 words with one word. That word is prepared
// as an `Operand`, once for all vectors that it is multiplied by.
struct F32 {
    using Element = float;
    using Operand = float;
    static constexpr int PER_WORD = 1;
    static Operand operand(uint32_t word) { return as_float(word); }
    static INLINED Floats mac(Floats acc, const uint32_t* lanes, Operand by) {
        return fma(load_as<Floats>(lanes), broadcast(by), acc);
    }
    static INLINED Floats mac_bytes(Floats acc, const int8_t* lanes, Operand by) {
        return fma(from_int8(lanes), broadcast(by), acc);
    }
    static float widen(float x) { return x; }
    static Floats widen(const float* p) { return load(p); }
    static void narrow(float* p, Floats x) { store(p, x); }
    static void narrow_operands(Operand* p, Floats x) { store(p, x); }
    static float round(float x) { return x; }
    static Words unpack(const int8_t* lanes) { return as<Words>(from_int8(lanes)); }
};

struct BF16 {
    using Element = uint16_t;
    static constexpr int PER_WORD = 2;
#if defined(__AVX512BF16__)
    using Operand = uint32_t;
    static Operand operand(uint32_t word) { return word; }
    static INLINED Floats mac(Floats acc, const uint32_t* lanes, Operand by) {
        return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(lanes),
                                        (__m512bh)_mm512_set1_epi32(static_cast<int>(by)));
    }
    static void narrow_operands(Operand* p, Floats x) { narrow(reinterpret_cast<Element*>(p), x); }
#elif defined(__ARM_NEON)
    using Operand = uint32_t;  // words_neon.h multiplies
    static Operand operand(uint32_t word) { return word; }
    static void narrow_operands(Operand* p, Floats x) { narrow(reinterpret_cast<Element*>(p), x); }
#else
    struct Operand { float first, second; };
    static Operand operand(uint32_t word) { return {as_float(word << 16), as_float(word & 0xffff0000u)}; }
    static INLINED Floats mac(Floats acc, const uint32_t* lanes, Operand by) {
        const Words w = load_as<Words>(lanes);
        acc = fma(as<Floats>(w << 16), broadcast(by.first), acc);
        return fma(as<Floats>(w & 0xffff0000u), broadcast(by.second), acc);
    }
    static INLINED Floats mac_bytes(Floats acc, const int8_t* lanes, Operand by) {
        acc = fma(from_int8(lanes), broadcast(by.first), acc);
        return fma(from_int8(lanes + LANES), broadcast(by.second), acc);
    }
    static void narrow_operands(Operand* p, Floats x) { store_as(p, as<Floats>(bf16_bits(x) & 0xffff0000u)); }
#endif
    static float widen(uint16_t x) { return from_bf16(x); }
    static Floats widen(const uint16_t* p) { return from_bf16(load_as<Halves>(p)); }
    static void narrow(uint16_t* p, Floats x) { store_as(p, to_bf16(x)); }
    static uint16_t round(float x) { return to_bf16(x); }
    // The low halves of 16 words, then the high halves. A float of an int8 has zeros in its lower 16 bits.
    static Words unpack(const int8_t* lanes) {
        return (as<Words>(from_int8(lanes)) >> 16) | as<Words>(from_int8(lanes + LANES));
    }
};

// The words of a row as operands.
//   to  [words], of which those beyond `count` elements become 0
template <class T> void copy_operands(const typename T::Element* from, long count, typename T::Operand* to, long words) {
    for (long i = 0; i < words; i++) {
        typename T::Element elements[T::PER_WORD] = {};
        for (long j = 0; j < T::PER_WORD && i * T::PER_WORD + j < count; j++) elements[j] = from[i * T::PER_WORD + j];
        uint32_t word;
        std::memcpy(&word, elements, sizeof word);
        to[i] = T::operand(word);
    }
}

// Whether the processor fetches ascending lines by itself, as AMD's with BF16 do. While little is computed with a line, software
// prefetches get in its way (bfloat16 words of one or two rows, weights in groups). Otherwise they save up to a third of the
// time, if they go 8 to 16 KB ahead (notebook/2026-11.md).
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool FETCHES_ASCENDING_LINES = true;
#else
constexpr bool FETCHES_ASCENDING_LINES = false;
#endif
constexpr long PREFETCH_DISTANCE = 4096;  // bytes from the data that is multiplied to the data that is prefetched

template <long DISTANCE = PREFETCH_DISTANCE> INLINED void prefetch(const void* from, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(from) + DISTANCE + line);
}

}  // namespace
