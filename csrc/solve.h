// Linear systems of the remainder's fit (longdraft/cache/remainder.py).
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "pool.h"

namespace longdraft {
namespace LONGDRAFT_VARIANT {

// row[first ..] -= factor * other[first ..]
inline void subtract(float* __restrict row, const float* __restrict other, float factor, long first, long n) {
    for (long j = first; j < n; j++) row[j] -= factor * other[j];
}

// Solve A X = B for a symmetric positive definite A [n, n] and B [n, n], in place of B, by Cholesky's A = U^T U. All loops run
// along rows, so that they are vectors. `factor` [n, n] is scratch.
inline void solve_spd_one(const float* a, float* x, long n, float* factor) {
    constexpr float LEAST = 1e-6f;  // pivots below this share of their diagonal are rounding errors: their unknowns become 0
    std::memcpy(factor, a, sizeof(float) * static_cast<size_t>(n * n));
    for (long k = 0; k < n; k++) {
        float* u = factor + k * n;
        const float diagonal = a[k * n + k];
        const float inverse = u[k] > LEAST * diagonal ? 1.0f / std::sqrt(u[k]) : 0.0f;
        for (long j = k; j < n; j++) u[j] *= inverse;
        u[k] = inverse;  // the diagonal holds inverses from here on
        for (long i = k + 1; i < n; i++) subtract(factor + i * n, u, u[i], i, n);
    }
    for (long k = 0; k < n; k++) {  // U^T Z = B
        const float* u = factor + k * n;
        float* z = x + k * n;
        for (long j = 0; j < n; j++) z[j] *= u[k];
        for (long i = k + 1; i < n; i++) subtract(x + i * n, z, u[i], 0, n);
    }
    for (long k = n - 1; k >= 0; k--) {  // U X = Z
        float* z = x + k * n;
        for (long j = 0; j < n; j++) z[j] *= factor[k * n + k];
        for (long i = 0; i < k; i++) subtract(x + i * n, z, factor[i * n + k], 0, n);
    }
}

// Solve `count` systems: a, x [count, n, n]; x holds the right-hand sides, then the solutions.
inline void solve_spd(const float* a, float* x, long count, long n) {
    parallel(count, [&](long i) {
        std::vector<float> factor(static_cast<size_t>(n * n));
        solve_spd_one(a + i * n * n, x + i * n * n, n, factor.data());
    });
}

}  // namespace LONGDRAFT_VARIANT
}  // namespace longdraft
