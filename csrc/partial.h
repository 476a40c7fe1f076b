// What a partial cache needs of a full one: some of its rows, and what the others gave.
#pragma once

#include "layout.h"

namespace longdraft {

// Rows at positions [heads, count] of `source` to positions start, start + 1, ... of `target`.
void copy(const Kernels& kernels, const Store& source, Store& target, const int64_t* positions, long count, long start);

// "Whole minus part" for one row: what attention gave it beyond the `length` positions of `part`.
//   q, whole [heads, dim], whole_lse [heads] -> rest [heads, dim + 1], an output and its log-sum-exp
void remainder(const Kernels& kernels, Store& part, long length, long heads, const void* q, const void* whole,
               const float* whole_lse, float* rest);

}  // namespace longdraft
