// The product of a few rows with a weight of whole numbers in groups. longdraft/kernels/formats/int4.py and groups.py define the
// numbers.
//
// Both operands are whole numbers: the weight's, of 4 to 8 bits, and each row quantised to int8 group by group. The sum
// over a group of 32 is an integer below 2^24, hence exact, hence the same on every processor and for every number of
// rows; what follows it are a few operations of floats for each group, in order. So one row by vector instructions and
// many rows by any other unit give the same bits.
//
//   sum over groups g of  scale[n][g] * step[g] * ( sum over i of value[n][i] * x[i]  -  zero[n][g] * sum of x[i] )
//                         + least[n][g] * step[g] * sum of x[i]
#pragma once

#include "amx.h"
#include "groups_avx2.h"
#include "groups_neon.h"
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
constexpr int ROWS = 8, TOGETHER = 4;  // rows whose totals of all outputs the registers hold
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int ROWS = 4;
#else
constexpr int ROWS = 1;
#endif

#if (!defined(__AVX2__) || defined(__AVX512F__)) && !defined(__ARM_FEATURE_DOTPROD)
// Byte i of each word.
inline Ints bytes_of(Raw line, int i) { return as<Ints>(as<Words>(line) >> (8 * i) & 0xffu); }

// Sums of 16 outputs over four lines, for one row: `start` plus the products of the lines' bytes (up to 6 bits) with 16 values.
inline Ints dot_codes(const Raw* lines, const int8_t* values, Ints start) {
#if defined(__AVX512VNNI__)
    auto total = (__m512i)start;
    for (int j = 0; j < WORDS; j++)
        total = _mm512_dpbusd_epi32(total, (__m512i)lines[j], _mm512_set1_epi32(word_at(values + 4 * j)));
    return (Ints)total;
#else
    for (int j = 0; j < WORDS; j++)
        for (int i = 0; i < 4; i++) start += bytes_of(lines[j], i) * int32_t{values[4 * j + i]};
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
#else
    Ints total = Ints{} - 128 * sum;
    for (int j = 0; j < WORDS; j++)
        for (int i = 0; i < 4; i++) total += bytes_of(lines[j], i) * int32_t{values[4 * j + i]};
    return total;
#endif
}

// The products of 16 zero points with a sum of values: both fit in 16 bits, which is faster.
inline Ints minus_products(Ints zeros, int32_t sum) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32(_mm512_setzero_si512(), (__m512i)zeros, _mm512_set1_epi32(-sum & 0xffff));
#else
    return zeros * -sum;
#endif
}

// What follows the sums of a group, for 16 outputs.
struct Factors {
    Ints zeros;
    Floats scale, second, least;
};

//   v  which 16 of the tile's outputs
template <Groups KIND> Factors factors(const uint8_t* tile, long g, int v) {
    using E = Encoding<KIND>;
    const uint8_t* group = tile + E::group(g);
    Factors found = {};
    auto halves = [&](const uint8_t* from) { return from_halves(reinterpret_cast<const uint16_t*>(from) + v * LANES); };
    if constexpr (E::SHAPE.has_zero) found.zeros = convert<Ints>(load_as<UnsignedBytes>(group + E::MIDDLE + v * LANES));
    if constexpr (E::SHAPE.common) {
        auto numbers = [&](int at) { return from_int8(reinterpret_cast<const int8_t*>(group + at) + v * LANES); };
        const uint8_t* common = tile + E::common(g);
        const Floats scale = halves(common);
        found.scale = numbers(0) * scale;  // products of 8 and 11 bits: exact
        if constexpr (E::SHAPE.halves) found.second = numbers(E::SECOND) * scale;
        if constexpr (E::SHAPE.has_least) found.least = numbers(E::MIDDLE) * halves(common + COLUMNS * 2);
    } else {
        found.scale = halves(group);
        if constexpr (E::SHAPE.halves) found.second = halves(group + E::SECOND);
        if constexpr (E::SHAPE.has_least) found.least = halves(group + E::MIDDLE);
    }
    return found;
}

// The codes of 16 outputs as bytes: line j has the inputs 4 j to 4 j + 3.
template <Groups KIND> void unpack_codes(const uint8_t* values, Raw* lines) {
    constexpr int BITS = shape_of(KIND).bits;
    if constexpr (BITS == 8) {
        UNROLLED for (int j = 0; j < 2 * WORDS; j++) lines[j] = load_as<Raw>(values + j * 64);
        return;
    }
    UNROLLED for (int j = 0; j < WORDS; j++) {
        const Words both = load_as<Words>(values + j * 64);
        lines[WORDS + j] = as<Raw>(both >> 4 & 0x0f0f0f0fu);
        lines[j] = as<Raw>(both & 0x0f0f0f0fu);
    }
    if constexpr (BITS > 4) {
        constexpr int STEP = BITS - 4;  // further bits of a code, which follow those of the line before in a word
        UNROLLED for (int j = 0; j < 2 * WORDS; j++) {
            const int from = STEP * j % 8;
            const Words x = load_as<Words>(values + Encoding<KIND>::EXTRA + STEP * j / 8 * 64);
            const Words moved = from < 4 ? x << (4 - from) : x >> (from - 4);
            lines[j] = as<Raw>(as<Words>(lines[j]) | (moved & (BITS == 5 ? 0x10101010u : 0x30303030u)));
        }
    }
}

// Add one group of 16 outputs, for one row with these values, to their totals.
template <Groups KIND>
Floats add_group(Floats total, const Raw* lines, const Factors& by, const int8_t* values, float step, const int32_t* sums,
                 [[maybe_unused]] float whole) {
    constexpr GroupShape SHAPE = shape_of(KIND);
    Ints first, last;
    if constexpr (SHAPE.bits == 8) {
        first = dot_bytes(lines, values, sums[0]), last = dot_bytes(lines + WORDS, values + 16, sums[1]);
    } else {
        const int32_t sum = sums[0] + sums[1];
        first = last = Ints{};
        if constexpr (SHAPE.has_zero) first = minus_products(by.zeros, sum);
        if constexpr (SHAPE.offset) first -= SHAPE.offset * (SHAPE.halves ? sums[0] : sum);
        if constexpr (SHAPE.offset && SHAPE.halves) last -= SHAPE.offset * sums[1];
        first = dot_codes(lines, values, first);
        last = dot_codes(lines + WORDS, values + 16, last);
    }
    if constexpr (SHAPE.halves) {
        total = fma(convert<Floats>(first) * step, by.scale, total);
        total = fma(convert<Floats>(last) * step, by.second, total);
    } else {
        total = fma(convert<Floats>(first + last) * step, by.scale, total);
    }
    if constexpr (SHAPE.has_least) total = fma(broadcast(whole), by.least, total);
    return total;
}

// Groups [from, to) of one tile, added to the sums of COUNT rows. The tile is read in order, which is what the
// processor's own fetching ahead wants.
template <Groups KIND, int COUNT>
void add_groups(const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    using E = Encoding<KIND>;
    constexpr int VECTORS = COLUMNS / LANES;
    Floats totals[COUNT][VECTORS];
    UNROLLED for (int r = 0; r < COUNT; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) totals[r][v] = load(sums[r] + v * LANES);
    for (long g = from; g < to; g++) {
        const uint8_t* group = tile + E::group(g);
        if constexpr (!FETCHES_ASCENDING_LINES) {
            prefetch<0>(group, E::VALUES);  // used after the first values
            if constexpr (E::SHAPE.common && E::SHAPE.bits == 4)  // measured: 15 % less time; with 5 and 6 bits 40 % more
                if (g % COMMON_GROUPS == COMMON_GROUPS - 1) prefetch<0>(tile + E::common(g + 1), E::SHAPE.common);
        }
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            if constexpr (!FETCHES_ASCENDING_LINES) prefetch(group + v * E::QUARTER * 64, E::QUARTER * 64);
            Raw lines[2 * WORDS];
            unpack_codes<KIND>(group + E::VALUES + v * E::OF_VECTOR, lines);
            const Factors by = factors<KIND>(tile, g, v);
            UNROLLED for (int r = 0; r < COUNT; r++) {
                const long at = (row + r) * x.groups + g;
                totals[r][v] = add_group<KIND>(totals[r][v], lines, by, x.values + at * GROUP, x.steps[at], x.sums + 2 * at,
                                               x.totals[at]);
            }
        }
    }
    UNROLLED for (int r = 0; r < COUNT; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) store(sums[r] + v * LANES, totals[r][v]);
}
#endif

#if defined(__AVX512F__)
// The same for more rows: 16 outputs after another. Each turn fetches its part of the groups that follow these.
template <Groups KIND, int COUNT>
void add_groups_in_turns(const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    using E = Encoding<KIND>;
    constexpr long VECTORS = COLUMNS / LANES, PART = E::SHAPE.bytes / VECTORS;
    for (int v = 0; v < VECTORS; v++) {
        Floats totals[COUNT];
        UNROLLED for (int r = 0; r < COUNT; r++) totals[r] = load(sums[r] + v * LANES);
        for (long g = from; g < to; g++) {
            const uint8_t* group = tile + E::group(g);
            if constexpr (!FETCHES_ASCENDING_LINES) prefetch<BLOCK_GROUPS * E::SHAPE.bytes>(group + v * PART, PART);
            Raw lines[2 * WORDS];
            unpack_codes<KIND>(group + E::VALUES + v * E::OF_VECTOR, lines);
            const Factors by = factors<KIND>(tile, g, v);
            UNROLLED for (int r = 0; r < COUNT; r++) {
                const long at = (row + r) * x.groups + g;
                totals[r] = add_group<KIND>(totals[r], lines, by, x.values + at * GROUP, x.steps[at], x.sums + 2 * at,
                                            x.totals[at]);
            }
        }
        UNROLLED for (int r = 0; r < COUNT; r++) store(sums[r] + v * LANES, totals[r]);
    }
}
#endif

template <Groups KIND, int COUNT = ROWS>
void add_rows(int rows, const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    if constexpr (COUNT > 1)
        if (rows < COUNT) return add_rows<KIND, COUNT - 1>(rows, tile, from, to, x, row, sums);
#if defined(__AVX512F__)
    if constexpr (COUNT > TOGETHER) return add_groups_in_turns<KIND, COUNT>(tile, from, to, x, row, sums);
#endif
    add_groups<KIND, COUNT>(tile, from, to, x, row, sums);
}

constexpr long LEAST_UNIT_ROWS = 9;  // for which the matrix unit multiplies, where there is one: with fewer it is slower

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
        const uint8_t* group = tile + E::group(g);
        prefetch(group, E::SHAPE.bytes);
        for (int v = 0; v < VECTORS; v++) unpack_codes<KIND>(group + E::VALUES + v * E::OF_VECTOR, lines[g % 2][v]);
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
        for (int v = 0; v < VECTORS; v++) {
            const Factors by = factors<KIND>(tile, g, v);
            const Ints* whole = found[g % 2][v];
            long at = row * x.groups + g;  // multiplied in each row, it would take a fifth of the time
            for (int r = 0; r < rows; r++, at += x.groups) {
                Ints group = whole[r];
                [[maybe_unused]] const int32_t* sum = x.sums + 2 * at;
                if constexpr (E::SHAPE.has_zero) group += minus_products(by.zeros, sum[0] + sum[1]);
                if constexpr (E::SHAPE.offset) group -= E::SHAPE.offset * (sum[0] + sum[1]);
                Floats total = fma(convert<Floats>(group) * x.steps[at], by.scale, load(sums[r] + v * LANES));
                if constexpr (E::SHAPE.has_least) total = fma(broadcast(x.totals[at]), by.least, total);
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
            if constexpr (!shape_of(of).halves)  // with a scale for each half, the unit would multiply twice: no gain
                for (; has_unit && rows - r >= LEAST_UNIT_ROWS; r += amx::ROWS)
                    add_groups_by_unit<of>(static_cast<int>(std::min<long>(amx::ROWS, rows - r)), tile, from, to, x, r, sums + r);
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
            if constexpr (shape_of(of).bits > 4)
                for (; rows - r > ROWS; r += MOST_TOGETHER)
                    add_groups_together<of>(std::min(MOST_TOGETHER, rows - r), tile, from, to, x, r, sums + r);
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
            for (; rows - r >= LEAST_TOGETHER; r += MOST_TOGETHER)
                add_groups_together<of>(std::min(MOST_TOGETHER, rows - r), tile, from, to, x, r, sums + r);
#endif
            for (; r < rows; r += ROWS)
                add_rows<of>(static_cast<int>(std::min<long>(ROWS, rows - r)), tile, from, to, x, r, sums + r);
        }
    });
}

// The numbers of a row in one of its groups.
template <Groups KIND> void decode_group(const Linear& w, long row, long g, float out[GROUP]) {
    using E = Encoding<KIND>;
    const uint8_t* tile = w.tile<uint8_t>(row / COLUMNS);
    const uint8_t *group = tile + E::group(g), *common = tile + E::common(g);
    const long c = row % COLUMNS;
    auto number = [&](int at, int of_common) {
        const auto* halves = reinterpret_cast<const uint16_t*>(E::SHAPE.common ? common + of_common : group + at);
        const float half = from_half(halves[c]);
        return E::SHAPE.common ? static_cast<float>(reinterpret_cast<const int8_t*>(group + at)[c]) * half : half;
    };
    const int zero = E::SHAPE.offset + (E::SHAPE.has_zero ? group[E::MIDDLE + c] : 0);
    const float scales[2] = {number(0, 0), number(E::SHAPE.halves ? E::SECOND : 0, 0)};
    const float least = E::SHAPE.has_least ? number(E::MIDDLE, COLUMNS * 2) : 0.0f;
    for (long i = 0; i < GROUP; i++) {
        const float product = static_cast<float>(E::code(group, c, i) - zero) * scales[i / 16];
        out[i] = E::SHAPE.has_least ? product + least : product;
    }
}

// The numbers of a row, in the order of the weight's columns: use(first column, numbers, how many).
template <class F> void decode_row(const Linear& w, long row, F use) {
    with_kind(w.groups, [&](auto of) {
        float numbers[GROUP];
        for (long first = 0; first < w.k; first += GROUP) {
            decode_group<of>(w, row, first / GROUP, numbers);
            use(first, numbers, std::min<long>(GROUP, w.k - first));
        }
    });
}

}  // namespace
