// How rows choose experts, and the sum of what the experts return. longdraft/kernels/experts.py states both.
#pragma once

#include "layout.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <limits>

namespace longdraft::LONGDRAFT_VARIANT {

// The softmax of a row of `count` elements, padded with zeros to 16 lanes. The order of its sum is the same in every row.
template <class T> void softmax(const typename T::Element* x, long count, float* out) {
    const long padded = round_up(count, LANES);
    for (long i = 0; i < count; i++) out[i] = T::widen(x[i]);
    std::fill(out + count, out + padded, -std::numeric_limits<float>::infinity());
    Floats highest = load(out), sums = {};
    for (long i = LANES; i < padded; i += LANES) highest = max(highest, load(out + i));
    const Floats top = broadcast(max(highest));
    for (long i = 0; i < padded; i += LANES) {
        const Floats power = exp2((load(out + i) - top) * 1.44269504f);
        store(out + i, power);
        sums += power;
    }
    const Floats total = broadcast(sum(sums));
    for (long i = 0; i < padded; i += LANES) store(out + i, load(out + i) / total);
}

// The experts of rows with logits [rows, count], best first, and their weights: both [rows, chosen]. Of equal
// probabilities the lower index comes first; a row that is not finite chooses the first ones, with weights that are NaN.
template <class T>
void route_as(const void* logits, long rows, const Routing& how, int32_t* experts, float* weights) {
    std::vector<float> p(static_cast<size_t>(round_up(how.count, LANES)));
    for (long r = 0; r < rows; r++, experts += how.chosen, weights += how.chosen) {
        softmax<T>(static_cast<const typename T::Element*>(logits) + r * how.count, how.count, p.data());
        long found = 0;
        for (long e = 0; e < how.count; e++) {
            const float each = p[static_cast<size_t>(e)];
            if (found == how.chosen && !(each > weights[found - 1])) continue;
            long place = found < how.chosen ? found++ : found - 1;
            for (; place > 0 && each > weights[place - 1]; place--) {
                weights[place] = weights[place - 1];
                experts[place] = experts[place - 1];
            }
            weights[place] = each;
            experts[place] = static_cast<int32_t>(e);
        }
        float total = weights[0];
        for (long i = 1; i < how.chosen; i++) total += weights[i];
        for (long i = 0; i < how.chosen; i++) {
            if (how.normalises) weights[i] /= total;
            if (how.scales) weights[i] *= how.scales[experts[i]];
            if (how.rounds) weights[i] = T::widen(T::round(weights[i]));
        }
    }
}

inline void sigmoid_all(float* x, long count) {
    for (long i = 0; i < count; i += LANES) {
        const long some = std::min<long>(LANES, count - i);
        float lanes[LANES];
        store(lanes, logistic(widen_some<F32>(x + i, some)));
        std::copy_n(lanes, some, x + i);
    }
}

// total[rows[i]] += weights[i] x[i] for i = 0, 1, .., in this order, for rows of `width`. `rows` null: 0, 1, ..
inline void add_weighted(float* total, const float* x, const int32_t* rows, const float* weights, long count, long width) {
    constexpr long PART = 16 * LANES;  // columns of a job
    const long parts = (width + PART - 1) / PART, in_one = count * width < MIN_PARALLEL_WORK ? parts : 1;
    parallel((parts + in_one - 1) / in_one, [&](long job) {
        const long first = job * in_one * PART, end = std::min(width, first + in_one * PART);
        for (long i = 0; i < count; i++) {
            float* to = total + (rows ? rows[i] : i) * width;
            const float* from = x + i * width;
            const Floats by = broadcast(weights[i]);
            long c = first;
            for (; c + LANES <= end; c += LANES) store(to + c, load(to + c) + load(from + c) * by);
            for (; c < end; c++) to[c] += from[c] * weights[i];
        }
    });
}

}  // namespace
