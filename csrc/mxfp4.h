// Weights in MXFP4 as words: numbers of 4 bits (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) times a power of two for
// each group of 32 inputs. Float and bfloat16 hold these products exactly, so the bits of a product are those of a weight
// that was converted before. longdraft/kernels/formats/mxfp4.py has the numbers.
//
// A tile of 64 outputs holds, for each group of 32 inputs:
//
//   [64] exponents, uint8: the power is 2^(exponent - 127)
//   [16 pairs of inputs][64] bytes: the first input of a pair in the low four bits, the second in the high ones
#pragma once

#include "layout.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>

namespace longdraft::LONGDRAFT_VARIANT::mxfp4 {

// Twice the numbers.
alignas(16) constexpr int8_t TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The numbers of 16 codes, times powers of two: those of twice the numbers.
inline Floats numbers(const uint8_t* codes, bool high, Floats powers) {
    int8_t whole[LANES];
#if defined(__AVX2__)
    __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    code = _mm_and_si128(high ? _mm_srli_epi16(code, 4) : code, _mm_set1_epi8(15));
    const __m128i found = _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(TWICE)), code);
    std::memcpy(whole, &found, sizeof found);
#elif defined(__ARM_NEON)
    const uint8x16_t both = vld1q_u8(codes), code = high ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    vst1q_s8(whole, vqtbl1q_s8(vld1q_s8(TWICE), code));
#else
    for (int i = 0; i < LANES; i++) whole[i] = TWICE[high ? codes[i] >> 4 : codes[i] & 15];
#endif
    return from_int8(whole) * powers;
}

// The words of steps [step, step + count) of one group.
template <class T> void unpack_in_group(const uint8_t* group, long step, long count, uint32_t* words) {
    for (long v = 0; v < COLUMNS; v += LANES) {
        const Floats powers = as<Floats>((convert<Ints>(load_as<UnsignedBytes>(group + v)) - 1) << 23);  // 2^(exponent - 128)
        for (long s = 0; s < count; s++) {
            Words made;
            if constexpr (T::PER_WORD == 1) {
                made = as<Words>(numbers(group + (1 + (step + s) / 2) * COLUMNS + v, (step + s) % 2, powers));
            } else {
                const uint8_t* codes = group + (1 + step + s) * COLUMNS + v;
                made = as<Words>(numbers(codes, false, powers)) >> 16 | (as<Words>(numbers(codes, true, powers)) & 0xffff0000u);
            }
            store_as(words + s * COLUMNS + v, made);
        }
    }
}

#if defined(__AVX512BW__)
// The same for bfloat16: a table of the 16 numbers, whose exponent bits the group's exponent is added to.
template <> inline void unpack_in_group<BF16>(const uint8_t* group, long step, long count, uint32_t* words) {
    alignas(64) static constexpr uint16_t NUMBERS[32] = {
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    const __m512i table = _mm512_load_si512(NUMBERS);
    const __m512i low_bits = _mm512_set1_epi32(0x000f000f), magnitude = _mm512_set1_epi16(7);
    for (long v = 0; v < COLUMNS; v += LANES) {
        auto bytes = [](const uint8_t* at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); };
        __m512i powers = _mm512_slli_epi32(_mm512_sub_epi32(bytes(group + v), _mm512_set1_epi32(127)), 7);
        powers = _mm512_or_si512(_mm512_and_si512(powers, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(powers, 16));
        for (long s = 0; s < count; s++) {
            const __m512i both = bytes(group + (1 + step + s) * COLUMNS + v);
            const __m512i codes = _mm512_and_si512(_mm512_or_si512(both, _mm512_slli_epi32(both, 12)), low_bits);
            const __m512i found = _mm512_permutexvar_epi16(codes, table);
            const __m512i made = _mm512_mask_add_epi16(found, _mm512_test_epi16_mask(codes, magnitude), found, powers);
            _mm512_storeu_si512(words + s * COLUMNS + v, made);
        }
    }
}
#elif defined(__ARM_NEON)
// The same for bfloat16: tables of the two bytes of the 16 numbers, whose exponent bits the group's exponent is added to.
template <> inline void unpack_in_group<BF16>(const uint8_t* group, long step, long count, uint32_t* words) {
    alignas(16) static constexpr uint8_t LOW[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    alignas(16) static constexpr uint8_t HIGH[16] = {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                                     0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    const uint8x16_t low = vld1q_u8(LOW), high = vld1q_u8(HIGH);
    for (long v = 0; v < COLUMNS; v += LANES) {
        const uint8x16_t exponents = vld1q_u8(group + v);
        auto power = [](uint8x8_t exponent) { return vshlq_n_u16(vsubq_u16(vmovl_u8(exponent), vdupq_n_u16(127)), 7); };
        const uint16x8_t powers[2] = {power(vget_low_u8(exponents)), power(vget_high_u8(exponents))};
        auto numbers = [&](uint8x16_t codes, uint16x8_t* to) {
            const uint8x16_t lower = vqtbl1q_u8(low, codes), upper = vqtbl1q_u8(high, codes);
            const uint8x16_t bytes[2] = {vzip1q_u8(lower, upper), vzip2q_u8(lower, upper)};
            UNROLLED for (int i = 0; i < 2; i++) {
                const uint16x8_t found = vreinterpretq_u16_u8(bytes[i]);
                to[i] = vaddq_u16(found, vandq_u16(powers[i], vtstq_u16(found, vdupq_n_u16(0x7fff))));  // of 0, nothing
            }
        };
        for (long s = 0; s < count; s++) {
            const uint8x16_t both = vld1q_u8(group + (1 + step + s) * COLUMNS + v);
            uint16x8_t first[2], second[2];
            numbers(vandq_u8(both, vdupq_n_u8(15)), first);
            numbers(vshrq_n_u8(both, 4), second);
            auto* to = reinterpret_cast<uint16_t*>(words + s * COLUMNS + v);
            UNROLLED for (int i = 0; i < 2; i++) {
                vst1q_u16(to + 16 * i, vzip1q_u16(first[i], second[i]));
                vst1q_u16(to + 16 * i + 8, vzip2q_u16(first[i], second[i]));
            }
        }
    }
}
#endif

// The steps of a tile, as `Int8Codes` in multiply.h.
template <class T> struct Codes {
    static constexpr long CHUNK = MXFP4_GROUP / T::PER_WORD;  // steps of a group
    const uint8_t* tile;

    void unpack(long step, long count, uint32_t* words) const {
        for (long end = step + count, some; step < end; step += some, words += some * COLUMNS) {
            some = std::min(end - step, CHUNK - step % CHUNK);
            unpack_in_group<T>(tile + step / CHUNK * MXFP4_GROUP_BYTES, step % CHUNK, some, words);
        }
    }
    template <long DISTANCE> INLINED void fetch(long step, long count) const {
        prefetch<DISTANCE>(tile + step / CHUNK * MXFP4_GROUP_BYTES + (1 + step % CHUNK * T::PER_WORD / 2) * COLUMNS,
                           std::max<long>(64, count * COLUMNS * T::PER_WORD / 2));
    }
};

// Codes [n, k / 2], of inputs 2 i in the low and 2 i + 1 in the high four bits, and exponents [n, k / 32], into tiles.
inline void pack(Linear& w, const uint8_t* codes, const uint8_t* exponents) {
    const long groups = w.k / MXFP4_GROUP;
    parallel(w.tiles(), [&](long tile) {
        for (long n = tile * COLUMNS; n < std::min(w.n, (tile + 1) * COLUMNS); n++)
            for (long g = 0; g < groups; g++) {
                uint8_t* group = w.tile<uint8_t>(tile) + g * MXFP4_GROUP_BYTES + n % COLUMNS;
                group[0] = exponents[n * groups + g];
                for (long i = 0; i < MXFP4_GROUP / 2; i++)
                    group[(1 + i) * COLUMNS] = codes[(n * groups + g) * (MXFP4_GROUP / 2) + i];
            }
    });
}

}  // namespace
