// Operations on single rows: norm, activation, rotation, and copies to and from a store.
#pragma once

#include "layout.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <cmath>

namespace longdraft::LONGDRAFT_VARIANT {

// Row `row` of one head.
template <class T> const typename T::Element* element_row(const Rows& x, long row, long head) {
    return static_cast<const typename T::Element*>(x.data) + row * x.row_stride + head * x.head_stride;
}

// Up to 16 elements as lanes, followed by zeros.
template <class T> Floats widen_some(const typename T::Element* p, long count) {
    if (count >= LANES) return T::widen(p);
    float lanes[LANES] = {};
    for (long i = 0; i < count; i++) lanes[i] = T::widen(p[i]);
    return load(lanes);
}

// RMS norm: x / sqrt(mean(x^2) + eps), rounded (unless `rounds_once`), times weight, rounded. The end of a row that does
// not fill 16 lanes is padded with zeros. `out` may be x.
template <class T, class Gain = T>
void rms_norm_as(const void* x, const void* weight, long rows, long width, float eps, bool rounds_once, void* out) {
    using Element = typename T::Element;
    const auto* gain = static_cast<const typename Gain::Element*>(weight);
    for (long r = 0; r < rows; r++) {
        const Element* in = static_cast<const Element*>(x) + r * width;
        Element* to = static_cast<Element*>(out) + r * width;
        Floats squares = {};
        for (long i = 0; i < width; i += LANES) {
            Floats v = widen_some<T>(in + i, width - i);
            squares = fma(v, v, squares);
        }
        float by = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
        long i = 0;
        for (; i + LANES <= width; i += LANES) {
            if (rounds_once) {
                T::narrow(to + i, Gain::widen(gain + i) * (T::widen(in + i) * by));
                continue;
            }
            typename T::Element scaled[LANES];
            T::narrow(scaled, T::widen(in + i) * by);
            T::narrow(to + i, Gain::widen(gain + i) * T::widen(scaled));
        }
        for (; i < width; i++) {
            float scaled = T::widen(in[i]) * by;
            to[i] = T::round(Gain::widen(gain[i]) * (rounds_once ? scaled : T::widen(T::round(scaled))));
        }
    }
}

// a + b, rounded. `out` may be a or b.
template <class T> void add_as(const void* a, const void* b, long count, void* out) {
    using Element = typename T::Element;
    const auto *x = static_cast<const Element*>(a), *y = static_cast<const Element*>(b);
    auto* to = static_cast<Element*>(out);
    long i = 0;
    for (; i + LANES <= count; i += LANES) T::narrow(to + i, T::widen(x + i) + T::widen(y + i));
    for (; i < count; i++) to[i] = T::round(T::widen(x[i]) + T::widen(y[i]));
}

// x * by, rounded, in place.
template <class T> void scale_as(void* x, long count, float by) {
    auto* at = static_cast<typename T::Element*>(x);
    long i = 0;
    for (; i + LANES <= count; i += LANES) T::narrow(at + i, T::widen(at + i) * by);
    for (; i < count; i++) at[i] = T::round(T::widen(at[i]) * by);
}

inline Floats logistic(Floats x) { return 1.0f / one_plus_exp_minus(x); }
inline Floats silu(Floats x) { return x / one_plus_exp_minus(x); }

// GELU by its tanh formula: x / 2 (1 + tanh(y)) is x / (1 + exp(-2 y)).
inline Floats gelu(Floats x) {
    constexpr float TWICE_ROOT = 1.5957691216f;  // 2 sqrt(2 / pi)
    return x / one_plus_exp_minus(TWICE_ROOT * x * (1.0f + 0.044715f * (x * x)));
}

// activation(gate) * up, for gate_up [rows, 2 width] with the gate first: out [rows, width].
template <class T, class F> void gated_as(const void* gate_up, long rows, long width, void* out, F activation) {
    using Element = typename T::Element;
    for (long r = 0; r < rows; r++) {
        const Element* gate = static_cast<const Element*>(gate_up) + r * 2 * width;
        const Element* up = gate + width;
        Element* to = static_cast<Element*>(out) + r * width;
        for (long i = 0; i < width; i += LANES) {
            long some = std::min<long>(LANES, width - i);
            float lanes[LANES];
            store(lanes, activation(widen_some<T>(gate + i, some)));
            if (some == LANES) {
                Element active[LANES];
                T::narrow(active, load(lanes));
                T::narrow(to + i, T::widen(active) * T::widen(up + i));
            } else {
                for (long j = 0; j < some; j++) to[i + j] = T::round(T::widen(T::round(lanes[j])) * T::widen(up[i + j]));
            }
        }
    }
}

// The activation of gpt-oss: (up + 1) gate sigmoid(alpha gate), with gate at most `limit` and up within it.
template <class T>
void clamped_swiglu_as(const void* gate_up, long rows, long width, float alpha, float limit, void* out) {
    using Element = typename T::Element;
    const Floats highest = broadcast(limit), lowest = broadcast(-limit);
    for (long r = 0; r < rows; r++) {
        const Element* from = static_cast<const Element*>(gate_up) + r * 2 * width;
        Element* to = static_cast<Element*>(out) + r * width;
        for (long i = 0; i < width; i += LANES) {
            const long some = std::min<long>(LANES, width - i);
            Floats gate = widen_some<T>(from + i, some), up = widen_some<T>(from + width + i, some);
            gate = select(gate > highest, highest, gate);  // NaN stays NaN
            up = select(up > highest, highest, select(up < lowest, lowest, up));
            Element lanes[LANES];
            T::narrow(lanes, (up + 1.0f) * (gate / one_plus_exp_minus(alpha * gate)));
            std::copy_n(lanes, some, to + i);
        }
    }
}

// x * sigmoid(gate), rounded, for x [rows, width]. The gates of two rows are `stride` apart. `out` may be x.
template <class T> void gate_as(const void* x, const void* gates, long stride, long rows, long width, void* out) {
    using Element = typename T::Element;
    for (long r = 0; r < rows; r++) {
        const Element* in = static_cast<const Element*>(x) + r * width;
        const Element* gate = static_cast<const Element*>(gates) + r * stride;
        Element* to = static_cast<Element*>(out) + r * width;
        for (long i = 0; i < width; i += LANES) {
            const long some = std::min<long>(LANES, width - i);
            Element lanes[LANES];
            T::narrow(lanes, widen_some<T>(in + i, some) * logistic(widen_some<T>(gate + i, some)));
            std::copy_n(lanes, some, to + i);
        }
    }
}

// soft_cap of each number, in place.
inline void soft_cap_all(float* x, long count, float cap) {
    for (long i = 0; i < count; i += LANES) {
        const long some = std::min<long>(LANES, count - i);
        float lanes[LANES];
        store(lanes, soft_cap(widen_some<F32>(x + i, some), cap));
        std::copy_n(lanes, some, x + i);
    }
}

// Rotary position embedding with paired halves: (a, b) -> (a cos - b sin, b cos + a sin). out [rows, heads, dim].
template <class T>
void rope_as(Rows x, const float* cos, const float* sin, long rows, long heads, long dim, void* out) {
    using Element = typename T::Element;
    long half = dim / 2;
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const Element* in = element_row<T>(x, r, h);
            Element* to = static_cast<Element*>(out) + (r * heads + h) * dim;
            const float *c = cos + r * half, *s = sin + r * half;
            long i = 0;
            for (; i + LANES <= half; i += LANES) {
                const Floats a = T::widen(in + i), b = T::widen(in + i + half), x = load(c + i), y = load(s + i);
                T::narrow(to + i, a * x - b * y);
                T::narrow(to + i + half, b * x + a * y);
            }
            for (; i < half; i++) {
                float a = T::widen(in[i]), b = T::widen(in[i + half]);
                to[i] = T::round(a * c[i] - b * s[i]);
                to[i + half] = T::round(b * c[i] + a * s[i]);
            }
        }
}

// A convolution over rows [rows, width] whose kernel differs between rows and groups of columns; zeros are before the rows:
//
//     out[i, c] = sum over t of (base[t, c] + moving[i, t, c / group]) * x[i - t, c],  rounded
//
//   base    [taps, width]
//   moving  [rows, taps, groups], rows `stride` apart
// `out` may be x: the last row is computed first.
template <class T>
void convolve_as(const void* x, const float* base, const float* moving, long stride, long groups, long taps, long rows,
                 long width, void* out) {
    using Element = typename T::Element;
    const long group = width / groups;
    for (long i = rows - 1; i >= 0; i--) {
        const Element* in = static_cast<const Element*>(x) + i * width;
        Element* to = static_cast<Element*>(out) + i * width;
        for (long c = 0; c < width; c++) {
            float total = 0;
            for (long t = 0; t < std::min(taps, i + 1); t++)
                total += (base[t * width + c] + moving[i * stride + t * groups + c / group]) * T::widen(in[c - t * width]);
            to[c] = T::round(total);
        }
    }
}

// The offset, in elements, of element d of a position in a head's keys and values (drawn in layout.h).
template <class T> long key_at(const Store& s, long place, long d) {
    const long word = ((place / LANES) * (s.padded / T::PER_WORD) + d / T::PER_WORD) * LANES + place % LANES;
    return word * T::PER_WORD + d % T::PER_WORD;
}
template <class T> long value_at(const Store& s, long place, long d) {
    return ((place / T::PER_WORD) * s.padded + d) * T::PER_WORD + place % T::PER_WORD;
}

// Whether all elements of the rows are finite.
template <class T> bool finite_rows(Rows x, long rows, long heads, long dim) {
    Floats zero = {};  // 0 * x is NaN where x is not finite
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const auto* in = element_row<T>(x, r, h);
            for (long d = 0; d < dim; d += LANES) zero += 0.0f * widen_some<T>(in + d, dim - d);
        }
    return sum(zero) == 0.0f;
}

// Write rows which[0], which[1], ... (null: all, in order) of k and v to positions start, start + 1, ...
template <class T> void write_as(Store& s, long start, Rows k, Rows v, const int64_t* which, long rows) {
    using Element = typename T::Element;
    for (long i = 0; i < rows; i++) {
        long block = (start + i) / SPLIT, place = (start + i) % SPLIT, r = which ? which[i] : i;
        for (long h = 0; h < s.heads; h++) {
            const Element *from_k = element_row<T>(k, r, h), *from_v = element_row<T>(v, r, h);
            auto* to_k = reinterpret_cast<Element*>(s.key(block, h));
            auto* to_v = reinterpret_cast<Element*>(s.value(block, h));
            for (long d = 0; d < s.dim; d++) {
                to_k[key_at<T>(s, place, d)] = from_k[d];
                to_v[value_at<T>(s, place, d)] = from_v[d];
            }
        }
    }
}

// Read the rows at positions [heads, count]: k, v [heads, count, dim].
template <class T> void read_as(const Store& s, const int64_t* positions, long count, void* k, void* v) {
    using Element = typename T::Element;
    for (long h = 0; h < s.heads; h++)
        for (long i = 0; i < count; i++) {
            long block = positions[h * count + i] / SPLIT, place = positions[h * count + i] % SPLIT;
            const auto* from_k = reinterpret_cast<const Element*>(s.key(block, h));
            const auto* from_v = reinterpret_cast<const Element*>(s.value(block, h));
            Element* to_k = static_cast<Element*>(k) + (h * count + i) * s.dim;
            Element* to_v = static_cast<Element*>(v) + (h * count + i) * s.dim;
            for (long d = 0; d < s.dim; d++) {
                to_k[d] = from_k[key_at<T>(s, place, d)];
                to_v[d] = from_v[value_at<T>(s, place, d)];
            }
        }
}

}  // namespace
