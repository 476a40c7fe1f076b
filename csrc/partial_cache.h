// Operations of a partial KV cache: copies of some rows of the full cache, and the remainder, which is the attention to the
// rows that were not copied.
#pragma once

#include "layout.h"

namespace longdraft {

// Copy the rows at positions [heads, count] of `source` to positions start, start + 1, ... of `target`.
void copy(const Kernels& kernels, const Store& source, Store& target, const int64_t* positions, long count, long start);

// The remainder of the text's last rows, which are also the last of the `length` positions of `part`: full attention minus
// the attention to the positions of `part` up to the row's own.
//   q, whole [rows, heads, dim], whole_lse [rows, heads] float32: queries, outputs and log-sum-exp of full attention
//   -> out [rows, heads, dim + 1]: an output and its log-sum-exp, which is -infinity where nothing remains
void remainder(const Kernels& kernels, Store& part, long length, long rows, long heads, const void* q, const void* whole,
               const float* whole_lse, float* out);

}  // namespace longdraft
