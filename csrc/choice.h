// The sampler's passes over the vocabulary, for the sampling parameters of most texts: temperature, repetition penalty,
// top-k, top-p, min-p, penalties by path. It chooses the same tokens as longdraft/sampling/sampler.py, which defines the result.
#pragma once

#include "highest.h"
#include "path_penalties.h"
#include "token_counts.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace longdraft {

struct ChoiceRules {
    double temperature;   // 0: choose the highest logit
    double lowest;        // min-p, a cheap test first: logits must be above best + lowest; -infinity: off
    double least;         // min-p: scores must be at least the best one + least
    double filter_temperature;  // of the scores that min-p sees: `temperature`, or 1 where temperature comes last
    float penalty;        // 1: off
    long window;          // the last `window` tokens of the text and the drafted path are penalised
    uint64_t seed;
    long top_k;           // 0: off
    double top_p;         // 1: off
};

// Some tokens of a vocabulary. Logits of these alone are in the order of `ids`.
struct PartOfVocabulary {
    std::vector<int64_t> ids;     // ascending, so that the order of the logits is the order of the ids
    std::vector<int32_t> places;  // [vocabulary]: the place of a token in `ids`; -1: it has none

    PartOfVocabulary(std::vector<int64_t> tokens, long vocabulary)
        : ids(std::move(tokens)), places(static_cast<size_t>(vocabulary), -1) {
        for (size_t i = 0; i < ids.size(); i++) places[static_cast<size_t>(ids[i])] = static_cast<int32_t>(i);
    }
};

// Tokens, best first, and how far the score of the best is ahead of the next token that the filters leave. Infinity
// where they leave one.
struct Ranked {
    std::vector<int64_t> tokens;
    double lead;
};

struct Shortlist {
    std::vector<int64_t> tokens;
    std::vector<double> scores;
};

// The sampler of one request. It holds the penalty window; the caller passes the tokens of the text as it grows.
class Choice {
  public:
    Choice(const ChoiceRules& rules, long vocabulary, std::vector<int64_t> banned);

    long vocabulary() const { return vocabulary_; }

    // Append tokens to the text.
    void extend(const int32_t* tokens, long count);

    // Penalties that are applied after the repetition penalty. Their text must be this one's; not owned.
    void set_penalties(const PathPenalties* penalties) { penalties_ = penalties; }

    // The target's token at each node of a tree; -1 where the node's logits are not finite.
    //   logits [nodes, vocabulary]; tokens, parents [nodes], the root first
    //   position: of the token that follows the root
    //   banned_depth: nodes at a smaller depth must not choose banned tokens
    //   every: false: only along the path that the choices take through the tree are they needed; others may be -1
    void choose(const float* logits, const int32_t* tokens, const int32_t* parents, long nodes, long position,
                long banned_depth, bool every, int64_t* chosen) const;

    // The up to `count` best tokens after `path` (the drafted tokens after the root) by a drafter's logits, best first.
    // Tokens whose score is more than `within` below the best score are left out. No tokens where logits are not finite.
    //   part  the tokens that `logits` are of; null: the whole vocabulary
    Ranked rank(const float* logits, const int32_t* path, long length, long position, bool is_banned, long count,
                double within, const PartOfVocabulary* part = nullptr) const;

    // The same for each of the places after the text, whose tokens before it are not known: tokens and their scores, which
    // do not rise. Tokens that the filters remove come last.
    //   logits        [places, vocabulary or part]; position: of the first place
    //   banned_depth  places before this one may not be banned tokens
    std::vector<Shortlist> shortlists(const float* logits, long places, long position, long banned_depth, long count,
                                      const PartOfVocabulary* part) const;

  private:
    struct WindowChange { std::vector<int64_t> added, removed; };
    struct PathChange { WindowChange window; std::vector<Edit> edits; };
    struct Row { const float* logits = nullptr; long best = 0; };  // best: the place of the highest one
    // The best tokens of a row, best first, and the lead as of `Ranked`. No tokens where the logits are not finite.
    struct Guesses { std::vector<Guess> best; double lead; };

    bool penalises() const { return rules_.penalty != 1.0f; }
    WindowChange window_change(const int32_t* path, long length) const;
    PathChange path_change(const int32_t* path, long length, bool follows) const;
    long size_of(const PartOfVocabulary* part) const { return part ? static_cast<long>(part->ids.size()) : vocabulary_; }
    Row prepare(const float* logits, const PartOfVocabulary* part, const PathChange& change, bool is_banned) const;
    Cut cut(const float* row, const PartOfVocabulary* part, long best) const;
    Guesses guesses_of(const float* logits, const PathChange& change, long position, bool is_banned, long count,
                       const PartOfVocabulary* part) const;
    std::vector<Guess> best_few(const float* row, const PartOfVocabulary* part, long best, const Cut& cut, uint64_t key,
                                long count) const;
    int64_t best_of(const float* row, const PartOfVocabulary* part, long best, uint64_t key) const;
    bool is_in_support(float value, long place, float best, const Cut& cut) const;
    float least_value(float best) const;
    double noise(uint64_t key, int64_t token) const;
    uint64_t least_bits(double wanted) const;

    ChoiceRules rules_;
    long vocabulary_;
    const PathPenalties* penalties_ = nullptr;
    std::vector<int64_t> banned_;
    std::vector<int32_t> recent_;       // ring buffer of the window's tokens
    long written_ = 0;                  // tokens of the text so far
    TokenCounts counts_;                // in the window
    std::vector<uint64_t> min_bits_;    // smallest random bits whose noise can reach NOISE_MIN + i * NOISE_STEP
};

}  // namespace longdraft
