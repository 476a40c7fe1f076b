// How the groups of a weight lie in its tiles. groups.h multiplies with them, blocks.cpp writes them.
//
// A tile of 64 outputs holds for each group of 32 inputs some lines of 64 bytes that are read in order:
//
//   [64] scales: float16, or whole numbers of 8 bits that a common scale multiplies; where the halves of a group have
//        their own, those of the first 16 inputs, then those of the last 16
//   [64] zero points, uint8, or least values, float16 or whole numbers as the scales, or neither
//   [4 vectors of 16 outputs][4 lines]   byte 4 o + i of line j: input 4 j + i of output o in the low nibble,
//                                        input 16 + 4 j + i in the high one
//        [1 line]   5 bits: bit j of byte 4 o + i is the fifth bit of input 4 j + i
//        [2 lines]  6 bits: bits 2 j and 2 j + 1 of byte 4 o + i are the upper ones of input 4 j + i, those of inputs
//                   from 16 on in the second line
//        [8 lines]  8 bits, in place of the 4: byte 4 o + i of line j: input 4 j + i of output o
//
// Common scales, and with least values the common factors of these, [64] float16 each, precede every 8 groups.
#pragma once

#include "layout.h"

namespace longdraft {

inline float from_half(uint16_t h) {
    // Exponent and mantissa shifted into place. A subnormal number is its mantissa in units of 2^-24, whatever the thread
    // makes of subnormal floats.
    const uint32_t rest = (h & 0x7fffu) << 13, exponent = h & 0x7c00u;
    uint32_t bits = rest + (exponent == 0x7c00u ? 0x70000000u : 0x38000000u);
    if (exponent == 0) {
        const float small = static_cast<float>(h & 0x3ffu) * 0x1p-24f;
        std::memcpy(&bits, &small, 4);
    }
    bits |= (h & 0x8000u) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint16_t to_half(float x) {  // nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00u;
    if (bits >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above: infinity
    if (bits < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
        float small;
        std::memcpy(&small, &bits, 4);
        small += 0.5f;  // whose last place is 2^-24
        uint32_t whole;
        std::memcpy(&whole, &small, 4);
        return static_cast<uint16_t>(sign | (whole - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13));
}

// Where the parts of a group are, for one of the encodings of layout.h.
template <Groups KIND> struct Encoding {
    static constexpr GroupShape SHAPE = shape_of(KIND);
    static constexpr int SCALE = SHAPE.common ? 1 : 2;       // bytes of a scale and of a least value
    static constexpr int SECOND = COLUMNS * SCALE;           // the second scales, or what follows the first ones
    static constexpr int MIDDLE = SECOND * (SHAPE.halves ? 2 : 1);  // zero points or least values
    static constexpr int VALUES = SHAPE.bytes - COLUMNS * GROUP * SHAPE.bits / 8;
    static constexpr int LINES = SHAPE.bytes / 64, QUARTER = (LINES + 3) / 4;
    static constexpr int OF_VECTOR = 16 * GROUP * SHAPE.bits / 8;
    static constexpr int EXTRA = 256;                        // after the nibbles of a vector: further bits

    static long group(long g) { return g * SHAPE.bytes + (SHAPE.common ? (g / COMMON_GROUPS + 1) * SHAPE.common : 0); }
    static long common(long g) { return g / COMMON_GROUPS * (COMMON_GROUPS * SHAPE.bytes + SHAPE.common); }
    static constexpr long lane(long c) { return VALUES + c / 16 * OF_VECTOR + c % 16 * 4; }

    // Write the codes of an output's group, which are below 2^bits.
    static void put(uint8_t* group, long c, const uint8_t* codes) {
        uint8_t* to = group + lane(c);
        uint32_t words[GROUP / 4], further[2] = {};
        std::memcpy(words, codes, sizeof words);
        if constexpr (SHAPE.bits == 8) {
            for (int j = 0; j < 8; j++) std::memcpy(to + 64 * j, words + j, 4);
            return;
        }
        for (int j = 0; j < 8; j++) {
            if constexpr (SHAPE.bits == 5) further[0] |= (words[j] >> 4 & 0x01010101u) << j;
            if constexpr (SHAPE.bits == 6) further[j / 4] |= (words[j] >> 4 & 0x03030303u) << 2 * (j % 4);
            words[j] &= 0x0f0f0f0fu;
        }
        for (int j = 0; j < 4; j++) {
            const uint32_t word = words[j] | words[4 + j] << 4;
            std::memcpy(to + 64 * j, &word, 4);
        }
        for (int e = 0; e < SHAPE.bits - 4; e++) std::memcpy(to + EXTRA + 64 * e, further + e, 4);
    }

    // The code of input i of output c.
    static int code(const uint8_t* group, long c, long i) {
        const long j = i / 4;
        const uint8_t* from = group + lane(c) + i % 4;
        if (SHAPE.bits == 8) return from[64 * j];
        const int low = from[64 * (j % 4)] >> (j / 4 * 4) & 15;
        if (SHAPE.bits == 5) return low | (from[EXTRA] >> j & 1) << 4;
        if (SHAPE.bits == 6) return low | (from[EXTRA + 64 * (j / 4)] >> 2 * (j % 4) & 3) << 4;
        return low;
    }
};

// Call f(std::integral_constant) with an encoding.
template <class F> auto with_kind(Groups kind, F f) {
    switch (kind) {
        case Groups::NIBBLES_LEAST: return f(std::integral_constant<Groups, Groups::NIBBLES_LEAST>{});
        case Groups::NIBBLES_COMMON: return f(std::integral_constant<Groups, Groups::NIBBLES_COMMON>{});
        case Groups::FIVE: return f(std::integral_constant<Groups, Groups::FIVE>{});
        case Groups::FIVE_COMMON: return f(std::integral_constant<Groups, Groups::FIVE_COMMON>{});
        case Groups::SIX_COMMON: return f(std::integral_constant<Groups, Groups::SIX_COMMON>{});
        case Groups::BYTES: return f(std::integral_constant<Groups, Groups::BYTES>{});
        case Groups::BYTES_HALVES_LEAST: return f(std::integral_constant<Groups, Groups::BYTES_HALVES_LEAST>{});
        default: return f(std::integral_constant<Groups, Groups::NIBBLES_ZERO>{});
    }
}

}  // namespace longdraft
