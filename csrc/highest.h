// Passes over one row of logits: its highest values, and the cut that top-k and top-p make.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace longdraft {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr long LANES = 16;  // values that are compared together, in loops of which the compiler makes vector instructions

// A token that may follow.
struct Guess {
    double score;
    long place;  // of the token in the row of logits
    bool operator<(const Guess& other) const {  // sorts the better token first
        return score > other.score || (score == other.score && place < other.place);
    }
};

// Call f(i) for each value that is `mark` or more, in order. Without branches for most values.
template <class F> void for_each_reaching(float mark, const float* values, long count, F f) {
    for (long start = 0; start < count; start += LANES) {
        const long some = std::min(LANES, count - start);
        int32_t reaches = 0;
        if (some == LANES)
            for (long i = 0; i < LANES; i++) reaches |= values[start + i] >= mark;
        for (long i = start; i < start + some && (reaches || some < LANES); i++)
            if (values[i] >= mark) f(i);
    }
}

// The highest of values of which none is NaN; of none: LOWEST.
inline float highest_value(const float* values, long count) {
    float most[LANES];
    std::fill_n(most, LANES, LOWEST);
    long at = 0;
    for (; at + LANES <= count; at += LANES)
        for (long i = 0; i < LANES; i++) most[i] = values[at + i] > most[i] ? values[at + i] : most[i];
    return std::max(*std::max_element(most, most + LANES), at < count ? *std::max_element(values + at, values + count) : LOWEST);
}

// The `wanted` highest values, or all if there are fewer, in order.
std::vector<Guess> highest_of(const float* values, long count, long wanted);

// Bit-identical to longdraft/kernels/reproducible.py, for x <= 0: only basic operations, never fused.
inline double exact_exp(double x) {
    constexpr double TERMS[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
    constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2**52: adding it leaves a whole number, halves to even
    const double least = x > -700.0 ? x : -700.0, n = (least * 1.44269504088896338700 + ROUND) - ROUND;
    const double r = (least - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double series = TERMS[0];
    for (int i = 1; i < 14; i++) series = series * r + TERMS[i];
    if (x < -700.0) return 0.0;
    const int64_t bits = (static_cast<int64_t>(n) + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, sizeof power);
    return series * power;
}

// The tokens that top-k and top-p leave are the first ones in the order of falling logits, and of places among equals.
struct Cut {
    float value = LOWEST;   // of the last token that is kept
    long place = LONG_MAX;  // of that token
    bool keeps(float logit, long at) const { return logit > value || (logit == value && at <= place); }
};

// top_k: 0: off. top_p: 1: off. best: the highest logit; divisor: of logits to scores. See sampling/process.py.
Cut cut_of(const float* row, long size, float best, long top_k, double top_p, double divisor);

}  // namespace longdraft
