// Rows times weights in groups with AVX2: what groups.h does, for eight outputs at a time, because a vector has 32 bytes.
#pragma once

#include "encoding.h"
#include "quantised_rows.h"
#include "simd.h"

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#if defined(__AVX2__) && !defined(__AVX512F__)
namespace longdraft::LONGDRAFT_VARIANT::groups {

constexpr int LINES = GROUP / 4;  // of a group: line j has the inputs 4 j to 4 j + 3

inline __m256i load_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256i four_values(const int8_t* from) { return _mm256_set1_epi32(word_at(from)); }

// The codes of eight outputs as bytes, which begin at `values`.
template <Groups KIND> void unpack_eight(const uint8_t* values, __m256i* lines) {
    constexpr int BITS = shape_of(KIND).bits;
    if constexpr (BITS == 8) {
        for (int j = 0; j < LINES; j++) lines[j] = load_bytes(values + 64 * j);
        return;
    }
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int j = 0; j < LINES / 2; j++) {
        const __m256i both = load_bytes(values + 64 * j);
        lines[j] = _mm256_and_si256(both, nibble);
        lines[LINES / 2 + j] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    }
    if constexpr (BITS > 4) {
        constexpr int STEP = BITS - 4;  // further bits of a code, which follow those of the line before in a word
        const __m256i mask = _mm256_set1_epi8(BITS == 5 ? 0x10 : 0x30);
        for (int j = 0; j < LINES; j++) {
            const int from = STEP * j % 8;
            const __m256i x = load_bytes(values + Encoding<KIND>::EXTRA + 64 * (STEP * j / 8));
            const __m256i moved = from < 4 ? _mm256_slli_epi32(x, 4 - from) : _mm256_srli_epi32(x, from - 4);
            lines[j] = _mm256_or_si256(lines[j], _mm256_and_si256(moved, mask));
        }
    }
}

// Products of codes with values on their way to the sums of eight outputs: with AVX-VNNI the sums themselves, otherwise sums of
// pairs in int16. Whole numbers, so both ways end in the same bits.
#if defined(__AVXVNNI__)
constexpr bool HAS_VNNI = true;
inline __m256i add_products(__m256i partial, __m256i codes, __m256i values) {
    return _mm256_dpbusd_avx_epi32(partial, codes, values);
}
#else
constexpr bool HAS_VNNI = false;
inline __m256i add_products(__m256i partial, __m256i codes, __m256i values) {
    return _mm256_add_epi16(partial, _mm256_maddubs_epi16(codes, values));
}
#endif

inline __m256i sums_of(__m256i partial) { return HAS_VNNI ? partial : _mm256_madd_epi16(partial, _mm256_set1_epi16(1)); }

// Lines, of COUNT, whose products may be added up before `sums_of`.
template <int BITS, int COUNT> constexpr int fitting() {
    return HAS_VNNI ? COUNT : std::min(COUNT, 32767 / (2 * 127 * ((1 << BITS) - 1)));
}

// Sums of eight outputs over COUNT lines: the products of the lines' codes with values.
template <int BITS, int COUNT> __m256i dot_eight(const __m256i* lines, const int8_t* values) {
    constexpr int FITTING = fitting<BITS, COUNT>();
    __m256i sums = _mm256_setzero_si256();
    for (int first = 0; first < COUNT; first += FITTING) {
        __m256i partial = _mm256_setzero_si256();
        for (int j = first; j < first + FITTING; j++) partial = add_products(partial, lines[j], four_values(values + 4 * j));
        sums = _mm256_add_epi32(sums, sums_of(partial));
    }
    return sums;
}

// The lines of eight outputs as the products take them: codes, or without AVX-VNNI the values of 8 bits (their codes less 128) and
// their magnitudes, because pairs of products of such codes do not fit in int16.
template <Groups KIND> struct Lines {
    static constexpr bool HAS_VALUES = shape_of(KIND).bits == 8 && !HAS_VNNI;
    __m256i codes[LINES], magnitudes[HAS_VALUES ? LINES : 1];

    explicit Lines(const uint8_t* values) {
        unpack_eight<KIND>(values, codes);
        if constexpr (HAS_VALUES)
            for (int j = 0; j < LINES; j++) {
                codes[j] = _mm256_xor_si256(codes[j], _mm256_set1_epi8(-128));
                magnitudes[j] = _mm256_abs_epi8(codes[j]);  // at most 128
            }
    }

    // Sums of eight outputs over COUNT lines from line `from` on: the products with a row's values.
    template <int COUNT> INLINED __m256i dot(int from, const int8_t* values) const {
        if constexpr (!HAS_VALUES) return dot_eight<shape_of(KIND).bits, COUNT>(codes + from, values + 4 * from);
        __m256i sums = _mm256_setzero_si256();
        for (int j = from; j < from + COUNT; j++) {
            const __m256i signed_values = _mm256_sign_epi8(four_values(values + 4 * j), codes[j]);
            const __m256i pairs = _mm256_maddubs_epi16(magnitudes[HAS_VALUES ? j : 0], signed_values);  // fit in int16
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        return sums;
    }
};

// What follows the sums of a group, for eight outputs.
struct EightFactors {
    __m256i zeros;
    __m256 scale, second, least;
};

//   first  of the tile's outputs
template <Groups KIND> EightFactors eight_factors(const uint8_t* tile, long g, int first) {
    using E = Encoding<KIND>;
    const uint8_t* group = tile + E::group(g);
    EightFactors found = {};
    auto whole = [&](int at) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(group + at + first)); };
    auto halves = [&](const uint8_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * first)));
    };
    if constexpr (E::SHAPE.has_zero) found.zeros = _mm256_cvtepu8_epi32(whole(E::MIDDLE));
    if constexpr (E::SHAPE.common) {
        auto numbers = [&](int at) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(whole(at))); };
        const uint8_t* common = tile + E::common(g);
        const __m256 scale = halves(common);
        found.scale = _mm256_mul_ps(numbers(0), scale);  // products of 8 and 11 bits: exact
        if constexpr (E::SHAPE.halves) found.second = _mm256_mul_ps(numbers(E::SECOND), scale);
        if constexpr (E::SHAPE.has_least) found.least = _mm256_mul_ps(numbers(E::MIDDLE), halves(common + COLUMNS * 2));
    } else {
        found.scale = halves(group);
        if constexpr (E::SHAPE.halves) found.second = halves(group + E::SECOND);
        if constexpr (E::SHAPE.has_least) found.least = halves(group + E::MIDDLE);
    }
    return found;
}

// What a row brings to a group, read once for all outputs.
template <Groups KIND> struct RowGroup {
    static constexpr GroupShape SHAPE = shape_of(KIND);
    static constexpr int OFFSET = SHAPE.bits < 8 ? SHAPE.offset : HAS_VNNI ? 128 : 0;  // of codes from values

    const int8_t* values;
    __m256 step, of_least;  // the step, and the step times the sum of the values
    __m256i minus_sum;      // the sum, negated, in the lower half of each lane; where weights have zero points
    __m256i too_much[2];    // the offset times the sum of the group, or of each half

    RowGroup() = default;
    RowGroup(const Quantised& x, long at)
        : values(x.values + at * GROUP), step(_mm256_set1_ps(x.steps[at])), of_least(_mm256_set1_ps(x.totals[at])) {
        const int32_t *halves = x.sums + 2 * at, sum = halves[0] + halves[1];
        if constexpr (SHAPE.has_zero) minus_sum = _mm256_set1_epi32(-sum & 0xffff);
        if constexpr (OFFSET) too_much[0] = _mm256_set1_epi32(OFFSET * (SHAPE.halves ? halves[0] : sum));
        if constexpr (OFFSET && SHAPE.halves) too_much[1] = _mm256_set1_epi32(OFFSET * halves[1]);
    }
};

// Add a group of eight outputs to their totals, for one row.
//   whole, second  sums of the products with the group's codes; where halves have their own scales, those of each half
template <Groups KIND>
INLINED __m256 add_sums(__m256 total, __m256i whole, __m256i second, const EightFactors& by, const RowGroup<KIND>& row) {
    constexpr GroupShape SHAPE = shape_of(KIND);
    auto add = [&](__m256i product, __m256 scale, int half) {
        if constexpr (RowGroup<KIND>::OFFSET) product = _mm256_sub_epi32(product, row.too_much[half]);
        if constexpr (SHAPE.has_zero)  // zero points and sums of values fit in 16 bits
            product = _mm256_add_epi32(product, _mm256_madd_epi16(by.zeros, row.minus_sum));
        total = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(product), row.step), scale, total);
    };
    add(whole, by.scale, 0);
    if constexpr (SHAPE.halves) add(second, by.second, 1);
    if constexpr (SHAPE.has_least) total = _mm256_fmadd_ps(row.of_least, by.least, total);
    return total;
}

// The same for one row and the group's lines.
template <Groups KIND>
INLINED __m256 add_eight(__m256 total, const Lines<KIND>& lines, const EightFactors& by, const RowGroup<KIND>& row) {
    constexpr bool HALVES = shape_of(KIND).halves;
    constexpr int COUNT = HALVES ? LINES / 2 : LINES;
    const __m256i second = HALVES ? lines.template dot<COUNT>(LINES - COUNT, row.values) : __m256i{};
    return add_sums<KIND>(total, lines.template dot<COUNT>(0, row.values), second, by, row);
}

constexpr int EIGHTS = COLUMNS / 8;

// Fetch the share of a group that belongs to `part` of PARTS, PREFETCH_DISTANCE ahead.
template <Groups KIND, int PARTS> INLINED void fetch_part(const uint8_t* group, int part) {
    constexpr int SHARE = (Encoding<KIND>::LINES + PARTS - 1) / PARTS;  // lines
    prefetch(group + part * SHARE * 64, SHARE * 64);
}

// The group of so many rows from row `row` on.
template <Groups KIND, size_t... R>
INLINED std::array<RowGroup<KIND>, sizeof...(R)> row_groups(const Quantised& x, long row, long g, std::index_sequence<R...>) {
    return {RowGroup<KIND>(x, (row + static_cast<long>(R)) * x.groups + g)...};
}

// One group of nibbles of a tile, added to the sums of COUNT rows. Some outputs take each of a row's values together: read and
// broadcast for eight outputs alone, they would cost more than the products. So many that the sums stay in registers.
template <Groups KIND, int COUNT>
INLINED void add_nibbles(const uint8_t* tile, long g, const std::array<RowGroup<KIND>, COUNT>& rows, float (*sums)[COLUMNS]) {
    using E = Encoding<KIND>;
    constexpr int SOME = EIGHTS / (COUNT > 2 ? 4 : 2);
    const uint8_t* group = tile + E::group(g);
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int first = 0; first < EIGHTS; first += SOME) {
        const uint8_t* from = group + E::VALUES + first / 2 * E::OF_VECTOR;
        __m256i partial[COUNT][SOME] = {};  // at most 8 * 2 * 15 * 127, which fits in int16
        fetch_part<KIND, EIGHTS / SOME>(group, first / SOME);
        UNROLLED for (int j = 0; j < LINES / 2; j++)
            UNROLLED for (int i = 0; i < SOME; i++) {
                const __m256i both = load_bytes(from + i / 2 * E::OF_VECTOR + i % 2 * 32 + 64 * j);
                const __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
                UNROLLED for (int r = 0; r < COUNT; r++) {
                    const int8_t* values = rows[r].values + 4 * j;
                    partial[r][i] = add_products(partial[r][i], low, four_values(values));
                    partial[r][i] = add_products(partial[r][i], high, four_values(values + GROUP / 2));
                    asm("" : "+x"(partial[r][i]));  // GCC would add in another order, for which there are too few registers
                }
            }
        UNROLLED for (int i = 0; i < SOME; i++) {
            const EightFactors by = eight_factors<KIND>(tile, g, 8 * (first + i));
            UNROLLED for (int r = 0; r < COUNT; r++) {
                float* total = sums[r] + 8 * (first + i);
                _mm256_storeu_ps(total, add_sums<KIND>(_mm256_loadu_ps(total), sums_of(partial[r][i]), __m256i{}, by, rows[r]));
            }
        }
    }
}

// The same for codes of more bits and any number of rows, for each of which eight outputs at a time are unpacked once.
template <Groups KIND>
INLINED void add_codes(const uint8_t* tile, long g, const RowGroup<KIND>* rows, long count, float (*sums)[COLUMNS]) {
    using E = Encoding<KIND>;
    const uint8_t* group = tile + E::group(g);
    for (int i = 0; i < EIGHTS; i++) {
        fetch_part<KIND, EIGHTS>(group, i);
        const Lines<KIND> lines(group + E::VALUES + i / 2 * E::OF_VECTOR + i % 2 * 32);
        const EightFactors by = eight_factors<KIND>(tile, g, 8 * i);
        for (long r = 0; r < count; r++) {
            float* total = sums[r] + 8 * i;
            _mm256_storeu_ps(total, add_eight<KIND>(_mm256_loadu_ps(total), lines, by, rows[r]));
        }
    }
}

// Groups [from, to) of one tile, added to the sums of COUNT rows.
template <Groups KIND, int COUNT>
void add_groups(const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    for (long g = from; g < to; g++) {
        const auto rows = row_groups<KIND>(x, row, g, std::make_index_sequence<COUNT>());
        if constexpr (shape_of(KIND).bits == 4) add_nibbles<KIND, COUNT>(tile, g, rows, sums);
        else add_codes<KIND>(tile, g, rows.data(), COUNT, sums);
    }
}

// Rows that a group of more than four bits is unpacked for. Nibbles are unpacked as fast as they are read.
constexpr long MOST_TOGETHER = 16;

template <Groups KIND>
void add_groups_together(long rows, const uint8_t* tile, long from, long to, const Quantised& x, long row,
                         float (*sums)[COLUMNS]) {
    RowGroup<KIND> own[MOST_TOGETHER];
    for (long g = from; g < to; g++) {
        for (long r = 0; r < rows; r++) own[r] = RowGroup<KIND>(x, (row + r) * x.groups + g);
        add_codes<KIND>(tile, g, own, rows, sums);
    }
}

}  // namespace
#endif
