// How often each token occurs in a window that moves over a text, and which tokens occur.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longdraft {

class TokenCounts {
  public:
    TokenCounts() = default;  // of no vocabulary: nothing is counted
    explicit TokenCounts(long vocabulary) : counts_(static_cast<size_t>(vocabulary)), places_(static_cast<size_t>(vocabulary)) {}

    bool empty() const { return counts_.empty(); }
    int32_t of(int32_t token) const { return counts_[static_cast<size_t>(token)]; }
    const std::vector<int32_t>& distinct() const { return distinct_; }  // the different tokens in the window

    void add(int32_t token) {
        if (counts_[static_cast<size_t>(token)]++) return;
        places_[static_cast<size_t>(token)] = static_cast<int32_t>(distinct_.size());
        distinct_.push_back(token);
    }
    void remove(int32_t token) {
        if (--counts_[static_cast<size_t>(token)]) return;
        const int32_t hole = places_[static_cast<size_t>(token)], last = distinct_.back();
        distinct_[static_cast<size_t>(hole)] = last;
        places_[static_cast<size_t>(last)] = hole;
        distinct_.pop_back();
    }

  private:
    std::vector<int32_t> counts_, places_;  // [vocabulary]: occurrences in the window; index of a token in `distinct_`
    std::vector<int32_t> distinct_;
};

}  // namespace longdraft
