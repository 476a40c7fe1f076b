// Penalties that depend on the tokens before a node: presence and frequency, DRY, and repeated n-grams. They are exact for
// every node of a draft tree, whose text is the committed text and the node's own path.
//
// Definition (longdraft/sampling/path_penalties.py computes it in the straightforward way), for a text s of N tokens:
//
//   presence, frequency   c = occurrences of a token among the generated tokens of the last `window`;
//                         logit -= presence + frequency * c where c > 0
//   DRY (oobabooga/text-generation-webui#5677)   s is cut to its last `range` tokens (0: the whole text). m: tokens after
//                         the last breaker. L(i), for each place i with a successor s[i+1] that is no breaker: the longest
//                         common suffix of s and s[..i], at most min(m, LONGEST). l(t): the largest L(i) with s[i+1] = t.
//                         logit(t) -= dry[l(t)] where l(t) >= allowed
//   n-grams               logit(t) = -infinity if the last n-1 tokens, followed by t, are in s already
//
// A suffix automaton of the text gives all successors of a suffix. Its time does not grow with the text. It cannot forget
// a token, so it does not yet have those that may be taken back: they are searched like a path.
#pragma once

#include "suffix.h"
#include "token_counts.h"

#include <cstdint>
#include <vector>

namespace longdraft {

constexpr int32_t LONGEST_REPEAT = 50;  // tokens: longer repeats are penalised like this one

struct Edit { int32_t token; float amount; };  // `amount` is subtracted from the token's logit

struct PenaltyRules {
    double presence, frequency;
    long window;             // of presence and frequency, tokens
    std::vector<float> dry;  // [LONGEST_REPEAT + 1]: the amount for a repeat of that many tokens; empty: no DRY
    long allowed, range;     // of DRY
    long ngram;              // n of the n-grams that may not repeat; 0: any may
    long held;               // last tokens of the text that may be taken back; more take time in proportion to the text
};

class PathPenalties {
public:
    PathPenalties(PenaltyRules rules, long vocabulary, long prompt_length, const std::vector<int32_t>& breakers);

    void extend(const int32_t* tokens, long count);
    void truncate(long length);  // take back the tokens from this place on
    long length() const { return static_cast<long>(text_.size()); }
    long vocabulary() const { return static_cast<long>(is_breaker_.size()); }

    // The edits after the text and `path` (without the root), in the order in which they are applied.
    //   follows  whether the next token directly follows the path; if not, only presence and frequency apply
    std::vector<Edit> edits(const int32_t* path, long length, bool follows = true) const;

    // Of each node of a tree, whether its token is not hopeless: DRY or the n-grams lower its logit by less than `most`.
    std::vector<bool> hopeful(const int32_t* tokens, const int32_t* parents, long nodes, float most) const;

private:
    // The text with a path after it.
    struct Extended {
        const std::vector<int32_t>& text;
        const int32_t* path;
        long length;
        long size() const { return static_cast<long>(text.size()) + length; }
        int32_t operator[](long i) const {
            const long known = static_cast<long>(text.size());
            return i < known ? text[static_cast<size_t>(i)] : path[i - known];
        }
    };

    bool searches() const { return !rules_.dry.empty() || rules_.ngram; }
    long indexed() const { return automaton_.size(); }  // tokens that the automaton has
    void index();
    SuffixAutomaton::Place after(SuffixAutomaton::Place place, int32_t token) const;
    void add_counts(const Extended& s, std::vector<Edit>& out) const;
    void add_repeats(const Extended& s, SuffixAutomaton::Place place, std::vector<Edit>& out) const;
    void add_ngrams(const Extended& s, SuffixAutomaton::Place place, std::vector<Edit>& out) const;
    long common_suffix(const Extended& s, long end, long most) const;
    long after_last_breaker(const Extended& s, long most) const;

    PenaltyRules rules_;
    long prompt_length_;
    std::vector<char> is_breaker_;       // [vocabulary]
    std::vector<int32_t> text_;
    SuffixAutomaton automaton_;
    SuffixAutomaton::Place end_{0, 0};   // the end of the text
    TokenCounts counts_;                 // of generated tokens in the window
    mutable std::vector<int32_t> mark_;  // [vocabulary]: scratch memory, 0 between calls
};

}  // namespace longdraft
