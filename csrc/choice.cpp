#include "choice.h"

#include "layout.h"
#include "pool.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace longdraft {
namespace {

constexpr double NOISE_MIN = -4.0, NOISE_STEP = 0.25, NOISE_MAX = 37.0;  // the range of Gumbel noise from 52 bits
constexpr long NEIGHBOURS = 256;  // tokens whose noise is compared with that which the best of them needs
constexpr long POOL = 128;  // number of best logits from which tokens outside the support are ranked

// Bit-identical to longdraft/kernels/noise.py.
uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

uint64_t key_of(uint64_t seed, long position) {
    return splitmix64(splitmix64(seed) + static_cast<uint64_t>(position) * 0xD1342543DE82EF95u);
}

uint64_t bits_of(uint64_t key, int64_t token) {
    return splitmix64(key + static_cast<uint64_t>(token) * 0xAF251AF3B0F025B5u) >> 12;
}

// Bit-identical to longdraft/kernels/reproducible.py: only basic operations, never fused.
double exact_log(double x) {
    int exponent;
    double mantissa = std::frexp(x, &exponent);
    if (mantissa < 0.70710678118654752440) {
        mantissa *= 2.0;
        exponent--;
    }
    const double n = exponent, s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
    double series = 2.0 / 23;
    for (int i = 10; i >= 0; i--) series = series * square + 2.0 / (2 * i + 1);
    return n * 6.93147180369123816490e-01 + (n * 1.90821492927058770002e-10 + s * series);
}

int64_t id_of(const PartOfVocabulary* part, long place) { return part ? part->ids[static_cast<size_t>(place)] : place; }

double gumbel(uint64_t bits) { return -exact_log(-exact_log((static_cast<double>(bits) + 0.5) * 0x1p-52)); }

float penalised(float logit, float by) { return logit < 0 ? logit * by : logit / by; }

}  // namespace

Choice::Choice(const ChoiceRules& rules, long vocabulary, std::vector<int64_t> banned)
    : rules_(rules), vocabulary_(vocabulary), banned_(std::move(banned)) {
    if (penalises()) counts_ = TokenCounts(vocabulary);
    for (double wanted = NOISE_MIN; wanted <= NOISE_MAX; wanted += NOISE_STEP) {
        double u = std::exp(-std::exp(-wanted)) * (1 - 1e-9) * 0x1p52;  // with a margin for rounding
        min_bits_.push_back(u > 2 ? static_cast<uint64_t>(u) - 2 : 0);
    }
}

void Choice::extend(const int32_t* tokens, long count) {
    if (!penalises()) return;
    for (long i = 0; i < count; i++, written_++) {
        const int32_t token = tokens[i];
        if (written_ < rules_.window) {  // grows with the text: a window may be longer than any text
            recent_.push_back(token);
        } else {
            counts_.remove(std::exchange(recent_[static_cast<size_t>(written_ % rules_.window)], token));
        }
        counts_.add(token);
    }
}

// The tokens that enter and leave the window when a path (root excluded) is appended to the text.
Choice::WindowChange Choice::window_change(const int32_t* path, long length) const {
    WindowChange change;
    if (!penalises()) return change;
    const long inside = std::min(length, rules_.window), held = std::min(written_, rules_.window);
    const int32_t* first = path + length - inside;
    for (long i = 0; i < inside; i++)
        if (!counts_.of(first[i])) change.added.push_back(first[i]);
    std::vector<int32_t> gone;
    for (long i = 0; i < held + inside - rules_.window; i++)
        gone.push_back(recent_[static_cast<size_t>((written_ - held + i) % rules_.window)]);
    std::sort(gone.begin(), gone.end());
    for (size_t i = 0, next; i < gone.size(); i = next) {
        for (next = i; next < gone.size() && gone[next] == gone[i];) next++;
        bool stays = counts_.of(gone[i]) > static_cast<int32_t>(next - i) ||
                     std::find(first, first + inside, gone[i]) != first + inside;
        if (!stays) change.removed.push_back(gone[i]);
    }
    return change;
}

Choice::PathChange Choice::path_change(const int32_t* path, long length, bool follows) const {
    return {window_change(path, length), penalties_ ? penalties_->edits(path, length, follows) : std::vector<Edit>{}};
}

// A row with penalties and bans, and its first highest logit. The row is null where the logits are not finite.
Choice::Row Choice::prepare(const float* logits, const PartOfVocabulary* part, const PathChange& change, bool is_banned) const {
    const long size = size_of(part);
    const bool is_changed = penalises() || !change.edits.empty() || is_banned;
    float* const copy = is_changed ? static_cast<float*>(workspace<3>(static_cast<size_t>(size) * sizeof(float))) : nullptr;
    const float* const row = is_changed ? copy : logits;
    // Calls set(place) for each of the tokens that the row has.
    auto each = [&](const auto& tokens, auto set) {
        for (auto token : tokens)
            if (long place = part ? part->places[static_cast<size_t>(token)] : token; place >= 0) set(place);
    };
    if (is_changed) std::copy_n(logits, size, copy);
    if (penalises()) {
        each(counts_.distinct(), [&](long place) { copy[place] = penalised(logits[place], rules_.penalty); });
        each(change.window.removed, [&](long place) { copy[place] = logits[place]; });
        each(change.window.added, [&](long place) { copy[place] = penalised(logits[place], rules_.penalty); });
    }
    for (const Edit& edit : change.edits)
        if (long place = part ? part->places[static_cast<size_t>(edit.token)] : edit.token; place >= 0) copy[place] -= edit.amount;
    if (is_banned) each(banned_, [&](long place) { copy[place] = LOWEST; });
    float most[LANES];
    int32_t is_nan[LANES] = {};
    std::fill_n(most, LANES, LOWEST);
    auto compare = [&](const float* values, long count) {
        for (long i = 0; i < count; i++) {
            most[i] = values[i] > most[i] ? values[i] : most[i];
            is_nan[i] |= values[i] != values[i];
        }
    };
    long at = 0;
    for (; at + LANES <= size; at += LANES) compare(row + at, LANES);
    compare(row + at, size - at);
    const float highest = *std::max_element(most, most + LANES);
    if (std::any_of(is_nan, is_nan + LANES, [](int32_t lane) { return lane != 0; }) || !std::isfinite(highest)) return {};
    return {row, std::find(row, row + size, highest) - row};
}

Cut Choice::cut(const float* row, const PartOfVocabulary* part, long best) const {
    if (rules_.temperature == 0 || (rules_.top_k == 0 && rules_.top_p >= 1)) return {};
    return cut_of(row, size_of(part), row[best], rules_.top_k, rules_.top_p, rules_.filter_temperature);
}

bool Choice::is_in_support(float value, long place, float best, const Cut& cut) const {
    if (!cut.keeps(value, place) || !(value > LOWEST)) return false;
    if (!(static_cast<double>(value) >= static_cast<double>(best) + rules_.lowest)) return false;
    return value / rules_.filter_temperature >= best / rules_.filter_temperature + rules_.least;
}

// A value that no token of the support is below.
float Choice::least_value(float best) const {
    return std::nextafter(static_cast<float>(best + rules_.lowest), LOWEST);
}

double Choice::noise(uint64_t key, int64_t token) const { return gumbel(bits_of(key, token)); }

// Noise of smaller bits is less than `wanted`.
uint64_t Choice::least_bits(double wanted) const {
    if (wanted <= NOISE_MIN) return 0;
    size_t step = static_cast<size_t>((std::min(wanted, NOISE_MAX) - NOISE_MIN) / NOISE_STEP);
    return min_bits_[std::min(step, min_bits_.size() - 1)];
}

// The `count` best tokens of the support, or all if there are fewer, best first. temperature > 0.
std::vector<Guess> Choice::best_few(const float* row, const PartOfVocabulary* part, long best, const Cut& cut,
                                    uint64_t key, long count) const {
    // The tokens so far set a mark. Another token needs noise that makes up for its lower score.
    std::vector<Guess> few = {{row[best] / rules_.temperature + noise(key, id_of(part, best)), best}};
    auto bits_for = [&](float logit) {
        return static_cast<long>(few.size()) < count ? 0 : least_bits(few.back().score - logit / rules_.temperature);
    };
    auto consider = [&](long i, uint64_t bits) {
        if (i == best || bits < bits_for(row[i]) || !is_in_support(row[i], i, row[best], cut)) return;
        const Guess other{row[i] / rules_.temperature + gumbel(bits), i};
        if (static_cast<long>(few.size()) == count) {
            if (!(other < few.back())) return;
            few.pop_back();
        }
        few.insert(std::upper_bound(few.begin(), few.end(), other), other);
    };
    // Most tokens have too little noise even for the highest logit among their neighbours.
    const float mark = std::max(least_value(row[best]), cut.value);
    for (long start = 0, end, size = size_of(part); start < size; start = end) {
        end = std::min(size, start + NEIGHBOURS);
        const float most = highest_value(row + start, end - start);
        if (most < mark) continue;
        const uint64_t least = bits_for(most);
        for (long i = start; i < end; i++)
            if (row[i] >= mark)
                if (const uint64_t bits = bits_of(key, id_of(part, i)); bits >= least) consider(i, bits);
    }
    return few;
}

int64_t Choice::best_of(const float* row, const PartOfVocabulary* part, long best, uint64_t key) const {
    return id_of(part, rules_.temperature == 0 ? best : best_few(row, part, best, cut(row, part, best), key, 1)[0].place);
}

void Choice::choose(const float* logits, const int32_t* tokens, const int32_t* parents, long nodes, long position,
                    long banned_depth, bool every, int64_t* chosen) const {
    std::vector<std::vector<int32_t>> paths(static_cast<size_t>(nodes));
    std::vector<PathChange> changes(static_cast<size_t>(nodes));
    for (long n = 0; n < nodes; n++)
        if (parents[n] >= 0) {
            paths[static_cast<size_t>(n)] = paths[static_cast<size_t>(parents[n])];
            paths[static_cast<size_t>(n)].push_back(tokens[n]);
        }
    std::vector<bool> is_chosen(static_cast<size_t>(nodes));
    auto choose_after = [&](const std::vector<long>& some) {
        for (long n : some) {
            const auto& path = paths[static_cast<size_t>(n)];
            changes[static_cast<size_t>(n)] = path_change(path.data(), static_cast<long>(path.size()), true);
            is_chosen[static_cast<size_t>(n)] = true;
        }
        parallel(static_cast<long>(some.size()), [&](long i) {
            const long n = some[static_cast<size_t>(i)], depth = static_cast<long>(paths[static_cast<size_t>(n)].size());
            const auto [row, best] = prepare(logits + n * vocabulary_, nullptr, changes[static_cast<size_t>(n)], depth < banned_depth);
            chosen[n] = row ? best_of(row, nullptr, best, key_of(rules_.seed, position + depth)) : -1;
        });
    };
    // The first child of a node, or of those with a token; `nodes`: there is none.
    auto child_of = [&](long node, const int64_t* token) {
        long n = node + 1;
        while (n < nodes && (parents[n] != node || (token && tokens[n] != *token))) n++;
        return n;
    };
    std::vector<long> some(static_cast<size_t>(every ? nodes : 0));
    std::iota(some.begin(), some.end(), 0);
    if (every) return choose_after(some);
    std::fill(chosen, chosen + nodes, -1);
    for (long node = 0; node < nodes; node = child_of(node, &chosen[node])) {
        if (is_chosen[static_cast<size_t>(node)]) continue;
        some.clear();  // as many as threads, along the likeliest path
        for (long next = node; next < nodes && static_cast<int>(some.size()) < threads(); next = child_of(next, nullptr))
            some.push_back(next);
        choose_after(some);
    }
}

Choice::Guesses Choice::guesses_of(const float* logits, const PathChange& change, long position, bool is_banned, long count,
                                   const PartOfVocabulary* part) const {
    const long size = size_of(part), few = std::max(count, 2L);
    const Row prepared = prepare(logits, part, change, is_banned);
    const float* const row = prepared.logits;
    const long best = prepared.best;
    if (!row) return {{}, INFINITY};
    const uint64_t key = key_of(rules_.seed, position);
    const Cut kept = cut(row, part, best);
    std::vector<Guess> guesses = rules_.temperature > 0 ? best_few(row, part, best, kept, key, few) : highest_of(row, size, few);
    const double lead = guesses.size() > 1 ? guesses[0].score - guesses[1].score : INFINITY;
    if (rules_.temperature > 0 && static_cast<long>(guesses.size()) < std::min(count, size)) {
        // A drafter's logits are an estimate: tokens that the filters remove are ranked last.
        std::vector<Guess> others = highest_of(row, size, std::max(POOL, count));
        others.erase(std::remove_if(others.begin(), others.end(), [&](const Guess& g) {
            return is_in_support(row[g.place], g.place, row[best], kept); }), others.end());
        for (Guess& g : others) g.score = row[g.place] / rules_.temperature + noise(key, id_of(part, g.place));
        std::sort(others.begin(), others.end());
        guesses.insert(guesses.end(), others.begin(), others.end());
    }
    guesses.resize(std::min(guesses.size(), static_cast<size_t>(count)));
    return {std::move(guesses), lead};
}

Ranked Choice::rank(const float* logits, const int32_t* path, long length, long position, bool is_banned, long count,
                    double within, const PartOfVocabulary* part) const {
    const bool follows = !penalties_ || position == penalties_->length() + length;
    const auto [guesses, lead] = guesses_of(logits, path_change(path, length, follows), position, is_banned, count, part);
    Ranked ranked{{}, lead};
    for (const Guess& guess : guesses)
        if (guess.score >= guesses[0].score - within) ranked.tokens.push_back(id_of(part, guess.place));
    return ranked;
}

std::vector<Shortlist> Choice::shortlists(const float* logits, long places, long position, long banned_depth, long count,
                                          const PartOfVocabulary* part) const {
    std::vector<Shortlist> found(static_cast<size_t>(places));
    const PathChange next = path_change(nullptr, 0, true), later = path_change(nullptr, 0, false);
    parallel(places, [&](long i) {
        const bool follows = !penalties_ || position + i == penalties_->length();
        const auto [guesses, lead] =
            guesses_of(logits + i * size_of(part), follows ? next : later, position + i, i < banned_depth, count, part);
        auto& [tokens, scores] = found[static_cast<size_t>(i)];
        double least = INFINITY;
        for (const Guess& guess : guesses) {
            if (!std::isfinite(guess.score)) continue;
            tokens.push_back(id_of(part, guess.place));
            scores.push_back(least = std::min(least, guess.score));
        }
    });
    return found;
}

}  // namespace longdraft
