// What followed every piece of a text, and how often: an online suffix automaton with counts.
//
// The definition, which the Python twin (longdraft/drafters/suffix_index.py) computes in the obvious way:
//
//   N(s)     how often the tokens s stood in the indexed text with a token behind them,   1 <= |s| <= longest
//   N(s, t)  how often that token was t;    T(s)  how many different tokens that were
//   contexts of a text x: its suffixes s with min_match <= |s| <= longest and N(s) >= seen, longest first; suffixes that
//            end at the same places are one context, known by the longest; at most `contexts` of them: s0, s1, ...
//   P(t | x) = P0, where Pj = (N(sj, t) + E(sj) * Pj+1) / (N(sj) + E(sj)), and 0 behind the last context, and
//            E(s) = ESCAPE * T(s) / (N(s) * |s|): what a context leaves to the next shorter one. It is the more the
//            oftener something new followed it (as with Witten and Bell) and the less the longer it is
//   guesses  the tokens seen behind a context of x, the RECENT latest of each; a guess's probability is the product of
//            P along its path; the tree is grown from the likeliest guess on
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longdraft {

constexpr int RECENT = 16;       // successors of a context that are looked at, the latest first
constexpr int MAX_CONTEXTS = 8;  // that Limits::contexts may ask for
constexpr double ESCAPE = 8;

struct Limits {
    long budget, depth;      // nodes of the tree, tokens ahead
    long min_match, seen;    // shortest context, how often one must have been followed
    long contexts;           // contexts blended
    double min_probability;  // below which nothing is guessed
};

// Nodes in the order in which they were chosen; a parent of -1 is the end of the text.
struct Guesses {
    std::vector<int32_t> tokens, parents;
    std::vector<double> probabilities;
};

// A state stands for the pieces of the text that end at the same places: all suffixes of its longest piece down to one
// token more than its link's. Only the states of the last `longest` tokens are counted, so that a token costs the
// amortised constant of the automaton and at most `longest` counts, however repetitive the text is.
class SuffixAutomaton {
public:
    explicit SuffixAutomaton(int32_t longest);
    void push(int32_t token);
    Guesses guess(const int32_t* tail, long length, const Limits& limits) const;
    size_t bytes() const;

private:
    struct State { int32_t length, link, followed, degree, first; };  // followed is N, degree is T, first an edge
    struct Edge { int32_t source, token, target, count, previous, next; };  // of one state: the latest seen first
    struct Place { int32_t state, length; };  // a piece of the text, `length` tokens long, in `state`
    struct Candidate { int32_t token, parent, depth; Place place; double probability; };

    int32_t add_state(int32_t length);
    int32_t add_edge(int32_t source, int32_t token, int32_t target, int32_t count);
    int32_t clone(int32_t state, int32_t length);
    void place_first(int32_t edge);
    void place_last(int32_t edge, int32_t before);
    void detach(int32_t edge);
    void count(int32_t token);
    int32_t find(int32_t source, int32_t token) const;
    void insert(int32_t edge);
    void settle(Place& place) const;
    Place match(const int32_t* tail, long length) const;
    void expand(Place place, int32_t parent, int32_t depth, double probability, const Limits& limits,
                std::vector<Candidate>& out) const;

    int32_t longest_, last_ = 0;
    Place recent_{0, 0};  // the last `longest` tokens of the text
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> slots_;  // hash of (source, token) -> edge + 1; 0 is free
};

// The automaton of the last tokens of a text: of at least capacity / 2 of them, of less than `capacity`. A second one
// is begun in the middle and takes over when the first is full, so that no token pays for forgetting.
class SuffixIndex {
public:
    SuffixIndex(int64_t capacity, int32_t longest);  // capacity 0: everything
    void extend(const int32_t* tokens, long count);
    Guesses guess(const int32_t* tail, long length, const Limits& limits) const;
    int64_t size() const { return size_; }  // tokens indexed
    size_t bytes() const { return older_.bytes() + younger_.bytes(); }

private:
    int64_t half_, size_ = 0;
    int32_t longest_;
    SuffixAutomaton older_, younger_;
};

}  // namespace longdraft
