// The product of a few rows with a weight of whole numbers in groups. longdraft/kernels/int4.py and groups.py define the
// numbers.
//
// Both operands are whole numbers: the weight's, of 4 or 8 bits, and each row quantised to int8 group by group. The sum
// over a group of 32 is an integer below 2^24, hence exact, hence the same on every processor and for every number of
// rows; what follows it are a few operations of floats for each group, in order. So one row by vector instructions and
// many rows by any other unit give the same bits.
//
//   sum over groups g of  scale[n][g] * step[g] * ( sum over i of value[n][i] * x[i]  -  zero[n][g] * sum of x[i] )
//                         + least[n][g] * step[g] * sum of x[i]
//
// A tile of 64 outputs holds for each group of 32 inputs some lines of 64 bytes that are read in order (`Encoding`):
//
//   [64] scales, float16; where the halves of a group have their own, those of the first 16 inputs, then those of the last 16
//   [64] zero points, uint8, or least values, float16, or neither
//   [4 vectors of 16 outputs][4 lines]   4 bits: byte 4 o + i of line j: input 4 j + i of output o in the low nibble,
//                                        input 16 + 4 j + i in the high one
//   [4 vectors of 16 outputs][8 lines]   8 bits: byte 4 o + i of line j: input 4 j + i of output o, plus 128
#pragma once

#include "amx.h"
#include "half.h"
#include "layout.h"
#include "pool.h"
#include "quantised_rows.h"
#include "simd.h"

#include <algorithm>

namespace longdraft::LONGDRAFT_VARIANT::groups {

constexpr int WORDS = GROUP / 8;   // 32-bit words of half of a group's bytes
constexpr long BLOCK_GROUPS = 16;  // groups that all rows read while they are in the cache near the processor (19 KB)
#if defined(__AVX512F__)
constexpr int ROWS = 4;
#else
constexpr int ROWS = 2;
#endif

typedef uint8_t Raw __attribute__((vector_size(64)));

// Where the parts of a group are, for one of the encodings of layout.h.
template <Groups KIND> struct Encoding {
    static constexpr GroupShape SHAPE = shape_of(KIND);
    static constexpr int SECOND = COLUMNS * 2;               // the second scales, or what follows the first ones
    static constexpr int MIDDLE = SECOND * (SHAPE.halves ? 2 : 1);  // zero points or least values
    static constexpr int VALUES = SHAPE.bytes - COLUMNS * GROUP * SHAPE.bits / 8;
    static constexpr int LINES = SHAPE.bytes / 64, QUARTER = (LINES + 3) / 4;
    static constexpr int OF_VECTOR = LANES * GROUP * SHAPE.bits / 8;

    // The place of the byte with input i of output c.
    static constexpr long place(long c, long i) {
        const long j = SHAPE.bits == 4 ? i % 16 / 4 : i / 4;
        return VALUES + c / LANES * OF_VECTOR + j * 64 + c % LANES * 4 + i % 4;
    }
};

inline int32_t word_at(const int8_t* p) { int32_t word; std::memcpy(&word, p, 4); return word; }

// Sums of 16 outputs over four lines, for one row: `start` plus the products of the lines' bytes, which are 0 to 15, with
// 16 values.
inline Ints dot_nibbles(const Raw* lines, const int8_t* values, Ints start) {
#if defined(__AVX512VNNI__)
    auto total = (__m512i)start;
    for (int j = 0; j < WORDS; j++)
        total = _mm512_dpbusd_epi32(total, (__m512i)lines[j], _mm512_set1_epi32(word_at(values + 4 * j)));
    return (Ints)total;
#elif defined(__AVX2__)
    for (int half = 0; half < 2; half++) {
        __m256i pairs = _mm256_setzero_si256(), bytes;  // int16: four pairs of products of at most 15 * 127 fit
        for (int j = 0; j < WORDS; j++) {
            std::memcpy(&bytes, reinterpret_cast<const char*>(lines + j) + 32 * half, 32);
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(bytes, _mm256_set1_epi32(word_at(values + 4 * j))));
        }
        const __m256i found = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        __m256i sums;
        std::memcpy(&sums, reinterpret_cast<char*>(&start) + 32 * half, 32);
        sums = _mm256_add_epi32(sums, found);
        std::memcpy(reinterpret_cast<char*>(&start) + 32 * half, &sums, 32);
    }
    return start;
#else
    for (int j = 0; j < WORDS; j++)
        for (int i = 0; i < 4; i++) start += (Ints)((Words)lines[j] >> (8 * i) & 0xffu) * values[4 * j + i];
    return start;
#endif
}

// The same for bytes that are 128 greater than the weight's values, which the products are made of.
//   sum  of the 16 values
inline Ints dot_bytes(const Raw* lines, const int8_t* values, [[maybe_unused]] int32_t sum) {
#if defined(__AVX512VNNI__)
    auto total = _mm512_set1_epi32(-128 * sum);
    for (int j = 0; j < WORDS; j++)
        total = _mm512_dpbusd_epi32(total, (__m512i)lines[j], _mm512_set1_epi32(word_at(values + 4 * j)));
    return (Ints)total;
#elif defined(__AVX2__)
    Ints found;
    for (int half = 0; half < 2; half++) {
        __m256i total = _mm256_setzero_si256(), bytes;
        for (int j = 0; j < WORDS; j++) {
            std::memcpy(&bytes, reinterpret_cast<const char*>(lines + j) + 32 * half, 32);
            bytes = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
            // Magnitudes of at most 128 and values with the sign moved to them: a pair of products fits in int16.
            const __m256i x = _mm256_sign_epi8(_mm256_set1_epi32(word_at(values + 4 * j)), bytes);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), x);
            total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        std::memcpy(reinterpret_cast<char*>(&found) + 32 * half, &total, 32);
    }
    return found;
#else
    Ints total = Ints{} - 128 * sum;
    for (int j = 0; j < WORDS; j++)
        for (int i = 0; i < 4; i++) total += (Ints)((Words)lines[j] >> (8 * i) & 0xffu) * values[4 * j + i];
    return total;
#endif
}

// 16 zero points as whole numbers, and their products with a sum of values: both fit in 16 bits, which is faster.
inline Ints zeros_of(const uint8_t* p) {
    Ints zeros;
#if defined(__AVX512F__)
    zeros = (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    typedef uint8_t Sixteen __attribute__((vector_size(16)));
    Sixteen bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    zeros = __builtin_convertvector(bytes, Ints);
#endif
    return zeros;
}
inline Ints minus_products(Ints zeros, int32_t sum) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32(_mm512_setzero_si512(), (__m512i)zeros, _mm512_set1_epi32(-sum & 0xffff));
#else
    return zeros * -sum;
#endif
}

inline Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// Add one group of 16 outputs, for one row with these values, to their totals.
template <Groups KIND>
Floats add_group(Floats total, const Raw* lines, Ints zeros, Floats scale, Floats second, Floats least,
                 const int8_t* values, float step, const int32_t* sums) {
    constexpr GroupShape SHAPE = shape_of(KIND);
    if constexpr (SHAPE.bits == 4) {
        const Ints start = SHAPE.has_zero ? minus_products(zeros, sums[0] + sums[1]) : Ints{};
        const Floats whole = as_floats(dot_nibbles(lines, values, start) + dot_nibbles(lines + WORDS, values + 16, Ints{}));
        total = fma(whole * step, scale, total);
    } else {
        const Ints first = dot_bytes(lines, values, sums[0]), last = dot_bytes(lines + WORDS, values + 16, sums[1]);
        if constexpr (SHAPE.halves) {
            total = fma(as_floats(first) * step, scale, total);
            total = fma(as_floats(last) * step, second, total);
        } else {
            total = fma(as_floats(first + last) * step, scale, total);
        }
    }
    if constexpr (SHAPE.has_least) total = fma(broadcast(step * static_cast<float>(sums[0] + sums[1])), least, total);
    return total;
}

// Groups [from, to) of one tile, added to the sums of COUNT rows. The tile is read in order, which is what the
// processor's own fetching ahead wants.
template <Groups KIND, int COUNT>
void add_groups(const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    using E = Encoding<KIND>;
    constexpr int VECTORS = COLUMNS / LANES;
    Floats totals[COUNT][VECTORS];
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < VECTORS; v++) totals[r][v] = load(sums[r] + v * LANES);
    for (long g = from; g < to; g++) {
        const uint8_t* group = tile + g * E::SHAPE.bytes;
        prefetch<0>(group, E::VALUES);  // used after the first values
        for (int v = 0; v < VECTORS; v++) {
            if constexpr (COUNT > 1 || !FETCHES_ASCENDING_LINES)
                prefetch(group + v * E::QUARTER * 64, E::QUARTER * 64);  // a quarter of its lines
            Raw lines[2 * WORDS];
            const uint8_t* values = group + E::VALUES + v * E::OF_VECTOR;
            if constexpr (E::SHAPE.bits == 4)
                for (int j = 0; j < WORDS; j++) {
                    std::memcpy(&lines[j], values + j * 64, 64);
                    lines[WORDS + j] = (Raw)((Words)lines[j] >> 4) & 15;
                    lines[j] &= 15;
                }
            else std::memcpy(lines, values, sizeof lines);
            auto halves = [&](int at) { return from_halves(reinterpret_cast<const uint16_t*>(group + at) + v * LANES); };
            const Floats scale = halves(0);
            Ints zeros = {};
            Floats second = {}, least = {};
            if constexpr (E::SHAPE.has_zero) zeros = zeros_of(group + E::MIDDLE + v * LANES);
            if constexpr (E::SHAPE.halves) second = halves(E::SECOND);
            if constexpr (E::SHAPE.has_least) least = halves(E::MIDDLE);
            for (int r = 0; r < COUNT; r++) {
                const long at = (row + r) * x.groups + g;
                totals[r][v] = add_group<KIND>(totals[r][v], lines, zeros, scale, second, least, x.values + at * GROUP,
                                               x.steps[at], x.sums + 2 * at);
            }
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < VECTORS; v++) store(sums[r] + v * LANES, totals[r][v]);
}

template <Groups KIND, int COUNT = ROWS>
void add_rows(int rows, const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    if constexpr (COUNT > 1)
        if (rows < COUNT) return add_rows<KIND, COUNT - 1>(rows, tile, from, to, x, row, sums);
    add_groups<KIND, COUNT>(tile, from, to, x, row, sums);
}

constexpr long LEAST_UNIT_ROWS = 10;  // for which the matrix unit multiplies, where there is one: with fewer it is slower

#if defined(__AMX_INT8__)
// Groups [from, to) of one tile, added to the sums of up to 16 rows, by the matrix unit: the same integers, so the same
// bits. A tile of the unit sums 64 inputs, of which a group is the first half; the other half meets zeros. Lines are
// unpacked a group before their use, and sums are read a group after they were stored, because loading what was just
// written would wait.
template <Groups KIND>
void add_groups_by_unit(int rows, const uint8_t* tile, long from, long to, const Quantised& x, long row,
                        float (*sums)[COLUMNS]) {
    using E = Encoding<KIND>;
    constexpr int VECTORS = COLUMNS / LANES;
    alignas(64) static thread_local Raw lines[2][VECTORS][4 * WORDS] = {};
    alignas(64) Ints found[2][VECTORS][amx::ROWS];
    auto unpack = [&](long g) {
        const uint8_t* group = tile + g * E::SHAPE.bytes;
        prefetch(group, E::SHAPE.bytes);
        for (int v = 0; v < VECTORS; v++)
            for (int j = 0; j < WORDS; j++) {
                Raw line;
                std::memcpy(&line, group + E::VALUES + v * E::OF_VECTOR + j * 64, 64);
                lines[g % 2][v][j] = line & 15;
                lines[g % 2][v][WORDS + j] = (Raw)((Words)line >> 4) & 15;
            }
    };
    auto multiply = [&](long g) {
        amx::load<amx::LEFT>(x.values + (row * x.groups + g) * GROUP, x.width);
        amx::each<VECTORS>([&](auto v) {
            amx::zero<amx::SUM + v>();
            amx::load<amx::RIGHT>(lines[g % 2][v], 64);
            amx::multiply_bytes<amx::SUM + v, amx::LEFT, amx::RIGHT>();
            amx::store<amx::SUM + v>(reinterpret_cast<float*>(found[g % 2][v]), 64);
        });
    };
    auto scale_sums = [&](long g) {
        const uint8_t* group = tile + g * E::SHAPE.bytes;
        for (int v = 0; v < VECTORS; v++) {
            const Floats scale = from_halves(reinterpret_cast<const uint16_t*>(group) + v * LANES);
            Ints zeros = {};
            Floats least = {};
            if constexpr (E::SHAPE.has_zero) zeros = zeros_of(group + E::MIDDLE + v * LANES);
            if constexpr (E::SHAPE.has_least) least = from_halves(reinterpret_cast<const uint16_t*>(group + E::MIDDLE) + v * LANES);
            for (int r = 0; r < rows; r++) {
                const long at = (row + r) * x.groups + g;
                const int32_t sum = x.sums[2 * at] + x.sums[2 * at + 1];
                Ints whole = found[g % 2][v][r];
                if constexpr (E::SHAPE.has_zero) whole += minus_products(zeros, sum);
                Floats total = fma(as_floats(whole) * x.steps[at], scale, load(sums[r] + v * LANES));
                if constexpr (E::SHAPE.has_least) total = fma(broadcast(x.steps[at] * static_cast<float>(sum)), least, total);
                store(sums[r] + v * LANES, total);
            }
        }
    };
    unpack(from);
    for (long g = from; g < to; g++) {
        if (g + 1 < to) unpack(g + 1);
        multiply(g);
        if (g > from) scale_sums(g - 1);
    }
    scale_sums(to - 1);
}
#endif

// Call f(std::integral_constant) with an encoding.
template <class F> auto with_kind(Groups kind, F f) {
    switch (kind) {
        case Groups::NIBBLES_LEAST: return f(std::integral_constant<Groups, Groups::NIBBLES_LEAST>{});
        case Groups::BYTES: return f(std::integral_constant<Groups, Groups::BYTES>{});
        case Groups::BYTES_HALVES_LEAST: return f(std::integral_constant<Groups, Groups::BYTES_HALVES_LEAST>{});
        default: return f(std::integral_constant<Groups, Groups::NIBBLES_ZERO>{});
    }
}

// The tile that begins at `tile`, times all rows.
//   has_unit  whether the matrix unit is set up for this thread
inline void multiply_tile(Groups kind, const uint8_t* tile, const Quantised& x, long rows, float (*sums)[COLUMNS],
                          [[maybe_unused]] bool has_unit) {
    std::fill_n(sums[0], rows * COLUMNS, 0.0f);
    with_kind(kind, [&](auto of) {
        for (long from = 0; from < x.groups; from += BLOCK_GROUPS) {
            const long to = std::min(x.groups, from + BLOCK_GROUPS);
            long r = 0;
#if defined(__AMX_INT8__)
            if constexpr (shape_of(of).bits == 4)
                for (; has_unit && rows - r >= LEAST_UNIT_ROWS; r += amx::ROWS)
                    add_groups_by_unit<of>(static_cast<int>(std::min<long>(amx::ROWS, rows - r)), tile, from, to, x, r, sums + r);
#endif
            for (; r < rows; r += ROWS)
                add_rows<of>(static_cast<int>(std::min<long>(ROWS, rows - r)), tile, from, to, x, r, sums + r);
        }
    });
}

// Values [n, k], 0 to 15 or 0 to 255, and scales (float16) [n, groups] or [n, groups, 2] into tiles; what the encoding
// has besides: zero points (uint8) or least values (float16) [n, groups].
inline void pack(Linear& w, const uint8_t* values, const uint16_t* scales, const void* besides) {
    with_kind(w.groups, [&](auto of) {
        using E = Encoding<of>;
        const long groups = w.num_groups(), parts = E::SHAPE.halves ? 2 : 1;
        parallel(w.tiles(), [&](long t) {
            auto* tile = w.tile<uint8_t>(t);
            for (long c = 0; c < std::min<long>(COLUMNS, w.n - t * COLUMNS); c++)
                for (long g = 0; g < groups; g++) {
                    const long n = t * COLUMNS + c, at = n * groups + g;
                    uint8_t* group = tile + g * E::SHAPE.bytes;
                    const uint8_t* from = values + n * w.k + g * GROUP;
                    for (long i = 0; i < std::min<long>(GROUP, w.k - g * GROUP); i++)
                        group[E::place(c, i)] |= static_cast<uint8_t>(from[i] << (E::SHAPE.bits == 4 ? i / 16 * 4 : 0));
                    for (long part = 0; part < parts; part++)
                        reinterpret_cast<uint16_t*>(group + part * E::SECOND)[c] = scales[at * parts + part];
                    if (E::SHAPE.has_zero) group[E::MIDDLE + c] = static_cast<const uint8_t*>(besides)[at];
                    if (E::SHAPE.has_least)
                        reinterpret_cast<uint16_t*>(group + E::MIDDLE)[c] = static_cast<const uint16_t*>(besides)[at];
                }
        });
    });
}

inline float value_at(const Linear& w, long n, long k) {
    return with_kind(w.groups, [&](auto of) {
        using E = Encoding<of>;
        const uint8_t* group = w.tile<uint8_t>(n / COLUMNS) + k / GROUP * E::SHAPE.bytes;
        const long c = n % COLUMNS, i = k % GROUP;
        auto half = [&](int at) { return from_half(reinterpret_cast<const uint16_t*>(group + at)[c]); };
        const int stored = group[E::place(c, i)];
        const int whole = E::SHAPE.bits == 8 ? stored - 128 : (stored >> (i / 16 * 4) & 15) - (E::SHAPE.has_zero ? group[E::MIDDLE + c] : 0);
        const float product = static_cast<float>(whole) * half(E::SHAPE.halves && i >= 16 ? E::SECOND : 0);
        return E::SHAPE.has_least ? product + half(E::MIDDLE) : product;
    });
}

}  // namespace
