// The Python bindings of the suffix index (suffix.h) and of the penalties by path, which check the arguments.
#include "module.h"

#include "path_penalties.h"
#include "suffix.h"

#include <tuple>

namespace longdraft {

static void bind_penalties(nb::module_& m) {
    using Lists = std::tuple<std::vector<int32_t>, std::vector<float>>;
    nb::class_<PathPenalties>(m, "PathPenalties")
        .def("__init__", [](PathPenalties* self, double presence, double frequency, long window, std::vector<float> dry,
                            long allowed, long range, long ngram, long held, long vocabulary, long prompt_length,
                            const std::vector<int32_t>& breakers) {
            require(vocabulary > 0 && window > 0 && range >= 0 && prompt_length >= 0, "a vocabulary, a window and a prompt");
            require(dry.empty() || (dry.size() == LONGEST_REPEAT + 1 && allowed >= 1), "an amount for each length");
            require(0 <= ngram && ngram <= LONGEST_REPEAT + 1 && held >= 0, "n of 0 to 51, and tokens that are held");
            require_ids(breakers, vocabulary);
            new (self) PathPenalties({presence, frequency, window, std::move(dry), allowed, range, ngram, held}, vocabulary,
                                     prompt_length, breakers); },
            nb::arg("presence"), nb::arg("frequency"), nb::arg("window"), nb::arg("dry"), nb::arg("allowed"),
            nb::arg("range"), nb::arg("ngram"), nb::arg("held"), nb::arg("vocabulary"), nb::arg("prompt_length"),
            nb::arg("breakers"))
        .def("extend", [](PathPenalties& self, const Tokens& tokens) {
            require_ids(tokens, self.vocabulary());
            self.extend(tokens.data(), static_cast<long>(tokens.size())); }, nb::arg("tokens"))
        .def("truncate", [](PathPenalties& self, long length) {
            require(0 <= length && length <= self.length(), "a length of at most the text's");
            self.truncate(length); }, nb::arg("length"))
        .def("edits", [](const PathPenalties& self, const std::vector<int32_t>& path, bool follows) {
            require_ids(path, self.vocabulary());
            Lists lists;
            for (const Edit& edit : self.edits(path.data(), static_cast<long>(path.size()), follows)) {
                std::get<0>(lists).push_back(edit.token);
                std::get<1>(lists).push_back(edit.amount);
            }
            return lists; }, nb::arg("path"), nb::arg("follows"))
        .def("hopeful", [](const PathPenalties& self, const std::vector<int32_t>& tokens,
                           const std::vector<int32_t>& parents, float most) {
            for (size_t node = 1; node < parents.size(); node++)
                require(0 <= parents[node] && parents[node] < static_cast<int32_t>(node), "parents before children");
            require(tokens.size() == parents.size(), "a parent for each token");
            require_ids(tokens, self.vocabulary());
            return self.hopeful(tokens.data(), parents.data(), static_cast<long>(tokens.size()), most); },
            nb::arg("tokens"), nb::arg("parents"), nb::arg("most"))
        .def("__len__", &PathPenalties::length);
}

void bind_suffix(nb::module_& m) {
    nb::class_<SuffixIndex>(m, "SuffixIndex")
        .def("__init__", [](SuffixIndex* self, int64_t capacity, int32_t longest) {
            require(capacity == 0 || (capacity > 1 && longest >= 1), "a capacity of 0 or of 2 and more, and longest >= 1");
            new (self) SuffixIndex(capacity, longest); }, nb::arg("capacity"), nb::arg("longest"))
        .def("extend", [](SuffixIndex& self, const Tokens& tokens) {
            self.extend(tokens.data(), static_cast<long>(tokens.size())); }, nb::arg("tokens"))
        .def("guess", [](const SuffixIndex& self, const Tokens& tail, long budget, long depth, long min_match, long seen,
                         long contexts, double min_probability) {
            require(min_match >= 1 && seen >= 1 && 1 <= contexts && contexts <= MAX_CONTEXTS,
                    "min_match and seen of 1 or more, and contexts of 1 to 8");
            Guesses found = self.guess(tail.data(), static_cast<long>(tail.size()),
                                       {budget, depth, min_match, seen, contexts, min_probability});
            return std::tuple(std::move(found.tokens), std::move(found.parents), std::move(found.probabilities)); },
            nb::arg("tail"), nb::arg("budget"), nb::arg("depth"), nb::arg("min_match"), nb::arg("seen"),
            nb::arg("contexts"), nb::arg("min_probability"))
        .def("__len__", &SuffixIndex::size)
        .def_prop_ro("nbytes", &SuffixIndex::bytes);
    bind_penalties(m);
}

}  // namespace longdraft
