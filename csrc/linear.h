// Products of a few rows with packed weights. Each output is one running sum over the inner dimension, in order.
#pragma once

#include "groups.h"
#include "layout.h"
#include "multiply.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr long MIN_PARALLEL_WORK = 1 << 16;  // multiply-adds: for fewer, waking another thread costs more than it saves

// The offset of element (n, k) in a packed weight, in elements, or in bytes for int8 (drawn in layout.h).
template <class T> long place(const Linear& w, long n, long k) {
    const long word = ((n / COLUMNS) * w.steps + k / T::PER_WORD) * COLUMNS + n % COLUMNS, part = k % T::PER_WORD;
    return w.is_int8 ? (word / LANES * T::PER_WORD + part) * LANES + word % LANES : word * T::PER_WORD + part;
}

template <class T, class Element> void pack_as(Linear& w, const Element* weight) {
    constexpr long TOGETHER = 64;  // inputs, whose memory of all outputs of a tile stays in the first cache
    auto* out = w.tile<Element>(0);
    parallel(w.tiles(), [&](long tile) {
        for (long first = 0; first < w.k; first += TOGETHER)
            for (long n = tile * COLUMNS; n < std::min(w.n, (tile + 1) * COLUMNS); n++)
                for (long k = first; k < std::min(w.k, first + TOGETHER); k++) out[place<T>(w, n, k)] = weight[n * w.k + k];
    });
}

template <class T> void narrow_some(typename T::Element* out, const float* x, long count) {
    for (; count >= LANES; count -= LANES, out += LANES, x += LANES) T::narrow(out, load(x));
    for (long i = 0; i < count; i++) out[i] = T::round(x[i]);
}

template <class T> void embed_row(const Linear& table, long n, typename T::Element* out) {
    if (table.is_grouped()) {
        groups::decode_row(table, n, [&](long first, const float* numbers, long count) {
            if (table.order.empty()) return narrow_some<T>(out + first, numbers, count);
            for (long i = 0; i < count; i++) out[table.order[first + i]] = T::round(numbers[i]);
        });
        return;
    }
    for (long k = 0; k < table.k; k++) {
        const long at = place<T>(table, n, k);
        out[k] = table.is_int8 ? T::round(static_cast<float>(table.tile<int8_t>(0)[at]) * table.scale[n])
                               : table.tile<typename T::Element>(0)[at];
    }
}

template <class T> void embed_as(const Linear& table, const int64_t* tokens, long rows, typename T::Element* out) {
    auto embed = [&](long r) { embed_row<T>(table, tokens[r], out + r * table.k); };
    if (rows * table.k >= MIN_PARALLEL_WORK) return parallel(rows, embed);
    for (long r = 0; r < rows; r++) embed(r);
}

// Scale, bias and round the sums of rows by one tile, and write them to `out`.
template <class T>
void finish(const Linear& w, long tile, long rows, float (*sums)[COLUMNS], void* out, bool keep_float) {
    const long first = tile * COLUMNS, columns = std::min<long>(COLUMNS, w.n - first);
    for (long i = 0; i < rows; i++) {
        if (w.is_int8)
            for (long c = 0; c < columns; c++) sums[i][c] *= w.scale[first + c];
        if (!w.bias.empty())
            for (long c = 0; c < columns; c++) sums[i][c] += w.bias[first + c];
        const long at = i * w.n + first;
        if (keep_float) std::copy_n(sums[i], columns, static_cast<float*>(out) + at);
        else narrow_some<T>(static_cast<typename T::Element*>(out) + at, sums[i], columns);
    }
}

// The rows of a product as its weight reads them: whole words padded with zeros, or whole numbers for weights in groups.
template <class T> struct Inputs {
    const typename T::Element* rows;
    groups::Quantised whole;
};

// Rows whose memory a variant reads. Some variants read several rows together, even if fewer are wanted.
template <class T> long rows_read(long rows) { return round_up(rows, Multiply<T>::READ_ROWS); }

// Bytes of the memory of a product's inputs; 0: the rows are read where they are.
template <class T> long input_bytes(const Product& p) {
    const Linear& w = *p.weight;
    if (w.is_grouped()) return round_up(groups::quantised_bytes(p.rows, w.k), 64);
    const long width = w.steps * T::PER_WORD, held = rows_read<T>(p.rows);
    return width == w.k && held == p.rows ? 0 : round_up(held * width * static_cast<long>(sizeof(typename T::Element)), 64);
}

template <class T> Inputs<T> prepare(const Product& p, char* memory) {
    using Element = typename T::Element;
    const Linear& w = *p.weight;
    const auto* in = static_cast<const Element*>(p.x);
    if (w.is_grouped()) return {nullptr, groups::quantise_rows<T>(p.x, p.rows, w.k, w.order.empty() ? nullptr : w.order.data(), memory)};
    if (!input_bytes<T>(p)) return {in, {}};
    auto* padded = reinterpret_cast<Element*>(memory);
    const long width = w.steps * T::PER_WORD;
    for (long r = 0; r < p.rows; r++) {
        std::copy_n(in + r * w.k, w.k, padded + r * width);
        std::fill_n(padded + r * width + w.k, width - w.k, Element{});
    }
    std::fill_n(padded + p.rows * width, (rows_read<T>(p.rows) - p.rows) * width, Element{});
    return {padded, {}};
}

// Whether two products read the same inputs.
inline bool reads_the_same(const Product& a, const Product& b) {
    return a.x == b.x && a.rows == b.rows && a.weight->k == b.weight->k && a.weight->is_grouped() == b.weight->is_grouped() &&
           a.weight->order == b.weight->order;
}

// All rows of a product by one tile of its weight.
template <class T> void multiply_tile(const Product& p, const Inputs<T>& in, long tile) {
    using Unit = Multiply<T>;
    const Linear& w = *p.weight;
    auto* sums = static_cast<float(*)[COLUMNS]>(workspace<6>(static_cast<size_t>(rows_read<T>(p.rows)) * COLUMNS * 4));
    if (w.is_grouped())
        groups::multiply_tile(w.groups, w.tile<uint8_t>(tile), in.whole, p.rows, sums, Unit::READ_ROWS > 1);
    else
        Unit::tile(p.rows, reinterpret_cast<const uint32_t*>(in.rows), w, tile, sums);
    finish<T>(w, tile, p.rows, sums, p.out, p.keep_float);
}

// The inputs of all products. Neighbours that read the same inputs share them.
template <class T> std::vector<Inputs<T>> prepare_all(const Product* products, long count) {
    std::vector<long> starts(static_cast<size_t>(count), -1);
    long bytes = 0, numbers = 0;
    for (long i = 0; i < count; i++) {
        if (i && reads_the_same(products[i - 1], products[i])) continue;
        starts[static_cast<size_t>(i)] = bytes;
        bytes += input_bytes<T>(products[i]);
        numbers += products[i].rows * products[i].weight->k;
    }
    char* memory = static_cast<char*>(workspace<5>(static_cast<size_t>(bytes) + 64));
    std::vector<Inputs<T>> inputs(static_cast<size_t>(count));
    const long in_one = numbers < MIN_PARALLEL_WORK ? count : 1;
    parallel((count + in_one - 1) / in_one, [&](long job) {
        for (long i = job * in_one; i < (job + 1) * in_one; i++)
            if (const long start = starts[static_cast<size_t>(i)]; start >= 0)
                inputs[static_cast<size_t>(i)] = prepare<T>(products[i], memory + start);
    });
    for (size_t i = 1; i < inputs.size(); i++)
        if (starts[i] < 0) inputs[i] = inputs[i - 1];
    return inputs;
}

// The tiles of all products, one product after another, on all threads where there is enough to do. `Around` is made
// once for each piece of consecutive tiles that a thread takes.
template <class T, class Around> void multiply_all(const Product* products, long count) {
    const std::vector<Inputs<T>> inputs = prepare_all<T>(products, count);
    std::vector<long> ends;  // of each product's tiles
    long work = 0, tiles = 0;
    for (long i = 0; i < count; i++) {
        work += products[i].rows * products[i].weight->k * products[i].weight->n;
        ends.push_back(tiles += products[i].weight->tiles());
    }
    const std::vector<long> pieces = pieces_of(tiles, work < MIN_PARALLEL_WORK ? tiles : products->weight->least_tiles());
    parallel(static_cast<long>(pieces.size()), [&](long job) {
        [[maybe_unused]] Around around;
        long place = job ? pieces[static_cast<size_t>(job - 1)] : 0;
        const long end = pieces[static_cast<size_t>(job)];
        size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), place) - ends.begin());
        for (; place < end; place++) {
            if (place == ends[i]) i++;
            multiply_tile<T>(products[i], inputs[i], place - (i ? ends[i - 1] : 0));
        }
    });
}

template <class T> void products_as(const Product* products, long count) {
    struct NoSetUp {};
    bool needs_none = true;  // few rows of weights in groups
    for (long i = 0; i < count; i++)
        needs_none = needs_none && products[i].weight->is_grouped() && products[i].rows < groups::LEAST_UNIT_ROWS;
    needs_none ? multiply_all<T, NoSetUp>(products, count) : multiply_all<T, Multiply<T>>(products, count);
}

}  // namespace
