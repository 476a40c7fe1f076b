// Vectors of sixteen lanes, whatever the width of the processor's registers.
//
// With AVX-512 a vector is one register. Otherwise it is a tree of pairs whose leaves are registers, of eight lanes with AVX2
// and of four elsewhere. Compilers keep such a tree in registers. A built-in vector that is wider than a register would stay
// in memory.
//
// Operators work lane by lane, as those of built-in vectors do. `as` keeps the bits, `convert` the numbers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace longdraft::LONGDRAFT_VARIANT {

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX2__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif

// For loops over the vectors that one function holds. GCC keeps an array in registers only if it unrolls these loops early.
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 32")
#endif

// For small functions that must disappear in their callers. A compiler may take one that only prefetches for one without
// effects, and drop calls that it has not inlined.
#define INLINED inline __attribute__((always_inline))

template <class Half> struct Pair {
    using HalfType = Half;
    Half low, high;
    auto operator[](int lane) const { return lane < LANES_OF_HALF ? low[lane] : high[lane - LANES_OF_HALF]; }

  private:
    static constexpr int LANES_OF_HALF = static_cast<int>(sizeof(Half) / sizeof(std::declval<Half>()[0]));
};

template <class V> struct IsPair { static constexpr bool VALUE = false; };
template <class Half> struct IsPair<Pair<Half>> { static constexpr bool VALUE = true; };
template <class V> constexpr bool IS_PAIR = IsPair<V>::VALUE;

template <class Half> INLINED Pair<Half> pair_of(Half low, Half high) { return {low, high}; }

#define LONGDRAFT_BINARY(OP)                                                                                                  \
    template <class H> INLINED auto operator OP(Pair<H> a, Pair<H> b) { return pair_of(a.low OP b.low, a.high OP b.high); }   \
    template <class H, class S> INLINED auto operator OP(Pair<H> a, S b) { return pair_of(a.low OP b, a.high OP b); }         \
    template <class H, class S> INLINED auto operator OP(S a, Pair<H> b) { return pair_of(a OP b.low, a OP b.high); }
LONGDRAFT_BINARY(+)
LONGDRAFT_BINARY(-)
LONGDRAFT_BINARY(*)
LONGDRAFT_BINARY(/)
LONGDRAFT_BINARY(&)
LONGDRAFT_BINARY(|)
LONGDRAFT_BINARY(<<)
LONGDRAFT_BINARY(>>)
LONGDRAFT_BINARY(<)
LONGDRAFT_BINARY(>)
LONGDRAFT_BINARY(==)
#undef LONGDRAFT_BINARY

template <class H> INLINED Pair<H> operator-(Pair<H> a) { return {-a.low, -a.high}; }
template <class H, class B> INLINED Pair<H>& operator+=(Pair<H>& a, B b) { return a = a + b; }
template <class H, class B> INLINED Pair<H>& operator-=(Pair<H>& a, B b) { return a = a - b; }

// A vector with COUNT elements in each of N lanes.
template <class Element, int COUNT, int N> struct Lanes {
    using Type = Pair<typename Lanes<Element, COUNT, N / 2>::Type>;
};
template <class Element, int COUNT> struct Lanes<Element, COUNT, REGISTER_LANES> {
    typedef Element Type __attribute__((vector_size(sizeof(Element) * COUNT * REGISTER_LANES)));
};

using Floats = Lanes<float, 1, LANES>::Type;
using Ints = Lanes<int32_t, 1, LANES>::Type;
using Words = Lanes<uint32_t, 1, LANES>::Type;
using Halves = Lanes<uint16_t, 1, LANES>::Type;
using Bytes = Lanes<int8_t, 1, LANES>::Type;
using UnsignedBytes = Lanes<uint8_t, 1, LANES>::Type;
using Raw = Lanes<uint8_t, 4, LANES>::Type;  // the four bytes of each lane's word

template <class To, class From> INLINED To as(From x) {
    if constexpr (IS_PAIR<From>)
        return {as<typename To::HalfType>(x.low), as<typename To::HalfType>(x.high)};
    else
        return (To)x;
}

// Bytes or halves of one register's lanes as 32-bit numbers. (GCC 12 converts bytes one by one.)
template <class To, class From> INLINED To widen_lanes(From x) {
    [[maybe_unused]] constexpr bool IS_SIGNED = std::is_signed_v<std::decay_t<decltype(x[0])>>;
#if defined(__AVX512F__)
    if constexpr (sizeof x == 32) return (To)_mm512_cvtepu16_epi32((__m256i)x);
    else return (To)(IS_SIGNED ? _mm512_cvtepi8_epi32((__m128i)x) : _mm512_cvtepu8_epi32((__m128i)x));
#elif defined(__AVX2__)
    if constexpr (sizeof x == 16) {
        return (To)_mm256_cvtepu16_epi32((__m128i)x);
    } else {
        const __m128i bytes = _mm_cvtsi64_si128((long long)x);
        return (To)(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
    }
#elif defined(__ARM_NEON)
    if constexpr (sizeof x == 8) {
        return (To)vmovl_u16((uint16x4_t)x);
    } else {
        const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32((uint32_t)x));
        if constexpr (IS_SIGNED) return (To)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes))));
        else return (To)vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
    }
#else
    return __builtin_convertvector(x, To);
#endif
}

template <class To, class From> INLINED To convert(From x) {
    if constexpr (IS_PAIR<From>)
        return {convert<typename To::HalfType>(x.low), convert<typename To::HalfType>(x.high)};
    else if constexpr (sizeof(From) < sizeof(To))
        return widen_lanes<To>(x);
    else
        return __builtin_convertvector(x, To);
}

// Of each lane: a where the mask, the result of a comparison, is true; otherwise b.
template <class Mask, class V> INLINED V select(Mask mask, V a, V b) {
    if constexpr (IS_PAIR<V>)
        return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else
        return mask ? a : b;
}

// Register by register: the compiler would copy a whole tree through memory.
template <class V> INLINED V load_as(const void* from) {
    if constexpr (IS_PAIR<V>) {
        using Half = typename V::HalfType;
        return {load_as<Half>(from), load_as<Half>(static_cast<const char*>(from) + sizeof(Half))};
    } else {
        V x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
}

template <class V> INLINED void store_as(void* to, V x) {
    if constexpr (IS_PAIR<V>) {
        store_as(to, x.low);
        store_as(static_cast<char*>(to) + sizeof x.low, x.high);
    } else {
        std::memcpy(to, &x, sizeof x);
    }
}

INLINED Floats load(const float* p) { return load_as<Floats>(p); }
INLINED void store(float* p, Floats x) { store_as(p, x); }
INLINED Floats broadcast(float x) { return x - Floats{}; }

template <class V> INLINED V max(V a, V b) { return select(a > b, a, b); }  // b where either is NaN

// Reduce all lanes to one, always in the same order: each step combines the lower half of the lanes with the upper half.
template <class V, class F> INLINED float reduce(V x, F f) {
    if constexpr (IS_PAIR<V>) {
        return reduce(f(x.low, x.high), f);
    } else if constexpr (sizeof x == 64) {
        return reduce(f(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                        __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)), f);
    } else if constexpr (sizeof x == 32) {
        return reduce(f(__builtin_shufflevector(x, x, 0, 1, 2, 3), __builtin_shufflevector(x, x, 4, 5, 6, 7)), f);
    } else {
        x = f(x, (V)__builtin_shufflevector(x, x, 2, 3, 2, 3));
        x = f(x, (V)__builtin_shufflevector(x, x, 1, 1, 1, 1));
        return x[0];
    }
}
INLINED float sum(Floats x) { return reduce(x, [](auto a, auto b) { return a + b; }); }
INLINED float max(Floats x) { return reduce(x, [](auto a, auto b) { return max(a, b); }); }

// a * b + c, fused where the processor has such an instruction.
template <class V> INLINED V fma(V a, V b, V c) {
    if constexpr (IS_PAIR<V>) return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
#if defined(__AVX512F__)
    else return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    else return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    else return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    else return a * b + c;
#endif
}

}  // namespace
