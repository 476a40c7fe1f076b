// What a partial cache needs of a full one: some of its rows, and what the others gave.
#pragma once

#include "layout.h"

namespace longdraft {

// Rows at positions [heads, count] of `source` to positions start, start + 1, ... of `target`.
void copy(const Kernels& kernels, const Store& source, Store& target, const int64_t* positions, long count, long start);

// "Whole minus part" for the text's last rows, which are the last of the `length` positions of `part`: what attention
// gave each beyond the positions of `part` up to its own.
//   q, whole [rows, heads, dim], whole_lse [rows, heads] -> rest [rows, heads, dim + 1], an output and its log-sum-exp
void remainder(const Kernels& kernels, Store& part, long length, long rows, long heads, const void* q, const void* whole,
               const float* whole_lse, float* rest);

}  // namespace longdraft
