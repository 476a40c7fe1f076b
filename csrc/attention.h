// A few query rows over a long cache, and a tree of provisional rows behind it; of one text or of several.
//
// The logical positions of a row are the committed ones, then its path in the tree, itself last; with a sliding
// window, the last of these. They are walked in blocks of BLOCK positions counted from 0, each with one step of an
// online softmax, in splits of SPLIT positions that are merged in order. Keys up to `in_place` (a multiple of GROUP
// at most the committed length) are read where they lie, by several rows at once; the few behind it, with the row's
// path, are first laid into scratch in logical order. Positions that a row does not see weigh exactly nothing. Each
// row's sums are the same operations in the same order either way, so a node of a tree gets the bits that plain
// decoding gives at its position.
//
//     [ block 0 ][ block 1 ] ... [ in place .. | scratch: rest of the prefix, path, self | masked ]
#pragma once

#include "attend.h"
#include "layout.h"
#include "pool.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr long TILE = 4 * BLOCK;  // positions that all batches visit while they are in the L2 cache
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;

// Query rows of one KV head that walk the cache together, as they lie one after the other.
template <class T> struct Batch {
    int count;
    const uint32_t* queries;  // `padded` elements each
    float* states;            // weighted values [padded], top score, total weight; `stride` floats each
    long stride;
    const long *first, *end;  // the logical positions that each row sees
    const uint32_t* const* tails;  // keys in scratch, from position `in_place` on; their values `tail_words` behind
    const long* tail_words;

    float* state(int r) const { return states + r * stride; }
};

template <class T> struct Blocks {
    using Element = typename T::Element;
    using Unit = Attend<T>;
    const Store& store;
    long head, in_place;
    float scale;  // to powers of two

    // Positions [start, start + BLOCK), of which some row sees some.
    void walk(const Batch<T>& b, long start) const {
        alignas(64) float scores[Unit::BATCH][BLOCK];
        alignas(64) Element weights[Unit::BATCH][BLOCK];
        const long padded = store.padded, steps = padded / T::STEP, place = start % SPLIT;
        long reach = 0;
        for (int r = 0; r < b.count; r++) reach = std::max(reach, b.end[r] - start);
        long near = std::clamp(in_place - start, 0L, std::min(BLOCK, round_up(reach, GROUP)));  // read in place
        if (near) Unit::score(b.count, b.queries, steps, store.key(start / SPLIT, head) + place * steps, near, steps, scores);
        long own[Unit::BATCH], behind = start + near - in_place;
        for (int r = 0; r < b.count; r++) {
            long from = std::clamp(b.first[r] - start, 0L, BLOCK), to = std::clamp(b.end[r] - start, 0L, BLOCK);
            own[r] = std::max(0L, round_up(to, GROUP) - near);
            if (own[r])
                Unit::score(1, b.queries + r * steps, steps, b.tails[r] + behind * steps, own[r], steps,
                            reinterpret_cast<float(*)[BLOCK]>(scores[r] + near));
            soften(b.state(r), scores[r], from, to, near + own[r], weights[r]);
        }
        if (near)
            Unit::mix(b.count, weights[0], store.value(start / SPLIT, head) + place / T::STEP * padded, near, padded,
                      b.states, b.stride);
        for (int r = 0; r < b.count; r++)
            if (own[r])
                Unit::mix(1, weights[r] + near, b.tails[r] + b.tail_words[r] + behind / T::STEP * padded, own[r], padded,
                          b.state(r), b.stride);
    }

    // Scores to weights 2^(scale * score - top); the state is brought to the new top. Outside [from, to): nothing.
    void soften(float* state, float* scores, long from, long to, long count, Element* weights) const {
        if (from >= to) {
            std::fill_n(weights, count, Element{});
            return;
        }
        float &top = state[store.padded], &total = state[store.padded + 1];
        for (long i = 0; i < from; i++) scores[i] = LOWEST;
        for (long i = to; i < count; i++) scores[i] = LOWEST;
        // Two of everything (a group is two vectors), so that one need not wait for the other.
        Floats high[2] = {all(LOWEST), all(LOWEST)};
        for (long i = 0; i < count; i += GROUP)
            for (int v = 0; v < 2; v++) high[v] = max(high[v], load(scores + i + v * LANES));
        float before = top;
        top = std::max(top, max(max(high[0], high[1])) * scale);
        Floats mass[2] = {}, by = all(scale), less = all(-top);
        for (long i = 0; i < count; i += GROUP)
            for (int v = 0; v < 2; v++) {
                Floats weight = exp2(fma(load(scores + i + v * LANES), by, less));
                mass[v] = mass[v] + weight;
                T::narrow(weights + i + v * LANES, weight);
            }
        float shrink = before == top ? 1.0f : exp2(before - top);
        if (!(top > LOWEST && top < -LOWEST)) total = top - top;  // only NaN or infinite scores: NaN
        total = total * shrink + sum(mass[0] + mass[1]);
        if (shrink != 1.0f)
            for (long d = 0; d < store.padded; d += LANES) put(state + d, load(state + d) * shrink);
    }

    static void put(float* to, Floats x) { longdraft::LONGDRAFT_VARIANT::store(to, x); }
};

// The tails of provisional rows for one KV head, from position `in_place` to their own, in logical order.
template <class T> class Tails {
  public:
    Tails(const Attention& a, long head, long in_place, long first, long last, const long* ends) : first_(first) {
        const long padded = a.store->padded;
        long total = 0;
        for (long node = first; node <= last; node++) {
            begins_.push_back(total);
            words_.push_back(round_up(ends[node] - in_place, GROUP) * padded / T::STEP);
            total += 2 * words_.back();
        }
        memory_.assign(static_cast<size_t>(total) + 16, 0);
        base_ = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) & ~uintptr_t{63});
        for (long node = first; node <= last; node++) fill(a, head, in_place, node);
    }
    uint32_t* keys(long node) const { return base_ + begins_[static_cast<size_t>(node - first_)]; }
    long words(long node) const { return words_[static_cast<size_t>(node - first_)]; }

  private:
    void fill(const Attention& a, long head, long in_place, long row) {
        const Store& s = *a.store;
        using Element = typename T::Element;
        uint32_t *keys_to = keys(row), *values_to = keys_to + words(row);
        if (a.length > in_place) {  // the cache's last, partly filled group: whole lines of 16 positions
            long block = in_place / SPLIT, place = in_place % SPLIT;
            long some = round_up(a.length - in_place, LANES) * s.padded / T::STEP, at = place * s.padded / T::STEP;
            std::copy_n(s.key(block, head) + at, some, keys_to);
            std::copy_n(s.value(block, head) + at, some, values_to);
        }
        auto* k = reinterpret_cast<Element*>(keys_to);
        auto* v = reinterpret_cast<Element*>(values_to);
        long place = a.length - in_place - 1;
        for (long node = row; node >= 0; node = a.parent[node]) place++;
        for (long node = row; node >= 0; node = a.parent[node], place--) {
            auto* from_k = static_cast<const Element*>(a.k.data) + node * a.k.row_stride + head * a.k.head_stride;
            auto* from_v = static_cast<const Element*>(a.v.data) + node * a.v.row_stride + head * a.v.head_stride;
            for (long d = 0; d < s.dim; d++) {
                k[key_at<T>(s, place, d)] = from_k[d];
                v[value_at<T>(s, place, d)] = from_v[d];
            }
        }
    }

    long first_;
    std::vector<long> begins_, words_;
    std::vector<uint32_t> memory_;
    uint32_t* base_;
};

// One text's rows, laid out for the walk, and what the walk leaves of them.
template <class T> class Walk {
    using Element = typename T::Element;
    static constexpr int BATCH = Attend<T>::BATCH;

  public:
    explicit Walk(const Attention& a) : a_(a), s_(*a.store), group_(a.heads / s_.heads), rows_(a.rows * group_) {
        bool is_chain = true;
        ends_.resize(static_cast<size_t>(a.rows));
        for (long r = 0; r < a.rows; r++) {
            ends_[r] = (a.parent[r] < 0 ? a.length : ends_[a.parent[r]]) + 1;
            is_chain = is_chain && a.parent[r] == r - 1;
        }
        longest_ = *std::max_element(ends_.begin(), ends_.end());
        // A chain's rows follow the committed ones as plain decoding would put them: write them there at once. But
        // not values that are no numbers: nothing times infinity would spoil the rows before them.
        is_chain = is_chain && finite_rows<T>(a.v, a.rows, s_.heads, s_.dim);
        if (is_chain) write_as<T>(s_, a.length, a.k, a.v, nullptr, a.rows);
        in_place_ = is_chain ? round_up(longest_, GROUP) : a.length / GROUP * GROUP;
        has_tails_ = !is_chain;
        for (long i = 0; i < rows_; i++) {
            row_end_.push_back(ends_[i / group_]);
            row_first_.push_back(a.window ? std::max(0L, row_end_.back() - a.window) : 0);
        }
        held_ = round_up(rows_, BATCH);
        stride_ = s_.padded + LANES;
        splits_ = (longest_ + SPLIT - 1) / SPLIT;
    }

    // What its queries and the states of its rows take, whole cache lines each.
    size_t query_bytes() const { return lines(static_cast<size_t>(s_.heads * held_ * s_.padded) * sizeof(Element)); }
    size_t state_bytes() const { return lines(static_cast<size_t>(s_.heads * splits_ * held_ * stride_) * sizeof(float)); }
    long units() const { return s_.heads * splits_; }

    void settle(void* queries, void* states) {
        queries_ = static_cast<Element*>(queries);
        states_ = static_cast<float*>(states);
        for (long head = 0; head < s_.heads; head++) lay_queries(head);
    }

    // Cut into jobs; into more where all that is to be done has few units. Returns how many.
    long cut(long units_in_all) {
        chunk_ = rows_;
        if (units_in_all < 2 * threads())
            chunk_ = std::max<long>(BATCH, round_up((rows_ + threads() - 1) / threads(), BATCH));
        return units() * ((rows_ + chunk_ - 1) / chunk_);
    }

    void work(long job) {
        long first = job / s_.heads / splits_ * chunk_;
        walk(job % s_.heads, job / s_.heads % splits_, first, std::min(rows_, first + chunk_));
    }

    void finish() {
        for (long node = 0; node < a_.rows; node++)
            for (long h = 0; h < a_.heads; h++) merge(node, h);
    }

  private:
    static size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

    float* state(long head, long split, long row) const {
        return states_ + ((head * splits_ + split) * held_ + row) * stride_;
    }

    // Query heads of a KV head are rows too, padded to whole groups of dimensions and whole batches.
    void lay_queries(long head) {
        const long padded = s_.padded;
        Element* to = queries_ + head * held_ * padded;
        std::fill_n(to, held_ * padded, Element{});
        for (long i = 0; i < rows_; i++)
            std::copy_n(static_cast<const Element*>(a_.q) + (i / group_ * a_.heads + head * group_ + i % group_) * s_.dim,
                        s_.dim, to + i * padded);
    }

    // Rows [first, last) of one KV head over one split.
    void walk(long head, long split, long first, long last) {
        [[maybe_unused]] Attend<T> unit;
        const long begin = split * SPLIT, end = std::min(longest_, begin + SPLIT), steps = s_.padded / T::STEP;
        Blocks<T> blocks{s_, head, in_place_, a_.scale * LOG2_E};
        bool needs_tails = has_tails_ && end > in_place_;
        std::vector<Tails<T>> tails;
        std::vector<const uint32_t*> keys(static_cast<size_t>(last - first), nullptr);
        std::vector<long> words(static_cast<size_t>(last - first), 0);
        if (needs_tails) {
            tails.emplace_back(a_, head, in_place_, first / group_, (last - 1) / group_, ends_.data());
            for (long i = first; i < last; i++) {
                keys[i - first] = tails[0].keys(i / group_);
                words[i - first] = tails[0].words(i / group_);
            }
        }
        for (long i = first; i < last; i++) {
            float* mine = state(head, split, i);
            std::fill_n(mine, stride_, 0.0f);
            mine[s_.padded] = LOWEST;
        }
        for (long tile = begin; tile < end; tile += TILE)
            for (long i = first; i < last; i += BATCH) {
                int count = static_cast<int>(std::min<long>(BATCH, last - i));
                Batch<T> batch{count, reinterpret_cast<const uint32_t*>(queries_) + (head * held_ + i) * steps,
                               state(head, split, i), stride_, row_first_.data() + i, row_end_.data() + i,
                               keys.data() + (i - first), words.data() + (i - first)};
                long low = *std::min_element(batch.first, batch.first + count);
                long high = *std::max_element(batch.end, batch.end + count);
                for (long start = tile; start < std::min(end, tile + TILE); start += BLOCK)
                    if (low < start + BLOCK && start < high) blocks.walk(batch, start);
            }
    }

    // The splits of one row in order, then the remainder.
    void merge(long node, long h) {
        const long head = h / group_, row = node * group_ + h % group_, padded = s_.padded;
        const long from = row_first_[row] / SPLIT, used = (row_end_[row] + SPLIT - 1) / SPLIT;
        float* sum = state(head, from, row);
        for (long split = from + 1; split < used; split++) {
            const float* other = state(head, split, row);
            add(sum, other, other[padded], other[padded + 1]);
        }
        if (a_.rest) {
            const float* rest = a_.rest + (node * a_.heads + h) * (s_.dim + 1);
            add(sum, rest, rest[s_.dim] * LOG2_E, 1.0f);
        }
        Element* out = static_cast<Element*>(a_.out) + (node * a_.heads + h) * s_.dim;
        // + 0: a sum that came to -0 would show how many nothings were added to it
        for (long d = 0; d < s_.dim; d++) out[d] = T::round((sum[d] + 0.0f) / sum[padded + 1]);
        a_.lse[node * a_.heads + h] = sum[padded] / LOG2_E + std::log(sum[padded + 1]);
    }

    void add(float* sum, const float* other, float other_top, float other_total) const {
        float &mine_top = sum[s_.padded], &total = sum[s_.padded + 1];
        float top = std::max(mine_top, other_top), mine = exp2(mine_top - top), theirs = exp2(other_top - top);
        for (long d = 0; d < s_.dim; d++) sum[d] = sum[d] * mine + other[d] * theirs;
        total = total * mine + other_total * theirs;
        mine_top = top;
    }

    const Attention& a_;
    Store& s_;
    long group_, rows_;         // query heads of a KV head; rows of one KV head
    long longest_, in_place_, held_, stride_, splits_, chunk_ = 0;
    bool has_tails_;
    std::vector<long> ends_, row_first_, row_end_;
    Element* queries_ = nullptr;
    float* states_ = nullptr;
};

// Texts of any lengths and numbers of rows: each walks its own store as it would alone, the jobs of all are done together.
template <class T> void attention_as(const Attention* texts, long count) {
    std::vector<Walk<T>> walks;
    walks.reserve(static_cast<size_t>(count));
    size_t queries = 0, states = 0;
    long units = 0, jobs = 0;
    for (long i = 0; i < count; i++) {
        walks.emplace_back(texts[i]);
        queries += walks.back().query_bytes();
        states += walks.back().state_bytes();
        units += walks.back().units();
    }
    char *at_queries = static_cast<char*>(workspace<0>(queries)), *at_states = static_cast<char*>(workspace<1>(states));
    std::vector<long> ends;  // of each text's jobs
    for (Walk<T>& walk : walks) {
        walk.settle(at_queries, at_states);
        at_queries += walk.query_bytes();
        at_states += walk.state_bytes();
        ends.push_back(jobs += walk.cut(units));
    }
    parallel(jobs, [&](long job) {
        const auto text = std::upper_bound(ends.begin(), ends.end(), job) - ends.begin();
        walks[static_cast<size_t>(text)].work(text ? job - ends[static_cast<size_t>(text - 1)] : job);
    });
    for (Walk<T>& walk : walks) walk.finish();
}

// For each KV head, softmax(q . k * scale) over [0, length), summed over rows and the head's query heads.
template <class T>
void weights_as(const Store& s, long length, const void* q, long rows, long heads, float scale, float* out) {
    using Element = typename T::Element;
    constexpr long BATCH = Attend<T>::BATCH;
    const long group = heads / s.heads, asked = rows * group, held = round_up(asked, BATCH);
    const long steps = s.padded / T::STEP, width = round_up(length, BLOCK);
    parallel(s.heads, [&](long head) {
        [[maybe_unused]] Attend<T> unit;
        std::vector<Element> queries(static_cast<size_t>(held * s.padded));
        for (long i = 0; i < asked; i++)
            std::copy_n(static_cast<const Element*>(q) + (i / group * heads + head * group + i % group) * s.dim, s.dim,
                        queries.data() + i * s.padded);
        std::vector<float> scores(static_cast<size_t>(asked * width));
        alignas(64) float block[BATCH][BLOCK];
        for (long start = 0; start < length; start += BLOCK)
            for (long first = 0; first < asked; first += BATCH) {
                int count = static_cast<int>(std::min(BATCH, asked - first));
                Attend<T>::score(count, reinterpret_cast<const uint32_t*>(queries.data()) + first * steps, steps,
                                 s.key(start / SPLIT, head) + start % SPLIT * steps, BLOCK, steps, block);
                for (int r = 0; r < count; r++) std::copy_n(block[r], BLOCK, scores.data() + (first + r) * width + start);
            }
        float* to = out + head * length;
        std::fill_n(to, length, 0.0f);
        for (long i = 0; i < asked; i++) {
            float* row = scores.data() + i * width;
            std::fill(row + length, row + width, LOWEST);
            float top = *std::max_element(row, row + length) * scale * LOG2_E;
            Floats mass = {};
            for (long p = 0; p < width; p += LANES) {
                Floats weight = exp2(fma(load(row + p), all(scale * LOG2_E), all(-top)));
                mass = mass + weight;
                store(row + p, weight);
            }
            float total = sum(mass);
            for (long p = 0; p < length; p++) to[p] += row[p] / total;
        }
    });
}

}  // namespace
