#include "blocks.h"

#include "encoding.h"
#include "pool.h"

#include <atomic>

namespace longdraft {
namespace {

// A group of a block as its type has it: value = scale of its half * (code - offset) + least. Scales and least values are
// float16, or with `is_common` products of a whole number and a float16 number that 8 groups share.
struct Numbers {
    uint8_t codes[GROUP] = {};
    int offset = 0;
    bool is_common = false;
    int scales[2] = {1, 1}, least = 0;
    uint16_t scale_by = 0, least_by = 0;
};

uint16_t half_at(const uint8_t* p) { uint16_t x; std::memcpy(&x, p, 2); return x; }

void nibbles(const uint8_t* from, uint8_t* codes) {  // byte i has the numbers i and i + 16
    for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[16 + i] = from[i] >> 4;
}

void add_fifth_bits(const uint8_t* from, uint8_t* codes) {  // that of code i is bit i of the 4 bytes, eight codes at a time
    for (int i = 0; i < 4; i++) {
        const uint64_t own = from[i] * 0x0101010101010101u & 0x8040201008040201u;  // in byte b, bit b of the source
        const uint64_t fifth = (own + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;  // bit 7 of the sum, if it is set
        uint64_t eight;
        std::memcpy(&eight, codes + 8 * i, 8);
        eight |= fifth;
        std::memcpy(codes + 8 * i, &eight, 8);
    }
}

// Add (from[i] >> shift & mask) << up to 32 codes, eight at a time. What a shift brings from the next byte is not in the
// mask.
void add_bits(const uint8_t* from, int shift, uint64_t mask, int up, uint8_t* codes) {
    for (int i = 0; i < GROUP; i += 8) {
        uint64_t eight, own;
        std::memcpy(&eight, codes + i, 8);
        std::memcpy(&own, from + i, 8);
        eight |= (own >> shift & mask * 0x0101010101010101u) << up;
        std::memcpy(codes + i, &eight, 8);
    }
}

// The numbers of IQ4, increased by 128, of both nibbles of each byte.
struct Iq4Pairs {
    uint8_t low[256] = {}, high[256] = {};
    constexpr Iq4Pairs() {
        constexpr uint8_t CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
        for (int b = 0; b < 256; b++) low[b] = CODES[b & 15], high[b] = CODES[b >> 4];
    }
};

void look_up(const uint8_t* from, uint8_t* codes) {  // byte i has the numbers i and i + 16
    static constexpr Iq4Pairs PAIRS;
    for (int i = 0; i < 16; i += 8) {
        uint64_t low = 0, high = 0;  // eight codes at a time: words of single bytes that were just written load slowly
        for (int j = 0; j < 8; j++) {
            low |= static_cast<uint64_t>(PAIRS.low[from[i + j]]) << 8 * j;
            high |= static_cast<uint64_t>(PAIRS.high[from[i + j]]) << 8 * j;
        }
        std::memcpy(codes + i, &low, 8);
        std::memcpy(codes + 16 + i, &high, 8);
    }
}

// The scale and the least value of group g, of the 12 bytes of Q4_K and Q5_K.
void k_scales(const uint8_t* s, int g, Numbers& to) {
    to.is_common = true;
    if (g < 4) {
        to.scales[0] = s[g] & 63, to.least = s[4 + g] & 63;
    } else {
        to.scales[0] = (s[4 + g] & 15) | s[g - 4] >> 6 << 4;
        to.least = s[4 + g] >> 4 | s[g] >> 6 << 4;
    }
    to.scales[1] = to.scales[0];
}

// The types, with their numbers in ggml.h: the layouts are those of longdraft/checkpoint/gguf/blocks.py.
constexpr int Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23;

Groups kind_of(int type) {
    switch (type) {
        case Q4_0: return Groups::NIBBLES_ZERO;
        case Q4_1: return Groups::NIBBLES_LEAST;
        case Q5_0: return Groups::FIVE;
        case Q4_K: return Groups::NIBBLES_COMMON;
        case Q5_K: return Groups::FIVE_COMMON;
        case Q6_K: return Groups::SIX_COMMON;
        case Q8_0: case IQ4_NL: case IQ4_XS: return Groups::BYTES;
        case Q5_1: case Q3_K: return Groups::BYTES_HALVES_LEAST;
        default: return Groups::NONE;
    }
}

struct BlockSize { int groups, bytes; };
BlockSize size_of(int type) {
    switch (type) {
        case Q4_0: case IQ4_NL: return {1, 18};
        case Q4_1: return {1, 20};
        case Q5_0: return {1, 22};
        case Q5_1: return {1, 24};
        case Q8_0: return {1, 34};
        case Q3_K: return {8, 110};
        case Q4_K: return {8, 144};
        case Q5_K: return {8, 176};
        case Q6_K: return {8, 210};
        default: return {8, 136};  // IQ4_XS
    }
}

void read_small(int type, const uint8_t* block, Numbers& to) {  // of 32 numbers
    to.scale_by = half_at(block);
    if (type == Q4_1 || type == Q5_1) to.least_by = half_at(block + 2), to.least = 1;
    switch (type) {
        case Q8_0:
            for (int i = 0; i < GROUP; i++) to.codes[i] = block[2 + i] ^ 128;
            to.offset = 128;
            break;
        case Q4_0: nibbles(block + 2, to.codes), to.offset = 8; break;
        case Q4_1: nibbles(block + 4, to.codes); break;
        case Q5_0: nibbles(block + 6, to.codes), add_fifth_bits(block + 2, to.codes), to.offset = 16; break;
        case Q5_1: nibbles(block + 8, to.codes), add_fifth_bits(block + 4, to.codes); break;
        default: look_up(block + 2, to.codes), to.offset = 128;
    }
}

void read_q6_k(const uint8_t* block, int g, Numbers& to) {
    add_bits(block + g / 4 * 64 + g % 2 * 32, g % 4 / 2 * 4, 15, 0, to.codes);
    add_bits(block + 128 + g / 4 * 32, 2 * (g % 4), 3, 4, to.codes);
    to.offset = 32, to.is_common = true, to.scale_by = half_at(block + 208);
    for (int half = 0; half < 2; half++) to.scales[half] = static_cast<int8_t>(block[192 + 2 * g + half]);
}

void read_q3_k(const uint8_t* block, int g, Numbers& to) {
    const uint8_t* s = block + 96;
    add_bits(block + 32 + g / 4 * 32, 2 * (g % 4), 3, 0, to.codes);
    add_bits(block, g, 1, 2, to.codes);
    to.offset = 4, to.is_common = true, to.scale_by = half_at(block + 108);
    for (int half = 0; half < 2; half++) {
        const int j = 2 * g + half;
        to.scales[half] = ((s[j % 8] >> j / 8 * 4 & 15) | (s[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32;
    }
}

void read_iq4_xs(const uint8_t* block, int g, Numbers& to) {
    look_up(block + 8 + g * 16, to.codes);
    to.offset = 128, to.is_common = true, to.scale_by = half_at(block);
    to.scales[0] = to.scales[1] = ((block[4 + g / 2] >> 4 * (g % 2) & 15) | (half_at(block + 2) >> 2 * g & 3) << 4) - 32;
}

constexpr long DISTANCE = 384;  // bytes of a row that are fetched ahead: 64 rows are too many streams for the processor itself

void read_numbers(int type, const uint8_t* row, long group, Numbers& found) {
    const BlockSize size = size_of(type);
    const uint8_t* block = row + group / size.groups * size.bytes;
    const int g = static_cast<int>(group % size.groups);
    __builtin_prefetch(block + DISTANCE);
    if (size.groups == 1) {
        read_small(type, block, found);
    } else if (type == Q4_K || type == Q5_K) {
        found.scale_by = half_at(block), found.least_by = half_at(block + 2) ^ 0x8000u;  // it is subtracted
        k_scales(block + 4, g, found);
        add_bits(block + (type == Q5_K ? 48 : 16) + g / 2 * 32, 4 * (g % 2), 15, 0, found.codes);  // 32 bytes: two groups
        if (type == Q5_K) add_bits(block + 16, g, 1, 4, found.codes);
    } else {
        (type == Q6_K ? read_q6_k : type == Q3_K ? read_q3_k : read_iq4_xs)(block, g, found);
    }
}

bool is_finite(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }

uint16_t* halves_of(uint8_t* group, long at) { return reinterpret_cast<uint16_t*>(group + at); }

// Write a group of output c. Returns whether its scales are finite. `from` is no copy: one would wait for the small parts
// that were just written.
template <Groups KIND> bool put(uint8_t* tile, long g, long c, Numbers& from) {
    using E = Encoding<KIND>;
    uint8_t* group = tile + E::group(g);
    if constexpr (KIND == Groups::BYTES || KIND == Groups::BYTES_HALVES_LEAST)
        for (uint8_t& code : from.codes) code = static_cast<uint8_t>(code + (E::SHAPE.offset - from.offset));
    E::put(group, c, from.codes);
    const int scales = E::SHAPE.halves ? 2 : 1;
    if constexpr (E::SHAPE.common) {
        uint16_t* common = halves_of(tile, E::common(g)) + c;
        common[0] = from.scale_by;
        if (E::SHAPE.has_least) common[COLUMNS] = from.least_by;
        for (int s = 0; s < scales; s++) group[s * E::SECOND + c] = static_cast<uint8_t>(from.scales[s]);
        if (E::SHAPE.has_least) group[E::MIDDLE + c] = static_cast<uint8_t>(from.least);
        return is_finite(from.scale_by) && (!E::SHAPE.has_least || is_finite(from.least_by));
    }
    auto product = [&](int whole, uint16_t by) {
        return from.is_common ? to_half(static_cast<float>(whole) * from_half(by)) : whole ? by : uint16_t{0};
    };
    bool finite = true;
    auto write = [&](long at, uint16_t half) { halves_of(group, at)[c] = half, finite = finite && is_finite(half); };
    for (int s = 0; s < scales; s++) write(s * E::SECOND, product(from.scales[s], from.scale_by));
    if constexpr (E::SHAPE.has_least) write(E::MIDDLE, product(from.least, from.least_by));
    if constexpr (E::SHAPE.has_zero) group[E::MIDDLE + c] = static_cast<uint8_t>(from.offset);
    return finite;
}

}  // namespace

Groups encoding_of(const uint8_t* types, long rows) {
    Groups found = kind_of(types[0]);
    bool has_one_scale = true, is_one = true;  // those with one scale a group and nothing else fit in bytes
    for (long n = 0; n < rows; n++) {
        const Groups kind = kind_of(types[n]);
        if (kind == Groups::NONE) return kind;
        is_one = is_one && kind == found;
        has_one_scale = has_one_scale && (kind == Groups::NIBBLES_ZERO || kind == Groups::FIVE || kind == Groups::BYTES);
    }
    return is_one ? found : has_one_scale ? Groups::BYTES : Groups::BYTES_HALVES_LEAST;
}

long pack_blocks(Linear& w, const uint8_t* const* rows, const uint8_t* types) {
    std::atomic<long> damaged{w.n};
    with_kind(w.groups, [&](auto kind) {
        parallel(w.tiles(), [&](long t) {
            auto* tile = w.tile<uint8_t>(t);
            const long first = t * COLUMNS, columns = std::min<long>(COLUMNS, w.n - first);
            for (long g = 0; g < w.num_groups(); g++)
                for (long c = 0; c < columns; c++) {
                    Numbers numbers;
                    read_numbers(types[first + c], rows[first + c], g, numbers);
                    if (!put<kind>(tile, g, c, numbers))
                        for (long seen = damaged; first + c < seen && !damaged.compare_exchange_weak(seen, first + c);) {}
                }
        });
    });
    return damaged == w.n ? -1 : damaged.load();
}

void pack_groups(Linear& w, const GroupParts& parts) {
    with_kind(w.groups, [&](auto kind) {
        using E = Encoding<kind>;
        constexpr long SCALES = E::SHAPE.halves ? 2 : 1, FACTORS = E::SHAPE.has_least ? 2 : 1;
        constexpr long BESIDES = E::SHAPE.has_zero ? 1 : E::SCALE;
        const long groups = w.num_groups();
        parallel(w.tiles(), [&](long t) {
            auto* tile = w.tile<uint8_t>(t);
            for (long c = 0; c < std::min<long>(COLUMNS, w.n - t * COLUMNS); c++)
                for (long g = 0; g < groups; g++) {
                    const long n = t * COLUMNS + c, at = n * groups + g;
                    uint8_t codes[GROUP] = {}, *group = tile + E::group(g);
                    std::copy_n(parts.values + n * w.k + g * GROUP, std::min<long>(GROUP, w.k - g * GROUP), codes);
                    E::put(group, c, codes);
                    auto copy = [&](long place, const void* from, long index, long size) {
                        std::memcpy(group + place + c * size, static_cast<const char*>(from) + index * size, static_cast<size_t>(size));
                    };
                    for (long s = 0; s < SCALES; s++) copy(s * E::SECOND, parts.scales, at * SCALES + s, E::SCALE);
                    if (E::SHAPE.has_zero || E::SHAPE.has_least) copy(E::MIDDLE, parts.besides, at, BESIDES);
                    for (long f = 0; f < (E::SHAPE.common ? FACTORS : 0); f++)
                        halves_of(tile, E::common(g))[f * COLUMNS + c] = parts.common[at / COMMON_GROUPS * FACTORS + f];
                }
        });
    });
}

}  // namespace longdraft
