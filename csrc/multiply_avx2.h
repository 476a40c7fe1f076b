// Rows times some steps of a tile with sixteen registers of 32 bytes: one vector of columns after another, so that the sums
// stay in registers.
#pragma once

#include "layout.h"
#include "simd.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
namespace longdraft::LONGDRAFT_VARIANT {

constexpr uint32_t UPPER_HALF = 0xffff0000u;  // of a word with two bfloat16

// The weights of eight words as floats: for each element of a word a vector.
template <class T> void widen_words(const uint32_t* words, __m256* parts) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    parts[0] = _mm256_castsi256_ps(T::PER_WORD == 1 ? w : _mm256_slli_epi32(w, 16));
    if constexpr (T::PER_WORD == 2)
        parts[1] = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(UPPER_HALF))));
}

// The same of int8, whose first elements of 16 words precede their second ones.
template <class T> void widen_bytes(const int8_t* bytes, __m256* parts) {
    for (int i = 0; i < T::PER_WORD; i++)
        parts[i] = _mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + i * LANES))));
}

// Add steps [first, last), at most MOST, to the sums of ROWS rows. `widen(step, vector, half, parts)` gives the weights.
template <class T, int ROWS, long MOST, class Widen>
void add_in_turn(const uint32_t* x, long stride, long first, long last, float (*sums)[COLUMNS], Widen widen) {
    constexpr int PARTS = T::PER_WORD;
    alignas(32) float numbers[PARTS][ROWS][MOST];  // of x
    for (int r = 0; r < ROWS; r++)
        for (long s = first; s < last; s++) {
            const uint32_t word = x[r * stride + s];
            numbers[0][r][s - first] = as_float(PARTS == 1 ? word : word << 16);
            if constexpr (PARTS == 2) numbers[1][r][s - first] = as_float(word & UPPER_HALF);
        }
    for (int v = 0; v < COLUMNS / LANES; v++) {
        __m256 held[ROWS][2];
        for (int r = 0; r < ROWS; r++)
            for (int half = 0; half < 2; half++) held[r][half] = _mm256_loadu_ps(sums[r] + v * LANES + 8 * half);
        for (long s = first; s < last; s++) {
            __m256 parts[2][PARTS];
            for (int half = 0; half < 2; half++) widen(s, v, half, parts[half]);
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < PARTS; i++) {
                    const __m256 number = _mm256_broadcast_ss(&numbers[i][r][s - first]);
                    for (int half = 0; half < 2; half++) held[r][half] = _mm256_fmadd_ps(parts[half][i], number, held[r][half]);
                }
        }
        for (int r = 0; r < ROWS; r++)
            for (int half = 0; half < 2; half++) _mm256_storeu_ps(sums[r] + v * LANES + 8 * half, held[r][half]);
    }
}

}  // namespace
#endif
