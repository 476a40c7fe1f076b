// Vectors of sixteen floats, and the multiply-accumulate that differs between processors.
//
// All data consists of 32-bit *words*: a word is one float, or two bfloat16 that are multiplied and added in order.
// In weights, keys and values, one 64-byte load reads a word for each of 16 lanes, and `mac` adds lane * word to 16
// running sums. The order of each lane's sum is fixed, whatever is computed in other lanes: this is row invariance.
//
// Each variant compiles this file with its own compiler flags, in the namespace LONGDRAFT_VARIANT. Fast-math is never
// used and -ffp-contract=off always is, so the only fused operations are the explicit ones.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace longdraft::LONGDRAFT_VARIANT {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

inline Floats load(const float* p) { Floats x; std::memcpy(&x, p, sizeof x); return x; }
inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline Floats broadcast(float x) { return x - Floats{}; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }  // b where either is NaN

// Reduce 16 lanes to one, always in the same order: each step combines the upper half of the lanes with the lower half.
template <class F> float reduce(Floats x, F f) {
    x = f(x, (Floats)__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    x = f(x, (Floats)__builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
    x = f(x, (Floats)__builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
    x = f(x, (Floats)__builtin_shufflevector(x, x, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1));
    return x[0];
}
inline float sum(Floats x) { return reduce(x, [](Floats a, Floats b) { return a + b; }); }
inline float max(Floats x) { return reduce(x, [](Floats a, Floats b) { return max(a, b); }); }

// a * b + c, fused where the processor has such an instruction.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    std::memcpy(z, &c, 64);
    z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]);
    z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
    std::memcpy(&c, z, 64);
    return c;
#else
    return a * b + c;
#endif
}

// 2^x for x <= 126, with an error of about 2 ulp: the Taylor series of 2^f for f in [-1/2, 1/2], whose coefficients are
// ln(2)^k / k!. Far below 0 the result is exactly 0, so that masked lanes have no weight. NaN stays NaN: damaged model
// weights must not turn into plausible text.
inline Floats exp2(Floats x) {
    const Floats lowest = broadcast(-160.0f);
    x = lowest > x ? lowest : x;  // with the operands in this order, NaN stays NaN
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
    Floats power = (Floats)((Ints)p + (((Ints)shifted) << 23));  // the low bits of `shifted` are the whole number
    power = whole < broadcast(-126.0f) ? Floats{} : power;
    return x == x ? power : x;
#endif
}

inline float exp2(float x) { return exp2(broadcast(x))[0]; }

// 1 + exp(-x), with the power of two within the range of exp2. Of NaN: 1.
inline Floats one_plus_exp_minus(Floats x) {
    Floats power = x * -1.44269504f;
    power = power > 126.0f ? broadcast(126.0f) : max(power, broadcast(-126.0f));
    return 1.0f + exp2(power);
}

// cap * tanh(x / cap): about x where it is small, and never beyond the cap. NaN stays NaN.
inline Floats soft_cap(Floats x, float cap) {
    const Floats capped = cap * (2.0f / one_plus_exp_minus(x * (2.0f / cap)) - 1.0f);
    return x == x ? capped : x;
}

// Round to nearest even, as PyTorch does. (The processor's instruction also flushes denormals to 0.)
inline Halves to_bf16(Floats x) {
#if defined(__AVX512BF16__)
    __m256bh rounded_by_hardware = _mm512_cvtneps_pbh((__m512)x);
    Halves h;
    std::memcpy(&h, &rounded_by_hardware, sizeof h);
    return h;
#else
    Words w = (Words)x;
    Words rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    Words quiet = (w >> 16) | 0x40u;  // a NaN stays one
    return __builtin_convertvector(x == x ? rounded : quiet, Halves);
#endif
}

inline uint16_t to_bf16(float x) { return to_bf16(broadcast(x))[0]; }

inline float from_bf16(uint16_t x) {
    uint32_t w = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &w, 4);
    return f;
}

inline Floats from_bf16(Halves x) { return (Floats)(__builtin_convertvector(x, Words) << 16); }

inline Floats from_int8(const int8_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    Floats x;
    for (int half = 0; half < 2; half++) {
        __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * half));
        __m256 eight = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        std::memcpy(reinterpret_cast<char*>(&x) + 32 * half, &eight, sizeof eight);
    }
    return x;
#else
    Bytes b;
    std::memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, Ints), Floats);
#endif
}

inline float as_float(uint32_t word) { float f; std::memcpy(&f, &word, 4); return f; }

// Element types: how many elements a word holds, and the multiply-accumulate of 16 words with one word.
struct F32 {
    using Element = float;
    static constexpr int PER_WORD = 1;
    static Floats mac(Floats acc, const uint32_t* lanes, uint32_t word) {
        return fma(load(reinterpret_cast<const float*>(lanes)), broadcast(as_float(word)), acc);
    }
    static float widen(float x) { return x; }
    static Floats widen(const float* p) { return load(p); }
    static void narrow(float* p, Floats x) { store(p, x); }
    static float round(float x) { return x; }
    static Words unpack(const int8_t* lanes) { return (Words)from_int8(lanes); }
};

struct BF16 {
    using Element = uint16_t;
    static constexpr int PER_WORD = 2;
    static Floats mac(Floats acc, const uint32_t* lanes, uint32_t word) {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(lanes),
                                        (__m512bh)_mm512_set1_epi32(static_cast<int>(word)));
#else
        Words w;
        std::memcpy(&w, lanes, sizeof w);
        acc = fma((Floats)(w << 16), broadcast(as_float(word << 16)), acc);
        return fma((Floats)(w & 0xffff0000u), broadcast(as_float(word & 0xffff0000u)), acc);
#endif
    }
    static float widen(uint16_t x) { return from_bf16(x); }
    static Floats widen(const uint16_t* p) { Halves h; std::memcpy(&h, p, sizeof h); return from_bf16(h); }
    static void narrow(uint16_t* p, Floats x) { Halves h = to_bf16(x); std::memcpy(p, &h, sizeof h); }
    static uint16_t round(float x) { return to_bf16(x); }
    // The low halves of 16 words, then the high halves. A float of an int8 has zeros in its lower 16 bits.
    static Words unpack(const int8_t* lanes) {
        return ((Words)from_int8(lanes) >> 16) | (Words)from_int8(lanes + LANES);
    }
};

// Whether the processor fetches ascending lines by itself, as AMD's with BF16 do. While little is computed with a line, software
// prefetches get in its way (bfloat16 words of one or two rows). Otherwise they save up to a third of the time, if they go
// 8 to 16 KB ahead (docs/notebook.md).
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool FETCHES_ASCENDING_LINES = true;
#else
constexpr bool FETCHES_ASCENDING_LINES = false;
#endif
constexpr long PREFETCH_DISTANCE = 4096;  // bytes from the data that is multiplied to the data that is prefetched

// For functions that only prefetch. To GCC they have no effect, so it drops calls that it has not inlined.
#define PREFETCHING inline __attribute__((always_inline))

template <long DISTANCE = PREFETCH_DISTANCE> PREFETCHING void prefetch(const void* from, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(from) + DISTANCE + line);
}

}  // namespace
