// Few rows times a packed weight. Each output is one running sum over the inner dimension, in order.
#pragma once

#include "amx.h"
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
constexpr long SMALL = 1 << 16;  // multiply-adds below which waking another thread costs more than it saves

template <class T> void pack_as(Linear& w, const typename T::Element* weight) {
    auto* out = reinterpret_cast<typename T::Element*>(w.data->words());
    for (long n = 0; n < w.n; n++)
        for (long k = 0; k < w.k; k++) {
            long word = ((n / COLUMNS) * w.steps + k / T::STEP) * COLUMNS + n % COLUMNS;
            out[word * T::STEP + k % T::STEP] = weight[n * w.k + k];
        }
}

template <class T> void embed_as(const Linear& table, const int64_t* tokens, long rows, typename T::Element* out) {
    auto* data = reinterpret_cast<const typename T::Element*>(table.data->words());
    for (long r = 0; r < rows; r++) {
        long n = tokens[r];
        for (long k = 0; k < table.k; k++) {
            long word = ((n / COLUMNS) * table.steps + k / T::STEP) * COLUMNS + n % COLUMNS;
            out[r * table.k + k] = data[word * T::STEP + k % T::STEP];
        }
    }
}

// ROWS rows of x times one tile of 64 columns. The same instructions for each row, whatever ROWS is.
template <class T, int ROWS>
void linear_tile(const uint32_t* x, long stride, const uint32_t* w, long steps, float (*out)[COLUMNS]) {
    Floats sums[ROWS][VECTORS] = {};
    for (long s = 0; s < steps; s++, w += COLUMNS) {
        for (int v = 0; v < VECTORS; v++) __builtin_prefetch(w + 16 * COLUMNS + v * LANES);
        for (int r = 0; r < ROWS; r++) {
            uint32_t word = x[r * stride + s];
            for (int v = 0; v < VECTORS; v++) sums[r][v] = T::mac(sums[r][v], w + v * LANES, word);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(out[r] + v * LANES, sums[r][v]);
}

template <class T, int ROWS = TILE_ROWS>
void linear_rows(int rows, const uint32_t* x, long stride, const uint32_t* w, long steps, float (*out)[COLUMNS]) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return linear_rows<T, ROWS - 1>(rows, x, stride, w, steps, out);
    linear_tile<T, ROWS>(x, stride, w, steps, out);
}

// How a variant multiplies: rows that share one reading of the weights, and what surrounds the work of a thread.
template <class T> struct Multiply {
    static constexpr int ROWS = TILE_ROWS;
    static constexpr bool WHOLE = false;  // all ROWS rows must be there to be read
    static void tile(int rows, const uint32_t* x, const uint32_t* w, long steps, float (*out)[COLUMNS]) {
        linear_rows<T>(rows, x, steps, w, steps, out);
    }
};

#if defined(__AMX_BF16__)
template <> struct Multiply<BF16> : amx::Unit {
    static constexpr int ROWS = amx::ROWS;
    static constexpr bool WHOLE = true;
    static void tile(int, const uint32_t* x, const uint32_t* w, long steps, float (*out)[COLUMNS]) {
        constexpr int WORDS = amx::INNER / 2;
        amx::each<VECTORS>([](auto v) { amx::zero<amx::SUM + v>(); });
        for (long s = 0; s < steps; s += WORDS, w += WORDS * COLUMNS) {
            amx::load<amx::LEFT>(x + s, steps * 4);
            amx::each<VECTORS>([&](auto v) {
                amx::prefetch(w + v * LANES + AHEAD_TILES * WORDS * COLUMNS, WORDS, COLUMNS);
                amx::load<amx::RIGHT>(w + v * LANES, COLUMNS * 4);
                amx::multiply<amx::SUM + v, amx::LEFT, amx::RIGHT>();
            });
        }
        amx::each<VECTORS>([&](auto v) { amx::store<amx::SUM + v>(out[0] + v * LANES, COLUMNS * 4); });
    }
    static constexpr long AHEAD_TILES = 1;  // of 4 KiB, from the one being multiplied to the one fetched
};
#endif

template <class T> void narrow_some(typename T::Element* out, const float* x, long count) {
    for (; count >= LANES; count -= LANES, out += LANES, x += LANES) T::narrow(out, load(x));
    for (long i = 0; i < count; i++) out[i] = T::round(x[i]);
}

template <class T> void linear_as(const Linear& w, const void* x, long rows, void* out, bool keep_float) {
    using Element = typename T::Element;
    using Unit = Multiply<T>;
    // Rows are read as words, some variants read several rows at once: zeros where there are none.
    std::vector<Element> padded;
    const Element* in = static_cast<const Element*>(x);
    long width = w.steps * T::STEP, held = Unit::WHOLE ? round_up(rows, Unit::ROWS) : rows;
    if (width != w.k || held != rows) {
        padded.assign(static_cast<size_t>(held * width), Element{});
        for (long r = 0; r < rows; r++) std::copy_n(in + r * w.k, w.k, padded.data() + r * width);
        in = padded.data();
    }
    long tiles = round_up(w.n, COLUMNS) / COLUMNS;
    long in_one = rows * w.k * w.n < SMALL ? tiles : std::max<long>(1, tiles / (4 * threads()));
    parallel((tiles + in_one - 1) / in_one, [&](long job) {
        alignas(64) float sums[Unit::ROWS][COLUMNS];
        [[maybe_unused]] Unit unit;
        for (long tile = job * in_one; tile < std::min(tiles, (job + 1) * in_one); tile++) {
            long first = tile * COLUMNS, columns = std::min<long>(COLUMNS, w.n - first);
            const float* bias = w.bias.empty() ? nullptr : w.bias.data() + first;
            for (long r = 0; r < rows; r += Unit::ROWS) {
                int some = static_cast<int>(std::min<long>(Unit::ROWS, rows - r));
                const auto* words = reinterpret_cast<const uint32_t*>(in + r * width);
                Unit::tile(some, words, w.tile(tile), w.steps, sums);
                for (int i = 0; i < some; i++) {
                    if (bias)
                        for (long c = 0; c < columns; c++) sums[i][c] += bias[c];
                    long at = (r + i) * w.n + first;
                    if (keep_float) std::copy_n(sums[i], columns, static_cast<float*>(out) + at);
                    else narrow_some<T>(static_cast<Element*>(out) + at, sums[i], columns);
                }
            }
        }
    });
}

}  // namespace
