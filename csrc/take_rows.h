// Some rows of a packed weight as a weight of their own, without its other rows: the head of a draft vocabulary.
#pragma once

#include "linear.h"

namespace longdraft::LONGDRAFT_VARIANT {

template <class T, class Element> void take_rows_as(const Linear& w, const int64_t* rows, Linear& out) {
    parallel(out.tiles(), [&](long tile) {
        for (long n = tile * COLUMNS; n < std::min(out.n, (tile + 1) * COLUMNS); n++)
            for (long k = 0; k < w.k; k++)
                out.tile<Element>(0)[place<T>(out, n, k)] = w.tile<Element>(0)[place<T>(w, rows[n], k)];
    });
}

// out.n rows of a weight that is not int4. `out` has the weight's format.
inline void take_rows(const Linear& w, const int64_t* rows, Linear& out) {
    if (w.is_int8) w.is_bf16 ? take_rows_as<BF16, int8_t>(w, rows, out) : take_rows_as<F32, int8_t>(w, rows, out);
    else w.is_bf16 ? take_rows_as<BF16, BF16::Element>(w, rows, out) : take_rows_as<F32, F32::Element>(w, rows, out);
    for (long n = 0; n < out.n; n++) {
        if (!w.scale.empty()) out.scale.push_back(w.scale[static_cast<size_t>(rows[n])]);
        if (!w.bias.empty()) out.bias.push_back(w.bias[static_cast<size_t>(rows[n])]);
    }
}

}  // namespace
