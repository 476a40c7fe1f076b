// The Python bindings of the suffix index (suffix.h), which check the arguments.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "suffix.h"

#include <stdexcept>
#include <tuple>

namespace nb = nanobind;

namespace longdraft {

void bind_suffix(nb::module_& m) {
    using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    nb::class_<SuffixIndex>(m, "SuffixIndex")
        .def("__init__", [](SuffixIndex* self, int64_t capacity, int32_t longest) {
            if (capacity < 0 || capacity == 1 || longest < 1)
                throw std::invalid_argument("a suffix index wants a capacity of 0 or 2 and more, and longest >= 1");
            new (self) SuffixIndex(capacity, longest); }, nb::arg("capacity"), nb::arg("longest"))
        .def("extend", [](SuffixIndex& self, Tokens tokens) {
            self.extend(tokens.data(), static_cast<long>(tokens.size())); }, nb::arg("tokens"))
        .def("guess", [](const SuffixIndex& self, Tokens tail, long budget, long depth, long min_match, long seen,
                         long contexts, double min_probability) {
            if (min_match < 1 || seen < 1 || contexts < 1 || contexts > MAX_CONTEXTS)
                throw std::invalid_argument("a suffix index wants min_match and seen >= 1 and contexts of 1 to 8");
            Guesses found = self.guess(tail.data(), static_cast<long>(tail.size()),
                                       {budget, depth, min_match, seen, contexts, min_probability});
            return std::tuple(std::move(found.tokens), std::move(found.parents), std::move(found.probabilities)); },
            nb::arg("tail"), nb::arg("budget"), nb::arg("depth"), nb::arg("min_match"), nb::arg("seen"),
            nb::arg("contexts"), nb::arg("min_probability"))
        .def("__len__", &SuffixIndex::size)
        .def_prop_ro("nbytes", &SuffixIndex::bytes);
}

}  // namespace longdraft
