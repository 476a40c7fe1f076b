// The attention weights themselves, summed over queries: what the selection of a partial cache ranks positions by.
#pragma once

#include "attention_block.h"
#include "attention_products.h"
#include "layout.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <vector>

namespace longdraft::LONGDRAFT_VARIANT {

// For each KV head, softmax(q . k * scale) over [0, length), summed over the rows and the head's query heads.
//   q [rows, heads, dim] -> out [KV heads, length]
template <class T>
void weights_as(const Store& s, long length, const void* q, long rows, long heads, float scale, float* out) {
    using Element = typename T::Element;
    constexpr long BATCH = Products<T>::BATCH;
    const long group = heads / s.heads, query_rows = rows * group, padded_rows = round_up(query_rows, BATCH);
    const long steps = s.padded / T::PER_WORD, width = round_up(length, BLOCK);
    parallel(s.heads, [&](long head) {
        [[maybe_unused]] Products<T> unit;  // sets up the matrix unit for this thread
        std::vector<typename T::Operand> queries(static_cast<size_t>(padded_rows * steps));
        for (long i = 0; i < query_rows; i++)
            copy_operands<T>(static_cast<const Element*>(q) + (i / group * heads + head * group + i % group) * s.dim, s.dim,
                             queries.data() + i * steps, steps);
        std::vector<float> scores(static_cast<size_t>(query_rows * width));
        alignas(64) float block[BATCH][BLOCK];
        Ahead none;
        for (long start = 0; start < length; start += BLOCK)
            for (long first = 0; first < query_rows; first += BATCH) {
                int count = static_cast<int>(std::min(BATCH, query_rows - first));
                Products<T>::score(count, queries.data() + first * steps, s.key(start / SPLIT, head) + start % SPLIT * steps,
                                   BLOCK, steps, block, none);
                for (int r = 0; r < count; r++)
                    std::copy_n(block[r], BLOCK, scores.data() + (first + r) * width + start);
            }
        float* to = out + head * length;
        std::fill_n(to, length, 0.0f);
        for (long i = 0; i < query_rows; i++) {
            float* row = scores.data() + i * width;
            if (s.score_cap != 0.0f) cap_scores(row, width, scale * LOG2_E, s.score_cap);
            std::fill(row + length, row + width, LOWEST);
            const float by = s.score_cap != 0.0f ? 1.0f : scale * LOG2_E;
            const float max_score = *std::max_element(row, row + length) * by;
            Floats sums = {};
            for (long p = 0; p < width; p += LANES) {
                Floats weight = exp2(fma(load(row + p), broadcast(by), broadcast(-max_score)));
                sums = sums + weight;
                store(row + p, weight);
            }
            const float total = sum(sums);
            for (long p = 0; p < length; p++) to[p] += row[p] / total;
        }
    });
}

}  // namespace
