// An index of which tokens followed each substring of a text, and how often: an online suffix automaton with counts.
//
// Definition (longdraft/drafters/suffix_index.py computes it in the straightforward way):
//
//   N(s)      number of times that the tokens s occurred in the indexed text and were followed by a token,
//             1 <= |s| <= longest
//   N(s, t)   number of times that this token was t;   T(s): number of different such tokens
//   contexts  of a text x: its suffixes s with min_match <= |s| <= longest and N(s) >= seen, longest first. Suffixes with
//             the same end positions are one context, of the longest one's length. At most `contexts` are used: s0, s1, ...
//   P(t | x)  = P0, where Pj = (N(sj, t) + E(sj) * Pj+1) / (N(sj) + E(sj)), and 0 after the last context
//   E(s)      = ESCAPE * T(s) / (N(s) * |s|): the weight of the next shorter context. As in Witten and Bell (1991), it
//             grows with the number of different tokens that followed s; it shrinks with the length of s
//   guesses   the tokens that followed a context of x, of each context the RECENT latest. The probability of a guess is
//             the product of P along its path. The tree grows from the most likely guess on
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longdraft {

constexpr int RECENT = 16;       // successors of a context that are considered, the latest first
constexpr int MAX_CONTEXTS = 8;  // largest allowed Limits::contexts
constexpr double ESCAPE = 8;

struct Limits {
    long budget, depth;      // maximum number of nodes and depth of the tree
    long min_match, seen;    // minimum length of a context, minimum N of a context
    long contexts;           // maximum number of contexts
    double min_probability;  // of a guess
};

// The nodes of a draft tree in the order of their choice. A parent of -1 is the end of the text.
struct Guesses {
    std::vector<int32_t> tokens, parents;
    std::vector<double> probabilities;
};

// A state represents the substrings with the same set of end positions: the suffixes of its longest substring that are
// longer than the longest substring of its link. Only the states of the last `longest` tokens are counted, so a token
// costs the amortised constant of the automaton and at most `longest` counts, however repetitive the text is.
class SuffixAutomaton {
public:
    explicit SuffixAutomaton(int32_t longest);
    void push(int32_t token);
    Guesses guess(const int32_t* tail, long length, const Limits& limits) const;
    size_t bytes() const;
    int32_t size() const { return states_[last_].length; }  // tokens pushed

    struct Place { int32_t state, length; };  // a substring of `length` tokens, in `state`

    Place tail() const { return recent_; }  // the last `longest` tokens of the text
    Place shortened(Place place, int32_t length) const;  // its last `length` tokens
    Place advanced(Place place, int32_t token) const;    // the longest suffix of place + token that the text has

    // Call f(token, length, latest) for every token that followed the substring at `place`, or one of its suffixes of at
    // least `least` tokens, anywhere in the text: the length of that suffix, and the token's latest position after it. The
    // longest suffix comes first; a token comes once for each set of suffixes with the same end positions.
    template <class F> void for_each_successor(Place place, int32_t least, F f) const {
        for (int32_t length = place.length, state = place.state; length >= least; length = states_[state].length) {
            for (int32_t edge = states_[state].first; edge >= 0; edge = edges_[edge].next)
                f(edges_[edge].token, length, edges_[edge].latest);
            if ((state = states_[state].link) < 0) break;
        }
    }

private:
    struct State { int32_t length, link, followed, degree, first; };  // followed: N; degree: T; first: an edge
    // A list per state, the latest seen first. `latest`: the token's last position after the state's substrings of up to
    // `longest` tokens.
    struct Edge { int32_t source, token, target, count, latest, previous, next; };
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

// The automaton of the last tokens of a text: at least capacity / 2, fewer than `capacity`. A second automaton starts at
// half of the capacity and replaces the first when that is full, so that no single token pays for the removal of others.
class SuffixIndex {
public:
    SuffixIndex(int64_t capacity, int32_t longest);  // capacity 0: unlimited
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
