// The sampler's passes over the vocabulary: what longdraft/sampling/sampler.py does with the settings that need
// no sums (temperature, penalty, min-p), to the bit.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace longdraft {

struct ChoiceRules {
    double temperature;   // 0: the highest logit
    double lowest;        // min-p: logits must be above best + lowest; -infinity: off
    double least;         // min-p: scores must be at least best / temperature + least
    float penalty;        // 1: off
    long window;          // tokens that are penalised: the last ones, text and path together
    uint64_t seed;
};

// One request's sampler. Holds the penalty window; the text is handed in as it grows.
class Choice {
  public:
    Choice(const ChoiceRules& rules, long vocabulary, std::vector<int64_t> banned);

    // The text grew by these tokens.
    void extend(const int32_t* tokens, long count);

    // The target's token behind each node of a tree, -1 where a row's logits are not finite.
    //   logits [nodes, vocabulary]; tokens, parents [nodes], the root first; position: that of the root's successor
    //   banned_depth: nodes less deep than this may not choose banned tokens
    void choose(const float* logits, const int32_t* tokens, const int32_t* parents, long nodes, long position,
                long banned_depth, int64_t* chosen) const;

    // A drafter's best guesses behind `path` (tokens after the root), best first, none whose score is more than `within`
    // below the first's; fewer than `count` if there are.
    std::vector<int64_t> rank(const float* logits, const int32_t* path, long length, long position, bool is_banned,
                              long count, double within) const;

  private:
    struct Change { std::vector<int64_t> added, left; };

    bool penalises() const { return rules_.penalty != 1.0f; }
    Change change(const int32_t* path, long length) const;
    bool prepare(const float* logits, const Change& change, bool is_banned, float* row, long& best) const;
    int64_t best_of(const float* row, long best, uint64_t key) const;
    bool is_inside(float value, float best) const;
    double noise(uint64_t key, int64_t token) const;
    bool could_reach(uint64_t bits, double wanted) const;

    ChoiceRules rules_;
    long vocabulary_;
    std::vector<int64_t> banned_;
    std::vector<int32_t> recent_;       // a ring of the window's tokens
    long written_ = 0;                  // tokens of the text so far
    std::vector<int32_t> counts_;       // [vocabulary], in the window
    std::vector<int32_t> place_;        // [vocabulary], where a token stands in `distinct_`
    std::vector<int32_t> distinct_;
    std::vector<uint64_t> reaching_;    // least bits of noise from FIRST on, in steps of STEP
};

}  // namespace longdraft
