// The product of rows with one tile of 64 columns of a packed weight, by vector instructions or by the matrix unit.
#pragma once

#include "amx.h"
#include "layout.h"
#include "mxfp4.h"
#include "simd.h"
#include "words_neon.h"

#include <algorithm>
#include <type_traits>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr int VECTORS = COLUMNS / LANES;
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;         // 6 x 4 sums, 4 weights and a broadcast fill the 32 registers
constexpr int CONVERTING_ROWS = 18;  // up to which each pass converts codes anew; for more, a chunk is converted once
constexpr bool IN_TURN = false;      // whether several rows take one vector of columns after another
constexpr int TURN_VECTORS = 4;
constexpr bool BYTES_IN_TURN = false;  // the same for any number of rows, of int8
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 5;  // 5 x 2 registers of sums, 4 of weights and a broadcast fill all 16
constexpr int CONVERTING_ROWS = 1;
constexpr int TURN_VECTORS = 4;  // of sums that one turn holds
constexpr bool IN_TURN = true, BYTES_IN_TURN = true;
#elif defined(__ARM_NEON)
constexpr int TILE_ROWS = 6, CONVERTING_ROWS = 1;
constexpr int TURN_VECTORS = 6;  // 24 of the 32 registers
constexpr bool IN_TURN = true, BYTES_IN_TURN = false;
#else
constexpr int TILE_ROWS = 2, CONVERTING_ROWS = 1;
constexpr int TURN_VECTORS = 2;
constexpr bool IN_TURN = true, BYTES_IN_TURN = false;
#endif

// Convert the int8 of `steps` steps of a tile to words.
template <class T> void unpack(const int8_t* bytes, long steps, uint32_t* words) {
    for (long i = 0; i < steps * COLUMNS; i += LANES) store_as(words + i, T::unpack(bytes + i * T::PER_WORD));
}

// The steps of an int8 tile.
template <class T> struct Int8Codes {
    const int8_t* tile;
    void unpack(long step, long count, uint32_t* words) const {
        longdraft::LONGDRAFT_VARIANT::unpack<T>(tile + step * COLUMNS * T::PER_WORD, count, words);
    }
    template <long DISTANCE> INLINED void fetch(long step, long count) const {
        prefetch<DISTANCE>(tile + step * COLUMNS * T::PER_WORD, count * COLUMNS * T::PER_WORD);
    }
};

// Call f with what a tile of a weight consists of: its words, or codes of another format.
template <class T, class F> void with_source(const Linear& w, long tile, F f) {
    if (w.is_int8) f(Int8Codes<T>{w.tile<int8_t>(tile)});
    else if (w.is_mxfp4) f(mxfp4::Codes<T>{w.tile<uint8_t>(tile)});
    else f(w.tile<const uint32_t>(tile));
}

// Several passes read a chunk of so many steps while it is in the cache near the processor, where the next one, which they
// fetch meanwhile, has room too: 8 KB of words each.
constexpr long CHUNK = 32;
constexpr long CHUNKED_PASSES = 10;  // with more, as for a prompt, loading sums for each chunk costs more than it gains
constexpr long MOST_IN_TURN = 64;    // steps whose operands are prepared together

// One of several passes over a chunk, which share the fetching of the next one.
struct Share { long pass, passes; };

// A pass over a tile reads one of the following. `at` returns the words of a step. `ahead` is called for each vector of them, and
// fetches something now and then: the processor would stop at a burst of lines.

// The words as they are in memory.
class StoredPass {
  public:
    static constexpr bool HAS_BYTES = false;
    //   count  steps of the chunk that begins with step `first`
    StoredPass(const uint32_t* words, long first, long count, Share share)
        : words_(words), next_(reinterpret_cast<const char*>(words + (first + CHUNK) * COLUMNS)
                               + count * COLUMNS * 4 * share.pass / share.passes),
          by_(LANES * 4 / share.passes) {}
    const uint32_t* at(long step) const { return words_ + step * COLUMNS; }
    // Lines are fetched in ascending order, even where they are not read so: memory is slower otherwise. One of several passes
    // asks for each line more than once, which costs less than a branch.
    template <int ROWS> INLINED void ahead(long, int) {
        if (ROWS <= 2 && FETCHES_ASCENDING_LINES) return;
        __builtin_prefetch(next_);
        next_ += by_;
    }

  private:
    const uint32_t* words_;
    const char* next_;
    long by_;  // bytes
};

// Words that were converted from codes, from step `first` on.
template <class Codes> struct ConvertedPass {
    static constexpr bool HAS_BYTES = false;
    Codes codes;
    const uint32_t* words;
    long first;
    bool fetches;
    const uint32_t* at(long step) const { return words + (step - first) * COLUMNS; }
    template <int> INLINED void ahead(long step, int part) const {
        if (part == 0 && fetches) codes.template fetch<0>(step + CHUNK, 1);
    }
};

// Words that the pass converts, a few steps at a time.
template <class T, class Codes> struct ConvertingPass {
    static constexpr bool HAS_BYTES = false;
    Codes codes;
    alignas(64) uint32_t words[Codes::CHUNK * COLUMNS];
    explicit ConvertingPass(Codes source) : codes(source) {}
    const uint32_t* at(long step) {
        if (step % Codes::CHUNK == 0) codes.unpack(step, Codes::CHUNK, words);
        return words + step % Codes::CHUNK * COLUMNS;
    }
    template <int> INLINED void ahead(long step, int part) const {
        if (part == 0) codes.template fetch<PREFETCH_DISTANCE>(step, 1);
    }
};

// Of int8, one step at a time, which stays in registers.
template <class T> struct ConvertingPass<T, Int8Codes<T>> {
    static constexpr bool HAS_BYTES = true;
    const int8_t* bytes;
    alignas(64) uint32_t words[COLUMNS];
    explicit ConvertingPass(Int8Codes<T> codes) : bytes(codes.tile) {}
    const uint32_t* at(long step) {
        unpack<T>(bytes + step * COLUMNS * T::PER_WORD, 1, words);
        return words;
    }
    template <int> INLINED void ahead(long step, int part) const {
        if (part < T::PER_WORD) prefetch(bytes + (step * T::PER_WORD + part) * COLUMNS, COLUMNS);
    }
};

// Add steps [first, last) of a tile to the sums of ROWS rows. The instructions for a row are the same for every ROWS, and for
// every way to cut the steps.
//   make_pass  returns the pass over them
template <class T, int ROWS, class MakePass>
void add_steps(const uint32_t* x, long stride, MakePass make_pass, long first, long last, float (*sums)[COLUMNS]) {
    auto pass = make_pass();
    Floats held[ROWS][VECTORS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) held[r][v] = load(sums[r] + v * LANES);
    for (long s = first; s < last; s++) {
        const uint32_t* w = pass.at(s);
        for (int v = 0; v < VECTORS; v++) pass.template ahead<ROWS>(s, v);
        UNROLLED for (int r = 0; r < ROWS; r++) {
            const auto by = T::operand(x[r * stride + s]);
            UNROLLED for (int v = 0; v < VECTORS; v++) held[r][v] = T::mac(held[r][v], w + v * LANES, by);
        }
    }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) store(sums[r] + v * LANES, held[r][v]);
}

// The same for at most MOST_IN_TURN steps, WIDE vectors of columns after WIDE others: the sums of all columns would not fit in
// sixteen registers.
template <class T, int ROWS, class MakePass>
void add_in_turn(const uint32_t* x, long stride, MakePass make_pass, long first, long last, float (*sums)[COLUMNS]) {
    auto pass = make_pass();
    constexpr int WIDE = 2 * ROWS > TURN_VECTORS ? 1 : VECTORS * ROWS > TURN_VECTORS ? 2 : VECTORS;
    typename T::Operand operands[ROWS][MOST_IN_TURN];
    for (int r = 0; r < ROWS; r++)
        for (long s = first; s < last; s++) operands[r][s - first] = T::operand(x[r * stride + s]);
    for (int turn = 0; turn < VECTORS; turn += WIDE) {
        Floats held[ROWS][WIDE];
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < WIDE; v++) held[r][v] = load(sums[r] + (turn + v) * LANES);
        for (long s = first; s < last; s++)
            UNROLLED for (int v = 0; v < WIDE; v++) {
                pass.template ahead<ROWS>(s, turn + v);
                const auto* row = &operands[0][s - first];
                asm volatile("" : "+r"(row));  // operands are read for each vector: there are no registers for them
                UNROLLED for (int r = 0; r < ROWS; r++) {
                    const auto by = row[r * MOST_IN_TURN];
                    if constexpr (decltype(pass)::HAS_BYTES)
                        held[r][v] = T::mac_bytes(held[r][v], pass.bytes + (s * COLUMNS + (turn + v) * LANES) * T::PER_WORD, by);
                    else
                        held[r][v] = T::mac(held[r][v], pass.at(s) + (turn + v) * LANES, by);
                }
            }
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < WIDE; v++) store(sums[r] + (turn + v) * LANES, held[r][v]);
    }
}

template <class T, int ROWS = TILE_ROWS, class MakePass>
void add_some(long rows, const uint32_t* x, long stride, MakePass make_pass, long first, long last, float (*sums)[COLUMNS]) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return add_some<T, ROWS - 1>(rows, x, stride, make_pass, first, last, sums);
    if constexpr (decltype(make_pass())::HAS_BYTES ? BYTES_IN_TURN : IN_TURN && ROWS > 1)
        add_in_turn<T, ROWS>(x, stride, make_pass, first, last, sums);
    else
        add_steps<T, ROWS>(x, stride, make_pass, first, last, sums);
}

// How a variant multiplies. An object is the set-up of a thread.
template <class T> struct Multiply {
    static constexpr int READ_ROWS = 1;  // memory of rows and of sums is a multiple of so many rows, even if fewer are wanted

    // sums [rows, COLUMNS] of rows [rows, w.steps] words by a tile
    static void tile(long rows, const uint32_t* x, const Linear& w, long tile, float (*sums)[COLUMNS]) {
        std::fill_n(sums[0], rows * COLUMNS, 0.0f);
        with_source<T>(w, tile, [&](auto source) { add(rows, x, w.steps, source, sums); });
    }

  private:
    // Passes of at most TILE_ROWS rows, of nearly as many each, over some steps.
    template <class PassOf>
    static void add_passes(long rows, long passes, const uint32_t* x, long steps, long first, long last, float (*sums)[COLUMNS],
                           PassOf pass_of) {
        const long some = (rows + passes - 1) / passes;
        for (long r = 0, i = 0; r < rows; r += some, i++) {
            auto make_pass = [&] { return pass_of(Share{i, passes}); };
            add_some<T>(std::min(some, rows - r), x + r * steps, steps, make_pass, first, last, sums + r);
        }
    }

    template <class Source> static void add(long rows, const uint32_t* x, long steps, Source source, float (*sums)[COLUMNS]) {
        constexpr bool IS_STORED = std::is_pointer_v<Source>;
        constexpr bool IN_BYTES = std::is_same_v<Source, Int8Codes<T>>;
        const bool converts = (IN_BYTES && BYTES_IN_TURN) || rows <= CONVERTING_ROWS;
        const bool in_turn = IN_BYTES && converts ? BYTES_IN_TURN : IN_TURN && rows > 1;
        const long passes = (rows + TILE_ROWS - 1) / TILE_ROWS;
        const bool chunked = IS_STORED ? (in_turn || passes > 1) && passes <= CHUNKED_PASSES : !converts;
        const long chunk = chunked ? CHUNK : in_turn ? MOST_IN_TURN : steps;
        for (long first = 0; first < steps; first += chunk) {
            const long last = std::min(steps, first + chunk);
            auto add_chunk = [&](auto pass_of) { add_passes(rows, passes, x, steps, first, last, sums, pass_of); };
            if constexpr (IS_STORED) {
                add_chunk([&](Share share) { return StoredPass(source, first, last - first, chunked ? share : Share{0, 1}); });
            } else if (converts) {
                add_chunk([&](Share) { return ConvertingPass<T, Source>(source); });
            } else {
                alignas(64) uint32_t words[CHUNK * COLUMNS];
                source.unpack(first, last - first, words);
                add_chunk([&](Share share) { return ConvertedPass<Source>{source, words, first, share.pass == 0}; });
            }
        }
    }
};

#if defined(__AMX_BF16__)
// The words as they are in memory, for the unit, which reads STEPS steps with one instruction.
struct StoredSteps {
    const uint32_t* words;
    const uint32_t* at(long step) const { return words + step * COLUMNS; }
    template <int STEPS> INLINED void ahead(long step, int part) const {
        for (int i = 0; i < STEPS; i++) prefetch(at(step + i) + part * LANES, 64);
    }
};

// Words converted from codes, one instruction of the unit before their use: loading a tile from memory that was just
// written would wait for the stores.
template <class Codes> class ConvertedSteps {
  public:
    ConvertedSteps(Codes codes, long steps) : codes_(codes), steps_(steps) { codes_.unpack(0, STEPS, words_[0]); }
    const uint32_t* at(long step) { return words_[step / STEPS % 2]; }
    template <int> INLINED void ahead(long step, int part) {
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
    static constexpr int READ_ROWS = amx::ROWS;

    static void tile(long rows, const uint32_t* x, const Linear& w, long tile, float (*sums)[COLUMNS]) {
        with_source<BF16>(w, tile, [&](auto source) { write(rows, x, w.steps, source, sums); });
    }

  private:
    static void write(long rows, const uint32_t* x, long steps, const uint32_t* words, float (*sums)[COLUMNS]) {
        for (long r = 0; r < rows; r += amx::ROWS) write_sixteen(x + r * steps, StoredSteps{words}, steps, sums + r);
    }

    template <class Codes> static void write(long rows, const uint32_t* x, long steps, Codes codes, float (*sums)[COLUMNS]) {
        if (rows <= amx::ROWS) return write_sixteen(x, ConvertedSteps<Codes>(codes, steps), steps, sums);
        // The tile is read many times, so it is converted once.
        auto* words = static_cast<uint32_t*>(workspace<4>(static_cast<size_t>(steps * COLUMNS) * 4));
        codes.unpack(0, steps, words);
        write(rows, x, steps, static_cast<const uint32_t*>(words), sums);
    }

    template <class Source> static void write_sixteen(const uint32_t* x, Source source, long steps, float (*sums)[COLUMNS]) {
        constexpr int WORDS = amx::INNER / 2;
        amx::each<VECTORS>([](auto v) { amx::zero<amx::SUM + v>(); });
        for (long s = 0; s < steps; s += WORDS) {
            const uint32_t* w = source.at(s);
            amx::load<amx::LEFT>(x + s, steps * 4);
            amx::each<VECTORS>([&](auto v) {
                source.template ahead<WORDS>(s, v);
                amx::load<amx::RIGHT>(w + v * LANES, COLUMNS * 4);
                amx::multiply<amx::SUM + v, amx::LEFT, amx::RIGHT>();
            });
        }
        amx::each<VECTORS>([&](auto v) { amx::store<amx::SUM + v>(sums[0] + v * LANES, COLUMNS * 4); });
    }
};
#elif defined(__ARM_NEON)
// With the instructions for bfloat16, or fused operations that have them for a model. Codes are converted by chunks.
template <> struct Multiply<BF16> {
    static constexpr int READ_ROWS = 1;

    static void tile(long rows, const uint32_t* x, const Linear& w, long tile, float (*sums)[COLUMNS]) {
        std::fill_n(sums[0], rows * COLUMNS, 0.0f);
        with_source<BF16>(w, tile, [&](auto source) {
            for (long first = 0; first < w.steps; first += CHUNK) {
                const long count = std::min(CHUNK, w.steps - first);
                auto add = [&](const uint32_t* words) {
                    words_neon::add_products(rows, x + first, w.steps, {words, COLUMNS, LANES}, COLUMNS, count, sums[0], COLUMNS);
                };
                if constexpr (std::is_pointer_v<decltype(source)>) {
                    add(source + first * COLUMNS);
                } else {
                    alignas(64) uint32_t words[CHUNK * COLUMNS];
                    source.unpack(first, count, words);
                    add(words);
                }
            }
        });
    }
};
#endif

}  // namespace
