// The two matrix products of attention for a few rows: scores (queries by keys) and weighted sums of values.
//
// `Products<T>` has both, and the number of rows that share one reading of the cache (BATCH). Queries and weights are operands
// of words (simd.h). `steps` counts multiply-accumulates of one word: words of a key, or words of positions.
#pragma once

#include "amx.h"
#include "layout.h"
#include "simd.h"
#include "words_neon.h"

#include <algorithm>
#include <type_traits>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr long AHEAD = 512;  // words between a load and the prefetch next to it; 2 KiB was fastest when measured

constexpr long div_up(long x, long by) { return (x + by - 1) / by; }

#if defined(__AVX512F__)
constexpr int SCORE_ROWS = 8, SUM_ROWS = 4;  // rows whose scores, and whose sums, are computed together
constexpr int CHAINS = 16;                   // vectors of sums that hide the latency of a multiply-accumulate
constexpr int WIDEST = 4, LEAST_WIDE = 4;    // vectors of dimensions that are summed together, for few and for many rows
#elif defined(__AVX2__)
constexpr int SCORE_ROWS = 5, SUM_ROWS = 5;  // 5 x 2 registers of sums, 4 of keys or values and a broadcast fill all 16
constexpr int CHAINS = 4;
constexpr int WIDEST = 4, LEAST_WIDE = 1;
#elif defined(__ARM_NEON)
constexpr int SCORE_ROWS = 6, SUM_ROWS = 6;  // 6 x 4 of the 32 registers
constexpr int CHAINS = 6;
constexpr int WIDEST = 4, LEAST_WIDE = 1;
#else
constexpr int SCORE_ROWS = 2, SUM_ROWS = 2;
constexpr int CHAINS = 2;
constexpr int WIDEST = 2, LEAST_WIDE = 1;
#endif

// Vectors of dimensions that are summed together for so many rows.
constexpr int wide_of(int rows) { return std::max(LEAST_WIDE, CHAINS / rows < WIDEST ? CHAINS / rows : WIDEST); }

// The keys and values that a batch of rows fetches for the tile after this one, into the L2 cache, while it computes. They
// come evenly over all parts of the work: a processor stops at a burst of lines, and a line that is fetched only when it is
// needed lets it wait for memory first, and memory for the softmax afterwards.
class Ahead {
  public:
    // Lines for each group of 16 scores, each pair of vectors of the softmax and each step of the weighted sums.
    long in_group = 0, in_pair = 0, in_step = 0;

    Ahead() = default;
    //   lines  of 64 bytes, of the keys and of the values
    //   steps  of the weighted sums, for each of which `padded` dimensions are added
    Ahead(const void* keys, const void* values, long lines, long rows, long steps, long padded)
        : at_(static_cast<const char*>(keys)), next_(static_cast<const char*>(values)), lines_(lines), left_(2 * lines) {
        const long passes = div_up(rows, SUM_ROWS), wide = LANES * wide_of(static_cast<int>(div_up(rows, passes)));
        in_group = div_up(left_ / 4, div_up(rows, SCORE_ROWS) * (BLOCK / LANES));
        in_pair = div_up(left_ / 4, rows * (BLOCK / POSITION_GROUP));
        in_step = div_up(left_ / 2, passes * steps * div_up(padded, wide));
    }

    void fetch(long count) {
        for (count = std::min(count, left_); count > 0; count--, left_--, at_ += 64) {
            if (left_ == lines_) at_ = next_;
            __builtin_prefetch(at_, 0, 2);
        }
    }

  private:
    const char *at_ = nullptr, *next_ = nullptr;
    long lines_ = 0, left_ = 0;
};

// Scores of ROWS queries with GROUPS groups of 16 keys: out[row * BLOCK + 16 * group + lane]. Each lane's sum is a chain
// of dependent operations, so with few rows several groups are computed at the same time.
template <class T, int ROWS, int GROUPS>
void score_groups(const typename T::Operand* q, const uint32_t* keys, long steps, float* out, Ahead& ahead) {
    Floats sums[GROUPS][ROWS] = {};
    for (long s = 0; s < steps; s++) {
        if (s < ahead.in_group) ahead.fetch(GROUPS);
        UNROLLED for (int g = 0; g < GROUPS; g++) {
            const uint32_t* lanes = keys + (g * steps + s) * LANES;
            __builtin_prefetch(lanes + AHEAD);
            UNROLLED for (int r = 0; r < ROWS; r++) sums[g][r] = T::mac(sums[g][r], lanes, q[r * steps + s]);
        }
    }
    UNROLLED for (int g = 0; g < GROUPS; g++)
        UNROLLED for (int r = 0; r < ROWS; r++) store(out + r * BLOCK + g * LANES, sums[g][r]);
}

template <class T, int ROWS>
void score_rows(const typename T::Operand* q, const uint32_t* keys, long count, long steps, float* out, Ahead& ahead) {
    constexpr int MANY = std::max(1, CHAINS / ROWS);
    long p = 0;
    for (; p + MANY * LANES <= count; p += MANY * LANES)
        score_groups<T, ROWS, MANY>(q, keys + p * steps, steps, out + p, ahead);
    for (; p < count; p += LANES) score_groups<T, ROWS, 1>(q, keys + p * steps, steps, out + p, ahead);
}

// sums[row] += weights[row] . values, for WIDE * 16 dimensions, positions in order.
template <class T, int ROWS, int WIDE>
void accumulate_wide(const typename T::Operand* weights, const uint32_t* values, long steps, long padded, float* sums,
                     long stride, Ahead& ahead) {
    Floats acc[ROWS][WIDE];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < WIDE; v++) acc[r][v] = load(sums + r * stride + v * LANES);
    for (long s = 0; s < steps; s++, values += padded) {
        UNROLLED for (int v = 0; v < WIDE; v++) __builtin_prefetch(values + v * LANES + AHEAD);
        ahead.fetch(ahead.in_step);
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < WIDE; v++)
                acc[r][v] = T::mac(acc[r][v], values + v * LANES, weights[r * (BLOCK / T::PER_WORD) + s]);
    }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < WIDE; v++) store(sums + r * stride + v * LANES, acc[r][v]);
}

// The same for the dimensions [d, padded).
template <class T, int ROWS, int WIDE = wide_of(ROWS)>
void accumulate_rows(const typename T::Operand* weights, const uint32_t* values, long steps, long d, long padded, float* sums,
                     long stride, Ahead& ahead) {
    for (; d + WIDE * LANES <= padded; d += WIDE * LANES)
        accumulate_wide<T, ROWS, WIDE>(weights, values + d, steps, padded, sums + d, stride, ahead);
    if constexpr (WIDE > 1)
        if (d < padded) accumulate_rows<T, ROWS, WIDE / 2>(weights, values, steps, d, padded, sums, stride, ahead);
}

// With vector instructions: the sums of all rows of a pass are in registers.
template <class T> struct Products {
    using Operand = typename T::Operand;
    static constexpr int BATCH = 16;
    static constexpr long TILE = BLOCK;  // positions that all batches of rows read before the next: they stay in L2
    static constexpr bool FETCHES_AHEAD = true;

    // out[row][position] = q[row] . keys[position], for `count` positions (a multiple of 16)
    static void score(int rows, const Operand* q, const uint32_t* keys, long count, long steps, float (*out)[BLOCK],
                      Ahead& ahead) {
        in_passes<SCORE_ROWS>(rows, [&](int r, auto n) {
            score_rows<T, n>(q + r * steps, keys, count, steps, out[r], ahead);
        });
    }

    // sums[row] += weights[row] . values, for `count` positions. weights [rows, BLOCK / PER_WORD]
    static void accumulate(int rows, const Operand* weights, const uint32_t* values, long count, long padded, float* sums,
                           long stride, Ahead& ahead) {
        in_passes<SUM_ROWS>(rows, [&](int r, auto n) {
            accumulate_rows<T, n>(weights + r * (BLOCK / T::PER_WORD), values, count / T::PER_WORD, 0, padded,
                                  sums + r * stride, stride, ahead);
        });
    }

  private:
    // Call f(first row, rows) for passes of at most MOST rows, of nearly as many each. A pass knows its number of rows when it
    // is compiled.
    template <int MOST, class F> static void in_passes(int rows, F f) {
        const int some = static_cast<int>(div_up(rows, div_up(rows, MOST)));
        for (int r = 0; r < rows; r += some)
            with_count<MOST>(std::min(some, rows - r), [&](auto n) { f(r, n); });
    }
    template <int MOST, class F> static void with_count(int rows, F f) {
        if constexpr (MOST > 1)
            if (rows < MOST) return with_count<MOST - 1>(rows, f);
        f(std::integral_constant<int, MOST>{});
    }
};

#if defined(__AMX_BF16__)
// With the matrix unit: sixteen rows to a tile; two tiles share one reading where there are more rows. A single row is
// used for all sixteen rows of its tile (stride 0), so that no padding rows are needed.
template <> struct Products<BF16> : amx::Unit {
    using Operand = BF16::Operand;
    static constexpr int BATCH = 2 * amx::ROWS;
    static constexpr long TILE = 4 * BLOCK;
    static constexpr bool FETCHES_AHEAD = false;
    static constexpr int WORDS = amx::INNER / 2;

    static void score(int rows, const Operand* q, const uint32_t* keys, long count, long steps, float (*out)[BLOCK], Ahead&) {
        long from = rows == 1 ? 0 : steps * 4, to = rows == 1 ? 0 : BLOCK * 4, p = 0;
        if (rows > amx::ROWS)
            for (; p < count; p += 2 * LANES) score_wide<2, 2>(q, from, keys + p * steps, steps, out[0] + p, to);
        for (; p + 4 * LANES <= count; p += 4 * LANES) score_wide<1, 4>(q, from, keys + p * steps, steps, out[0] + p, to);
        for (; p < count; p += LANES) score_wide<1, 1>(q, from, keys + p * steps, steps, out[0] + p, to);
    }

    static void accumulate(int rows, const Operand* weights, const uint32_t* values, long count, long padded, float* sums,
                           long stride, Ahead&) {
        long from = rows == 1 ? 0 : BLOCK * 2, to = rows == 1 ? 0 : stride * 4, d = 0;
        if (rows > amx::ROWS)
            for (; d < padded; d += 2 * LANES) accumulate_wide<2, 2>(weights, from, values + d, count, padded, sums + d, to);
        for (; d + 4 * LANES <= padded; d += 4 * LANES)
            accumulate_wide<1, 4>(weights, from, values + d, count, padded, sums + d, to);
        for (; d < padded; d += LANES) accumulate_wide<1, 1>(weights, from, values + d, count, padded, sums + d, to);
    }

  private:
    // TILES * 16 rows by WIDE groups of 16 keys; `from` and `to` are the distances between rows in bytes.
    template <int TILES, int WIDE>
    static void score_wide(const uint32_t* q, long from, const uint32_t* keys, long steps, float* out, long to) {
        amx::each<TILES * WIDE>([](auto i) { amx::zero<amx::SUM + i>(); });
        for (long s = 0; s < steps; s += WORDS) {
            amx::each<TILES>([&](auto t) { amx::load<amx::LEFT + t>(q + t * amx::ROWS * from / 4 + s, from); });
            amx::each<WIDE>([&](auto v) {
                const uint32_t* lanes = keys + (v * steps + s) * LANES;
                amx::prefetch(lanes + AHEAD, WORDS, LANES);
                amx::load<amx::RIGHT>(lanes, LANES * 4);
                amx::each<TILES>([&](auto t) { amx::multiply<amx::SUM + t * WIDE + v, amx::LEFT + t, amx::RIGHT>(); });
            });
        }
        amx::each<TILES * WIDE>([&](auto i) {
            amx::store<amx::SUM + i>(out + i / WIDE * amx::ROWS * to / 4 + i % WIDE * LANES, to);
        });
    }

    // TILES * 16 rows by WIDE * 16 dimensions of the values.
    template <int TILES, int WIDE>
    static void accumulate_wide(const Operand* weights, long from, const uint32_t* values, long count, long padded,
                                float* sums, long to) {
        auto at = [&](auto i) { return sums + i / WIDE * amx::ROWS * to / 4 + i % WIDE * LANES; };
        amx::each<TILES * WIDE>([&](auto i) { amx::load<amx::SUM + i>(at(i), to); });
        for (long p = 0; p < count; p += amx::INNER, values += WORDS * padded) {
            amx::each<TILES>([&](auto t) { amx::load<amx::LEFT + t>(weights + t * amx::ROWS * from / 4 + p / 2, from); });
            amx::each<WIDE>([&](auto v) {
                amx::prefetch(values + v * LANES + AHEAD, WORDS, padded);
                amx::load<amx::RIGHT>(values + v * LANES, padded * 4);
                amx::each<TILES>([&](auto t) { amx::multiply<amx::SUM + t * WIDE + v, amx::LEFT + t, amx::RIGHT>(); });
            });
        }
        amx::each<TILES * WIDE>([&](auto i) { amx::store<amx::SUM + i>(at(i), to); });
    }
};
#elif defined(__ARM_NEON)
// With the same instructions as linear layers.
template <> struct Products<BF16> {
    using Operand = BF16::Operand;
    static constexpr int BATCH = 16;
    static constexpr long TILE = BLOCK;
    static constexpr bool FETCHES_AHEAD = false;  // not measured

    static void score(int rows, const Operand* q, const uint32_t* keys, long count, long steps, float (*out)[BLOCK], Ahead&) {
        for (int r = 0; r < rows; r++) std::fill_n(out[r], count, 0.0f);
        words_neon::add_products(rows, q, steps, {keys, LANES, LANES * steps}, count, steps, out[0], BLOCK);
    }

    static void accumulate(int rows, const Operand* weights, const uint32_t* values, long count, long padded, float* sums,
                           long stride, Ahead&) {
        words_neon::add_products(rows, weights, BLOCK / 2, {values, padded, LANES}, padded, count / 2, sums, stride);
    }
};
#endif

}  // namespace
