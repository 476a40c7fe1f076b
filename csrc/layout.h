// Data structures that all variants share, and the table of a variant's operations.
#pragma once

#include "memory.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

namespace longdraft {

constexpr long SPLIT = 4096;         // positions of a block of storage, and of one online softmax
constexpr long BLOCK = 256;          // positions of one step of the online softmax, counted from position 0
constexpr long POSITION_GROUP = 32;  // the rows of a tree read such a group in the store together, or not at all
constexpr int COLUMNS = 64;          // output columns of a packed tile
constexpr size_t LEAST_PIECE = 1 << 14;  // bytes of a weight that a thread takes at least

constexpr int GROUP = 32;            // inputs of a weight in groups that share a scale
constexpr int MXFP4_GROUP = 32;      // inputs of an MXFP4 weight that share an exponent
constexpr int MXFP4_GROUP_BYTES = COLUMNS * (MXFP4_GROUP / 2 + 1);  // of such a group in a tile (mxfp4.h)
constexpr int MXFP4 = -4;            // in place of a number of bits

// How the groups of a weight are stored (encoding.h).
enum class Groups {
    NONE, NIBBLES_ZERO, NIBBLES_LEAST, NIBBLES_COMMON, FIVE, FIVE_COMMON, SIX_COMMON, BYTES, BYTES_HALVES_LEAST
};

constexpr int COMMON_GROUPS = 8;     // groups with a common scale

struct GroupShape {
    int bits, offset;                  // a value is its code of so many bits, minus the offset
    bool halves, has_zero, has_least;  // a scale for each half; a zero point; a least value
    int common;                        // bytes of the common scales of 8 groups; 0: scales are numbers by themselves
    int bytes;                         // of a group in a tile, without them
};

constexpr GroupShape shape_of(Groups kind) {
    auto shape = [](int bits, int offset, bool halves, bool zero, bool least, bool is_common) {
        const int numbers = (halves ? 2 : 1) + (least ? 1 : 0), common = is_common ? COLUMNS * 2 * (least ? 2 : 1) : 0;
        const int bytes = COLUMNS * (numbers * (is_common ? 1 : 2) + (zero ? 1 : 0)) + COLUMNS * GROUP * bits / 8;
        return GroupShape{bits, offset, halves, zero, least, common, bytes};
    };
    switch (kind) {
        case Groups::NIBBLES_LEAST: return shape(4, 0, false, false, true, false);
        case Groups::NIBBLES_COMMON: return shape(4, 0, false, false, true, true);
        case Groups::FIVE: return shape(5, 16, false, false, false, false);
        case Groups::FIVE_COMMON: return shape(5, 0, false, false, true, true);
        case Groups::SIX_COMMON: return shape(6, 32, true, false, false, true);
        case Groups::BYTES: return shape(8, 128, false, false, false, false);
        case Groups::BYTES_HALVES_LEAST: return shape(8, 128, true, false, true, false);
        default: return shape(4, 0, false, true, false, false);
    }
}

// A weight [n, k] in tiles of 64 of its rows: [n / 64][k / PER_WORD][64] words. For bfloat16, k is padded with zeros to a
// multiple of 32, which the matrix unit sums in one instruction. `bias` is [n] or empty.
//
// An int8 weight is byte * scale[n], and a word holds one byte per element. Float and bfloat16 represent all int8 values
// exactly, so the bytes are multiplied as elements and the sums are scaled. The bytes of 16 words are stored together:
// their first elements, then their second elements.
//
// The tiles of weights in groups and in MXFP4 are described in encoding.h and mxfp4.h. An MXFP4 weight has a multiple of 32
// columns. `order` is empty, or [k]: the input that each column of a weight in groups multiplies, where a file's groups
// are no consecutive inputs.
struct Linear {
    bool is_bf16, is_int8, is_mxfp4;  // is_int8: with a scale for each row
    Groups groups;
    long n, k, steps;
    std::unique_ptr<Memory> data;
    std::vector<float> bias, scale;
    std::vector<int32_t> order;

    // lasts  whether it lives as long as the model: its memory may be shared with other weights
    Linear(bool bf16, int bits, Groups kind, long rows, long columns, bool lasts = true)
        : is_bf16(bf16), is_int8(kind == Groups::NONE && bits == 8), is_mxfp4(bits == MXFP4), groups(kind), n(rows), k(columns),
          steps(bf16 ? round_up(columns, 32) / 2 : columns) {
        const size_t size = static_cast<size_t>(tiles()) * tile_bytes();
        data = lasts ? weight_memory(size) : std::make_unique<Memory>(size);
    }
    Linear(const Linear&) = delete;
    long tiles() const { return round_up(n, COLUMNS) / COLUMNS; }
    bool is_grouped() const { return groups != Groups::NONE; }
    long num_groups() const { return round_up(k, GROUP) / GROUP; }
    size_t tile_bytes() const {
        if (is_grouped()) {
            const GroupShape shape = shape_of(groups);
            return static_cast<size_t>(num_groups() * shape.bytes + num_groups() / COMMON_GROUPS * shape.common);
        }
        if (is_mxfp4) return static_cast<size_t>(k / MXFP4_GROUP) * MXFP4_GROUP_BYTES;
        return static_cast<size_t>(steps * COLUMNS) * (is_int8 ? (is_bf16 ? 2 : 1) : 4);
    }
    template <class Element> Element* tile(long index) const {
        return reinterpret_cast<Element*>(reinterpret_cast<char*>(data->words()) + static_cast<size_t>(index) * tile_bytes());
    }
    // Tiles that a thread takes at least: of one small tile after another, the processor would fetch nothing ahead.
    long least_tiles() const { return 1 + static_cast<long>(LEAST_PIECE / tile_bytes()); }
    size_t bytes() const { return static_cast<size_t>(tiles()) * tile_bytes() + (bias.size() + scale.size() + order.size()) * 4; }
};

// A product of rows x [rows, weight->k] with a weight: out [rows, weight->n], float32 with `keep_float`, else elements.
struct Product {
    const Linear* weight;
    const void* x;
    long rows;
    void* out;
    bool keep_float;
};

// How rows choose among `count` experts (longdraft/kernels/experts.py).
struct Routing {
    long count, chosen;
    bool normalises, rounds;  // weights are divided by their sum; and rounded to the element type, at the end
    const float* scales;      // [count]: multiply the weights after the division; null: nothing does
};

// Keys and values of one layer, in blocks of SPLIT positions. The only block of a short text is smaller, and grows.
// Each block holds for every KV head, one head after another:
//
//   keys    [SPLIT / 16][padded / PER_WORD][16] words
//           one 64-byte load: the same dimension(s) d of 16 positions, for 16 scores
//
//               group of 16 positions:   p+0 d0  p+1 d0  p+2 d0 .. p+15 d0
//                                        p+0 d1  p+1 d1  p+2 d1 .. p+15 d1
//
//   values  [SPLIT / PER_WORD][padded] words
//           one 64-byte load: 16 dimensions of the same position(s), for 16 weighted sums
//
//               position:   p d0  p d1  p d2 .. p d(padded-1)
//
// With bfloat16 a word holds two elements: two dimensions (d, d + 1) of a key, two positions (p, p + 1) of a value.
// `padded` is dim rounded up to a multiple of 16, or of 32 for bfloat16 (what one instruction of the matrix unit sums).
// Positions that were never written are zeros, and positions after the text may hold older rows: all are finite.
//
// Several stores may share a block (`append`). `prepare` gives a store its own copy before it writes to a shared one.
struct Store {
    bool is_bf16;
    long heads, dim, padded;
    float score_cap;  // scores are cap * tanh(score / cap); 0: as they are
    long room = 0;    // positions of the first block
    std::vector<std::shared_ptr<Memory>> keys, values;

    Store(bool bf16, long num_heads, long head_dim, float cap)
        : is_bf16(bf16), heads(num_heads), dim(head_dim), padded(round_up(head_dim, bf16 ? 32 : 16)), score_cap(cap) {}

    Store(const Store&) = delete;

    int step() const { return is_bf16 ? 2 : 1; }
    long words_of(long block) const { return (block ? SPLIT : room) * padded / step(); }  // for one head
    long capacity() const { return keys.empty() ? 0 : room + (static_cast<long>(keys.size()) - 1) * SPLIT; }
    uint32_t* key(long block, long head) const { return keys[block]->words() + head * words_of(block); }
    uint32_t* value(long block, long head) const { return values[block]->words() + head * words_of(block); }

    void reserve(long length) {
        if (length > room && room < SPLIT) grow_first(std::min(SPLIT, std::max(2 * room, round_up(length, BLOCK))));
        while (capacity() < length) add_block(new_block(SPLIT), new_block(SPLIT));
    }
    size_t bytes_of(long positions) const { return static_cast<size_t>(positions * heads * padded / step()) * 8; }
    size_t bytes() const { return bytes_of(capacity()); }

    // Reserve `start + count` positions, of which the last `count` may be written: their blocks are this store's alone.
    void prepare(long start, long count) {
        reserve(start + count);
        for (long block = start / SPLIT; count > 0 && block <= (start + count - 1) / SPLIT; block++)
            for (auto* blocks : {&keys, &values})
                if ((*blocks)[static_cast<size_t>(block)].use_count() > 1) {
                    std::shared_ptr<Memory> own = new_block(block ? SPLIT : room);
                    std::memcpy(own->words(), (*blocks)[static_cast<size_t>(block)]->words(),
                                static_cast<size_t>(heads * words_of(block)) * 4);
                    (*blocks)[static_cast<size_t>(block)] = std::move(own);
                }
    }

    // Add the positions [first, first + count) of another store after this one's capacity. Whole blocks are shared, the
    // rest is copied, into memory for round_up(count, BLOCK) positions. `first` and the capacity are multiples of SPLIT.
    void append(const Store& source, long first, long count) {
        for (; count >= SPLIT; first += SPLIT, count -= SPLIT) {
            const size_t block = static_cast<size_t>(first / SPLIT);
            add_block(source.keys[block], source.values[block]);
            room = SPLIT;
        }
        if (!count) return;
        const long block = first / SPLIT, mine = capacity() / SPLIT;
        reserve(capacity() + count);
        // Positions are stored by groups of 16, so the beginning of a head's part of a block is contiguous.
        const size_t size = static_cast<size_t>(round_up(count, 16) * padded / step()) * 4;
        for (long head = 0; head < heads; head++) {
            std::memcpy(key(mine, head), source.key(block, head), size);
            std::memcpy(value(mine, head), source.value(block, head), size);
        }
    }

  private:
    std::shared_ptr<Memory> new_block(long positions) const {
        return std::make_shared<Memory>(static_cast<size_t>(heads * positions * padded / step()) * 4);
    }

    void add_block(std::shared_ptr<Memory> k, std::shared_ptr<Memory> v) {
        keys.push_back(std::move(k));
        values.push_back(std::move(v));
    }

    void grow_first(long positions) {
        std::shared_ptr<Memory> k = new_block(positions), v = new_block(positions);
        const long words = positions * padded / step(), held = words_of(0);
        for (long head = 0; head < heads && !keys.empty(); head++) {
            std::memcpy(k->words() + head * words, key(0, head), static_cast<size_t>(held) * 4);
            std::memcpy(v->words() + head * words, value(0, head), static_cast<size_t>(held) * 4);
        }
        keys.clear();
        values.clear();
        add_block(std::move(k), std::move(v));
        room = positions;
    }
};

// Rows in the caller's memory: element (row, head, i) is at row * row_stride + head * head_stride + i.
struct Rows {
    void* data;
    long row_stride, head_stride;
};

// The attention of one text: inputs, and where the results are written.
struct Attention {
    Store* store;
    long length;             // committed positions
    long rows, heads;        // uncommitted rows, query heads
    const void* q;           // [rows, heads, dim]
    Rows k, v;               // keys and values of the uncommitted rows; null: they follow the others in the store
    const int32_t* parent;   // [rows]; -1: the row follows the committed positions
    float scale;             // of the scores: 1 / sqrt(dim)
    long window;             // positions that a row sees, itself included; 0: all
    const float* remainder;  // [rows, heads, dim + 1] or null: attention to keys outside the store, output and log-sum-exp
    void* out;               // [rows, heads, dim]
    float* lse;              // [rows, heads]: log of the sum of exp(score)
    bool is_causal = true;   // whether a row sees its own path; else all rows, and `parent` is not read
};

// The fit of the remainder (longdraft/cache/remainder.py, which names the constants) for `count` heads and rows of n
// numbers. Each head has its memory (fit.h): decayed sums over rows, and up to `room` rows that are not in the sums yet.
struct RemainderFit {
    long count, n, room;
    float decay_rows, ridge, ridge_rows, least_spread, last_error, log_zero;
    long held = 0;  // rows that are not in the sums yet
    bool is_solved = false;
    std::unique_ptr<Memory> memory = std::make_unique<Memory>(bytes());

    long width() const { return round_up(n, 16); }
    long per_head() const { return (2 * n + 1 + 2 * room) * width(); }
    size_t bytes() const { return static_cast<size_t>(count * per_head()) * sizeof(float); }
    float* of_head(long head) const { return reinterpret_cast<float*>(memory->words()) + head * per_head(); }
};

// Rows for the fit: content [layers, rows, heads, n - 1] elements, whose layers are `layer_rows` rows apart, and remainders
// [layers, rows, heads, n].
struct RemainderRows {
    long rows, heads, layer_rows;
    const void* content;
    const float* remainders;
};

constexpr long MAX_WIDTH = 16;  // of the convolution of a delta layer

// The weights of a delta layer (delta.h) that are no matrices. C = 2 key_heads key_dim + value_heads value_dim channels.
struct DeltaLayer {
    long key_heads, value_heads, key_dim, value_dim, width;
    const float *conv, *decay, *bias, *norm;  // [width, C], twice [value_heads], [value_dim]
    float eps;                                // of the norm
};

// C: q, k and v of a row.
inline long channels(const DeltaLayer& l) { return 2 * l.key_heads * l.key_dim + l.value_heads * l.value_dim; }

// Columns of a block of the state.
inline long state_columns(const DeltaLayer& l) { return l.value_dim % 32 ? 16 : 32; }

// One text's rows in a delta layer. The states are blocks of columns: [value_heads][value_dim / columns][key_dim][columns].
struct DeltaText {
    long rows;
    const void* history;     // [width - 1, C]: inputs of the convolution before the rows
    const float* state;
    void* history_after;     // results: both after the last row and its path
    float* state_after;
    const void* mixed;       // [rows, C]
    const float* gates;      // [rows, 2 value_heads]
    const void* z;           // rows of value_heads value_dim, `z_stride` apart; null: no output is wanted
    long z_stride;
    void* out;               // [rows, value_heads value_dim]
    const int32_t* parent;   // [rows]; -1: the row continues `state`
};

// One variant's operations. `bf16` selects the element type where the data does not determine it.
struct Kernels {
    const char* name;
    void (*pack)(Linear&, const void* weight);
    void (*pack_mxfp4)(Linear&, const uint8_t* codes, const uint8_t* exponents);
    void (*quantise_int4)(bool bf16, const void* weight, long n, long k, uint8_t* values, uint16_t* scales, uint8_t* zeros);
    void (*products)(const Product*, long count);  // with weights of one element type; all of them on all threads
    void (*embed)(const Linear&, const int64_t* tokens, long rows, void* out);
    void (*take_rows)(const Linear&, const int64_t* rows, Linear& out);
    void (*rms_norm)(bool bf16, const void* x, const void* weight, long rows, long width, float eps, bool rounds_once,
                     void* out);
    void (*add)(bool bf16, const void* a, const void* b, long count, void* out);
    void (*swiglu)(bool bf16, const void* gate_up, long rows, long width, void* out);
    void (*gate)(bool bf16, const void* x, const void* gates, long stride, long rows, long width, void* out);
    void (*rope)(bool bf16, Rows x, const float* cos, const float* sin, long rows, long heads, long dim, void* out);
    void (*write)(Store&, long start, Rows k, Rows v, const int64_t* which, long rows);
    void (*read)(const Store&, const int64_t* positions, long count, void* k, void* v);
    void (*weights)(const Store&, long length, const void* q, long rows, long heads, float scale, float* out);
    void (*attention)(const Attention*, long count);  // of `count` texts, each with its own store
    void (*map_remainder)(bool bf16, const void* content, const float* map, long rows, long heads, long dim, float* out);
    void (*scale)(bool bf16, void* x, long count, float by);
    // Add rows to the fit. `solves`: the equations are solved with them. fit: the maps [count, n, n], which are changed.
    void (*learn_rows)(bool bf16, const RemainderFit&, const RemainderRows&, bool solves, float* fit);
    // The remainders [count, dim + 1] of `count` rows and heads: `whole` attention less that to a part of its keys.
    void (*subtract_part)(bool bf16, const void* whole, const float* whole_lse, const void* part, const float* part_lse,
                          long count, long dim, float* out);
    void (*delta)(bool bf16, const DeltaLayer&, const DeltaText*, long count);  // of `count` texts
    // As rms_norm with rounds_once, with a float32 weight.
    void (*rms_norm_float)(bool bf16, const void* x, const float* weight, long rows, long width, float eps, void* out);
    void (*geglu)(bool bf16, const void* gate_up, long rows, long width, void* out);
    void (*soft_cap)(float* x, long count, float cap);
    void (*clamped_swiglu)(bool bf16, const void* gate_up, long rows, long width, float alpha, float limit, void* out);
    void (*route)(bool bf16, const void* logits, long rows, const Routing&, int32_t* experts, float* weights);
    void (*sigmoid)(float* x, long count);
    void (*add_weighted)(float* total, const float* x, const int32_t* rows, const float* weights, long count, long width);
    void (*narrow)(bool bf16, const float* x, long count, void* out);
    void (*convolve)(bool bf16, const void* x, const float* base, const float* moving, long stride, long groups, long taps,
                     long rows, long width, void* out);

    void linear(const Linear& w, const void* x, long rows, void* out, bool keep_float) const {
        const Product product = {&w, x, rows, out, keep_float};
        products(&product, 1);
    }
};

}  // namespace longdraft
