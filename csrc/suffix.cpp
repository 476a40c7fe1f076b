#include "suffix.h"

#include <algorithm>
#include <queue>
#include <utility>

namespace longdraft {

namespace {

constexpr int32_t ROOT = 0, NONE = -1;
constexpr size_t FIRST_SLOTS = 64;  // a power of two

uint64_t hash(int32_t source, int32_t token) {
    uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(source)) << 32 | static_cast<uint32_t>(token);
    key *= 0x9E3779B97F4A7C15u;
    return key ^ key >> 32;
}

}  // namespace

SuffixAutomaton::SuffixAutomaton(int32_t longest) : longest_(longest), slots_(FIRST_SLOTS) { add_state(0); }

size_t SuffixAutomaton::bytes() const {
    return states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) + slots_.capacity() * sizeof(int32_t);
}

// Append a token to the automaton (Blumer et al. 1985), then count it as a successor.
void SuffixAutomaton::push(int32_t token) {
    int32_t whole = add_state(states_[last_].length + 1), state = last_, edge = NONE;
    for (; state != NONE && (edge = find(state, token)) == NONE; state = states_[state].link)
        add_edge(state, token, whole, 0);
    int32_t link = ROOT;
    if (state != NONE) {
        int32_t target = link = edges_[edge].target;
        if (states_[target].length != states_[state].length + 1) {
            link = clone(target, states_[state].length + 1);
            for (; state != NONE && (edge = find(state, token)) != NONE && edges_[edge].target == target;
                 state = states_[state].link)
                edges_[edge].target = link;
            states_[target].link = link;
        }
    }
    states_[whole].link = link;
    last_ = whole;
    count(token);
}

// Move the substrings of `state` up to `length` to a new state. Until now they had the same end positions.
int32_t SuffixAutomaton::clone(int32_t state, int32_t length) {
    int32_t made = add_state(length);
    states_[made].link = states_[state].link;
    states_[made].followed = states_[state].followed;
    int32_t before = NONE;
    for (int32_t edge = states_[state].first; edge != NONE; edge = edges_[edge].next) {
        Edge copied = edges_[edge];
        int32_t copy = add_edge(made, copied.token, copied.target, copied.count);
        edges_[copy].latest = copied.latest;
        detach(copy);
        place_last(copy, before);
        before = copy;
    }
    return made;
}

// Count `token` as a successor of every suffix of the last `longest` tokens, except the empty suffix.
void SuffixAutomaton::count(int32_t token) {
    settle(recent_);
    for (int32_t state = recent_.state; state != ROOT; state = states_[state].link) {
        int32_t edge = find(state, token);
        edges_[edge].count++;
        edges_[edge].latest = states_[last_].length - 1;
        states_[state].followed++;
        detach(edge);
        place_first(edge);
    }
    recent_ = {edges_[find(recent_.state, token)].target, std::min(recent_.length + 1, longest_)};
    settle(recent_);
}

// Move to the state that contains the last `place.length` tokens of the substring.
void SuffixAutomaton::settle(Place& place) const {
    for (int32_t link; (link = states_[place.state].link) != NONE && states_[link].length >= place.length;)
        place.state = link;
}

SuffixAutomaton::Place SuffixAutomaton::shortened(Place place, int32_t length) const {
    place.length = std::min(place.length, length);
    settle(place);
    return place;
}

SuffixAutomaton::Place SuffixAutomaton::advanced(Place place, int32_t token) const {
    int32_t edge;
    while ((edge = find(place.state, token)) == NONE && place.state != ROOT) {
        place.state = states_[place.state].link;
        place.length = states_[place.state].length;
    }
    return edge == NONE ? Place{ROOT, 0} : Place{edges_[edge].target, place.length + 1};
}

int32_t SuffixAutomaton::add_state(int32_t length) {
    states_.push_back({length, NONE, 0, 0, NONE});
    return static_cast<int32_t>(states_.size()) - 1;
}

int32_t SuffixAutomaton::add_edge(int32_t source, int32_t token, int32_t target, int32_t count) {
    int32_t edge = static_cast<int32_t>(edges_.size());
    edges_.push_back({source, token, target, count, states_[last_].length, NONE, NONE});
    states_[source].degree++;
    place_first(edge);
    insert(edge);
    return edge;
}

void SuffixAutomaton::place_first(int32_t edge) {
    State& source = states_[edges_[edge].source];
    edges_[edge].previous = NONE;
    edges_[edge].next = source.first;
    if (source.first != NONE) edges_[source.first].previous = edge;
    source.first = edge;
}

void SuffixAutomaton::place_last(int32_t edge, int32_t before) {
    edges_[edge].previous = before;
    edges_[edge].next = NONE;
    (before == NONE ? states_[edges_[edge].source].first : edges_[before].next) = edge;
}

void SuffixAutomaton::detach(int32_t edge) {
    const Edge& e = edges_[edge];
    (e.previous == NONE ? states_[e.source].first : edges_[e.previous].next) = e.next;
    if (e.next != NONE) edges_[e.next].previous = e.previous;
}

int32_t SuffixAutomaton::find(int32_t source, int32_t token) const {
    size_t mask = slots_.size() - 1;
    for (size_t slot = hash(source, token) & mask; slots_[slot]; slot = (slot + 1) & mask) {
        const Edge& edge = edges_[slots_[slot] - 1];
        if (edge.source == source && edge.token == token) return slots_[slot] - 1;
    }
    return NONE;
}

// Half of the slots stay free. The cost of doubling them is amortised over the edges.
void SuffixAutomaton::insert(int32_t edge) {
    auto put = [this](int32_t which) {
        size_t mask = slots_.size() - 1, slot = hash(edges_[which].source, edges_[which].token) & mask;
        while (slots_[slot]) slot = (slot + 1) & mask;
        slots_[slot] = which + 1;
    };
    if (edges_.size() * 2 > slots_.size()) {
        slots_ = std::vector<int32_t>(slots_.size() * 2);
        for (int32_t which = 0; which < edge; which++) put(which);
    }
    put(edge);
}

// The longest suffix of `tail` that occurs in the text.
SuffixAutomaton::Place SuffixAutomaton::match(const int32_t* tail, long length) const {
    Place place{ROOT, 0};
    for (long i = std::max(0L, length - longest_); i < length; i++) place = advanced(place, tail[i]);
    return place;
}

Guesses SuffixAutomaton::guess(const int32_t* tail, long length, const Limits& limits) const {
    Guesses out;
    std::vector<Candidate> candidates;
    std::priority_queue<std::pair<double, long>> open;  // the most likely first; of equals, the first found
    auto grow = [&](Place place, int32_t parent, int32_t depth, double probability) {
        size_t known = candidates.size();
        if (depth < limits.depth) expand(place, parent, depth + 1, probability, limits, candidates);
        for (size_t i = known; i < candidates.size(); i++)
            open.push({candidates[i].probability, -static_cast<long>(i)});
    };
    grow(match(tail, length), NONE, 0, 1.0);
    while (!open.empty() && static_cast<long>(out.tokens.size()) < limits.budget) {
        Candidate best = candidates[-open.top().second];
        open.pop();
        int32_t node = static_cast<int32_t>(out.tokens.size());
        out.tokens.push_back(best.token);
        out.parents.push_back(best.parent);
        out.probabilities.push_back(best.probability);
        grow(best.place, node, best.depth, best.probability);
    }
    return out;
}

// Append the guesses that may follow the substring at `place`, at `depth` in the tree, as children of `parent`.
void SuffixAutomaton::expand(Place place, int32_t parent, int32_t depth, double probability, const Limits& limits,
                             std::vector<Candidate>& out) const {
    auto shorter = [this](Place of) {
        int32_t link = states_[of.state].link;
        return Place{link, states_[link].length};
    };
    while (place.state != ROOT && states_[place.state].followed < limits.seen) place = shorter(place);
    Place contexts[MAX_CONTEXTS];
    long num = 0;
    for (; num < limits.contexts && place.state != ROOT && place.length >= limits.min_match; place = shorter(place))
        contexts[num++] = place;
    int32_t seen_tokens[MAX_CONTEXTS * RECENT];
    long num_seen = 0;
    double escapes[MAX_CONTEXTS];
    for (long i = 0; i < num; i++) {
        const State& context = states_[contexts[i].state];
        escapes[i] = ESCAPE * context.degree / (static_cast<double>(context.followed) * contexts[i].length);
    }
    double left = probability;  // upper bound of the probability that remains for tokens that only this context has
    for (long level = 0; level < num; level++) {
        const State& state = states_[contexts[level].state];
        // No further token can reach the minimum probability (0.999 allows for rounding).
        if (left < 0.999 * limits.min_probability) break;
        int32_t edge = state.first;
        for (int look = 0; look < RECENT && edge != NONE; look++, edge = edges_[edge].next) {
            const int32_t token = edges_[edge].token;
            if (token < 0 || std::find(seen_tokens, seen_tokens + num_seen, token) != seen_tokens + num_seen) continue;
            seen_tokens[num_seen++] = token;
            double estimate = 0;
            Place child{ROOT, 0};
            for (long i = num - 1; i >= 0; i--) {
                const State& context = states_[contexts[i].state];
                const int32_t found = i == level ? edge : find(contexts[i].state, token);
                if (found != NONE) child = {edges_[found].target, std::min(contexts[i].length + 1, longest_)};
                const double times = found == NONE ? 0 : edges_[found].count;
                estimate = (times + escapes[i] * estimate) / (context.followed + escapes[i]);
            }
            if (probability * estimate < limits.min_probability) continue;
            settle(child);
            out.push_back({token, parent, depth, child, probability * estimate});
        }
        left = left * escapes[level] / (state.followed + escapes[level]);
    }
}

SuffixIndex::SuffixIndex(int64_t capacity, int32_t longest)
    : half_(capacity / 2), longest_(longest), older_(longest), younger_(longest) {}

void SuffixIndex::extend(const int32_t* tokens, long count) {
    for (long i = 0; i < count; i++) {
        older_.push(tokens[i]);
        size_++;
        if (!half_) continue;
        if (size_ > half_) younger_.push(tokens[i]);
        if (size_ == 2 * half_) {
            older_ = std::move(younger_);
            younger_ = SuffixAutomaton(longest_);
            size_ = half_;
        }
    }
}

Guesses SuffixIndex::guess(const int32_t* tail, long length, const Limits& limits) const {
    return older_.guess(tail, length, limits);
}

}  // namespace longdraft
