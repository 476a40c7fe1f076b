// Sums of products of bfloat16 words with ARM's vector instructions: the inner loop of linear layers, scores and weighted values.
//
//     sums[row][column] += for each step in order: x[row][step] . w[step][column]       (both bfloat16 of a word, the low one first)
//
// A row's sum is a chain over the steps that depends on no other row or column, nor on where the steps are cut. So rows may meet
// different instructions:
//
//   with BF16  BFDOT for a single row, BFMMLA for pairs: the architecture defines BFMMLA as two BFDOT in order, for each of two
//              rows by two columns. Sums are rounded to odd
//   otherwise  two fused operations: the bits of AVX2
#pragma once

#include "simd.h"

#include <algorithm>
#include <type_traits>

#if defined(__ARM_NEON)
namespace longdraft::LONGDRAFT_VARIANT::words_neon {

// Where the words of the right operand are: those of a step are side by side for 16 columns, and the next 16 columns are `jump`
// words further. The next step is `width` words further.
struct Steps {
    const uint32_t* words;
    long width, jump;
    Steps at_column(long column) const { return {words + column / LANES * jump + column % LANES, width, jump}; }
    const uint32_t* of_quad(long step, int quad) const { return words + step * width + quad / 4 * jump + quad % 4 * 4; }
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

INLINED bfloat16x8_t as_bf16(uint32x4_t x) { return vreinterpretq_bf16_u32(x); }
// The lower, and the upper, two words of both.
INLINED uint32x4_t lower_halves(uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_u64(vzip1q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
}
INLINED uint32x4_t upper_halves(uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_u64(vzip2q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
}

// One row by QUADS times four columns.
template <int QUADS> void add_row(const uint32_t* x, Steps w, long steps, float* sums) {
    float32x4_t held[QUADS];
    UNROLLED for (int q = 0; q < QUADS; q++) held[q] = vld1q_f32(sums + 4 * q);
    for (long s = 0; s < steps; s += 4) {
        const bfloat16x8_t by = as_bf16(vld1q_u32(x + s));
        UNROLLED for (int q = 0; q < QUADS; q++) held[q] = vbfdotq_laneq_f32(held[q], as_bf16(vld1q_u32(w.of_quad(s, q))), by, 0);
        UNROLLED for (int q = 0; q < QUADS; q++) held[q] = vbfdotq_laneq_f32(held[q], as_bf16(vld1q_u32(w.of_quad(s + 1, q))), by, 1);
        UNROLLED for (int q = 0; q < QUADS; q++) held[q] = vbfdotq_laneq_f32(held[q], as_bf16(vld1q_u32(w.of_quad(s + 2, q))), by, 2);
        UNROLLED for (int q = 0; q < QUADS; q++) held[q] = vbfdotq_laneq_f32(held[q], as_bf16(vld1q_u32(w.of_quad(s + 3, q))), by, 3);
    }
    UNROLLED for (int q = 0; q < QUADS; q++) vst1q_f32(sums + 4 * q, held[q]);
}

// ROWS rows by QUADS times four columns. A register holds the sums of two rows and two columns; two steps of four columns are
// interleaved where they are used. The last row of an odd number is its own partner.
template <int ROWS, int QUADS>
void add_rows(const uint32_t* x, long stride, Steps w, long steps, float* sums, long to) {
    if constexpr (ROWS == 1) return add_row<QUADS>(x, w, steps, sums);
    constexpr int PAIRS = (ROWS + 1) / 2;
    auto second = [](int pair) { return std::min(2 * pair + 1, ROWS - 1); };
    float32x4_t held[PAIRS][QUADS][2];
    UNROLLED for (int p = 0; p < PAIRS; p++)
        UNROLLED for (int q = 0; q < QUADS; q++) {
            const uint32x4_t a = vreinterpretq_u32_f32(vld1q_f32(sums + 2 * p * to + 4 * q));
            const uint32x4_t b = vreinterpretq_u32_f32(vld1q_f32(sums + second(p) * to + 4 * q));
            held[p][q][0] = vreinterpretq_f32_u32(lower_halves(a, b));
            held[p][q][1] = vreinterpretq_f32_u32(upper_halves(a, b));
        }
    for (long s = 0; s < steps; s += 4) {
        uint32x4_t by[PAIRS][2];
        UNROLLED for (int p = 0; p < PAIRS; p++) {
            const uint32x4_t a = vld1q_u32(x + 2 * p * stride + s), b = vld1q_u32(x + second(p) * stride + s);
            by[p][0] = lower_halves(a, b), by[p][1] = upper_halves(a, b);
        }
        UNROLLED for (int half = 0; half < 2; half++)
            UNROLLED for (int q = 0; q < QUADS; q++) {
                const uint32x4_t a = vld1q_u32(w.of_quad(s + 2 * half, q)), b = vld1q_u32(w.of_quad(s + 2 * half + 1, q));
                const bfloat16x8_t left = as_bf16(vzip1q_u32(a, b)), right = as_bf16(vzip2q_u32(a, b));
                UNROLLED for (int p = 0; p < PAIRS; p++) {
                    held[p][q][0] = vbfmmlaq_f32(held[p][q][0], as_bf16(by[p][half]), left);
                    held[p][q][1] = vbfmmlaq_f32(held[p][q][1], as_bf16(by[p][half]), right);
                }
            }
    }
    UNROLLED for (int p = 0; p < PAIRS; p++)
        UNROLLED for (int q = 0; q < QUADS; q++) {
            const uint32x4_t a = vreinterpretq_u32_f32(held[p][q][0]), b = vreinterpretq_u32_f32(held[p][q][1]);
            vst1q_f32(sums + 2 * p * to + 4 * q, vreinterpretq_f32_u32(lower_halves(a, b)));
            if (2 * p + 1 < ROWS) vst1q_f32(sums + (2 * p + 1) * to + 4 * q, vreinterpretq_f32_u32(upper_halves(a, b)));
        }
}

#else

// ROWS rows by QUADS times four columns. Words are widened to floats where they are used.
template <int ROWS, int QUADS>
void add_rows(const uint32_t* x, long stride, Steps w, long steps, float* sums, long to) {
    const uint16x8_t zero = vdupq_n_u16(0);
    auto low = [&](uint32x4_t words) { return vreinterpretq_f32_u16(vtrn1q_u16(zero, vreinterpretq_u16_u32(words))); };
    auto high = [&](uint32x4_t words) { return vreinterpretq_f32_u16(vtrn2q_u16(zero, vreinterpretq_u16_u32(words))); };
    float32x4_t held[ROWS][QUADS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int q = 0; q < QUADS; q++) held[r][q] = vld1q_f32(sums + r * to + 4 * q);
    for (long s = 0; s < steps; s += 2) {
        float32x4_t by[ROWS];  // both numbers of the first word, then of the second
        UNROLLED for (int r = 0; r < ROWS; r++)
            by[r] = vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u32(vld1_u32(x + r * stride + s)), 16));
        UNROLLED for (int q = 0; q < QUADS; q++) {
            const uint32x4_t words = vld1q_u32(w.of_quad(s, q));
            const float32x4_t first = low(words), second = high(words);
            UNROLLED for (int r = 0; r < ROWS; r++) held[r][q] = vfmaq_laneq_f32(held[r][q], first, by[r], 0);
            UNROLLED for (int r = 0; r < ROWS; r++) held[r][q] = vfmaq_laneq_f32(held[r][q], second, by[r], 1);
        }
        UNROLLED for (int q = 0; q < QUADS; q++) {
            const uint32x4_t words = vld1q_u32(w.of_quad(s + 1, q));
            const float32x4_t first = low(words), second = high(words);
            UNROLLED for (int r = 0; r < ROWS; r++) held[r][q] = vfmaq_laneq_f32(held[r][q], first, by[r], 2);
            UNROLLED for (int r = 0; r < ROWS; r++) held[r][q] = vfmaq_laneq_f32(held[r][q], second, by[r], 3);
        }
    }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int q = 0; q < QUADS; q++) vst1q_f32(sums + r * to + 4 * q, held[r][q]);
}

#endif

constexpr int PASS_ROWS = 8;  // rows that one reading of the words serves

// Times four columns that so many rows take together: up to 16 of the 32 registers hold sums.
constexpr int quads_of(int rows) { return rows == 1 ? 16 : rows == 2 ? 8 : rows <= 4 ? 4 : 2; }

template <int ROWS = PASS_ROWS>
void add_pass(long rows, const uint32_t* x, long stride, Steps w, long columns, long steps, float* sums, long to) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return add_pass<ROWS - 1>(rows, x, stride, w, columns, steps, sums, to);
    constexpr int QUADS = quads_of(ROWS), FEW = std::min(QUADS, 4);
    long c = 0;
    for (; c + 4 * QUADS <= columns; c += 4 * QUADS) add_rows<ROWS, QUADS>(x, stride, w.at_column(c), steps, sums + c, to);
    for (; c < columns; c += 4 * FEW) add_rows<ROWS, FEW>(x, stride, w.at_column(c), steps, sums + c, to);
}

// For any number of rows, each `stride` words after the one before, and its sums `to` floats after.
//   columns  a multiple of 16
//   steps    a multiple of 4
inline void add_products(long rows, const uint32_t* x, long stride, Steps w, long columns, long steps, float* sums, long to) {
    const long passes = (rows + PASS_ROWS - 1) / PASS_ROWS, some = (rows + passes - 1) / passes;
    for (long r = 0; r < rows; r += some)
        add_pass(std::min(some, rows - r), x + r * stride, stride, w, columns, steps, sums + r * to, to);
}

}  // namespace
#endif
