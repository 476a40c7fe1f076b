#include "highest.h"

namespace longdraft {
namespace {

constexpr double NEGLIGIBLE = 32.0;  // nats below the best score at which a mass is 0
constexpr long FIRST_TOP_P = 256;    // highest logits that top-p examines first; eight times as many at each further try

// exp(score - best) * 2^44, rounded: whole numbers, whose sum is the same in every order.
int64_t mass(float logit, double best, double divisor) {
    const double gap = best - logit / divisor;
    return gap < NEGLIGIBLE ? static_cast<int64_t>(exact_exp(-gap) * 0x1p44 + 0.5) : 0;
}

}  // namespace

std::vector<Guess> highest_of(const float* values, long count, long wanted) {
    wanted = std::min(wanted, count);
    float mark = LOWEST;
    if (count / LANES / LANES * LANES >= wanted) {
        std::vector<float> bests;  // of 16 values each; `wanted` of them are `mark` or more, so no lower value is wanted
        for (long start = 0; start + LANES * LANES <= count; start += LANES * LANES) {
            float most[LANES];
            std::copy_n(values + start, LANES, most);
            for (long i = LANES; i < LANES * LANES; i++)
                most[i % LANES] = values[start + i] > most[i % LANES] ? values[start + i] : most[i % LANES];
            bests.insert(bests.end(), most, most + LANES);
        }
        std::nth_element(bests.begin(), bests.begin() + wanted - 1, bests.end(), std::greater<>());
        mark = bests[static_cast<size_t>(wanted) - 1];
    }
    std::vector<Guess> found;
    for_each_reaching(mark, values, count, [&](long i) { found.push_back({values[i], i}); });
    std::partial_sort(found.begin(), found.begin() + wanted, found.end());
    found.resize(static_cast<size_t>(wanted));
    return found;
}

Cut cut_of(const float* row, long size, float best, long top_k, double top_p, double divisor) {
    Cut cut;
    const bool has_top_k = 0 < top_k && top_k < size, has_top_p = top_p < 1;
    std::vector<Guess> head;  // the best logits, in order; with top-k the only ones
    auto end_at = [&](const Guess& last) { cut = {static_cast<float>(last.score), last.place}; };
    if (has_top_k) {
        head = highest_of(row, size, top_k);
        end_at(head.back());
    }
    if (!has_top_p) return cut;
    const double highest = best / divisor;
    int64_t total = 0;
    if (has_top_k) {
        for (const Guess& each : head) total += mass(static_cast<float>(each.score), highest, divisor);
    } else {
        for (long i = 0; i < size; i++) total += mass(row[i], highest, divisor);
    }
    const int64_t reached = static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total)));
    const int64_t goal = std::max<int64_t>(1, std::min(total, reached));
    for (long examined = has_top_k ? top_k : FIRST_TOP_P;; examined *= 8) {
        if (!has_top_k) head = highest_of(row, size, examined);
        int64_t before = 0;
        for (const Guess& each : head) {
            before += mass(static_cast<float>(each.score), highest, divisor);
            if (before >= goal) {
                end_at(each);
                return cut;
            }
        }
    }
}

}  // namespace longdraft
