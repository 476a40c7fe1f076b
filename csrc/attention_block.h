// One block of BLOCK positions for a batch of query rows: scores, one step of the online softmax, weighted values.
#pragma once

#include "attention_products.h"
#include "layout.h"
#include "simd.h"

#include <algorithm>
#include <limits>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;

// Query rows of one KV head that read the keys and values together. Each array has one entry per query row.
//
//     state   [ weighted sum of the values: `padded` floats | maximum score, base 2 | sum of the weights | unused ]
template <class T> struct RowBatch {
    int count;
    const typename T::Operand* queries;  // [count, `padded` elements]
    float* states;            // `stride` floats each
    long stride;
    const long *first, *end;           // the positions [first, end) that the row sees
    const uint32_t* const* tail_keys;  // the row's tail (attention_rows.h), from position shared_end on
    const long* tail_words;            // words between the tail's keys and its values

    float* state(int r) const { return states + r * stride; }
};

// Scores in base 2 with the soft cap: `scale` and `cap` as for BlockAttention and Store. `count` is a multiple of LANES.
inline void cap_scores(float* scores, long count, float scale, float cap) {
    for (long i = 0; i < count; i += LANES) store(scores + i, soft_cap(load(scores + i) * scale, cap * LOG2_E));
}

template <class T> struct BlockAttention {
    using Operand = typename T::Operand;
    using Unit = Products<T>;
    const Store& store;
    long head, shared_end;
    float scale;  // of scores in base 2: log2(e) / sqrt(dim)

    // Add the positions [start, start + BLOCK) to the rows' states. At least one row must see one of them.
    void add(const RowBatch<T>& b, long start, Ahead ahead) const {
        alignas(64) float scores[Unit::BATCH][BLOCK];
        alignas(64) Operand weights[Unit::BATCH][BLOCK / T::PER_WORD];
        const long padded = store.padded, steps = padded / T::PER_WORD, place = start % SPLIT;
        long reach = 0;
        for (int r = 0; r < b.count; r++) reach = std::max(reach, b.end[r] - start);
        // `shared` positions of the block are read in the store by all rows, `own[r]` more in the row's tail.
        const long shared = std::clamp(shared_end - start, 0L, std::min(BLOCK, round_up(reach, POSITION_GROUP)));
        if (shared)
            Unit::score(b.count, b.queries, store.key(start / SPLIT, head) + place * steps, shared, steps, scores,
                        ahead);
        const long in_tail = start + shared - shared_end;
        long own[Unit::BATCH];
        Ahead none;
        for (int r = 0; r < b.count; r++) {
            const long from = std::clamp(b.first[r] - start, 0L, BLOCK), to = std::clamp(b.end[r] - start, 0L, BLOCK);
            own[r] = std::max(0L, round_up(to, POSITION_GROUP) - shared);
            if (own[r])
                Unit::score(1, b.queries + r * steps, b.tail_keys[r] + in_tail * steps, own[r], steps,
                            reinterpret_cast<float(*)[BLOCK]>(scores[r] + shared), none);
            online_softmax(b.state(r), scores[r], from, to, shared + own[r], weights[r], ahead);
        }
        if (shared)
            Unit::accumulate(b.count, weights[0], store.value(start / SPLIT, head) + place / T::PER_WORD * padded, shared,
                             padded, b.states, b.stride, ahead);
        for (int r = 0; r < b.count; r++)
            if (own[r])
                Unit::accumulate(1, weights[r] + shared / T::PER_WORD,
                                 b.tail_keys[r] + b.tail_words[r] + in_tail / T::PER_WORD * padded, own[r], padded,
                                 b.state(r), b.stride, none);
    }

    // One step of the online softmax (Milakov and Gimelshein 2018): `count` scores become weights
    // 2^(scale * score - maximum), and the state is rescaled to the new maximum. Outside [from, to) a weight is 0.
    void online_softmax(float* state, float* scores, long from, long to, long count, Operand* weights,
                        Ahead& ahead) const {
        if (from >= to) {
            std::fill_n(weights, count / T::PER_WORD, Operand{});
            return;
        }
        float &max_score = state[store.padded], &weight_sum = state[store.padded + 1];
        const float by = store.score_cap != 0.0f ? 1.0f : scale;
        if (store.score_cap != 0.0f) cap_scores(scores, count, scale, store.score_cap);
        for (long i = 0; i < from; i++) scores[i] = LOWEST;
        for (long i = to; i < count; i++) scores[i] = LOWEST;
        // Two vectors per position group, with separate accumulators: two independent chains of operations.
        Floats high[2] = {broadcast(LOWEST), broadcast(LOWEST)};
        for (long i = 0; i < count; i += POSITION_GROUP)
            for (int v = 0; v < 2; v++) high[v] = max(high[v], load(scores + i + v * LANES));
        const float before = max_score;
        max_score = std::max(max_score, max(max(high[0], high[1])) * by);
        Floats sums[2] = {}, factor = broadcast(by), shift = broadcast(-max_score);
        for (long i = 0; i < count; i += POSITION_GROUP) {
            ahead.fetch(ahead.in_pair);
            for (int v = 0; v < 2; v++) {
                Floats weight = exp2(fma(load(scores + i + v * LANES), factor, shift));
                sums[v] = sums[v] + weight;
                T::narrow_operands(weights + (i + v * LANES) / T::PER_WORD, weight);
            }
        }
        const float rescale = before == max_score ? 1.0f : exp2(before - max_score);
        if (!(max_score > LOWEST && max_score < -LOWEST)) weight_sum = max_score - max_score;  // no finite score: NaN
        weight_sum = weight_sum * rescale + sum(sums[0] + sums[1]);
        if (rescale != 1.0f)
            for (long d = 0; d < store.padded; d += LANES)
                longdraft::LONGDRAFT_VARIANT::store(state + d, load(state + d) * rescale);
    }
};

}  // namespace
