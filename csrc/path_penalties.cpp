#include "path_penalties.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace longdraft {
namespace {

constexpr float BANNED = std::numeric_limits<float>::infinity();

}  // namespace

PathPenalties::PathPenalties(PenaltyRules rules, long vocabulary, long prompt_length, const std::vector<int32_t>& breakers)
    : rules_(std::move(rules)), prompt_length_(prompt_length), is_breaker_(static_cast<size_t>(vocabulary)),
      automaton_(LONGEST_REPEAT), mark_(static_cast<size_t>(vocabulary)) {
    for (int32_t token : breakers) is_breaker_[static_cast<size_t>(token)] = 1;
    if (rules_.presence == 0 && rules_.frequency == 0) return;
    counts_ = TokenCounts(vocabulary);
}

void PathPenalties::extend(const int32_t* tokens, long count) {
    for (long i = 0; i < count; i++) {
        const long position = length(), oldest = position - rules_.window;
        text_.push_back(tokens[i]);
        if (counts_.empty()) continue;
        if (oldest >= prompt_length_) counts_.remove(text_[static_cast<size_t>(oldest)]);
        if (position >= prompt_length_) counts_.add(tokens[i]);
    }
    index();
}

void PathPenalties::truncate(long length) {
    while (this->length() > length) {
        const int32_t token = text_.back();
        text_.pop_back();
        const long position = this->length(), oldest = position - rules_.window;
        if (counts_.empty()) continue;
        if (position >= prompt_length_) counts_.remove(token);
        if (oldest >= prompt_length_) counts_.add(text_[static_cast<size_t>(oldest)]);
    }
    if (indexed() > length) automaton_ = SuffixAutomaton(LONGEST_REPEAT);
    index();
}

// Have the automaton follow the text, but not its last `held` tokens.
void PathPenalties::index() {
    if (!searches()) return;
    while (indexed() < length() - rules_.held) automaton_.push(text_[static_cast<size_t>(indexed())]);
    end_ = automaton_.tail();
    for (long i = indexed(); i < length(); i++) end_ = after(end_, text_[static_cast<size_t>(i)]);
}

SuffixAutomaton::Place PathPenalties::after(SuffixAutomaton::Place place, int32_t token) const {
    return automaton_.advanced(automaton_.shortened(place, LONGEST_REPEAT), token);
}

std::vector<Edit> PathPenalties::edits(const int32_t* path, long length, bool follows) const {
    const Extended s{text_, path, length};
    std::vector<Edit> out;
    if (!counts_.empty()) add_counts(s, out);
    if (!follows || !searches()) return out;
    SuffixAutomaton::Place place = end_;
    for (long i = 0; i < length; i++) place = after(place, path[i]);
    if (!rules_.dry.empty()) add_repeats(s, place, out);
    if (rules_.ngram) add_ngrams(s, place, out);
    return out;
}

void PathPenalties::add_counts(const Extended& s, std::vector<Edit>& out) const {
    auto add = [&](int32_t token, int32_t count) {
        if (count > 0) out.push_back({token, static_cast<float>(rules_.presence + rules_.frequency * count)});
    };
    const long known = length(), start = std::max(prompt_length_, s.size() - rules_.window);
    // `mark_`: how much the path changes a token's count.
    for (long i = std::max(prompt_length_, known - rules_.window); i < std::min(known, start); i++)
        mark_[static_cast<size_t>(s[i])]--;
    for (long i = std::max(known, start); i < s.size(); i++) mark_[static_cast<size_t>(s[i])]++;
    for (int32_t token : counts_.distinct()) add(token, counts_.of(token) + mark_[static_cast<size_t>(token)]);
    for (long i = std::max(prompt_length_, known - rules_.window); i < std::min(known, start); i++)
        mark_[static_cast<size_t>(s[i])] = 0;
    for (long i = std::max(known, start); i < s.size(); i++) {
        int32_t& added = mark_[static_cast<size_t>(s[i])];
        if (added > 0 && counts_.of(s[i]) == 0) add(s[i], added);
        added = 0;
    }
}

// The tokens at the end of s that are also the tokens before place `end` (exclusive), at most `most`.
long PathPenalties::common_suffix(const Extended& s, long end, long most) const {
    long found = 0;
    while (found < most && s[end - 1 - found] == s[s.size() - 1 - found]) found++;
    return found;
}

long PathPenalties::after_last_breaker(const Extended& s, long most) const {
    long found = 0;
    while (found < most && !is_breaker_[static_cast<size_t>(s[s.size() - 1 - found])]) found++;
    return found;
}

void PathPenalties::add_repeats(const Extended& s, SuffixAutomaton::Place place, std::vector<Edit>& out) const {
    const long start = rules_.range ? std::max(0L, s.size() - rules_.range) : 0;
    const long most = after_last_breaker(s, std::min(s.size() - start, static_cast<long>(LONGEST_REPEAT)));
    if (most < rules_.allowed) return;
    std::vector<int32_t> found;  // their longest repeats are in `mark_`
    auto add = [&](int32_t token, long length) {
        if (length < rules_.allowed || is_breaker_[static_cast<size_t>(token)]) return;
        int32_t& longest = mark_[static_cast<size_t>(token)];
        if (!longest) found.push_back(token);
        longest = std::max(longest, static_cast<int32_t>(length));
    };
    place = automaton_.shortened(place, static_cast<int32_t>(most));
    automaton_.for_each_successor(place, static_cast<int32_t>(rules_.allowed), [&](int32_t token, int32_t length, int32_t latest) {
        add(token, std::min(static_cast<long>(length), latest - start)); });
    for (long next = std::max(indexed(), start + 1); next < s.size(); next++)
        add(s[next], common_suffix(s, next, std::min(most, next - start)));
    for (int32_t token : found) {
        int32_t& longest = mark_[static_cast<size_t>(token)];
        out.push_back({token, rules_.dry[static_cast<size_t>(longest)]});
        longest = 0;
    }
}

void PathPenalties::add_ngrams(const Extended& s, SuffixAutomaton::Place place, std::vector<Edit>& out) const {
    const long known = rules_.ngram - 1;
    if (s.size() < rules_.ngram) return;
    place = automaton_.shortened(place, static_cast<int32_t>(known));
    std::vector<int32_t> found;
    auto add = [&](int32_t token) {
        if (mark_[static_cast<size_t>(token)]++ == 0) found.push_back(token);
    };
    if (place.length == known) automaton_.for_each_successor(place, place.length, [&](int32_t token, int32_t, int32_t) { add(token); });
    for (long next = std::max(indexed(), known); next < s.size(); next++)
        if (common_suffix(s, next, known) == known) add(s[next]);
    for (int32_t token : found) {
        out.push_back({token, BANNED});
        mark_[static_cast<size_t>(token)] = 0;
    }
}

std::vector<bool> PathPenalties::hopeful(const int32_t* tokens, const int32_t* parents, long nodes, float most) const {
    std::vector<bool> kept(static_cast<size_t>(nodes), true);
    if (!searches()) return kept;
    std::vector<std::vector<int32_t>> paths(static_cast<size_t>(nodes));
    std::vector<std::vector<long>> children(static_cast<size_t>(nodes));
    for (long node = 1; node < nodes; node++) {
        auto& path = paths[static_cast<size_t>(node)];
        path = paths[static_cast<size_t>(parents[node])];
        path.push_back(tokens[node]);
        children[static_cast<size_t>(parents[node])].push_back(node);
    }
    for (long node = 0; node < nodes; node++) {
        if (children[static_cast<size_t>(node)].empty()) continue;
        const auto& path = paths[static_cast<size_t>(node)];
        const Extended s{text_, path.data(), static_cast<long>(path.size())};
        SuffixAutomaton::Place place = end_;
        for (int32_t token : path) place = after(place, token);
        std::vector<Edit> edits;
        if (!rules_.dry.empty()) add_repeats(s, place, edits);
        if (rules_.ngram) add_ngrams(s, place, edits);
        for (const Edit& edit : edits)
            for (long child : children[static_cast<size_t>(node)])
                if (tokens[child] == edit.token && edit.amount >= most) kept[static_cast<size_t>(child)] = false;
    }
    return kept;
}

}  // namespace longdraft
