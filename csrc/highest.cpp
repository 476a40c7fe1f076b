#include "highest.h"

namespace longdraft {
namespace {

constexpr double NEGLIGIBLE = 32.0;  // nats below the best score at which a mass is 0

// exp(-gap) * 2^44, rounded, of a score that is `gap` below the best: whole numbers, whose sum is the same in every order.
int64_t mass(double gap) {
    return gap < NEGLIGIBLE ? static_cast<int64_t>(exact_exp(-gap) * 0x1p44 + 0.5) : 0;
}

int64_t total_mass(const float* row, long size, double best, double divisor) {
    int64_t total = 0;
    for (long i = 0; i < size; i++) total += mass(best - row[i] / divisor);
    return total;
}

constexpr long BLOCK = 1024;  // loops of so many values become vector instructions

// Add 2^x to each of the sums, for x <= 0, with a relative error of 2^-21 at most. Below -126 it is 2^-126.
void add_near_exp2(const float* x, double* sums) {
    constexpr float TERMS[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 0.24022651f, 0.69314718f,
                               1.0f};     // ln(2)^n / n!
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves a whole number in the lowest bits
    float shifted[BLOCK], series[BLOCK];
    uint32_t whole[BLOCK], bits[BLOCK];
    for (long i = 0; i < BLOCK; i++) {
        const float most = x[i] > -126.0f ? x[i] : -126.0f;
        shifted[i] = most + ROUND;
        const float rest = most - (shifted[i] - ROUND);
        float sum = TERMS[0];
        for (int term = 1; term < 7; term++) sum = sum * rest + TERMS[term];
        series[i] = sum;
    }
    std::memcpy(whole, shifted, sizeof whole);
    std::memcpy(bits, series, sizeof bits);
    for (long i = 0; i < BLOCK; i++) bits[i] += whole[i] << 23;  // into the exponent
    std::memcpy(series, bits, sizeof bits);
    for (long i = 0; i < BLOCK; i++) sums[i] += series[i];
}

struct Weighed {
    Guess guess;
    int64_t mass;
    size_t bin;
    bool operator<(const Weighed& other) const { return guess < other.guess; }
};

// Tokens in bins of falling scores, and what the tokens of each bin weigh.
struct Masses {
    static constexpr double BINS_PER_NAT = 16;
    double highest, divisor;
    std::vector<Weighed> tokens;
    std::vector<int64_t> of_bins;
    int64_t sum = 0;

    Masses(double best, double by)
        : highest(best), divisor(by), of_bins(static_cast<size_t>(NEGLIGIBLE * BINS_PER_NAT) + 1) {}

    void add(const Guess& guess) {
        const double gap = highest - static_cast<float>(guess.score) / divisor;
        const Weighed token = {guess, mass(gap), static_cast<size_t>(std::min(gap, NEGLIGIBLE) * BINS_PER_NAT)};
        tokens.push_back(token);
        of_bins[token.bin] += token.mass;
        sum += token.mass;
    }
    // Begin anew with the tokens whose logit is `mark` or more.
    void add_from(float mark, const float* row, long size) {
        tokens.clear();
        std::fill(of_bins.begin(), of_bins.end(), 0);
        sum = 0;
        for_each_reaching(mark, row, size, [&](long i) { add({row[i], i}); });
    }
    std::vector<Weighed> in_bin(size_t bin) const {
        std::vector<Weighed> found;
        std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(found),
                     [&](const Weighed& token) { return token.bin == bin; });
        std::sort(found.begin(), found.end());
        return found;
    }
};

struct Between { int64_t least, most; };

// What the total mass is not below and not above, in a tenth of the time that the sum itself takes.
Between near_total_mass(const float* row, long size, float best, double divisor) {
    // Relative: x is rounded three times, which 20 nats (29 bits) below the best is 3 * 2^-24 * 29 * ln(2) = 2^-18 of 2^x;
    // 2^-21 of 2^x itself. What is further below weighs nothing: 2^-29 of the best at most.
    constexpr double ERROR = 0x1p-17;
    if (divisor < 1e-6) {  // factor would not be finite
        const int64_t total = total_mass(row, size, best / divisor, divisor);
        return {total, total};
    }
    const float factor = static_cast<float>(1.44269504088896338700 / divisor);
    float x[BLOCK];
    double sums[BLOCK] = {};
    for (long start = 0; start < size; start += BLOCK) {
        const long count = std::min(BLOCK, size - start);
        for (long i = 0; i < count; i++) x[i] = (row[start + i] - best) * factor;
        std::fill(x + count, x + BLOCK, LOWEST);
        add_near_exp2(x, sums);
    }
    double total = 0;
    for (double sum : sums) total += sum;
    total *= 0x1p44;
    const long rounded = size + 1;  // each mass, by half at most
    return {static_cast<int64_t>(total * (1 - ERROR)) - rounded, static_cast<int64_t>(total * (1 + ERROR)) + rounded};
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
    const bool has_top_k = 0 < top_k && top_k < size;
    std::vector<Guess> head;  // the only ones that top-k leaves
    Cut cut;
    auto end_at = [&](const Guess& last) { cut = {static_cast<float>(last.score), last.place}; };
    if (has_top_k) {
        head = highest_of(row, size, top_k);
        end_at(head.back());
    }
    if (top_p >= 1) return cut;

    const double highest = best / divisor;
    Masses masses(highest, divisor);
    Between total;
    if (has_top_k) {
        for (const Guess& guess : head) masses.add(guess);
        total = {masses.sum, masses.sum};
    } else {
        total = near_total_mass(row, size, best, divisor);
    }
    auto goal_of = [&](int64_t of) {
        const int64_t reached = static_cast<int64_t>(std::ceil(top_p * static_cast<double>(of)));
        return std::max<int64_t>(1, std::min(of, reached));
    };
    Between goal = {goal_of(total.least), goal_of(total.most)};
    auto is_enough = [&](int64_t kept) {
        if (goal.least <= kept && kept < goal.most) goal.least = goal.most = goal_of(total_mass(row, size, highest, divisor));
        return kept >= goal.most;
    };
    if (!has_top_k) {
        // Tokens with less than their share of what may be left out are not needed, even if all have nearly as much.
        const double share = (1 - top_p) * static_cast<double>(total.least) * 0x1p-44 / static_cast<double>(size);
        masses.add_from(static_cast<float>(best + divisor * std::log(share)), row, size);
        if (!is_enough(masses.sum)) masses.add_from(LOWEST, row, size);
    }
    int64_t kept = 0;
    size_t bin = 0;
    while (!is_enough(kept + masses.of_bins[bin])) kept += masses.of_bins[bin++];  // all of them are enough
    for (const Weighed& token : masses.in_bin(bin)) {
        kept += token.mass;
        if (is_enough(kept)) {
            end_at(token.guess);
            break;
        }
    }
    return cut;
}

}  // namespace longdraft
