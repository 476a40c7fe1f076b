// The fit of the remainder (longdraft/cache/remainder.py): sums over new rows, and the solution of the normal equations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "layout.h"
#include "pool.h"

namespace longdraft {
namespace LONGDRAFT_VARIANT {

constexpr long FIT_LANES = 16;
typedef float FitLanes __attribute__((vector_size(FIT_LANES * sizeof(float))));  // whatever vectors the processor has

// out[j] = from[j] * scale - the sum over m < count of factors[m * step] * rows[m][j], for `SIZE` vectors of columns. The sums
// stay in registers. Rows are `width` floats apart.
template <int SIZE>
inline void subtract_block(const float* from, float scale, const float* factors, long step, const float* rows, long width,
                           long count, float* out) {
    FitLanes sums[SIZE], row;
    for (int i = 0; i < SIZE; i++) {
        std::memcpy(&sums[i], from + i * FIT_LANES, sizeof(FitLanes));
        sums[i] *= scale;
    }
    for (long m = 0; m < count; m++)
        for (int i = 0; i < SIZE; i++) {
            std::memcpy(&row, rows + m * width + i * FIT_LANES, sizeof(FitLanes));
            sums[i] -= factors[m * step] * row;
        }
    for (int i = 0; i < SIZE; i++) std::memcpy(out + i * FIT_LANES, &sums[i], sizeof(FitLanes));
}

// The same for the columns from `first` on, rounded down to a whole vector. `width` is a multiple of FIT_LANES.
inline void subtract(const float* from, float scale, const float* factors, long step, const float* rows, long width,
                     long count, long first, float* out) {
    long j = first / FIT_LANES * FIT_LANES;
    for (; j + 4 * FIT_LANES <= width; j += 4 * FIT_LANES)
        subtract_block<4>(from + j, scale, factors, step, rows + j, width, count, out + j);
    for (; j < width; j += FIT_LANES) subtract_block<1>(from + j, scale, factors, step, rows + j, width, count, out + j);
}

// Solve A X = B for a symmetric positive definite A and B, both [n, width], by Cholesky's A = U^T U: A becomes U, B becomes X.
// What stands left of A's diagonal is not read.
inline void solve_spd(float* a, float* x, long n, long width) {
    constexpr float LEAST = 1e-6f;  // pivots below this share of their diagonal are rounding errors: their unknowns become 0
    for (long k = 0; k < n; k++) {
        float* u = a + k * width;
        const float diagonal = u[k];
        subtract(u, 1.0f, a + k, width, a, width, k, k, u);
        const float inverse = u[k] > LEAST * diagonal ? 1.0f / std::sqrt(u[k]) : 0.0f;
        for (long j = k; j < n; j++) u[j] *= inverse;
        float* z = x + k * width;  // U^T Z = B
        subtract(z, 1.0f, a + k, width, x, width, k, 0, z);
        for (long j = 0; j < n; j++) z[j] *= inverse;
        u[k] = inverse;  // the diagonal holds inverses from here on
    }
    for (long k = n - 1; k >= 0; k--) {  // U X = Z
        float* z = x + k * width;
        subtract(z, 1.0f, a + k * width + k + 1, 1, x + (k + 1) * width, width, n - 1 - k, 0, z);
        for (long j = 0; j < n; j++) z[j] *= a[k * width + k];
    }
}

// One head's sums [n, n] with its new rows x, y [rows, n], and the solution [n, n].
inline void fit_one(const RemainderFit& f, const float* x, const float* y, float* gram, float* cross, float* fit) {
    const long n = f.n, width = round_up(n, FIT_LANES), rows = f.rows;
    std::vector<float> memory(static_cast<size_t>((2 * rows + 2 * n + rows) * width));
    float *padded_x = memory.data(), *padded_y = padded_x + rows * width, *a = padded_y + rows * width, *b = a + n * width;
    float* weighted = b + n * width;  // -x, by age
    auto copy = [&](const float* from, long count, float* to) {
        for (long r = 0; r < count; r++) std::memcpy(to + r * width, from + r * n, static_cast<size_t>(n) * 4);
    };
    auto keep = [&](const float* from, float* to) {
        for (long r = 0; r < n; r++) std::memcpy(to + r * n, from + r * width, static_cast<size_t>(n) * 4);
    };
    copy(x, rows, padded_x), copy(y, rows, padded_y), copy(gram, n, a), copy(cross, n, b);
    for (long r = 0; r < rows; r++) {
        const float weight = -std::exp(static_cast<float>(r + 1 - rows) / f.decay_rows);
        for (long j = 0; j < n; j++) weighted[r * width + j] = weight * x[r * n + j];
    }
    const float before = std::exp(static_cast<float>(-rows) / f.decay_rows);
    for (long i = 0; i < n; i++) {
        subtract(a + i * width, before, weighted + i, width, padded_x, width, rows, 0, a + i * width);
        subtract(b + i * width, before, weighted + i, width, padded_y, width, rows, 0, b + i * width);
    }
    keep(a, gram), keep(b, cross);

    const long last = n - 1;
    const float mass = a[last * width + last], count = std::max(mass, 1e-6f);
    float squares = 0, variance = 0;
    for (long i = 0; i < last; i++) {
        const float square = a[i * width + i] / count, mean = a[i * width + last] / count;
        squares += square;
        variance += square - mean * mean;
    }
    // Rows that are nearly equal would make the equations singular.
    const float spread = std::max({variance / last, f.least_spread * squares / last, 1e-6f});
    for (long i = 0; i < last; i++) a[i * width + i] += (f.ridge * mass + f.ridge_rows) * spread;
    a[last * width + last] += 1e-6f;
    solve_spd(a, b, n, width);
    keep(b, fit);
    if (mass < 1e-3f) fit[n * n - 1] = f.log_zero;  // of this head nothing was ever left out
}

inline void fit_remainder(const RemainderFit& f, const float* x, const float* y, float* gram, float* cross, float* fit) {
    const long square = f.n * f.n;
    parallel(f.count, [&](long i) {
        fit_one(f, x + i * f.rows * f.n, y + i * f.rows * f.n, gram + i * square, cross + i * square, fit + i * square);
    });
}

}  // namespace LONGDRAFT_VARIANT
}  // namespace longdraft
