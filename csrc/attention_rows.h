// The positions that each row of a text sees, and the two layouts of the rows' keys and values.
//
// A row sees the committed positions, then its path in the tree, itself last; with a sliding window, the last of these.
//
//   chain  Each row's parent is the row before it, as in plain decoding or in a prompt. The rows are written to the store
//          at the positions where plain decoding would write them, and all rows read everything in the store:
//
//          store      [ committed: 0 .. length )[ row 0 ][ row 1 ] .. [ last row ]( up to a multiple of POSITION_GROUP )
//                     |<------------------------- shared: 0 .. shared_end ------------------------------------------->|
//
//          Where rows are not causal, each sees all of them, as if it were the last row of a chain.
//
//   tree   The rows of several branches would need the same positions. All rows read the full groups of the committed
//          part in the store. What follows is copied for each row into scratch memory, its *tail*:
//
//          store      [ committed: 0 .. shared_end )    shared_end: `length` rounded down to a multiple of POSITION_GROUP
//          tail of r                               [ committed: shared_end .. length )[ path of r ][ r ]( zeros )
//
// Both layouts run the same operations in the same order for a row, so a node of a tree gets the bits of plain decoding.
#pragma once

#include "layout.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <vector>

namespace longdraft::LONGDRAFT_VARIANT {

// A *query row* is one query head of one row. The query rows of a KV head are numbered row by row:
//
//     query row i of KV head h:  row i / group, query head h * group + i % group      (group: query heads per KV head)
struct RowLayout {
    bool is_chain;
    long shared_end;               // positions before this are read in the store, by all rows
    long longest;                  // positions that the deepest row sees without a window
    std::vector<long> row_ends;    // [rows]: positions that the row sees without a window
    std::vector<long> first, end;  // [query rows of a KV head]: the positions [first, end) that a query row sees
};

template <class T> RowLayout row_layout(const Attention& a) {
    RowLayout layout;
    layout.is_chain = true;
    for (long r = 0; r < a.rows; r++) {
        const bool is_first = !a.is_causal || a.parent[r] < 0;
        const long before = is_first ? a.length : layout.row_ends[static_cast<size_t>(a.parent[r])];
        layout.row_ends.push_back(a.is_causal ? before + 1 : a.length + a.rows);
        layout.is_chain = layout.is_chain && (!a.is_causal || a.parent[r] == r - 1);
    }
    layout.longest = *std::max_element(layout.row_ends.begin(), layout.row_ends.end());
    // In a chain, a value that is not finite would also reach the rows before it: a weight of 0 times infinity is NaN.
    layout.is_chain = layout.is_chain && (!a.is_causal || !a.v.data || finite_rows<T>(a.v, a.rows, a.store->heads, a.store->dim));
    layout.shared_end =
        layout.is_chain ? round_up(layout.longest, POSITION_GROUP) : a.length / POSITION_GROUP * POSITION_GROUP;
    const long group = a.heads / a.store->heads;
    for (long i = 0; i < a.rows * group; i++) {
        const long end = layout.row_ends[static_cast<size_t>(i / group)];
        layout.end.push_back(end);
        layout.first.push_back(a.window ? std::max(0L, end - a.window) : 0);
    }
    return layout;
}

// The tails of the rows [first, last] of a tree, for one KV head. A tail is laid out like a store's keys and values.
template <class T> class TreeTails {
    using Element = typename T::Element;

  public:
    TreeTails(const Attention& a, const RowLayout& layout, long head, long first, long last)
        : a_(a), store_(*a.store), shared_end_(layout.shared_end), head_(head), first_(first) {
        long total = 0;
        for (long row = first; row <= last; row++) {
            const long positions = round_up(layout.row_ends[static_cast<size_t>(row)] - shared_end_, POSITION_GROUP);
            starts_.push_back(total);
            words_.push_back(positions * store_.padded / T::PER_WORD);
            total += 2 * words_.back();
        }
        memory_.assign(static_cast<size_t>(total) + 16, 0);  // 16 words more, to align to 64 bytes
        base_ = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) & ~uintptr_t{63});
    }

    void copy() {
        for (long row = first_; row < first_ + static_cast<long>(words_.size()); row++) {
            copy_committed(row);
            copy_path(row);
        }
    }

    // The tail's keys, from position shared_end on. Its values follow, `words` words after the keys.
    uint32_t* keys(long row) const { return base_ + starts_[static_cast<size_t>(row - first_)]; }
    long words(long row) const { return words_[static_cast<size_t>(row - first_)]; }

  private:
    // The committed positions [shared_end, length): the store's last, partly filled group, in whole lines of 16.
    void copy_committed(long row) {
        if (a_.length == shared_end_) return;
        const long block = shared_end_ / SPLIT, place = shared_end_ % SPLIT;
        const long count = round_up(a_.length - shared_end_, LANES) * store_.padded / T::PER_WORD;
        const long at = place * store_.padded / T::PER_WORD;
        std::copy_n(store_.key(block, head_) + at, count, keys(row));
        std::copy_n(store_.value(block, head_) + at, count, keys(row) + words(row));
    }

    void copy_path(long row) {
        auto* k = reinterpret_cast<Element*>(keys(row));
        auto* v = reinterpret_cast<Element*>(keys(row) + words(row));
        long place = a_.length - shared_end_ - 1;
        for (long node = row; node >= 0; node = a_.parent[node]) place++;
        for (long node = row; node >= 0; node = a_.parent[node], place--) {
            const Element* from_k = element_row<T>(a_.k, node, head_);
            const Element* from_v = element_row<T>(a_.v, node, head_);
            for (long d = 0; d < store_.dim; d++) {
                k[key_at<T>(store_, place, d)] = from_k[d];
                v[value_at<T>(store_, place, d)] = from_v[d];
            }
        }
    }

    const Attention& a_;
    const Store& store_;
    long shared_end_, head_, first_;
    std::vector<long> starts_, words_;  // of each row
    std::vector<uint32_t> memory_;
    uint32_t* base_;
};

}  // namespace
