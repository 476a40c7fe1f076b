// Rows as whole numbers of 8 bits in groups of 32 inputs, as weights in groups are multiplied with them (groups.h).
// longdraft/kernels/formats/int4.py defines the numbers.
#pragma once

#include "amx.h"
#include "layout.h"
#include "simd.h"

#include <algorithm>

namespace longdraft::LONGDRAFT_VARIANT::groups {

constexpr float LEAST_MAGNITUDE = 0x1p-120f;  // groups below have the step 0: 127 / magnitude would not be finite

// Rows as whole numbers: values [rows, width] padded with zeros to groups; for each group its step (largest magnitude /
// 127; NaN where the row is not finite), the sums of the values of its two halves, and what these sums stand for, which
// least values are multiplied with: step * (sum of the first half + sum of the last).
struct Quantised {
    const int8_t* values;
    const float* steps;
    const int32_t* sums;  // [rows, groups, 2]
    const float* totals;  // [rows, groups]
    long width, groups;
};

// Four values, which one instruction multiplies with bytes.
inline int32_t word_at(const int8_t* values) { int32_t word; std::memcpy(&word, values, 4); return word; }

// One group of a row: 32 floats. Rounds to nearest even by adding 1.5 * 2^23.
inline void quantise_group(Floats low, Floats high, int8_t* values, float* step, int32_t* sums) {
    const Floats positive_low = select(low < 0.0f, -low, low), positive_high = select(high < 0.0f, -high, high);
    const float largest = max(max(positive_low, positive_high));
    const float damage = sum((low - low) + (high - high));  // NaN where anything is not finite, else 0
    const float inverse = largest >= LEAST_MAGNITUDE ? 127.0f / largest : 0.0f;
    const Floats shifter = broadcast(12582912.0f);
    for (int half = 0; half < 2; half++) {
        Ints whole = as<Ints>((half ? high : low) * inverse + shifter) - as<Ints>(shifter);
        whole = damage == 0 ? whole : Ints{};
        store_as(values + half * LANES, convert<Bytes>(whole));
        sums[half] = static_cast<int32_t>(sum(convert<Floats>(whole)));  // below 2^11: exact
    }
    *step = (largest < LEAST_MAGNITUDE ? 0.0f : largest / 127.0f) + damage;
}

#if defined(__AMX_INT8__)
constexpr long UNIT_ROWS = amx::ROWS;  // rows of values that must exist, even if fewer are wanted
#else
constexpr long UNIT_ROWS = 1;
#endif

// Bytes of memory for rows of k inputs.
inline long quantised_bytes(long rows, long k) {
    const long groups = round_up(k, GROUP) / GROUP;
    return round_up(rows, UNIT_ROWS) * groups * (GROUP + 16) + 2 * GROUP;
}

//   order  the input that each column of the weight multiplies; null: its own
template <class T> Quantised quantise_rows(const void* x, long rows, long k, const int32_t* order, char* memory) {
    const long groups = round_up(k, GROUP) / GROUP, width = groups * GROUP;
    auto* values = reinterpret_cast<int8_t*>(memory);
    auto* steps = reinterpret_cast<float*>(values + rows * width);
    auto* sums = reinterpret_cast<int32_t*>(steps + rows * groups);
    auto* totals = reinterpret_cast<float*>(sums + 2 * rows * groups);
    auto* in = static_cast<const typename T::Element*>(x);
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < groups; g++) {
            const typename T::Element* from = in + r * k + g * GROUP;
            const long count = std::min<long>(GROUP, k - g * GROUP);
            typename T::Element held[GROUP] = {};
            if (order) {
                for (long i = 0; i < count; i++) held[i] = in[r * k + order[g * GROUP + i]];
                from = held;
            } else if (count < GROUP) {
                std::copy_n(from, count, held);
                from = held;
            }
            const long at = r * groups + g;
            quantise_group(T::widen(from), T::widen(from + LANES), values + r * width + g * GROUP, steps + at, sums + 2 * at);
            totals[at] = steps[at] * static_cast<float>(sums[2 * at] + sums[2 * at + 1]);
        }
    return {values, steps, sums, totals, width, groups};
}

}  // namespace
