// A few query rows over a long cache, and a tree of provisional rows behind it.
//
// The logical positions of a row are the committed ones, then its path in the tree, itself last. They are
// walked in blocks of BLOCK positions counted from 0, each with one step of an online softmax, in splits of
// SPLIT positions that are merged in order. Keys up to `in_place` (a multiple of 16 at most the committed
// length) are read where they lie, by several rows at once; the few behind it, with the row's path, are first
// laid into scratch in logical order. Each lane does the same operations in the same order either way, so a
// node of a tree gets the bits that plain decoding gives at its position.
//
//     [ block 0 ][ block 1 ] ... [ in place .. | scratch: rest of the prefix, path, self | masked ]
#pragma once

#include "layout.h"
#include "pool.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr int BATCH = 8;                  // rows that share one reading of the cache
constexpr long TILE = 4 * BLOCK;          // positions that all batches visit while they are in the L2 cache
constexpr long AHEAD = 512;               // words between a load and the prefetch beside it (measured: 2 KiB)
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;

// Scores of ROWS queries with groups of 16 keys: out[row][at + 16 * group + lane]. Each lane's sum is a chain of
// dependent operations, so with few rows several groups are under way at once.
template <class T, int ROWS, int GROUPS>
void score_groups(const uint32_t* const* q, const uint32_t* keys, long steps, long stride, float scale,
                  float (*out)[BLOCK], long at) {
    Floats sums[GROUPS][ROWS] = {};
    for (long s = 0; s < steps; s++)
        for (int g = 0; g < GROUPS; g++) {
            __builtin_prefetch(keys + g * stride + s * LANES + AHEAD);
            for (int r = 0; r < ROWS; r++) sums[g][r] = T::mac(sums[g][r], keys + g * stride + s * LANES, q[r][s]);
        }
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < ROWS; r++) store(out[r] + at + g * LANES, sums[g][r] * scale);
}

template <class T, int ROWS>
void score(const uint32_t* const* q, const uint32_t* keys, long groups, long steps, long stride, float scale,
           float (*out)[BLOCK], long at) {
    constexpr int MANY = ROWS > 4 ? 1 : 8 / ROWS;
    long g = 0;
    for (; g + MANY <= groups; g += MANY)
        score_groups<T, ROWS, MANY>(q, keys + g * stride, steps, stride, scale, out, at + g * LANES);
    for (; g < groups; g++) score_groups<T, ROWS, 1>(q, keys + g * stride, steps, stride, scale, out, at + g * LANES);
}

// out[row] += weights[row] . values, VECTORS * 16 dimensions at a time, positions in order.
template <class T, int ROWS, int WIDE>
void mix(const uint32_t* const* weights, const uint32_t* values, long steps, long stride, float* const* out) {
    Floats sums[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDE; v++) sums[r][v] = load(out[r] + v * LANES);
    for (long s = 0; s < steps; s++, values += stride) {
        for (int v = 0; v < WIDE; v++) __builtin_prefetch(values + v * LANES + AHEAD);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < WIDE; v++) sums[r][v] = T::mac(sums[r][v], values + v * LANES, weights[r][s]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDE; v++) store(out[r] + v * LANES, sums[r][v]);
}

template <class T, int ROWS>
void mix_all(const uint32_t* const* weights, const uint32_t* values, long steps, long padded, float* const* out) {
    float* to[ROWS];
    for (long d = 0; d < padded;) {
        for (int r = 0; r < ROWS; r++) to[r] = out[r] + d;
        long left = (padded - d) / LANES;
        if (left >= 4) { mix<T, ROWS, 4>(weights, values + d, steps, padded, to); d += 4 * LANES; }
        else if (left >= 2) { mix<T, ROWS, 2>(weights, values + d, steps, padded, to); d += 2 * LANES; }
        else { mix<T, ROWS, 1>(weights, values + d, steps, padded, to); d += LANES; }
    }
}

// One query row of one KV head: what it reads behind `in_place`, and its running softmax.
struct Row {
    const uint32_t* q;
    long length;             // its logical positions
    const uint32_t *keys, *values;  // scratch, from position `in_place` on
    float* mixed;            // [padded]
    float *top, *total;
};

template <class T> struct Blocks {
    const Store& store;
    long head, in_place;
    float scale;

    long steps() const { return store.padded / T::STEP; }

    template <int ROWS> void score_rows(Row* const* rows, const uint32_t* keys, long groups, float (*out)[BLOCK]) const {
        const uint32_t* q[ROWS];
        for (int r = 0; r < ROWS; r++) q[r] = rows[r]->q;
        score<T, ROWS>(q, keys, groups, steps(), steps() * LANES, scale, out, 0);
    }

    // Positions [start, start + BLOCK) for up to BATCH rows, every one of which reaches beyond `start`.
    template <int ROWS> void walk(Row* const* rows, long start) const {
        alignas(64) float scores[ROWS][BLOCK];
        alignas(64) typename T::Element weights[ROWS][BLOCK];
        long place = start % SPLIT;
        long near = std::clamp(in_place - start, 0L, BLOCK) / LANES;  // groups read in place
        const uint32_t* keys = near ? store.key(start / SPLIT, head) + place * steps() : nullptr;
        const uint32_t* values = near ? store.value(start / SPLIT, head) + place / T::STEP * store.padded : nullptr;
        score_rows<ROWS>(rows, keys, near, scores);
        const uint32_t* words[ROWS];
        float* mixed[ROWS];
        long reach[ROWS];  // groups in place that each row sees
        bool alike = true;
        for (int r = 0; r < ROWS; r++) {
            Row& row = *rows[r];
            long count = std::min(row.length - start, BLOCK);
            long groups = (count + LANES - 1) / LANES, own = std::max(0L, groups - near);
            if (own)
                score<T, 1>(&row.q, row.keys + (start + near * LANES - in_place) * steps(), own, steps(),
                            steps() * LANES, scale, scores + r, near * LANES);
            soften(row, scores[r], count, groups, weights[r]);
            words[r] = reinterpret_cast<const uint32_t*>(weights[r]);
            mixed[r] = row.mixed;
            reach[r] = std::min(groups, near);
            alike = alike && reach[r] == reach[0];
        }
        if (alike) mix_rows<ROWS>(words, values, reach[0] * LANES / T::STEP, mixed);
        for (int r = 0; r < ROWS && !alike; r++)  // rows that end within this block: each its own length
            mix_rows<1>(words + r, values, reach[r] * LANES / T::STEP, mixed + r);
        for (int r = 0; r < ROWS; r++) {
            long count = std::min(rows[r]->length - start, BLOCK);
            long own = (count + LANES - 1) / LANES - near;
            if (own <= 0) continue;
            const uint32_t* behind = words[r] + near * LANES / T::STEP;
            const uint32_t* from = rows[r]->values + (start + near * LANES - in_place) / T::STEP * store.padded;
            mix_all<T, 1>(&behind, from, own * LANES / T::STEP, store.padded, mixed + r);
        }
    }

    // Four rows at a time: more sums than registers would not pay.
    template <int ROWS>
    void mix_rows(const uint32_t* const* words, const uint32_t* values, long count, float* const* mixed) const {
        if (!count) return;
        constexpr int FIRST = ROWS < 4 ? ROWS : 4;
        mix_all<T, FIRST>(words, values, count, store.padded, mixed);
        if constexpr (ROWS > FIRST) mix_rows<ROWS - FIRST>(words + FIRST, values, count, mixed + FIRST);
    }

    // Scores to weights 2^(score - top), with `mixed` and `total` brought to the new top.
    void soften(Row& row, float* scores, long count, long groups, typename T::Element* weights) const {
        for (long i = count; i < groups * LANES; i++) scores[i] = LOWEST;
        Floats highest = all(LOWEST);
        for (long g = 0; g < groups; g++) highest = max(highest, load(scores + g * LANES));
        float top = std::max(*row.top, max(highest));
        float shrink = exp2(*row.top - top);
        Floats mass = {};
        for (long g = 0; g < groups; g++) {
            Floats weight = exp2(load(scores + g * LANES) - top);
            mass = mass + weight;
            T::narrow(weights + g * LANES, weight);
        }
        if (!(top > LOWEST && top < -LOWEST)) *row.total = top - top;  // only NaN or infinite scores: NaN
        *row.total = *row.total * shrink + sum(mass);
        *row.top = top;
        if (shrink != 1.0f)
            for (long d = 0; d < store.padded; d += LANES) longdraft::LONGDRAFT_VARIANT::store(row.mixed + d, load(row.mixed + d) * shrink);
    }

    template <int ROWS = BATCH> void walk_some(Row* const* rows, int count, long start) const {
        if constexpr (ROWS > 1)
            if (count < ROWS) return walk_some<ROWS - 1>(rows, count, start);
        walk<ROWS>(rows, start);
    }
};

// The tail of one provisional row for one KV head, from position `in_place` to its own, in logical order.
template <class T> class Scratch {
  public:
    Scratch(const Attention& a, long head, long in_place, long most) : a_(a), head_(head), in_place_(in_place) {
        words_ = round_up(most, LANES) * a.store->padded / T::STEP;
        memory_.resize(static_cast<size_t>(2 * words_) + 16);
        base_ = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) & ~uintptr_t{63});
    }
    const uint32_t* keys() const { return base_; }
    const uint32_t* values() const { return base_ + words_; }

    void fill(long row) {
        const Store& s = *a_.store;
        using Element = typename T::Element;
        if (a_.length > in_place_) {  // the cache's last, partly filled group: whole lines
            long block = in_place_ / SPLIT, place = in_place_ % SPLIT, line = LANES * s.padded / T::STEP;
            std::copy_n(s.key(block, head_) + place / LANES * line, line, base_);
            std::copy_n(s.value(block, head_) + place / LANES * line, line, base_ + words_);
        }
        auto* k = reinterpret_cast<Element*>(base_);
        auto* v = reinterpret_cast<Element*>(base_ + words_);
        long place = a_.length - in_place_ - 1;
        for (long node = row; node >= 0; node = a_.parent[node]) place++;
        for (long node = row; node >= 0; node = a_.parent[node], place--) {
            auto* from_k = static_cast<const Element*>(a_.k.data) + node * a_.k.row_stride + head_ * a_.k.head_stride;
            auto* from_v = static_cast<const Element*>(a_.v.data) + node * a_.v.row_stride + head_ * a_.v.head_stride;
            for (long d = 0; d < s.dim; d++) {
                k[key_at<T>(s, place, d)] = from_k[d];
                v[value_at<T>(s, place, d)] = from_v[d];
            }
        }
    }

  private:
    const Attention& a_;
    long head_, in_place_, words_;
    std::vector<uint32_t> memory_;
    uint32_t* base_;
};

template <class T> void attention_as(const Attention& a) {
    using Element = typename T::Element;
    Store& s = *a.store;
    long group = a.heads / s.heads, padded = s.padded;
    std::vector<long> lengths(a.rows);
    bool is_chain = true;
    for (long r = 0; r < a.rows; r++) {
        lengths[r] = (a.parent[r] < 0 ? a.length : lengths[a.parent[r]]) + 1;
        is_chain = is_chain && a.parent[r] == r - 1;
    }
    long longest = *std::max_element(lengths.begin(), lengths.end());
    // A chain's rows follow the committed ones as plain decoding would put them: write them there at once.
    if (is_chain) write_as<T>(s, a.length, a.k, a.v, nullptr, a.rows);
    long in_place = is_chain ? round_up(longest, LANES) : a.length / LANES * LANES;

    // Queries padded to whole groups of dimensions, words in a row.
    std::vector<Element> queries(static_cast<size_t>(a.rows * a.heads * padded));
    for (long i = 0; i < a.rows * a.heads; i++)
        std::copy_n(static_cast<const Element*>(a.q) + i * s.dim, s.dim, queries.data() + i * padded);

    long splits = (longest + SPLIT - 1) / SPLIT;
    long all_rows = a.rows * group;               // of one KV head: query heads are rows too
    long chunk = all_rows;                        // rows of one job
    if (s.heads * splits < 2 * threads())
        chunk = std::max<long>(BATCH, round_up((all_rows + threads() - 1) / threads(), BATCH));
    long chunks = (all_rows + chunk - 1) / chunk;
    // State of each (head, split, row): weighted values, top score, total weight.
    long state = padded + 2;
    std::vector<float> states(static_cast<size_t>(s.heads * splits * all_rows * state), 0.0f);
    auto state_of = [&](long head, long split, long row) {
        return states.data() + ((head * splits + split) * all_rows + row) * state;
    };

    auto work = [&](long job) {
        long head = job % s.heads, split = job / s.heads % splits, first = job / s.heads / splits * chunk;
        long last = std::min(all_rows, first + chunk), begin = split * SPLIT;
        long end = std::min(longest, begin + SPLIT);
        Blocks<T> blocks{s, head, in_place, a.scale * LOG2_E};
        std::vector<Scratch<T>> scratch;
        long first_node = first / group, nodes = (last - 1) / group - first_node + 1;
        if (!is_chain && end > in_place) {
            scratch.reserve(static_cast<size_t>(nodes));
            for (long n = 0; n < nodes; n++) {
                long own = lengths[first_node + n];
                scratch.emplace_back(a, head, in_place, own - in_place);
                if (own > begin) scratch.back().fill(first_node + n);
            }
        }
        std::vector<Row> rows(static_cast<size_t>(last - first));
        for (long i = first; i < last; i++) {
            long node = i / group, query = node * a.heads + head * group + i % group;
            float* mine = state_of(head, split, i);
            mine[padded] = LOWEST;
            const Scratch<T>* tail = scratch.empty() ? nullptr : &scratch[static_cast<size_t>(node - first_node)];
            rows[static_cast<size_t>(i - first)] = Row{
                reinterpret_cast<const uint32_t*>(queries.data() + query * padded), lengths[node],
                tail ? tail->keys() : nullptr, tail ? tail->values() : nullptr, mine, mine + padded, mine + padded + 1};
        }
        Row* some[BATCH];
        for (long tile = begin; tile < end; tile += TILE)
            for (size_t i = 0; i < rows.size(); i += BATCH)
                for (long start = tile; start < std::min(end, tile + TILE); start += BLOCK) {
                    int count = 0;
                    for (size_t j = i; j < std::min(rows.size(), i + BATCH); j++)
                        if (rows[j].length > start) some[count++] = &rows[j];
                    if (count) blocks.walk_some(some, count, start);
                }
    };
    parallel(s.heads * splits * chunks, work);

    for (long node = 0; node < a.rows; node++)
        for (long h = 0; h < a.heads; h++) {
            long head = h / group, row = node * group + h % group;
            long used = (lengths[node] + SPLIT - 1) / SPLIT;
            float* sum = state_of(head, 0, row);
            for (long split = 1; split < used; split++) {
                float* other = state_of(head, split, row);
                float top = std::max(sum[padded], other[padded]);
                float mine = exp2(sum[padded] - top), theirs = exp2(other[padded] - top);
                for (long d = 0; d < s.dim; d++) sum[d] = sum[d] * mine + other[d] * theirs;
                sum[padded + 1] = sum[padded + 1] * mine + other[padded + 1] * theirs;
                sum[padded] = top;
            }
            if (a.rest) {
                const float* rest = a.rest + h * (s.dim + 1);
                float theirs_top = rest[s.dim] * LOG2_E, top = std::max(sum[padded], theirs_top);
                float mine = exp2(sum[padded] - top), theirs = exp2(theirs_top - top);
                for (long d = 0; d < s.dim; d++) sum[d] = sum[d] * mine + rest[d] * theirs;
                sum[padded + 1] = sum[padded + 1] * mine + theirs;
                sum[padded] = top;
            }
            Element* out = static_cast<Element*>(a.out) + (node * a.heads + h) * s.dim;
            for (long d = 0; d < s.dim; d++) out[d] = T::round(sum[d] / sum[padded + 1]);
            a.lse[node * a.heads + h] = sum[padded] / LOG2_E + std::log(sum[padded + 1]);
        }
}

// For each KV head, softmax(q . k * scale) over [0, length), summed over rows and the head's query heads.
template <class T>
void weights_as(const Store& s, long length, const void* q, long rows, long heads, float scale, float* out) {
    using Element = typename T::Element;
    long group = heads / s.heads, groups = (length + LANES - 1) / LANES, steps = s.padded / T::STEP;
    parallel(s.heads, [&](long head) {
        std::vector<Element> query(static_cast<size_t>(s.padded));
        std::vector<float> scores(static_cast<size_t>(groups * LANES));
        float* to = out + head * length;
        std::fill_n(to, length, 0.0f);
        for (long i = 0; i < rows * group; i++) {
            const Element* from = static_cast<const Element*>(q) + ((i / group) * heads + head * group + i % group) * s.dim;
            std::copy_n(from, s.dim, query.data());
            const uint32_t* words = reinterpret_cast<const uint32_t*>(query.data());
            for (long g = 0; g < groups; g += BLOCK / LANES) {
                long some = std::min(groups - g, BLOCK / LANES), start = g * LANES;
                score<T, 1>(&words, s.key(start / SPLIT, head) + start % SPLIT * steps, some, steps, steps * LANES,
                            scale * LOG2_E, reinterpret_cast<float(*)[BLOCK]>(scores.data() + start), 0);
            }
            float top = LOWEST;
            for (long p = 0; p < length; p++) top = std::max(top, scores[static_cast<size_t>(p)]);
            for (long p = length; p < groups * LANES; p++) scores[static_cast<size_t>(p)] = LOWEST;
            Floats mass = {};
            for (long g = 0; g < groups; g++) {
                Floats weight = exp2(load(scores.data() + g * LANES) - top);
                mass = mass + weight;
                longdraft::LONGDRAFT_VARIANT::store(scores.data() + g * LANES, weight);
            }
            float total = sum(mass);
            for (long p = 0; p < length; p++) to[p] += scores[static_cast<size_t>(p)] / total;
        }
    });
}

}  // namespace
