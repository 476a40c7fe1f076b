"""The filters: from one row of logits to the tokens that can be chosen, as pure functions in a fixed order.

    0. logit_bias added                                    (raw logits, float32)
    1. repetition penalty, then presence and frequency penalty, within the window
    2. DRY, then no_repeat_ngram_size
    3. end-of-text ids banned before min_new_tokens
    4. temperature, unless `temperature_last`              (from here on float64)
    5. top_n_sigma, top_k, typical_p, top_p, min_p, eta_cutoff
    6. XTC
    7. with `temperature_last`: temperature, or dynamic temperature

This is the order of `transformers` (logits processors, then warpers); with `temperature_last` it is llama.cpp's. Each
filter sees the distribution that the previous one left. Of equal scores, the smaller token id wins, everywhere. The
vocabulary is never sorted where a threshold suffices; else the largest scores come first, with an exact fallback.

A *support* is the set of tokens with non-zero probability: ids, ascending, and their scores.

Filters that add probabilities up add whole numbers: the *mass* of a token is exp(score - best) * 2^44, rounded. The sum
does not depend on the order, so the compiled sampler and a device find the same support.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.errors import NumericalError
from longdraft.kernels import reproducible
from longdraft.request.sampling_params import SamplingParams

MASS_OF_BEST = 2.0**44  # sums of 2^19 tokens fit into 63 bits
NEGLIGIBLE = 32.0  # nats below the best score at which a mass is 0: e^-32 < 2^-45
MIN_TEMPERATURE = 1e-3  # lower bound of dynamic temperature
_FIRST_TOP_P = 256  # highest scores that top_p examines first; eight times as many at each further try


class Support(NamedTuple):
    """Tokens that can be chosen: ids [N], ascending, and scores [N] float64 (logit / temperature)."""

    ids: NDArray[np.int64]
    scores: NDArray[np.float64]

    def keep(self, mask: NDArray[np.bool_]) -> Support:
        return Support(self.ids[mask], self.scores[mask])


def penalise(logits: NDArray[np.float32], penalty: float) -> NDArray[np.float32]:
    """Logits of tokens in the penalty window: divided where positive, multiplied where negative (CTRL, 2019)."""
    theta = np.float32(penalty)
    return np.where(logits < 0, logits * theta, logits / theta)


def filter_temperature(params: SamplingParams) -> float:
    """The temperature (> 0) of the scores that the filters see."""
    return 1.0 if params.temperature_last else params.temperature


def filtered(row: NDArray[np.float32], params: SamplingParams, coin: float = 1.0,
             protected: frozenset[int] = frozenset()) -> Support:
    """The tokens that temperature (> 0) and the filters leave of one penalised row [V].

    coin       uniform number of the position, for XTC
    protected  ids that XTC never excludes: if it would, it does nothing

    Raises NumericalError if the highest logit is not finite.
    """
    divisor = filter_temperature(params)
    best = float(row.max())
    if not math.isfinite(best):
        raise NumericalError
    # With min_p alone, a threshold on the float32 row removes most tokens; a nat of margin keeps it exact.
    lowest = -math.inf
    is_alone = params.top_p == 1 and params.top_k == 0 and params.typical_p == 1 and params.top_n_sigma <= 0
    if params.min_p > 0 and is_alone and params.min_tokens_to_keep == 1:
        lowest = best + divisor * (math.log(params.min_p) - 1.0)
    # In float64: the margin may be less than float32's step.
    ids = np.flatnonzero(row > -np.inf if lowest == -math.inf else row >= np.float64(lowest))
    kept = Support(ids, row[ids].astype(np.float64) / divisor)
    if params.top_n_sigma > 0:
        kept = top_n_sigma(kept, params.top_n_sigma)
    if 0 < params.top_k < len(kept.ids):
        kept = top_k(kept, params.top_k)
    if params.typical_p < 1:
        kept = typical(kept, params.typical_p)
    if params.top_p < 1:
        kept = top_p(kept, params.top_p)
    if params.min_p > 0:
        kept = min_p(kept, params.min_p, params.min_tokens_to_keep)
    if params.eta_cutoff > 0:
        kept = eta(kept, params.eta_cutoff, params.min_tokens_to_keep)
    if params.has_xtc and coin < params.xtc_probability:
        kept = without_top_choices(kept, params.xtc_threshold, protected)
    if params.temperature_last:
        kept = Support(kept.ids, kept.scores / final_temperature(kept, params))
    return kept


def top_n_sigma(kept: Support, n: float) -> Support:
    """Scores of at least the highest minus n standard deviations of all (Tang et al. 2024, arXiv 2411.07641)."""
    mean = float(np.cumsum(kept.scores)[-1]) / len(kept.scores)
    variance = float(np.cumsum((kept.scores - mean) ** 2)[-1]) / len(kept.scores)
    return kept.keep(kept.scores >= float(kept.scores.max()) - n * math.sqrt(variance))


def typical(kept: Support, p: float) -> Support:
    """The tokens whose surprise is closest to the entropy, up to a total probability of p (Meister et al. 2022)."""
    probabilities, surprises, entropy = _surprises(kept)
    order = np.lexsort((kept.ids, np.abs(surprises - entropy)))
    num_kept = int((np.cumsum(probabilities[order]) < p).sum()) + 1
    mask = np.zeros(len(order), dtype=bool)
    mask[order[:num_kept]] = True
    return kept.keep(mask)


def without_top_choices(kept: Support, threshold: float, protected: frozenset[int]) -> Support:
    """XTC: without the tokens of a probability of at least `threshold`, except the least likely of these.

    oobabooga/text-generation-webui#6335. All are kept if one that would go is protected.
    """
    probabilities, _, _ = _surprises(kept)
    top = np.flatnonzero(probabilities >= threshold)
    excluded = top[np.lexsort((kept.ids[top], -kept.scores[top]))[:-1]]
    if not len(excluded) or not protected.isdisjoint(kept.ids[excluded].tolist()):
        return kept
    mask = np.ones(len(kept.ids), dtype=bool)
    mask[excluded] = False
    return kept.keep(mask)


def final_temperature(kept: Support, params: SamplingParams) -> float:
    """The temperature after the filters: with `dynatemp_range`, by the entropy of what they left (as in llama.cpp)."""
    if not params.dynatemp_range or len(kept.ids) == 1:
        return params.temperature
    low = max(MIN_TEMPERATURE, params.temperature - params.dynatemp_range)
    _, _, entropy = _surprises(kept)
    share = min(1.0, max(0.0, entropy / math.log(len(kept.ids))))
    return low + (params.temperature + params.dynatemp_range - low) * math.pow(share, params.dynatemp_exponent)


def _surprises(kept: Support) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Probabilities [N], their negative logarithms [N], and the entropy."""
    masses, gaps = _masses(kept)
    log_total = log_of_mass(int(masses.sum()))
    return masses / float(masses.sum()), log_total + gaps, _entropy(masses, gaps, log_total)


def log_probabilities(kept: Support) -> NDArray[np.float64]:
    """The logarithms of the tokens' probabilities [N]."""
    masses, gaps = _masses(kept)
    return log_probabilities_of(gaps, int(masses.sum()))


def log_probabilities_of(gaps: NDArray[np.float64], total: int) -> NDArray[np.float64]:
    """As `log_probabilities`, of tokens whose scores are `gaps` [N] below the best one; total: the support's mass."""
    return -gaps - log_of_mass(total)


def top_k(kept: Support, k: int) -> Support:
    """The k highest scores."""
    threshold = -np.partition(-kept.scores, k - 1)[k - 1]
    above = kept.scores > threshold
    ties = np.flatnonzero(kept.scores == threshold)[: k - int(above.sum())]
    above[ties] = True
    return kept.keep(above)


def top_p(kept: Support, p: float) -> Support:
    """The smallest set of most likely tokens whose probability reaches p (nucleus sampling)."""
    goal = top_p_goal(int(_masses(kept)[0].sum()), p)
    best = float(kept.scores.max())
    num_examined = _FIRST_TOP_P
    while True:
        head = kept
        if num_examined < len(kept.ids):
            head = kept.keep(kept.scores >= -np.partition(-kept.scores, num_examined - 1)[num_examined - 1])
        order = np.lexsort((head.ids, -head.scores))
        reached = np.cumsum(_mass_of(best - head.scores[order]))
        num_kept = int(np.searchsorted(reached, goal, side="left")) + 1
        if num_kept <= len(order):
            chosen = np.zeros(len(order), dtype=bool)
            chosen[order[:num_kept]] = True
            return head.keep(chosen)
        num_examined *= 8


def top_p_goal(total: int, p: float) -> int:
    """The mass that top-p keeps at least, of a total mass."""
    return max(1, min(total, math.ceil(p * float(total))))


def min_p(kept: Support, fraction: float, at_least: int) -> Support:
    """Tokens at least `fraction` as likely as the most likely one: a threshold, no sum."""
    return _above(kept, float(kept.scores.max()) + math.log(fraction), at_least)


def eta(kept: Support, epsilon: float, at_least: int) -> Support:
    """Tokens with a probability of at least min(epsilon, sqrt(epsilon) * exp(-entropy)) (Hewitt et al. 2022)."""
    masses, gaps = _masses(kept)
    log_total, log_epsilon = log_of_mass(int(masses.sum())), math.log(epsilon)
    log_cutoff = min(log_epsilon, 0.5 * log_epsilon - _entropy(masses, gaps, log_total))
    return _above(kept, float(kept.scores.max()) + log_total + log_cutoff, at_least)


def _above(kept: Support, threshold: float, at_least: int) -> Support:
    """Tokens with a score of at least `threshold`; the `at_least` best ones if those are fewer."""
    mask = kept.scores >= threshold
    if int(mask.sum()) >= at_least:
        return kept.keep(mask)
    return top_k(kept, at_least) if at_least < len(kept.ids) else kept


def _masses(kept: Support) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The masses [N], and how far each score is below the best one [N], in nats."""
    gaps = kept.scores.max() - kept.scores
    masses = np.zeros(len(gaps), np.int64)
    near = gaps < NEGLIGIBLE
    masses[near] = _mass_of(gaps[near])
    return masses, gaps


def _mass_of(gaps: NDArray[np.float64]) -> NDArray[np.int64]:
    return (reproducible.exp(-gaps) * MASS_OF_BEST + 0.5).astype(np.int64)


def log_of_mass(mass: int) -> float:
    """log(sum of exp(score - best)), from the sum of the masses."""
    return float(reproducible.log(np.array(float(mass) / MASS_OF_BEST)))


def _entropy(masses: NDArray[np.int64], gaps: NDArray[np.float64], log_total: float) -> float:
    """The entropy of a support with these masses, in nats. The sum of mass * gap is one of whole numbers too."""
    weighted = int(np.where(masses > 0, masses * gaps, 0.0).astype(np.int64).sum())
    return log_total + weighted / float(masses.sum())


def best_token(row: NDArray[Any]) -> int:
    """The id of the highest logit; the smallest id among equals. NumericalError if that logit is not finite."""
    best = int(row.argmax())  # numpy returns the first
    if not math.isfinite(float(row[best])):
        raise NumericalError
    return best
