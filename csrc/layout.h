// What the kernels of every variant share: the data they work on and the table of operations they offer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace longdraft {

constexpr long SPLIT = 4096;  // positions in a block of storage and in one online softmax; splits merge in order
constexpr long BLOCK = 256;   // positions of one softmax step, counted from position 0
constexpr long GROUP = 32;     // positions that are read where they lie together or not at all
constexpr int COLUMNS = 64;   // output columns of a packed tile

inline long round_up(long x, long to) { return (x + to - 1) / to * to; }

// Zeroed memory. Large pieces lie on huge pages where the system has them: a pass over a long cache touches
// so much memory that looking up small pages would take half of its time.
class Memory {
  public:
    explicit Memory(size_t bytes) {
        size_t alignment = bytes < HUGE ? 64 : HUGE;
        bytes = (bytes + alignment - 1) / alignment * alignment;
        data_ = std::aligned_alloc(alignment, bytes);
        if (!data_) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == HUGE) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
        std::memset(data_, 0, bytes);
    }
    ~Memory() { std::free(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint32_t* words() const { return static_cast<uint32_t*>(data_); }

  private:
    static constexpr size_t HUGE = size_t{2} << 20;
    void* data_;
};

// Room for intermediate values, kept by each thread and grown as needed; each SLOT is one user's.
template <int SLOT> void* workspace(size_t bytes) {
    thread_local std::unique_ptr<Memory> memory;
    thread_local size_t held = 0;
    if (held < bytes) {
        memory.reset();
        held = 0;
        memory.reset(new Memory(bytes + bytes / 2));
        held = bytes + bytes / 2;
    }
    return memory->words();
}

// A weight [n, k]: tiles of 64 rows of it, [n / 64][k / STEP][64] words, k padded with zeros to a multiple of 32
// where it is bfloat16 (what the matrix unit sums at once). `bias` is [n] or empty.
//
// With int8 a byte stands for each element of a word, and the weight is byte * scale[n]. Bytes are multiplied as
// elements, which hold them exactly, and the sums are scaled. For 16 words lie together: their first elements, then
// their second ones.
struct Linear {
    bool is_bf16, is_int8;
    long n, k, steps;
    std::unique_ptr<Memory> data;
    std::vector<float> bias, scale;

    Linear(bool bf16, bool int8, long rows, long columns)
        : is_bf16(bf16), is_int8(int8), n(rows), k(columns), steps(bf16 ? round_up(columns, 32) / 2 : columns),
          data(new Memory(static_cast<size_t>(tiles()) * tile_bytes())) {}
    Linear(const Linear&) = delete;
    long tiles() const { return round_up(n, COLUMNS) / COLUMNS; }
    size_t tile_bytes() const { return static_cast<size_t>(steps * COLUMNS) * (is_int8 ? (is_bf16 ? 2 : 1) : 4); }
    template <class Element> Element* tile(long index) const {
        return reinterpret_cast<Element*>(reinterpret_cast<char*>(data->words()) + static_cast<size_t>(index) * tile_bytes());
    }
    size_t bytes() const { return static_cast<size_t>(tiles()) * tile_bytes() + (bias.size() + scale.size()) * 4; }
};

// Keys and values of one layer in blocks of SPLIT positions (a short text's only block is smaller, and grows), for
// each KV head
//   keys    [SPLIT / 16][dim / STEP][16] words     one load: a word of the same dimension for 16 positions
//   values  [SPLIT / STEP][dim] words              one load: 16 dimensions of the same position(s)
// with `dim` padded to a multiple of 16, of 32 in bfloat16 (what the matrix unit sums at once). What lies beyond the written positions is finite: zeros, or older rows.
struct Store {
    bool is_bf16;
    long heads, dim, padded;
    long room = 0;  // positions of the first block
    std::vector<std::unique_ptr<Memory>> keys, values;

    Store(bool bf16, long num_heads, long head_dim)
        : is_bf16(bf16), heads(num_heads), dim(head_dim), padded(round_up(head_dim, bf16 ? 32 : 16)) {}

    Store(const Store&) = delete;

    int step() const { return is_bf16 ? 2 : 1; }
    long words_of(long block) const { return (block ? SPLIT : room) * padded / step(); }  // for one head
    long capacity() const { return keys.empty() ? 0 : room + (static_cast<long>(keys.size()) - 1) * SPLIT; }
    uint32_t* key(long block, long head) const { return keys[block]->words() + head * words_of(block); }
    uint32_t* value(long block, long head) const { return values[block]->words() + head * words_of(block); }

    void reserve(long length) {
        if (length > room && room < SPLIT) grow_first(std::min(SPLIT, std::max(2 * room, round_up(length, BLOCK))));
        while (capacity() < length) {
            std::unique_ptr<Memory> k = new_block(SPLIT), v = new_block(SPLIT);
            keys.push_back(std::move(k));
            values.push_back(std::move(v));
        }
    }
    size_t bytes() const { return static_cast<size_t>(capacity() * heads * padded / step()) * 8; }

  private:
    std::unique_ptr<Memory> new_block(long positions) const {
        return std::unique_ptr<Memory>(new Memory(static_cast<size_t>(heads * positions * padded / step()) * 4));
    }

    void grow_first(long positions) {
        std::unique_ptr<Memory> k = new_block(positions), v = new_block(positions);
        const long words = positions * padded / step(), held = words_of(0);
        for (long head = 0; head < heads && !keys.empty(); head++) {
            std::memcpy(k->words() + head * words, key(0, head), static_cast<size_t>(held) * 4);
            std::memcpy(v->words() + head * words, value(0, head), static_cast<size_t>(held) * 4);
        }
        keys.clear();
        values.clear();
        keys.push_back(std::move(k));
        values.push_back(std::move(v));
        room = positions;
    }
};

// Rows given or wanted by a caller: element (row, head, i) lies at row * row_stride + head * head_stride + i.
struct Rows {
    void* data;
    long row_stride, head_stride;
};

struct Attention {
    Store* store;
    long length;           // committed positions
    long rows, heads;      // provisional rows, query heads
    const void* q;         // [rows, heads, dim]
    Rows k, v;             // provisional keys and values
    const int32_t* parent; // [rows], -1: follows the committed part
    float scale;
    long window;           // positions a row sees, itself included; 0: all
    const float* rest;     // [rows, heads, dim + 1] or null: what keys that are not here give, output then log-sum-exp
    void* out;             // [rows, heads, dim]
    float* lse;            // [rows, heads]: log of the sum of exp(score)
};

// One variant's operations. `bf16` chooses the element type where the data does not say.
struct Kernels {
    const char* name;
    void (*pack)(Linear&, const void* weight);
    void (*linear)(const Linear&, const void* x, long rows, void* out, bool keep_float);
    void (*embed)(const Linear&, const int64_t* tokens, long rows, void* out);
    void (*rms_norm)(bool bf16, const void* x, const void* weight, long rows, long width, float eps, bool once,
                     void* out);
    void (*add)(bool bf16, const void* a, const void* b, long count, void* out);
    void (*swiglu)(bool bf16, const void* gate_up, long rows, long width, void* out);
    void (*rope)(bool bf16, Rows x, const float* cos, const float* sin, long rows, long heads, long dim, void* out);
    void (*write)(Store&, long start, Rows k, Rows v, const int64_t* which, long rows);
    void (*read)(const Store&, const int64_t* positions, long count, void* k, void* v);
    void (*weights)(const Store&, long length, const void* q, long rows, long heads, float scale, float* out);
    void (*attention)(const Attention*, long count);  // of several texts, each with its own store
    void (*rests)(bool bf16, const void* content, const float* map, long rows, long heads, long dim, float* out);
    void (*scale)(bool bf16, void* x, long count, float by);
};

}  // namespace longdraft
