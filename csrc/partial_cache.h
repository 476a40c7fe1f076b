// Operations of a partial KV cache: copies of some rows of the full cache, and the remainder, which is the attention to the
// rows that were not copied.
#pragma once

#include "layout.h"

#include <vector>

namespace longdraft {

// Copy the rows at positions [layers, heads, count] of each source to positions start, start + 1, ... of its target.
void copy(const std::vector<Store*>& sources, const std::vector<Store*>& targets, const int64_t* positions, long count,
          long start);

// The attention to the full cache of the text's last rows: of all layers, [layers, rows, heads, dim] elements, and
// [layers, rows, heads] log-sum-exps. The layers are `layer_rows` rows apart.
struct WholeAttention {
    long rows, heads, layer_rows;
    const void *q, *out;
    const float* lse;
};

// The remainder of these rows, which are also the last of the `length` positions of `parts`: full attention minus the
// attention to the positions of `parts` up to the row's own. `parts` have one shape.
//   -> out [layers, rows, heads, dim + 1]: an output and its log-sum-exp, which is -infinity where nothing remains
void remainder(const Kernels& kernels, const std::vector<Store*>& parts, long length, const WholeAttention& whole, float* out);

// The same, and the fit to them, whose maps [layers, heads, dim + 1, dim + 1] change.
//   content  [layers, rows, heads, dim], as `whole`
void learn_remainder(const Kernels& kernels, const std::vector<Store*>& parts, long length, const WholeAttention& whole,
                     const void* content, RemainderFit& fit, float* maps);

}  // namespace longdraft
