// Some rows of a packed weight as a weight of their own, without its other rows: the head of a draft vocabulary.
#pragma once

#include "encoding.h"
#include "linear.h"

namespace longdraft::LONGDRAFT_VARIANT {

template <class T, class Element> void take_rows_as(const Linear& w, const int64_t* rows, Linear& out) {
    const long stride = place<T>(w, 0, T::PER_WORD) - place<T>(w, 0, 0);  // from a step of a tile to the next one
    parallel(out.tiles(), [&](long tile) {
        const long first = tile * COLUMNS, count = std::min<long>(COLUMNS, out.n - first);
        const Element* from[COLUMNS][T::PER_WORD];
        Element* to[COLUMNS][T::PER_WORD];
        for (long c = 0; c < count; c++)
            for (long part = 0; part < T::PER_WORD; part++) {
                from[c][part] = w.tile<Element>(0) + place<T>(w, rows[first + c], part);
                to[c][part] = out.tile<Element>(0) + place<T>(out, first + c, part);
            }
        for (long at = 0; at < w.steps * stride; at += stride)  // all rows of a step: neighbours share cache lines
            for (long c = 0; c < count; c++)
                for (long part = 0; part < T::PER_WORD; part++) to[c][part][at] = from[c][part][at];
    });
}

template <Groups KIND> void take_groups(const Linear& w, const int64_t* rows, Linear& out) {
    using E = Encoding<KIND>;
    parallel(out.tiles(), [&](long tile) {
        const long first = tile * COLUMNS, count = std::min<long>(COLUMNS, out.n - first);
        uint8_t* to = out.tile<uint8_t>(tile);
        for (long g = 0; g < w.num_groups(); g++)
            for (long c = 0; c < count; c++) {
                const long group = E::group(g), taken = rows[first + c] % COLUMNS;
                const uint8_t* from = w.tile<uint8_t>(rows[first + c] / COLUMNS);
                auto copy = [&](long at, long bytes) { std::memcpy(to + at + c * bytes, from + at + taken * bytes, bytes); };
                if (E::SHAPE.common && g % COMMON_GROUPS == 0)
                    for (long at = 0; at < E::SHAPE.common; at += 2 * COLUMNS) copy(E::common(g) + at, 2);
                copy(group, E::SCALE);
                if (E::SHAPE.halves) copy(group + E::SECOND, E::SCALE);
                if (E::SHAPE.has_zero) copy(group + E::MIDDLE, 1);
                if (E::SHAPE.has_least) copy(group + E::MIDDLE, E::SCALE);
                for (long line = 0; line < E::OF_VECTOR; line += 64)
                    std::memcpy(to + group + E::lane(c) + line, from + group + E::lane(taken) + line, 4);
            }
    });
}

// out.n rows of a weight that is not in MXFP4. `out` has the weight's format.
inline void take_rows(const Linear& w, const int64_t* rows, Linear& out) {
    if (w.is_grouped()) with_kind(w.groups, [&](auto kind) { take_groups<kind.value>(w, rows, out); });
    else if (w.is_int8) w.is_bf16 ? take_rows_as<BF16, int8_t>(w, rows, out) : take_rows_as<F32, int8_t>(w, rows, out);
    else w.is_bf16 ? take_rows_as<BF16, BF16::Element>(w, rows, out) : take_rows_as<F32, F32::Element>(w, rows, out);
    for (long n = 0; n < out.n; n++) {
        if (!w.scale.empty()) out.scale.push_back(w.scale[static_cast<size_t>(rows[n])]);
        if (!w.bias.empty()) out.bias.push_back(w.bias[static_cast<size_t>(rows[n])]);
    }
    out.order = w.order;
}

}  // namespace
