// The exact remainder of a row and the fit to such rows (longdraft/cache/remainder.py): the new rows of each head, the sums
// over them, the solution of the normal equations, and what the fit gives drafts. The heads are divided among the threads;
// all that a head needs stays in the caches of its core.
#pragma once

#include "layout.h"
#include "linear.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace longdraft::LONGDRAFT_VARIANT {

constexpr float NEGLIGIBLE_SHARE = 1e-3f;  // a share of attention that rounding errors may produce

// See Kernels::subtract_part.
template <class T>
void subtract_part_as(const void* whole, const float* whole_lse, const void* part, const float* part_lse, long count,
                      long dim, float* out) {
    const auto *from = static_cast<const typename T::Element*>(whole), *less = static_cast<const typename T::Element*>(part);
    for (long i = 0; i < count; i++, from += dim, less += dim, out += dim + 1) {
        const float share = std::exp(part_lse[i] - whole_lse[i]), left = 1.0f - share;
        if (!(left >= NEGLIGIBLE_SHARE)) {
            std::fill_n(out, dim, 0.0f);
            out[dim] = -std::numeric_limits<float>::infinity();
            continue;
        }
        for (long d = 0; d < dim; d++) out[d] = (T::widen(from[d]) - share * T::widen(less[d])) / left;
        out[dim] = whole_lse[i] + std::log(left);
    }
}

// out[j] = from[j] * scale + the sum over m < count of factors[m * step] * rows[m][j], for `SIZE` vectors of columns. The
// sums stay in registers. Rows are `width` floats apart.
template <int SIZE>
void add_block(const float* from, float scale, const float* factors, long step, const float* rows, long width, long count,
               float* out) {
    Floats sums[SIZE];
    for (int i = 0; i < SIZE; i++) sums[i] = load(from + i * LANES) * scale;
    for (long m = 0; m < count; m++)
        for (int i = 0; i < SIZE; i++)
            sums[i] = fma(broadcast(factors[m * step]), load(rows + m * width + i * LANES), sums[i]);
    for (int i = 0; i < SIZE; i++) store(out + i * LANES, sums[i]);
}

// The same for the columns [first, width), whole vectors. Five vectors at a time: fewer would wait for each other's sums.
template <int SIZE = 5>
void add_rows(const float* from, float scale, const float* factors, long step, const float* rows, long width, long count,
              long first, float* out) {
    for (; first + SIZE * LANES <= width; first += SIZE * LANES)
        add_block<SIZE>(from + first, scale, factors, step, rows + first, width, count, out + first);
    if constexpr (SIZE > 1)
        if (first < width) add_rows<SIZE - 1>(from, scale, factors, step, rows, width, count, first, out);
}

// Solve A X = B for a symmetric positive definite A and B, both [n, width], by Cholesky's A = U^T U. B becomes X, and A is
// lost. What stands left of A's diagonal is not read.
inline void solve_spd(float* a, float* x, long n, long width) {
    constexpr float LEAST = 1e-6f;  // pivots below this share of their diagonal are rounding errors: their unknowns become 0
    std::vector<float> minus(static_cast<size_t>(n));  // a column of -U above the diagonal
    for (long k = 0; k < n; k++) {
        float *u = a + k * width, *z = x + k * width;
        const float diagonal = u[k];
        for (long m = 0; m < k; m++) minus[static_cast<size_t>(m)] = -a[m * width + k];
        add_rows(u, 1.0f, minus.data(), 1, a, width, k, k / LANES * LANES, u);
        add_rows(z, 1.0f, minus.data(), 1, x, width, k, 0, z);  // U^T Z = B
        const float inverse = u[k] > LEAST * diagonal ? 1.0f / std::sqrt(u[k]) : 0.0f;
        for (long j = k; j < n; j++) u[j] *= inverse;
        for (long j = 0; j < n; j++) z[j] *= inverse;
        u[k] = inverse;  // the diagonal holds inverses from here on
    }
    for (long k = n - 1; k >= 0; k--) {  // U X = Z
        float *u = a + k * width, *z = x + k * width;
        for (long m = k + 1; m < n; m++) u[m] = -u[m];
        add_rows(z, 1.0f, u + k + 1, 1, x + (k + 1) * width, width, n - 1 - k, 0, z);
        for (long j = 0; j < n; j++) z[j] *= u[k];
    }
}

// What a head keeps between two steps. Rows are `width` floats apart; what follows their n numbers is 0.
struct HeadFit {
    const RemainderFit& f;
    const long n, width;
    float *gram, *cross, *base, *x, *y;  // [n, width] twice, [width], [room, width] twice

    HeadFit(const RemainderFit& fit, long head)
        : f(fit), n(fit.n), width(fit.width()), gram(fit.of_head(head)), cross(gram + n * width), base(cross + n * width),
          x(base + width), y(x + f.room * width) {}

    // Add the first `rows` held rows to the sums. Of x^T x the part from the diagonal on is kept.
    void add_to_sums(long rows) const {
        std::vector<float> weighted(static_cast<size_t>(rows)), fade(weighted);
        const float before = std::exp(static_cast<float>(-rows) / f.decay_rows);
        for (long r = 0; r < rows; r++)
            fade[static_cast<size_t>(r)] = std::exp(static_cast<float>(r + 1 - rows) / f.decay_rows);
        for (long i = 0; i < n; i++) {
            for (long r = 0; r < rows; r++) weighted[static_cast<size_t>(r)] = fade[static_cast<size_t>(r)] * x[r * width + i];
            float *g = gram + i * width, *c = cross + i * width;
            add_rows(g, before, weighted.data(), 1, x, width, rows, i / LANES * LANES, g);
            add_rows(c, before, weighted.data(), 1, y, width, rows, 0, c);
        }
    }

    // fit [n, n], and its last row, to which the last row's error is added.
    void solve(float* fit) const {
        const long last = n - 1;
        auto* a = static_cast<float*>(workspace<6>(static_cast<size_t>(2 * n * width) * sizeof(float)));
        float* b = a + n * width;
        std::copy(gram, cross + n * width, a);
        const float mass = a[last * width + last], count = std::max(mass, 1e-6f);
        float squares = 0, variance = 0;
        for (long i = 0; i < last; i++) {
            const float square = a[i * width + i] / count, mean = a[i * width + last] / count;
            squares += square;
            variance += square - mean * mean;
        }
        // Rows that are nearly equal would make the equations singular.
        const float size = static_cast<float>(last);
        const float spread = std::max({variance / size, f.least_spread * squares / size, 1e-6f});
        for (long i = 0; i < last; i++) a[i * width + i] += (f.ridge * mass + f.ridge_rows) * spread;
        a[last * width + last] += 1e-6f;
        solve_spd(a, b, n, width);
        for (long i = 0; i < n; i++) std::copy_n(b + i * width, n, fit + i * n);
        std::copy_n(b + last * width, n, base);
        if (mass < 1e-3f) base[last] = f.log_zero;  // of this head nothing was ever left out
    }

    // The fit's last row: b, and a share of the error of the held row `row`.
    void correct(long row, float* fit) const {
        const float *u = x + row * width, *r = y + row * width, share = f.last_error * u[n - 1];
        std::vector<float> fitted(base, base + n);
        add_rows(base, 1.0f, u, 1, fit, n, n - 1, 0, fitted.data());
        for (long j = n / LANES * LANES; j < n; j++)
            for (long d = 0; d < n - 1; d++) fitted[static_cast<size_t>(j)] += u[d] * fit[d * n + j];
        for (long j = 0; j < n; j++) fit[(n - 1) * n + j] = base[j] + share * (r[j] - fitted[static_cast<size_t>(j)]);
    }

    // Hold a row as (u, 1) and its remainder; zeros where the row is not finite, as where no key was left out.
    template <class T> void hold(const typename T::Element* content, const float* remainder, long row) const {
        float *u = x + row * width, *r = y + row * width;
        for (long i = 0; i < n - 1; i++) u[i] = T::widen(content[i]);
        u[n - 1] = 1.0f;
        std::copy_n(remainder, n, r);
        Floats zero = {};  // 0 * x is NaN where x is not finite
        for (long i = 0; i < width; i += LANES) zero += 0.0f * load(u + i) + 0.0f * load(r + i);
        if (sum(zero) == 0.0f) return;
        std::fill_n(u, n, 0.0f);
        std::fill_n(r, n, 0.0f);
    }
};

// See Kernels::learn_rows.
template <class T> void learn_rows_as(const RemainderFit& f, const RemainderRows& rows, bool solves, float* fit) {
    parallel(f.count, [&](long i) {
        const HeadFit head(f, i);
        float* mine = fit + i * f.n * f.n;
        const long layer = i / rows.heads, number = i % rows.heads, dim = f.n - 1;
        const auto* content = static_cast<const typename T::Element*>(rows.content) + layer * rows.layer_rows * rows.heads * dim;
        long held = f.held, last = 0;
        for (long r = 0; r < rows.rows; r++) {
            const long at = r * rows.heads + number;
            last = held++;
            head.template hold<T>(content + at * dim, rows.remainders + (layer * rows.rows * rows.heads + at) * f.n, last);
            if (held == f.room) head.add_to_sums(std::exchange(held, 0));
        }
        if (solves) {
            if (held) head.add_to_sums(held);
            head.solve(mine);
        }
        head.correct(last, mine);
    });
}

// The remainder of each row and head, by an affine map of the row's content: content times the first dim rows of `map`, plus
// its last row.
//   content [rows, heads, dim], map [heads, dim + 1, dim + 1] -> out [rows, heads, dim + 1]
template <class T>
void map_remainder_as(const void* content, const float* map, long rows, long heads, long dim, float* out) {
    const long wide = dim + 1;
    const long in_one = rows * heads * dim * wide < MIN_PARALLEL_WORK / 2 ? heads : 1;  // a number is read for each product
    parallel((heads + in_one - 1) / in_one, [&](long job) {
        std::vector<float> held(static_cast<size_t>(dim));
        float* u = held.data();
        for (long h = job * in_one; h < (job + 1) * in_one; h++)
            for (long r = 0; r < rows; r++) {
                const auto* from = static_cast<const typename T::Element*>(content) + (r * heads + h) * dim;
                const float *mine = map + h * wide * wide, *base = mine + dim * wide;
                float* to = out + (r * heads + h) * wide;
                for (long d = 0; d < dim; d++) u[d] = T::widen(from[d]);
                add_rows(base, 1.0f, u, 1, mine, wide, dim, 0, to);
                for (long j = wide / LANES * LANES; j < wide; j++) {
                    to[j] = base[j];
                    for (long d = 0; d < dim; d++) to[j] += u[d] * mine[d * wide + j];
                }
            }
    });
}

}  // namespace
