// Attention of a few query rows over a long cache and a tree of uncommitted rows, for one text or several.
//
// The positions are cut into splits of SPLIT positions and blocks of BLOCK positions, both counted from position 0.
// A split is one online softmax over its blocks, left to right. The splits of a row are merged in order:
//
//     position    0             4096             8192         end
//                 [   split 0   )[    split 1    )[  split 2  )         state: weighted values, maximum score, weight sum
//                 [b][b][b] .. [b][b][b] ..
//
//     row's state    state 0   <-   state 1   <-   state 2   <-   remainder           then: values / weight sum, rounded
//
// The cut depends on positions alone, and a row's operations on the row alone. Splits, chunks of rows and KV heads are
// independent jobs for the threads. Positions that a row does not see have a weight of exactly 0.
//
// Many rows after a long text (a chunk of a prompt) would have hundreds of megabytes of states. Their splits are computed in
// waves: each wave is merged before the next one, whose states take the same memory.
//
// The file attention_rows.h draws where the keys and values of a row are; layout.h draws the blocks of a store.
#pragma once

#include "attention_block.h"
#include "attention_products.h"
#include "attention_rows.h"
#include "layout.h"
#include "pool.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace longdraft::LONGDRAFT_VARIANT {

// The attention of one text. Use: construct, `prepare`, then for each wave `next_wave`, run all jobs in any order, `merge_rows`.
//
//     queries  [KV heads][padded query rows][steps] operands (simd.h)
//     states   [KV heads][slots][padded query rows][stride] floats: see RowBatch. A slot is one split; from the second wave
//              on, the first slot is the state of all waves before
template <class T> class TextAttention {
    using Element = typename T::Element;
    using Operand = typename T::Operand;
    static constexpr int BATCH = Products<T>::BATCH;
    static constexpr long TILE = Products<T>::TILE;
    static constexpr long MOST_STATES = 32L << 20;  // bytes of the states of a text, if two slots take no more
    static constexpr long LEAST_MERGED = 1 << 15;   // numbers that a thread merges at least

  public:
    explicit TextAttention(const Attention& a)
        : a_(a), store_(*a.store), layout_(row_layout<T>(a)), group_(a.heads / store_.heads),
          query_rows_(a.rows * group_), padded_rows_(round_up(query_rows_, BATCH)), steps_(store_.padded / T::PER_WORD),
          stride_(store_.padded + LANES),
          splits_(div_up(layout_.longest, SPLIT)),
          slots_(std::min(splits_, std::max(2L, MOST_STATES / (store_.heads * padded_rows_ * stride_ * 4)))) {}

    // Bytes of the queries and of the states, in whole cache lines.
    size_t query_bytes() const {
        return cache_lines(static_cast<size_t>(store_.heads * padded_rows_ * steps_) * sizeof(Operand));
    }
    size_t state_bytes() const {
        return cache_lines(static_cast<size_t>(store_.heads * slots_ * padded_rows_ * stride_) * sizeof(float));
    }

    // Take the memory for queries and states, write a chain's rows to the store, and copy the queries.
    void prepare(void* queries, void* states) {
        queries_ = static_cast<Operand*>(queries);
        states_ = static_cast<float*>(states);
        if (layout_.is_chain && a_.k.data) write_as<T>(store_, a_.length, a_.k, a_.v, nullptr, a_.rows);
        for (long head = 0; head < store_.heads; head++) copy_queries(head);
    }

    // Begin with the next splits. Returns the pairs of a KV head and one of them; 0: there are none.
    long next_wave() {
        first_ = last_;
        last_ = std::min(splits_, first_ + slots_ - (first_ > 0));
        return store_.heads * (last_ - first_);
    }

    // Cut the wave into jobs and return their number. Where all texts together have few units, the rows are cut too. Threads
    // wait for each other at the end of a wave, so many waves have smaller jobs.
    long cut_into_jobs(long units_of_all_texts) {
        const long units = store_.heads * (last_ - first_), pieces = slots_ < splits_ ? div_up(8 * threads(), units_of_all_texts)
                                                                   : units_of_all_texts < 2 * threads() ? threads() : 1;
        chunk_ = pieces == 1 ? query_rows_ : round_up(div_up(query_rows_, pieces), BATCH);
        return units * div_up(query_rows_, chunk_);
    }

    void run_job(long job) {
        const long splits = last_ - first_, first = job / store_.heads / splits * chunk_;
        run_split(job % store_.heads, first_ + job / store_.heads % splits, first, std::min(query_rows_, first + chunk_));
    }

    void merge_rows() const {
        const long numbers = a_.rows * a_.heads * (last_ - first_) * stride_;
        const long pieces = std::clamp(numbers / LEAST_MERGED, 1L, a_.rows);
        parallel(pieces, [&](long i) {
            for (long row = a_.rows * i / pieces; row < a_.rows * (i + 1) / pieces; row++)
                for (long h = 0; h < a_.heads; h++) merge_row(row, h);
        });
    }

  private:
    static size_t cache_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

    float* state_in(long head, long slot, long query_row) const {
        return states_ + ((head * slots_ + slot) * padded_rows_ + query_row) * stride_;
    }
    // For a split of the wave.
    float* state(long head, long split, long query_row) const { return state_in(head, split - first_ + (first_ > 0), query_row); }

    void copy_queries(long head) {
        Operand* to = queries_ + head * padded_rows_ * steps_;
        std::fill_n(to, padded_rows_ * steps_, Operand{});
        for (long i = 0; i < query_rows_; i++) {
            const long at = (i / group_ * a_.heads + head * group_ + i % group_) * store_.dim;
            copy_operands<T>(static_cast<const Element*>(a_.q) + at, store_.dim, to + i * steps_, steps_);
        }
    }

    // Compute the states of query rows [first, last) of one KV head for one split.
    void run_split(long head, long split, long first, long last) {
        [[maybe_unused]] Products<T> unit;  // sets up the matrix unit for this thread
        const long begin = split * SPLIT, end = std::min(layout_.longest, begin + SPLIT);
        const BlockAttention<T> block{store_, head, layout_.shared_end, a_.scale * LOG2_E};
        std::optional<TreeTails<T>> tails;
        std::vector<const uint32_t*> tail_keys(static_cast<size_t>(last - first), nullptr);
        std::vector<long> tail_words(static_cast<size_t>(last - first), 0);
        if (!layout_.is_chain && end > layout_.shared_end) {
            tails.emplace(a_, layout_, head, first / group_, (last - 1) / group_);
            tails->copy();
            for (long i = first; i < last; i++) {
                tail_keys[static_cast<size_t>(i - first)] = tails->keys(i / group_);
                tail_words[static_cast<size_t>(i - first)] = tails->words(i / group_);
            }
        }
        for (long i = first; i < last; i++) {
            float* mine = state(head, split, i);
            std::fill_n(mine, stride_, 0.0f);
            mine[store_.padded] = LOWEST;
        }
        for (long tile = begin; tile < end; tile += TILE)
            for (long i = first; i < last; i += BATCH) {
                const int count = static_cast<int>(std::min<long>(BATCH, last - i));
                const RowBatch<T> batch{count, queries_ + (head * padded_rows_ + i) * steps_, state(head, split, i), stride_,
                                        layout_.first.data() + i, layout_.end.data() + i, tail_keys.data() + (i - first),
                                        tail_words.data() + (i - first)};
                const long low = *std::min_element(batch.first, batch.first + count);
                const long high = *std::max_element(batch.end, batch.end + count);
                for (long start = tile; start < std::min(end, tile + TILE); start += BLOCK)
                    if (low < start + BLOCK && start < high)
                        block.add(batch, start, ahead(head, start, end, i - first, last - first));
            }
    }

    // The batch of rows from `row` on, of `rows`, fetches its share of the next tile of the split beside the block at
    // `start`. A single row reads the cache as fast as memory gives it.
    Ahead ahead(long head, long start, long end, long row, long rows) const {
        const long next = start + TILE;
        if (!Products<T>::FETCHES_AHEAD || rows == 1 || next + BLOCK > end) return {};
        const long lines = BLOCK / LANES * steps_, share = div_up(lines, div_up(rows, BATCH)), from = row / BATCH * share;
        const long words = next % SPLIT * steps_ + from * LANES;
        return {store_.key(next / SPLIT, head) + words, store_.value(next / SPLIT, head) + words,
                std::min(share, lines - from), std::min<long>(BATCH, rows - row), BLOCK / T::PER_WORD, store_.padded};
    }

    // Merge the wave's splits of one row and query head in order. After the last one, merge the remainder and write the result.
    void merge_row(long row, long h) const {
        const long head = h / group_, query_row = row * group_ + h % group_, padded = store_.padded;
        const long from = layout_.first[static_cast<size_t>(query_row)] / SPLIT;
        const long to = div_up(layout_.end[static_cast<size_t>(query_row)], SPLIT);
        if (to <= first_ || last_ <= from) return;
        float* const before = state_in(head, 0, query_row);
        float* merged = from < first_ ? before : state(head, from, query_row);
        for (long split = std::max(from + 1, first_); split < std::min(to, last_); split++) {
            const float* next = state(head, split, query_row);
            merge_state(merged, next, next[padded], next[padded + 1]);
        }
        if (last_ < to) {
            if (merged != before) std::copy_n(merged, stride_, before);
            return;
        }
        if (a_.remainder) {
            const float* remainder = a_.remainder + (row * a_.heads + h) * (store_.dim + 1);
            merge_state(merged, remainder, remainder[store_.dim] * LOG2_E, 1.0f);
        }
        Element* out = static_cast<Element*>(a_.out) + (row * a_.heads + h) * store_.dim;
        // Adding 0 turns -0 into 0: the sign of a zero would depend on how many zeros were added to it.
        const Floats sums = broadcast(merged[padded + 1]);
        long d = 0;
        for (; d + LANES <= store_.dim; d += LANES) T::narrow(out + d, (load(merged + d) + 0.0f) / sums);
        for (; d < store_.dim; d++) out[d] = T::round((merged[d] + 0.0f) / sums[0]);
        a_.lse[row * a_.heads + h] = merged[padded] / LOG2_E + std::log(merged[padded + 1]);
    }

    void merge_state(float* merged, const float* values, float max_score, float weight_sum) const {
        float &merged_max = merged[store_.padded], &merged_sum = merged[store_.padded + 1];
        const float top = std::max(merged_max, max_score);
        const float rescale = exp2(merged_max - top), share = exp2(max_score - top);
        for (long d = 0; d < store_.dim; d++) merged[d] = merged[d] * rescale + values[d] * share;
        merged_sum = merged_sum * rescale + weight_sum * share;
        merged_max = top;
    }

    const Attention& a_;
    Store& store_;
    RowLayout layout_;
    long group_, query_rows_, padded_rows_;  // query heads per KV head; query rows of a KV head, and with padding
    long steps_, stride_;                    // words of a key; floats of a state
    long splits_, slots_;                    // number of splits; states of a query row
    long first_ = 0, last_ = 0;              // the wave's splits [first, last)
    long chunk_ = 0;                         // query rows of a job
    Operand* queries_ = nullptr;
    float* states_ = nullptr;
};

// The texts have any lengths and numbers of rows, and each reads its own store. Their jobs run together.
template <class T> void attention_as(const Attention* texts, long count) {
    std::vector<TextAttention<T>> attentions;
    attentions.reserve(static_cast<size_t>(count));
    size_t query_bytes = 0, state_bytes = 0;
    for (long i = 0; i < count; i++) {
        attentions.emplace_back(texts[i]);
        query_bytes += attentions.back().query_bytes();
        state_bytes += attentions.back().state_bytes();
    }
    char *queries = static_cast<char*>(workspace<0>(query_bytes)), *states = static_cast<char*>(workspace<1>(state_bytes));
    for (TextAttention<T>& attention : attentions) {
        attention.prepare(queries, states);
        queries += attention.query_bytes();
        states += attention.state_bytes();
    }
    while (true) {
        long units = 0, jobs = 0;
        for (TextAttention<T>& attention : attentions) units += attention.next_wave();
        if (!units) return;
        std::vector<long> ends;  // of each text's jobs
        for (TextAttention<T>& attention : attentions) ends.push_back(jobs += attention.cut_into_jobs(units));
        parallel(jobs, [&](long job) {
            const auto text = std::upper_bound(ends.begin(), ends.end(), job) - ends.begin();
            const long first = text ? ends[static_cast<size_t>(text - 1)] : 0;
            attentions[static_cast<size_t>(text)].run_job(job - first);
        });
        for (const TextAttention<T>& attention : attentions) attention.merge_rows();
    }
}

}  // namespace
