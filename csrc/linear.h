// Products of a few rows with packed weights. Each output is one running sum over the inner dimension, in order.
#pragma once

#include "amx.h"
#include "groups.h"
#include "layout.h"
#include "mxfp4.h"
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
            if (table.is_grouped()) {
                out[r * table.k + (table.order.empty() ? k : table.order[k])] = T::round(groups::value_at(table, n, k));
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

// The steps of an int8 tile.
template <class T> struct Int8Codes {
    const int8_t* tile;
    void unpack(long step, long count, uint32_t* words) const {
        longdraft::LONGDRAFT_VARIANT::unpack<T>(tile + step * COLUMNS * T::PER_WORD, count, words);
    }
    template <long DISTANCE> void fetch(long step, long count) const {
        prefetch<DISTANCE>(tile + step * COLUMNS * T::PER_WORD, count * COLUMNS * T::PER_WORD);
    }
};

// Words converted from the codes of another format, a chunk of steps at a time. Only the bytes of that format are read
// from memory.
template <class T, class Codes> struct UnpackedWords {
    Codes codes;
    alignas(64) uint32_t words[Codes::CHUNK * COLUMNS];
    UnpackedWords(Codes source, long) : codes(source) {}
    const uint32_t* at(long step) {
        if (step % Codes::CHUNK == 0) codes.unpack(step, Codes::CHUNK, words);
        return words + step % Codes::CHUNK * COLUMNS;
    }
    template <int STEPS> void ahead(long step, int part) const {
        if (part == 0) codes.template fetch<PREFETCH_DISTANCE>(step, 1);
    }
};

// Of int8, one step at a time, which stays in registers.
template <class T> struct UnpackedWords<T, Int8Codes<T>> {
    const int8_t* bytes;
    alignas(64) uint32_t words[COLUMNS];
    UnpackedWords(Int8Codes<T> codes, long) : bytes(codes.tile) {}
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
    template <class Codes> using Unpacked = UnpackedWords<T, Codes>;
    template <class Weights>
    static void tile(int rows, const uint32_t* x, Weights& weights, long steps, float (*out)[COLUMNS]) {
        linear_rows<T>(rows, x, steps, weights, steps, out);
    }
};

#if defined(__AMX_BF16__)
// Words converted from codes, one instruction of the unit before their use: loading a tile from memory that was just
// written would wait for the stores.
template <class Codes> class UnpackedWordsAhead {
  public:
    UnpackedWordsAhead(Codes codes, long steps) : codes_(codes), steps_(steps) { codes_.unpack(0, STEPS, words_[0]); }
    const uint32_t* at(long step) { return words_[step / STEPS % 2]; }
    template <int> void ahead(long step, int part) {
        constexpr int SOME = STEPS / VECTORS;
        const long next = step + STEPS;
        if (next == steps_) return;
        const long first = next + part * SOME;
        codes_.template fetch<PREFETCH_DISTANCE / 2>(first, SOME);  // measured: the full distance is a third slower
        codes_.unpack(first, SOME, words_[next / STEPS % 2] + part * SOME * COLUMNS);
    }

  private:
    static constexpr int STEPS = amx::INNER / 2;
    Codes codes_;
    long steps_;
    alignas(64) uint32_t words_[2][STEPS * COLUMNS];
};

template <> struct Multiply<BF16> : amx::Unit {
    static constexpr int ROWS = amx::ROWS;
    static constexpr long CONVERTING_ROWS = ROWS;
    static constexpr bool READS_ALL_ROWS = true;
    template <class Codes> using Unpacked = UnpackedWordsAhead<Codes>;
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

// The rows of a product as its weight reads them: whole words padded with zeros, or whole numbers for weights in groups.
template <class T> struct Inputs {
    const typename T::Element* rows;
    groups::Quantised whole;
};

// Rows whose memory a variant reads. Some variants read several rows together, even if fewer are wanted.
template <class T> long rows_read(long rows) { return Multiply<T>::READS_ALL_ROWS ? round_up(rows, Multiply<T>::ROWS) : rows; }

// Bytes of the memory of a product's inputs; 0: the rows are read where they are.
template <class T> long input_bytes(const Product& p) {
    const Linear& w = *p.weight;
    if (w.is_grouped()) return round_up(groups::quantised_bytes(p.rows, w.k), 64);
    const long width = w.steps * T::PER_WORD, held = rows_read<T>(p.rows);
    return width == w.k && held == p.rows ? 0 : round_up(held * width * static_cast<long>(sizeof(typename T::Element)), 64);
}

template <class T> Inputs<T> prepare(const Product& p, char* memory) {
    using Element = typename T::Element;
    const Linear& w = *p.weight;
    const auto* in = static_cast<const Element*>(p.x);
    if (w.is_grouped()) return {nullptr, groups::quantise_rows<T>(p.x, p.rows, w.k, w.order.empty() ? nullptr : w.order.data(), memory)};
    if (!input_bytes<T>(p)) return {in, {}};
    auto* padded = reinterpret_cast<Element*>(memory);
    const long width = w.steps * T::PER_WORD;
    for (long r = 0; r < p.rows; r++) {
        std::copy_n(in + r * w.k, w.k, padded + r * width);
        std::fill_n(padded + r * width + w.k, width - w.k, Element{});
    }
    std::fill_n(padded + p.rows * width, (rows_read<T>(p.rows) - p.rows) * width, Element{});
    return {padded, {}};
}

// Whether two products read the same inputs.
inline bool reads_the_same(const Product& a, const Product& b) {
    return a.x == b.x && a.rows == b.rows && a.weight->k == b.weight->k && a.weight->is_grouped() == b.weight->is_grouped() &&
           a.weight->order == b.weight->order;
}

// All rows of a product by one tile of its weight.
template <class T> void multiply_tile(const Product& p, const Inputs<T>& in, long tile) {
    using Unit = Multiply<T>;
    const Linear& w = *p.weight;
    if (w.is_grouped()) {
        auto* sums = static_cast<float(*)[COLUMNS]>(workspace<6>(static_cast<size_t>(p.rows) * COLUMNS * 4));
        groups::multiply_tile(w.groups, w.tile<uint8_t>(tile), in.whole, p.rows, sums, Unit::READS_ALL_ROWS);
        for (long r = 0; r < p.rows; r++) finish<T>(w, tile, r, 1, sums + r, p.out, p.keep_float);
        return;
    }
    alignas(64) float sums[Unit::ROWS][COLUMNS];
    auto multiply = [&](auto&& weights) {
        for (long r = 0; r < p.rows; r += Unit::ROWS) {
            int some = static_cast<int>(std::min<long>(Unit::ROWS, p.rows - r));
            const auto* x = reinterpret_cast<const uint32_t*>(in.rows + r * w.steps * T::PER_WORD);
            Unit::tile(some, x, weights, w.steps, sums);
            finish<T>(w, tile, r, some, sums, p.out, p.keep_float);
        }
    };
    auto convert = [&](auto codes) {
        if (p.rows <= Unit::CONVERTING_ROWS) return multiply(typename Unit::template Unpacked<decltype(codes)>(codes, w.steps));
        // The tile is read many times, so it is converted once.
        auto* words = static_cast<uint32_t*>(workspace<4>(static_cast<size_t>(w.steps * COLUMNS) * 4));
        codes.unpack(0, w.steps, words);
        multiply(StoredWords{words});
    };
    if (w.is_int8) convert(Int8Codes<T>{w.tile<int8_t>(tile)});
    else if (w.is_mxfp4) convert(mxfp4::Codes<T>{w.tile<uint8_t>(tile)});
    else multiply(StoredWords{w.tile<uint32_t>(tile)});
}

// The inputs of all products. Neighbours that read the same inputs share them.
template <class T> std::vector<Inputs<T>> prepare_all(const Product* products, long count) {
    std::vector<long> starts(static_cast<size_t>(count), -1);
    long bytes = 0, numbers = 0;
    for (long i = 0; i < count; i++) {
        if (i && reads_the_same(products[i - 1], products[i])) continue;
        starts[static_cast<size_t>(i)] = bytes;
        bytes += input_bytes<T>(products[i]);
        numbers += products[i].rows * products[i].weight->k;
    }
    char* memory = static_cast<char*>(workspace<5>(static_cast<size_t>(bytes) + 64));
    std::vector<Inputs<T>> inputs(static_cast<size_t>(count));
    const long in_one = numbers < MIN_PARALLEL_WORK ? count : 1;
    parallel((count + in_one - 1) / in_one, [&](long job) {
        for (long i = job * in_one; i < (job + 1) * in_one; i++)
            if (const long start = starts[static_cast<size_t>(i)]; start >= 0)
                inputs[static_cast<size_t>(i)] = prepare<T>(products[i], memory + start);
    });
    for (size_t i = 1; i < inputs.size(); i++)
        if (starts[i] < 0) inputs[i] = inputs[i - 1];
    return inputs;
}

// The tiles of all products, one product after another, on all threads where there is enough to do. `Around` is made
// once for each piece of consecutive tiles that a thread takes.
template <class T, class Around> void multiply_all(const Product* products, long count) {
    const std::vector<Inputs<T>> inputs = prepare_all<T>(products, count);
    std::vector<long> ends;  // of each product's tiles
    long work = 0, tiles = 0;
    for (long i = 0; i < count; i++) {
        work += products[i].rows * products[i].weight->k * products[i].weight->n;
        ends.push_back(tiles += products[i].weight->tiles());
    }
    constexpr size_t LEAST = 1 << 16;  // bytes of a piece: the processor fetches ahead what is read in order
    const std::vector<long> pieces =
        pieces_of(tiles, work < MIN_PARALLEL_WORK ? tiles : static_cast<long>(1 + LEAST / products->weight->tile_bytes()));
    parallel(static_cast<long>(pieces.size()), [&](long job) {
        [[maybe_unused]] Around around;
        long place = job ? pieces[static_cast<size_t>(job - 1)] : 0;
        const long end = pieces[static_cast<size_t>(job)];
        size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), place) - ends.begin());
        for (; place < end; place++) {
            if (place == ends[i]) i++;
            multiply_tile<T>(products[i], inputs[i], place - (i ? ends[i - 1] : 0));
        }
    });
}

template <class T> void products_as(const Product* products, long count) {
    struct NoSetUp {};
    bool needs_none = true;  // few rows of weights in groups
    for (long i = 0; i < count; i++)
        needs_none = needs_none && products[i].weight->is_grouped() && products[i].rows < groups::LEAST_UNIT_ROWS;
    needs_none ? multiply_all<T, NoSetUp>(products, count) : multiply_all<T, Multiply<T>>(products, count);
}

}  // namespace
