// The product of a few rows with a packed int4 weight. longdraft/kernels/int4.py defines the numbers.
//
// Both operands are whole numbers: the weight's nibbles, and each row quantised to int8 group by group. The sum over
// a group of 32 is an integer, hence exact, hence the same on every processor and for every number of rows; what
// follows it is one multiplication and one fused addition of floats for each group, in order. So one row by vector
// instructions and many rows by any other unit give the same bits.
//
//   sum over groups g of  scale[n][g] * step[g] * ( sum over i of nibble[n][i] * x[i]  -  zero[n][g] * sum of x[i] )
//
// A tile of 64 outputs holds, for each group of 32 inputs, 19 lines of 64 bytes that are read in order:
//
//   [64] scales, float16
//   [64] zero points, uint8
//   [4 vectors of 16 outputs][4 lines]   byte 4 o + i of line j: input 4 j + i of output o in the low nibble,
//                                        input 16 + 4 j + i in the high one
#pragma once

#include "layout.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <iterator>

namespace longdraft::LONGDRAFT_VARIANT {

namespace int4 {

constexpr int WORDS = INT4_GROUP / 8;                  // 32-bit words of one output's nibbles
constexpr int ZEROS = COLUMNS * 2, NIBBLES = ZEROS + COLUMNS;  // where they begin in a group
constexpr long BLOCK_GROUPS = 16;  // groups that all rows read while they are in the first-level cache (19 KB)
#if defined(__AVX512F__)
constexpr int ROWS = 4;
#else
constexpr int ROWS = 2;
#endif

typedef uint8_t Raw __attribute__((vector_size(64)));

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

// Rows as whole numbers: values [rows, width] padded with zeros to groups, and for each group its step (largest
// magnitude / 127; NaN where the row is not finite) and the sum of its values, negated.
struct Quantised {
    const int8_t* values;
    const float* steps;
    const int32_t* minus_sums;
    long width, groups;
};

// One group of a row: 32 floats. Rounds to nearest even by adding 1.5 * 2^23.
inline void quantise_group(Floats low, Floats high, int8_t* values, float* step, int32_t* minus_sum) {
    const Floats positive_low = low < 0 ? -low : low, positive_high = high < 0 ? -high : high;
    const float largest = max(max(positive_low, positive_high));
    const float damage = sum((low - low) + (high - high));  // NaN where anything is not finite, else 0
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    const Floats shifter = broadcast(12582912.0f);
    Ints total = {};
    for (int half = 0; half < 2; half++) {
        Ints whole = (Ints)((half ? high : low) * inverse + shifter) - (Ints)shifter;
        whole = damage == 0 ? whole : Ints{};
        const Bytes bytes = __builtin_convertvector(whole, Bytes);
        std::memcpy(values + half * LANES, &bytes, sizeof bytes);
        total += whole;
    }
    *step = largest / 127.0f + damage;
    *minus_sum = -static_cast<int32_t>(sum(__builtin_convertvector(total, Floats)));  // below 2^12: exact
}

// Bytes of memory for rows of k inputs.
inline long quantised_bytes(long rows, long k) {
    const long groups = round_up(k, INT4_GROUP) / INT4_GROUP;
    return rows * groups * (INT4_GROUP + 8);
}

template <class T> Quantised quantise_rows(const void* x, long rows, long k, char* memory) {
    const long groups = round_up(k, INT4_GROUP) / INT4_GROUP, width = groups * INT4_GROUP;
    auto* values = reinterpret_cast<int8_t*>(memory);
    auto* steps = reinterpret_cast<float*>(values + rows * width);
    auto* minus_sums = reinterpret_cast<int32_t*>(steps + rows * groups);
    auto* in = static_cast<const typename T::Element*>(x);
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < groups; g++) {
            const typename T::Element* from = in + r * k + g * INT4_GROUP;
            typename T::Element padded[INT4_GROUP] = {};
            if (k - g * INT4_GROUP < INT4_GROUP) {
                std::copy_n(from, k - g * INT4_GROUP, padded);
                from = padded;
            }
            quantise_group(T::widen(from), T::widen(from + LANES), values + r * width + g * INT4_GROUP,
                           steps + r * groups + g, minus_sums + r * groups + g);
        }
    return {values, steps, minus_sums, width, groups};
}

inline int32_t word_at(const int8_t* p) { int32_t word; std::memcpy(&word, p, 4); return word; }

// The integer sum of 16 outputs over one group, for one row: nibbles times values, less the zero points' part.
// `low` and `high` are the group's nibbles, a byte each.
#if defined(__AVX512VNNI__)
using Zeros = __m512i;
inline Zeros zeros_of(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Floats group_sum(const Raw* low, const Raw* high, Zeros zeros, const int8_t* values, int32_t minus_sum) {
    __m512i a = _mm512_dpwssd_epi32(_mm512_setzero_si512(), zeros, _mm512_set1_epi32(minus_sum & 0xffff));
    __m512i b = _mm512_setzero_si512();
    for (int j = 0; j < WORDS; j++) {
        a = _mm512_dpbusd_epi32(a, (__m512i)low[j], _mm512_set1_epi32(word_at(values + 4 * j)));
        b = _mm512_dpbusd_epi32(b, (__m512i)high[j], _mm512_set1_epi32(word_at(values + 16 + 4 * j)));
    }
    return (Floats)_mm512_cvtepi32_ps(_mm512_add_epi32(a, b));
}
#elif defined(__AVX2__)
struct Zeros { __m256i halves[2]; };
inline Zeros zeros_of(const uint8_t* p) {
    return {{_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
             _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))}};
}
inline Floats group_sum(const Raw* low, const Raw* high, const Zeros& zeros, const int8_t* values, int32_t minus_sum) {
    Floats found;
    for (int half = 0; half < 2; half++) {
        __m256i pairs = _mm256_setzero_si256();  // int16: eight pairs of products of at most 15 * 127 fit
        for (int j = 0; j < WORDS; j++) {
            __m256i nibbles[2];
            std::memcpy(&nibbles[0], reinterpret_cast<const char*>(low + j) + 32 * half, 32);
            std::memcpy(&nibbles[1], reinterpret_cast<const char*>(high + j) + 32 * half, 32);
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(nibbles[0], _mm256_set1_epi32(word_at(values + 4 * j))));
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(nibbles[1], _mm256_set1_epi32(word_at(values + 16 + 4 * j))));
        }
        const __m256i total = _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)),
                                               _mm256_madd_epi16(zeros.halves[half], _mm256_set1_epi32(minus_sum & 0xffff)));
        const __m256 floats = _mm256_cvtepi32_ps(total);
        std::memcpy(reinterpret_cast<char*>(&found) + 32 * half, &floats, 32);
    }
    return found;
}
#else
using Zeros = Ints;
inline Zeros zeros_of(const uint8_t* p) {
    Zeros z;
    for (int i = 0; i < LANES; i++) z[i] = p[i];
    return z;
}
inline Floats group_sum(const Raw* low, const Raw* high, Zeros zeros, const int8_t* values, int32_t minus_sum) {
    Ints total = zeros * minus_sum;
    for (int j = 0; j < WORDS; j++) {
        const Words a = (Words)low[j], b = (Words)high[j];
        for (int i = 0; i < 4; i++)
            total += (Ints)(a >> (8 * i) & 0xffu) * values[4 * j + i] + (Ints)(b >> (8 * i) & 0xffu) * values[16 + 4 * j + i];
    }
    return __builtin_convertvector(total, Floats);
}
#endif

// Groups [from, to) of one tile, added to the sums of COUNT rows. The tile is read in order, which is what the
// processor's own fetching ahead wants.
template <int COUNT>
void add_groups(const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    constexpr int VECTORS = COLUMNS / LANES;
    Floats totals[COUNT][VECTORS];
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < VECTORS; v++) totals[r][v] = load(sums[r] + v * LANES);
    for (long g = from; g < to; g++) {
        const uint8_t* group = tile + g * INT4_GROUP_BYTES;
        prefetch<0>(group, NIBBLES);  // used after the first nibbles
        for (int v = 0; v < VECTORS; v++) {
            if constexpr (COUNT > 1 || !FETCHES_ASCENDING_LINES) prefetch(group + v * 5 * 64, 5 * 64);  // a quarter of its lines
            Raw low[WORDS], high[WORDS];
            for (int j = 0; j < WORDS; j++) {
                std::memcpy(&low[j], group + NIBBLES + (v * WORDS + j) * 64, 64);
                high[j] = (Raw)((Words)low[j] >> 4) & 15;
                low[j] &= 15;
            }
            const Zeros zeros = zeros_of(group + ZEROS + v * LANES);
            const Floats scale = from_halves(reinterpret_cast<const uint16_t*>(group) + v * LANES);
            for (int r = 0; r < COUNT; r++) {
                const long at = (row + r) * x.groups + g;
                const Floats whole = group_sum(low, high, zeros, x.values + at * INT4_GROUP, x.minus_sums[at]);
                totals[r][v] = fma(whole * x.steps[at], scale, totals[r][v]);
            }
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < VECTORS; v++) store(sums[r] + v * LANES, totals[r][v]);
}

template <int COUNT = ROWS>
void add_rows(int rows, const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    if constexpr (COUNT > 1)
        if (rows < COUNT) return add_rows<COUNT - 1>(rows, tile, from, to, x, row, sums);
    add_groups<COUNT>(tile, from, to, x, row, sums);
}

// The tile that begins at `tile`, times all rows.
inline void multiply_tile(const uint8_t* tile, const Quantised& x, long rows, float (*sums)[COLUMNS]) {
    std::fill_n(sums[0], rows * COLUMNS, 0.0f);
    for (long from = 0; from < x.groups; from += BLOCK_GROUPS)
        for (long r = 0; r < rows; r += ROWS)
            add_rows(static_cast<int>(std::min<long>(ROWS, rows - r)), tile, from, std::min(x.groups, from + BLOCK_GROUPS),
                     x, r, sums + r);
}

// Values [n, k] of 0 to 15, scales (float16) and zero points [n, groups], into tiles.
inline void pack(Linear& w, const uint8_t* values, const uint16_t* scales, const uint8_t* zeros) {
    const long groups = w.num_groups();
    parallel(w.tiles(), [&](long t) {
        auto* tile = w.tile<uint8_t>(t);
        for (long c = 0; c < std::min<long>(COLUMNS, w.n - t * COLUMNS); c++)
            for (long g = 0; g < groups; g++) {
                const long n = t * COLUMNS + c, v = c / LANES, lane = c % LANES;
                uint8_t* group = tile + g * INT4_GROUP_BYTES;
                for (long i = 0; i < std::min<long>(INT4_GROUP, w.k - g * INT4_GROUP); i++)
                    group[NIBBLES + (v * WORDS + i % 16 / 4) * 64 + lane * 4 + i % 4] |=
                        static_cast<uint8_t>(values[n * w.k + g * INT4_GROUP + i] << (i / 16 * 4));
                reinterpret_cast<uint16_t*>(group)[c] = scales[n * groups + g];
                group[ZEROS + c] = zeros[n * groups + g];
            }
    });
}

inline float value_at(const Linear& w, long n, long k) {
    const uint8_t* group = w.tile<uint8_t>(n / COLUMNS) + k / INT4_GROUP * INT4_GROUP_BYTES;
    const long c = n % COLUMNS, i = k % INT4_GROUP;
    const int nibble = group[NIBBLES + (c / LANES * WORDS + i % 16 / 4) * 64 + c % LANES * 4 + i % 4] >> (i / 16 * 4) & 15;
    return static_cast<float>(nibble - group[ZEROS + c]) * from_half(reinterpret_cast<const uint16_t*>(group)[c]);
}

// How a group of 32 float32 weights is quantised with one clipping ratio.
struct Clipping {
    uint16_t half;  // the step as float16
    float step;
    Floats zero;    // the same in all lanes

    Clipping(float least, float width, float ratio) : half(to_half(width * ratio / 15.0f)), step(from_half(half)) {
        zero = step > 0 ? clamp(nearest(broadcast(-(least * ratio) / step))) : Floats{};
    }

    // 0 to 15 as floats. The quotient is clamped before it is rounded as well: `nearest` is right for small numbers only.
    Floats values(Floats weights) const {
        Floats quotient = step > 0 ? weights / step : Floats{};
        quotient = quotient < -16 ? broadcast(-16.0f) : quotient;
        quotient = quotient > 16 ? broadcast(16.0f) : quotient;
        return clamp(nearest(quotient) + zero);
    }

    float squared_error(Floats low, Floats high) const {
        const Floats first = (values(low) - zero) * step - low, second = (values(high) - zero) * step - high;
        return sum(first * first + second * second);
    }

  private:
    static Floats nearest(Floats x) { return (x + broadcast(12582912.0f)) - broadcast(12582912.0f); }
    static Floats clamp(Floats x) {
        x = x < 0 ? Floats{} : x;
        return x > 15 ? broadcast(15.0f) : x;
    }
};

constexpr float RATIOS[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};  // of a group's range, tried in this order

// A weight [n, k] to values [n, k], scales (float16) and zero points [n, groups].
template <class T> void quantise(const void* weight, long n, long k, uint8_t* values, uint16_t* scales, uint8_t* zeros) {
    const long groups = round_up(k, INT4_GROUP) / INT4_GROUP;
    auto* in = static_cast<const typename T::Element*>(weight);
    parallel(n, [&](long row) {
        for (long g = 0; g < groups; g++) {
            const long count = std::min<long>(INT4_GROUP, k - g * INT4_GROUP), at = row * groups + g;
            uint8_t* out = values + row * k + g * INT4_GROUP;
            typename T::Element group[INT4_GROUP] = {};
            std::copy_n(in + row * k + g * INT4_GROUP, count, group);
            const Floats low = T::widen(group), high = T::widen(group + LANES);
            if (const float damage = sum((low - low) + (high - high)); !(damage == 0)) {
                std::fill_n(out, count, 0);
                scales[at] = 0x7e00;  // NaN: damaged weights must not become plausible text
                zeros[at] = 0;
                continue;
            }
            const float most = std::max(0.0f, max(max(low, high))), least = std::min(0.0f, -max(max(-low, -high)));
            Clipping best(least, most - least, RATIOS[0]);
            float error = best.squared_error(low, high);
            for (size_t i = 1; i < std::size(RATIOS); i++) {
                const Clipping tried(least, most - least, RATIOS[i]);
                const float found = tried.squared_error(low, high);
                if (found < error) error = found, best = tried;
            }
            const Floats parts[2] = {best.values(low), best.values(high)};
            for (long i = 0; i < count; i++) out[i] = static_cast<uint8_t>(parts[i / LANES][i % LANES]);
            scales[at] = best.half;
            zeros[at] = static_cast<uint8_t>(best.zero[0]);
        }
    });
}

}  // namespace int4
}  // namespace
