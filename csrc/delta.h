// Gated delta nets: layers with a state in place of attention. longdraft/kernels/delta.py states the rule.
//
// A job is one value head of one text: it convolves q, k and v of the head for all rows, then takes the head's state
// through the rows, a block of columns at a time, which stays in the cache of a core meanwhile. So all rows of a forward
// read the state from memory once, and write the state after the last row once. The operations for a row are the same
// for every number of rows, and along a chain as in a tree.
#pragma once

#include "layout.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"
#include "simd.h"

#include <cmath>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr float LENGTH_EPS = 1e-6f;  // of the lengths of q and k

inline float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x rounded to the element type.
template <class T> Floats rounded(Floats x) {
    typename T::Element elements[LANES];
    T::narrow(elements, x);
    return T::widen(elements);
}

inline float dot(const float* x, const float* y, long count) {
    Floats total = {};
    for (long i = 0; i < count; i += LANES) total = fma(load(x + i), load(y + i), total);
    return sum(total);
}

// Scale a vector to the length `to`.
inline void normalise(float* x, long count, float to) {
    const float by = to / std::sqrt(dot(x, x, count) + LENGTH_EPS);
    for (long i = 0; i < count; i += LANES) store(x + i, load(x + i) * by);
}

// One value head of one text.
template <class T> class DeltaHead {
    using Element = typename T::Element;

  public:
    DeltaHead(const DeltaLayer& layer, const DeltaText& text, long head)
        : l_(layer), t_(text), head_(head), channels_(channels(layer)), columns_(state_columns(layer)) {
        for (long row = 0; row < t_.rows; row++) is_chain_ = is_chain_ && t_.parent[row] == row - 1;
        const long kept = is_chain_ ? 1 : t_.rows, per_row = 2 * l_.key_dim + 2 * l_.value_dim;
        q_ = static_cast<float*>(workspace<7>(static_cast<size_t>(t_.rows * per_row + kept * l_.key_dim * columns_) * 4));
        k_ = q_ + t_.rows * l_.key_dim;
        v_ = k_ + t_.rows * l_.key_dim;
        out_ = v_ + t_.rows * l_.value_dim;
        states_ = out_ + t_.rows * l_.value_dim;
    }

    void run() {
        const long key_head = head_ / (l_.value_heads / l_.key_heads), keys = l_.key_heads * l_.key_dim;
        for (long row = 0; row < t_.rows; row++) {
            convolve(row, key_head * l_.key_dim, l_.key_dim, q_ + row * l_.key_dim);
            convolve(row, keys + key_head * l_.key_dim, l_.key_dim, k_ + row * l_.key_dim);
            convolve(row, 2 * keys + head_ * l_.value_dim, l_.value_dim, v_ + row * l_.value_dim);
            normalise(q_ + row * l_.key_dim, l_.key_dim, 1.0f / std::sqrt(static_cast<float>(l_.key_dim)));
            normalise(k_ + row * l_.key_dim, l_.key_dim, 1.0f);
        }
        for (long block = 0; block < l_.value_dim / columns_; block++)
            columns_ == LANES ? recur<1>(block) : recur<2>(block);
        for (long row = 0; t_.z && row < t_.rows; row++) finish(row);
        if (head_ == 0)
            for (long i = 0; i < l_.width - 1; i++)
                std::memcpy(static_cast<Element*>(t_.history_after) + i * channels_,
                            input(t_.rows - 1, l_.width - 2 - i), static_cast<size_t>(channels_) * sizeof(Element));
    }

  private:
    // The input of the convolution that is `back` rows before a row on its path.
    const Element* input(long row, long back) const {
        for (; back > 0 && row >= 0; back--) row = t_.parent[row];
        return row >= 0 ? static_cast<const Element*>(t_.mixed) + row * channels_
                        : static_cast<const Element*>(t_.history) + (l_.width - 2 - back) * channels_;
    }

    void convolve(long row, long first, long count, float* to) const {
        const Element* inputs[MAX_WIDTH];
        for (long i = 0; i < l_.width; i++) inputs[i] = input(row, l_.width - 1 - i) + first;
        for (long c = 0; c < count; c += LANES) {
            Floats total = load(l_.conv + first + c) * T::widen(inputs[0] + c);
            for (long i = 1; i < l_.width; i++)
                total = fma(load(l_.conv + i * channels_ + first + c), T::widen(inputs[i] + c), total);
            store(to + c, rounded<T>(silu(rounded<T>(total))));
        }
    }

    // Take COUNT * 16 columns of the state through the rows.
    template <int COUNT> void recur(long block) const {
        const long rows = t_.rows, keys = l_.key_dim, size = keys * columns_;
        const long first = (head_ * (l_.value_dim / columns_) + block) * size;
        for (long row = 0; row < rows; row++) {
            const long parent = t_.parent[row], value = row * l_.value_dim + block * columns_;
            const float* before = parent < 0 ? t_.state + first : states_ + (is_chain_ ? 0 : parent * size);
            const float *q = q_ + row * keys, *k = k_ + row * keys, *gates = t_.gates + row * 2 * l_.value_heads;
            const float kept = std::exp(l_.decay[head_] * softplus(gates[l_.value_heads + head_] + l_.bias[head_]));
            const float beta = logistic(gates[head_]), product = dot(q, k, keys);
            Floats known[COUNT] = {}, read[COUNT] = {}, change[COUNT];
            for (long i = 0; i < keys; i++)
                for (int c = 0; c < COUNT; c++) {
                    const Floats s = load(before + i * columns_ + c * LANES);
                    known[c] = fma(s, broadcast(k[i]), known[c]);
                    read[c] = fma(s, broadcast(q[i]), read[c]);
                }
            for (int c = 0; c < COUNT; c++) {
                change[c] = (load(v_ + value + c * LANES) - known[c] * kept) * beta;
                store(out_ + value + c * LANES, fma(change[c], broadcast(product), read[c] * kept));
            }
            if (row + 1 < rows && !has_child(row)) continue;
            float* after = row + 1 == rows ? t_.state_after + first : states_ + (is_chain_ ? 0 : row * size);
            for (long i = 0; i < keys; i++)
                for (int c = 0; c < COUNT; c++)
                    store(after + i * columns_ + c * LANES,
                          fma(change[c], broadcast(k[i]), load(before + i * columns_ + c * LANES) * kept));
        }
    }

    bool has_child(long row) const {
        for (long other = row + 1; other < t_.rows; other++)
            if (t_.parent[other] == row) return true;
        return false;
    }

    // Norm and gate of a row's output.
    void finish(long row) const {
        float* x = out_ + row * l_.value_dim;
        for (long i = 0; i < l_.value_dim; i += LANES) store(x + i, rounded<T>(load(x + i)));
        const float by = 1.0f / std::sqrt(dot(x, x, l_.value_dim) / static_cast<float>(l_.value_dim) + l_.eps);
        const Element* z = static_cast<const Element*>(t_.z) + row * t_.z_stride + head_ * l_.value_dim;
        Element* to = static_cast<Element*>(t_.out) + (row * l_.value_heads + head_) * l_.value_dim;
        for (long i = 0; i < l_.value_dim; i += LANES) {
            const Floats normed = rounded<T>(load(l_.norm + i) * rounded<T>(load(x + i) * by));
            T::narrow(to + i, normed * silu(T::widen(z + i)));
        }
    }

    const DeltaLayer& l_;
    const DeltaText& t_;
    const long head_, channels_, columns_;  // columns_: of a block of the state
    bool is_chain_ = true;
    float *q_, *k_, *v_, *out_;  // [rows, key_dim] twice, [rows, value_dim] twice
    float* states_;              // a block after each row, or after the latest row of a chain
};

template <class T> void delta_as(const DeltaLayer& layer, const DeltaText* texts, long count) {
    long rows = 0;
    for (long i = 0; i < count; i++) rows += texts[i].rows;
    const long jobs = count * layer.value_heads;
    const long in_one = rows * layer.value_heads * layer.key_dim * layer.value_dim < MIN_PARALLEL_WORK ? jobs : 1;
    parallel(jobs / in_one, [&](long job) {
        for (long i = job * in_one; i < (job + 1) * in_one; i++)
            DeltaHead<T>(layer, texts[i / layer.value_heads], i % layer.value_heads).run();
    });
}

}  // namespace
