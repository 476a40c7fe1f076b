// The product of a few rows with a packed weight. Each output is one running sum over the inner dimension, in order.
#pragma once

#include "amx.h"
#include "int4.h"
#include "layout.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <type_traits>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr int VECTORS = COLUMNS / LANES;
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;  // 6 x 4 sums, 4 weights and a broadcast fill the 32 registers
#else
constexpr int TILE_ROWS = 2;
#endif
constexpr long MIN_PARALLEL_WORK = 1 << 16;  // multiply-adds: for fewer, waking another thread costs more than it saves

// The offset of element (n, k) in a packed weight, in elements, or in bytes for int8 (drawn in layout.h).
template <class T> long place(const Linear& w, long n, long k) {
    const long word = ((n / COLUMNS) * w.steps + k / T::PER_WORD) * COLUMNS + n % COLUMNS, part = k % T::PER_WORD;
    return w.is_int8 ? (word / LANES * T::PER_WORD + part) * LANES + word % LANES : word * T::PER_WORD + part;
}

template <class T, class Element> void pack_as(Linear& w, const Element* weight) {
    auto* out = w.tile<Element>(0);
    for (long n = 0; n < w.n; n++)
        for (long k = 0; k < w.k; k++) out[place<T>(w, n, k)] = weight[n * w.k + k];
}

template <class T> void embed_as(const Linear& table, const int64_t* tokens, long rows, typename T::Element* out) {
    for (long r = 0; r < rows; r++) {
        long n = tokens[r];
        for (long k = 0; k < table.k; k++) {
            if (table.is_int4) {
                out[r * table.k + k] = T::round(int4::value_at(table, n, k));
                continue;
            }
            long at = place<T>(table, n, k);
            out[r * table.k + k] = table.is_int8 ? T::round(static_cast<float>(table.tile<int8_t>(0)[at]) * table.scale[n])
                                                 : table.tile<typename T::Element>(0)[at];
        }
    }
}

// Convert the int8 of `steps` steps of a tile to words.
template <class T> void unpack(const int8_t* bytes, long steps, uint32_t* words) {
    for (long i = 0; i < steps * COLUMNS; i += LANES) {
        const Words made = T::unpack(bytes + i * T::PER_WORD);
        std::memcpy(words + i, &made, sizeof made);
    }
}

// Sources of the words of a tile of 64 columns. `at` returns the words of a step, or of all steps that are multiplied in
// one instruction. `ahead` does one of VECTORS parts of the preparation of a later step. The parts are spread between
// other instructions, which the whole preparation at once would delay.

// The words as they are in memory.
struct StoredWords {
    const uint32_t* words;
    const uint32_t* at(long step) const { return words + step * COLUMNS; }
    template <int STEPS> void ahead(long step, int part) const {
        if constexpr (FETCHES_ASCENDING_LINES) return;
        for (int i = 0; i < STEPS; i++) prefetch(words + (step + i) * COLUMNS + part * LANES, 64);
    }
};

// Words converted from int8, one step at a time, which stays in registers. Only half of the bytes of bfloat16 are read
// from memory, or a quarter of those of float32.
template <class T> struct UnpackedWords {
    const int8_t* bytes;
    alignas(64) uint32_t words[COLUMNS];
    UnpackedWords(const int8_t* tile, long) : bytes(tile) {}
    const uint32_t* at(long step) {
        unpack<T>(bytes + step * COLUMNS * T::PER_WORD, 1, words);
        return words;
    }
    template <int STEPS> void ahead(long step, int part) const {
        if (part < T::PER_WORD) prefetch(bytes + (step * T::PER_WORD + part) * COLUMNS, COLUMNS);
    }
};

// ROWS rows of x by one tile of 64 columns. The instructions for a row are the same for every ROWS.
template <class T, int ROWS, class Weights>
void linear_tile(const uint32_t* x, long stride, Weights& weights, long steps, float (*out)[COLUMNS]) {
    Floats sums[ROWS][VECTORS] = {};
    for (long s = 0; s < steps; s++) {
        const uint32_t* w = weights.at(s);
        for (int v = 0; v < VECTORS; v++) weights.template ahead<1>(s, v);
        for (int r = 0; r < ROWS; r++) {
            uint32_t word = x[r * stride + s];
            for (int v = 0; v < VECTORS; v++) sums[r][v] = T::mac(sums[r][v], w + v * LANES, word);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(out[r] + v * LANES, sums[r][v]);
}

template <class T, int ROWS = TILE_ROWS, class Weights>
void linear_rows(int rows, const uint32_t* x, long stride, Weights& weights, long steps, float (*out)[COLUMNS]) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return linear_rows<T, ROWS - 1>(rows, x, stride, weights, steps, out);
    linear_tile<T, ROWS>(x, stride, weights, steps, out);
}

// How a variant multiplies: the number of rows that share one reading of the weights, how int8 weights become words, up
// to how many rows each reading converts them anew, and (as constructor and destructor) the set-up of a thread.
template <class T> struct Multiply {
    static constexpr int ROWS = TILE_ROWS;
#if defined(__AVX512F__)
    static constexpr long CONVERTING_ROWS = 3 * ROWS;
#else
    static constexpr long CONVERTING_ROWS = ROWS;
#endif
    static constexpr bool READS_ALL_ROWS = false;  // whether memory for ROWS rows must exist, even if fewer are wanted
    using Int8Words = UnpackedWords<T>;
    template <class Weights>
    static void tile(int rows, const uint32_t* x, Weights& weights, long steps, float (*out)[COLUMNS]) {
        linear_rows<T>(rows, x, steps, weights, steps, out);
    }
};

#if defined(__AMX_BF16__)
// Words converted from int8, one instruction of the unit before their use: loading a tile from memory that was just
// written would wait for the stores.
class UnpackedWordsAhead {
  public:
    UnpackedWordsAhead(const int8_t* tile, long steps) : bytes_(tile), steps_(steps) { unpack<BF16>(tile, STEPS, words_[0]); }
    const uint32_t* at(long step) { return words_[step / STEPS % 2]; }
    template <int> void ahead(long step, int part) {
        constexpr int SOME = STEPS / VECTORS;
        const long next = step + STEPS;
        if (next == steps_) return;
        const int8_t* from = bytes_ + (next + part * SOME) * COLUMNS * 2;
        prefetch<PREFETCH_DISTANCE / 2>(from, SOME * COLUMNS * 2);  // measured: the full distance is a third slower
        unpack<BF16>(from, SOME, words_[next / STEPS % 2] + part * SOME * COLUMNS);
    }

  private:
    static constexpr int STEPS = amx::INNER / 2;
    const int8_t* bytes_;
    long steps_;
    alignas(64) uint32_t words_[2][STEPS * COLUMNS];
};

template <> struct Multiply<BF16> : amx::Unit {
    static constexpr int ROWS = amx::ROWS;
    static constexpr long CONVERTING_ROWS = ROWS;
    static constexpr bool READS_ALL_ROWS = true;
    using Int8Words = UnpackedWordsAhead;
    template <class Weights>
    static void tile(int, const uint32_t* x, Weights& weights, long steps, float (*out)[COLUMNS]) {
        constexpr int WORDS = amx::INNER / 2;
        amx::each<VECTORS>([](auto v) { amx::zero<amx::SUM + v>(); });
        for (long s = 0; s < steps; s += WORDS) {
            const uint32_t* w = weights.at(s);
            amx::load<amx::LEFT>(x + s, steps * 4);
            amx::each<VECTORS>([&](auto v) {
                weights.template ahead<WORDS>(s, v);
                amx::load<amx::RIGHT>(w + v * LANES, COLUMNS * 4);
                amx::multiply<amx::SUM + v, amx::LEFT, amx::RIGHT>();
            });
        }
        amx::each<VECTORS>([&](auto v) { amx::store<amx::SUM + v>(out[0] + v * LANES, COLUMNS * 4); });
    }
};
#endif

template <class T> void narrow_some(typename T::Element* out, const float* x, long count) {
    for (; count >= LANES; count -= LANES, out += LANES, x += LANES) T::narrow(out, load(x));
    for (long i = 0; i < count; i++) out[i] = T::round(x[i]);
}

// Scale, bias and round the sums of `rows` rows (from row `row` on) of one tile, and write them to `out`.
template <class T>
void finish(const Linear& w, long tile, long row, int rows, float (*sums)[COLUMNS], void* out, bool keep_float) {
    long first = tile * COLUMNS, columns = std::min<long>(COLUMNS, w.n - first);
    for (int i = 0; i < rows; i++) {
        if (w.is_int8)
            for (long c = 0; c < columns; c++) sums[i][c] *= w.scale[first + c];
        if (!w.bias.empty())
            for (long c = 0; c < columns; c++) sums[i][c] += w.bias[first + c];
        long at = (row + i) * w.n + first;
        if (keep_float) std::copy_n(sums[i], columns, static_cast<float*>(out) + at);
        else narrow_some<T>(static_cast<typename T::Element*>(out) + at, sums[i], columns);
    }
}

// Call work(tile) for every tile of a weight, on all threads where there is enough to do; `around` is made once for each
// piece of consecutive tiles that a thread takes.
template <class Around, class F> void for_each_tile(const Linear& w, long rows, F work) {
    const bool is_small = rows * w.k * w.n < MIN_PARALLEL_WORK;
    const long tiles = w.tiles(), in_one = is_small ? tiles : std::max<long>(1, tiles / (4 * threads()));
    parallel((tiles + in_one - 1) / in_one, [&](long job) {
        [[maybe_unused]] Around around;
        for (long tile = job * in_one; tile < std::min(tiles, (job + 1) * in_one); tile++) work(tile);
    });
}

template <class T> void linear_as(const Linear& w, const void* x, long rows, void* out, bool keep_float) {
    using Element = typename T::Element;
    using Unit = Multiply<T>;
    // Rows are read as whole words, and some variants read several rows together: pad with zeros.
    std::vector<Element> padded;
    const Element* in = static_cast<const Element*>(x);
    long width = w.steps * T::PER_WORD, held = Unit::READS_ALL_ROWS ? round_up(rows, Unit::ROWS) : rows;
    if (width != w.k || held != rows) {
        padded.assign(static_cast<size_t>(held * width), Element{});
        for (long r = 0; r < rows; r++) std::copy_n(in + r * w.k, w.k, padded.data() + r * width);
        in = padded.data();
    }
    for_each_tile<Unit>(w, rows, [&](long tile) {
        alignas(64) float sums[Unit::ROWS][COLUMNS];
        auto multiply = [&](auto&& weights) {
            for (long r = 0; r < rows; r += Unit::ROWS) {
                int some = static_cast<int>(std::min<long>(Unit::ROWS, rows - r));
                Unit::tile(some, reinterpret_cast<const uint32_t*>(in + r * width), weights, w.steps, sums);
                finish<T>(w, tile, r, some, sums, out, keep_float);
            }
        };
        if (!w.is_int8) multiply(StoredWords{w.tile<uint32_t>(tile)});
        else if (rows <= Unit::CONVERTING_ROWS) multiply(typename Unit::Int8Words(w.tile<int8_t>(tile), w.steps));
        else {  // the tile is read many times, so it is converted once
            auto* words = static_cast<uint32_t*>(workspace<4>(static_cast<size_t>(w.steps * COLUMNS) * 4));
            unpack<T>(w.tile<int8_t>(tile), w.steps, words);
            multiply(StoredWords{words});
        }
    });
}

// Rows times a four-bit weight.
template <class T> void linear_of_int4(const Linear& w, const void* x, long rows, void* out, bool keep_float) {
    const int4::Quantised quantised = int4::quantise_rows<T>(x, rows, w.k);
    struct NoSetUp {};
    for_each_tile<NoSetUp>(w, rows, [&](long tile) {
        auto* sums = static_cast<float(*)[COLUMNS]>(workspace<6>(static_cast<size_t>(rows) * COLUMNS * 4));
        int4::multiply_tile(w.tile<uint8_t>(tile), quantised, rows, sums);
        for (long r = 0; r < rows; r++) finish<T>(w, tile, r, 1, sums + r, out, keep_float);
    });
}

}  // namespace
