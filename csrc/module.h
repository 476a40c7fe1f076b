// What the files of bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "choice.h"
#include "layout.h"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace longdraft {

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RankedPair = std::pair<std::vector<int64_t>, double>;  // Ranked, for Python

inline RankedPair pair_of(Ranked ranked) { return {std::move(ranked.tokens), ranked.lead}; }

inline void require(bool condition, const char* wanted) {
    if (!condition) refuse(wanted);
}

// Python may pass None for each of the objects of a list.
template <class T> void require_all(const std::vector<T*>& objects) {
    for (const T* object : objects) require(object != nullptr, "objects, none of which is None");
}

// The memory of a contiguous array that is checked elsewhere, or null for None.
template <class T = void> T* contiguous(const Array& x) {
    require(!x || (x.is_contiguous && x.type != Type::OTHER), "contiguous parts of a weight, in memory");
    return reinterpret_cast<T*>(x.data);
}

inline void require_order(const int32_t* parent, long rows) {
    for (long row = 0; row < rows; row++) require(-1 <= parent[row] && parent[row] < row, "parents before children");
}

// Token ids that the caller indexes an array of the vocabulary with.
template <class Ids> void require_ids(const Ids& ids, long vocabulary) {
    for (size_t i = 0; i < ids.size(); i++)
        require(0 <= ids.data()[i] && ids.data()[i] < vocabulary, "token ids of the vocabulary");
}

void bind_decoder(nb::module_& m, nb::class_<Kernels>& kernels);  // decoder_module.cpp
void bind_suffix(nb::module_& m);                                 // suffix_module.cpp

}  // namespace longdraft
