// Rows times weights in groups with ARM's dot products: what groups.h does, for four outputs at a time, because a register has
// 16 bytes. A group's sum is an integer, so that SDOT, SMMLA and ordinary operations give the same one.
#pragma once

#include "encoding.h"
#include "quantised_rows.h"
#include "simd.h"

#include <algorithm>
#include <type_traits>

#if defined(__ARM_FEATURE_DOTPROD)
namespace longdraft::LONGDRAFT_VARIANT::groups {

constexpr int LINES = GROUP / 4;      // of a group: line j has the inputs 4 j to 4 j + 3
constexpr int QUADS = COLUMNS / 4;    // of a tile's outputs
constexpr int IN_VECTOR = LANES / 4;  // quads whose bytes are in one line of 64 bytes

// Call f(std::integral_constant) for 0 .. COUNT - 1: the number of a register's lane must be a constant.
template <int COUNT, class F> INLINED void each(F f) {
    if constexpr (COUNT > 1) each<COUNT - 1>(f);
    f(std::integral_constant<int, COUNT - 1>{});
}

// Four numbers of one byte, and of float16.
INLINED int8x8_t load_four(const void* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return vreinterpret_s8_u32(vdup_n_u32(word));
}
INLINED int32x4_t whole_numbers(const void* from) { return vmovl_s16(vget_low_s16(vmovl_s8(load_four(from)))); }
INLINED float32x4_t half_numbers(const void* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const uint16_t*>(from))));
}

// The codes of four outputs as bytes, which begin at `values`; of bytes, the weight's values, which are 128 less.
template <Groups KIND> INLINED void unpack_four(const uint8_t* values, int8x16_t* lines) {
    constexpr int BITS = shape_of(KIND).bits;
    if constexpr (BITS == 8) {
        UNROLLED for (int j = 0; j < LINES; j++)
            lines[j] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(values + 64 * j), vdupq_n_u8(0x80)));
        return;
    }
    uint8x16_t codes[LINES];
    UNROLLED for (int j = 0; j < LINES / 2; j++) {
        const uint8x16_t both = vld1q_u8(values + 64 * j);
        codes[j] = vandq_u8(both, vdupq_n_u8(15));
        codes[LINES / 2 + j] = vshrq_n_u8(both, 4);
    }
    if constexpr (BITS > 4) {
        constexpr int STEP = BITS - 4;  // further bits of a code, which follow those of the line before in a byte
        const uint8x16_t mask = vdupq_n_u8(BITS == 5 ? 0x10 : 0x30);
        UNROLLED for (int j = 0; j < LINES; j++) {
            const uint8x16_t further = vld1q_u8(values + Encoding<KIND>::EXTRA + 64 * (STEP * j / 8));
            const int at = STEP * j % 8;
            codes[j] = vorrq_u8(codes[j], vandq_u8(at < 4 ? further << (4 - at) : further >> (at - 4), mask));
        }
    }
    UNROLLED for (int j = 0; j < LINES; j++) lines[j] = vreinterpretq_s8_u8(codes[j]);
}

template <Groups KIND> INLINED const uint8_t* values_of(const uint8_t* group, int quad) {
    using E = Encoding<KIND>;
    return group + E::VALUES + quad / IN_VECTOR * E::OF_VECTOR + quad % IN_VECTOR * 16;
}

// What follows the sums of a group, for four outputs.
struct FourFactors { float32x4_t scale, second, least; };

template <Groups KIND> INLINED FourFactors four_factors(const uint8_t* group, const uint8_t* common, int quad) {
    using E = Encoding<KIND>;
    FourFactors by = {};
    if constexpr (E::SHAPE.common) {
        auto numbers = [&](int at) { return vcvtq_f32_s32(whole_numbers(group + at + 4 * quad)); };
        const float32x4_t scale = half_numbers(common + 8 * quad);
        by.scale = vmulq_f32(numbers(0), scale);  // products of 8 and 11 bits: exact
        if constexpr (E::SHAPE.halves) by.second = vmulq_f32(numbers(E::SECOND), scale);
        if constexpr (E::SHAPE.has_least) by.least = vmulq_f32(numbers(E::MIDDLE), half_numbers(common + COLUMNS * 2 + 8 * quad));
    } else {
        by.scale = half_numbers(group + 8 * quad);
        if constexpr (E::SHAPE.halves) by.second = half_numbers(group + E::SECOND + 8 * quad);
        if constexpr (E::SHAPE.has_least) by.least = half_numbers(group + E::MIDDLE + 8 * quad);
    }
    return by;
}

// start plus the products of COUNT lines, from line FROM on, with a row's 16 values for each four of them.
template <int FROM, int COUNT> INLINED int32x4_t dot_four(int32x4_t start, const int8x16_t* lines, const int8x16_t* values) {
    each<COUNT>([&](auto i) { start = vdotq_laneq_s32(start, lines[FROM + i], values[(FROM + i) / 4], (FROM + i) % 4); });
    return start;
}

// Groups [from, to) of one tile, added to the sums of COUNT rows (up to 4), by SDOT: a line of the layout is its operand as it is.
// Numbers of the rows are lanes of registers.
template <Groups KIND, int COUNT>
void add_groups(const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    using E = Encoding<KIND>;
    constexpr GroupShape SHAPE = E::SHAPE;
    constexpr int OFFSET = SHAPE.bits == 8 ? 0 : SHAPE.offset;
    for (long g = from; g < to; g++) {
        const uint8_t *group = tile + E::group(g), *common = tile + E::common(g);
        int8x16_t values[COUNT][2];
        float steps_of[4] = {}, leasts_of[4] = {};
        int32_t minus_of[4] = {}, first_of[4] = {}, second_of[4] = {};  // what is subtracted: for zero points, and for offsets
        UNROLLED for (int r = 0; r < COUNT; r++) {
            const long at = (row + r) * x.groups + g;
            const int32_t *halves = x.sums + 2 * at, sum = halves[0] + halves[1];
            values[r][0] = vld1q_s8(x.values + at * GROUP), values[r][1] = vld1q_s8(x.values + at * GROUP + 16);
            steps_of[r] = x.steps[at], leasts_of[r] = x.totals[at], minus_of[r] = -sum;
            first_of[r] = -OFFSET * (SHAPE.halves ? halves[0] : sum), second_of[r] = -OFFSET * halves[1];
        }
        float32x4_t steps = vld1q_f32(steps_of), leasts = vld1q_f32(leasts_of);
        int32x4_t minus = vld1q_s32(minus_of), first = vld1q_s32(first_of), second = vld1q_s32(second_of);
        for (int vector = 0; vector < QUADS / IN_VECTOR; vector++) {
            // Clang would copy every four values to a register of their own before the loop, of which there are too few.
            UNROLLED for (int r = 0; r < COUNT; r++) asm("" : "+w"(values[r][0]), "+w"(values[r][1]));
            asm("" : "+w"(steps), "+w"(leasts), "+w"(minus), "+w"(first), "+w"(second));
            UNROLLED for (int i = 0; i < IN_VECTOR; i++) {
                const int quad = vector * IN_VECTOR + i;
                int8x16_t lines[LINES];
                unpack_four<KIND>(values_of<KIND>(group, quad), lines);
                const FourFactors by = four_factors<KIND>(group, common, quad);
                [[maybe_unused]] int32x4_t zeros;
                if constexpr (SHAPE.has_zero) zeros = whole_numbers(group + E::MIDDLE + 4 * quad);
                each<COUNT>([&](auto r) {
                    float* at = sums[r] + 4 * quad;
                    float32x4_t total = vld1q_f32(at);
                    auto add = [&](int32x4_t product, float32x4_t scale) {
                        total = vfmaq_f32(total, vmulq_laneq_f32(vcvtq_f32_s32(product), steps, r), scale);
                    };
                    int32x4_t start = vdupq_n_s32(0);
                    if constexpr (SHAPE.has_zero) start = vmulq_laneq_s32(zeros, minus, r);
                    if constexpr (OFFSET != 0) start = vdupq_laneq_s32(first, r);
                    if constexpr (SHAPE.halves) {
                        add(dot_four<0, LINES / 2>(start, lines, values[r]), by.scale);
                        if constexpr (OFFSET != 0) start = vdupq_laneq_s32(second, r);
                        add(dot_four<LINES / 2, LINES / 2>(start, lines, values[r]), by.second);
                    } else {
                        add(dot_four<0, LINES>(start, lines, values[r]), by.scale);
                    }
                    if constexpr (SHAPE.has_least) total = vfmaq_laneq_f32(total, by.least, leasts, r);
                    vst1q_f32(at, total);
                });
            }
        }
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr long LEAST_TOGETHER = 5;  // rows: with fewer, moving bytes into place costs more than SMMLA saves
constexpr long MOST_TOGETHER = 16;

// The numbers of the first two outputs of four twice, and those of the last two: for two rows each.
struct Doubled {
    float32x4_t of[2];
    explicit Doubled(float32x4_t x)
        : of{vreinterpretq_f32_f64(vdupq_laneq_f64(vreinterpretq_f64_f32(x), 0)),
             vreinterpretq_f32_f64(vdupq_laneq_f64(vreinterpretq_f64_f32(x), 1))} {}
};

// The lower, and the upper, two numbers of both.
INLINED float32x4_t lower_two(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
INLINED float32x4_t upper_two(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

// The same for up to 16 rows, in pairs, by SMMLA. Codes are made the weight's values first, once for all rows. Registers hold two
// outputs of two rows; the last row of an odd number is its own partner.
template <Groups KIND>
void add_groups_together(long rows, const uint8_t* tile, long from, long to, const Quantised& x, long row, float (*sums)[COLUMNS]) {
    using E = Encoding<KIND>;
    constexpr GroupShape SHAPE = E::SHAPE;
    constexpr int OFFSET = SHAPE.bits == 8 ? 0 : SHAPE.offset, EIGHTS = LINES / 2;  // of a group's inputs
    constexpr long PAIRS = MOST_TOGETHER / 2;
    const long pairs = (rows + 1) / 2;
    auto second = [&](long pair) { return std::min(2 * pair + 1, rows - 1); };
    float32x4_t totals[QUADS][PAIRS][2];
    for (int q = 0; q < QUADS; q++)
        for (long p = 0; p < pairs; p++) {
            const float32x4_t a = vld1q_f32(sums[2 * p] + 4 * q), b = vld1q_f32(sums[second(p)] + 4 * q);
            totals[q][p][0] = lower_two(a, b), totals[q][p][1] = upper_two(a, b);
        }
    for (long g = from; g < to; g++) {
        const uint8_t *group = tile + E::group(g), *common = tile + E::common(g);
        int8x16_t values[PAIRS][EIGHTS];  // eight of each row of a pair
        float32x4_t steps[PAIRS], leasts[PAIRS];
        for (long p = 0; p < pairs; p++) {
            const long a = (row + 2 * p) * x.groups + g, b = (row + second(p)) * x.groups + g;
            UNROLLED for (int i = 0; i < EIGHTS; i++)
                values[p][i] = vcombine_s8(vld1_s8(x.values + a * GROUP + 8 * i), vld1_s8(x.values + b * GROUP + 8 * i));
            auto of_both = [](float first, float last) { return vcombine_f32(vdup_n_f32(first), vdup_n_f32(last)); };
            steps[p] = of_both(x.steps[a], x.steps[b]);
            if constexpr (SHAPE.has_least) leasts[p] = of_both(x.totals[a], x.totals[b]);
        }
        for (int quad = 0; quad < QUADS; quad++) {
            int8x16_t lines[LINES], columns[EIGHTS][2];  // eight inputs of the first two outputs, and of the last two
            unpack_four<KIND>(values_of<KIND>(group, quad), lines);
            if constexpr (SHAPE.has_zero) {
                const int8x8_t once = load_four(group + E::MIDDLE + 4 * quad), twice = vzip1_s8(once, once);
                const int8x16_t zeros = vcombine_s8(vzip1_s8(twice, twice), vzip2_s8(twice, twice));
                UNROLLED for (int j = 0; j < LINES; j++) lines[j] = vsubq_s8(lines[j], zeros);
            }
            if constexpr (OFFSET != 0)
                UNROLLED for (int j = 0; j < LINES; j++) lines[j] = vsubq_s8(lines[j], vdupq_n_s8(OFFSET));
            UNROLLED for (int i = 0; i < EIGHTS; i++) {
                const int32x4_t a = vreinterpretq_s32_s8(lines[2 * i]), b = vreinterpretq_s32_s8(lines[2 * i + 1]);
                columns[i][0] = vreinterpretq_s8_s32(vzip1q_s32(a, b)), columns[i][1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
            }
            const FourFactors by = four_factors<KIND>(group, common, quad);
            const Doubled scale(by.scale), later(by.second), least(by.least);
            for (long p = 0; p < pairs; p++)
                UNROLLED for (int i = 0; i < 2; i++) {
                    float32x4_t& total = totals[quad][p][i];
                    int32x4_t sum = vmmlaq_s32(vdupq_n_s32(0), values[p][0], columns[0][i]);
                    sum = vmmlaq_s32(sum, values[p][1], columns[1][i]);
                    auto add = [&](float32x4_t factor) { total = vfmaq_f32(total, vmulq_f32(vcvtq_f32_s32(sum), steps[p]), factor); };
                    if constexpr (SHAPE.halves) {
                        add(scale.of[i]);
                        sum = vdupq_n_s32(0);
                    }
                    sum = vmmlaq_s32(sum, values[p][2], columns[2][i]);
                    sum = vmmlaq_s32(sum, values[p][3], columns[3][i]);
                    add(SHAPE.halves ? later.of[i] : scale.of[i]);
                    if constexpr (SHAPE.has_least) total = vfmaq_f32(total, leasts[p], least.of[i]);
                }
        }
    }
    for (int q = 0; q < QUADS; q++)
        for (long p = 0; p < pairs; p++) {
            vst1q_f32(sums[2 * p] + 4 * q, lower_two(totals[q][p][0], totals[q][p][1]));
            if (2 * p + 1 < rows) vst1q_f32(sums[2 * p + 1] + 4 * q, upper_two(totals[q][p][0], totals[q][p][1]));
        }
}
#endif

}  // namespace
#endif
