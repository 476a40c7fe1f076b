"""Triton kernels that find the tokens which top-k, top-p, min-p and eta leave, without sorting.

longdraft/sampling/process.py defines the result. Every filter leaves the first tokens in the order of falling logits,
and of token ids among equals. So the support is described by a *cut*, the place of its last token in this order, and by
a least score. Sums are whole numbers and do not depend on the order of additions.

    order     int64: the logit's bits, so that they increase with it, above the inverted token id
    key       the upper half as a number of 32 bits without sign
    mass      int64: exp(score - best) * 2^44, rounded; score: logit / the filters' temperature
    settings  float64 [R, 6]: temperature; log(min_p); the filters' temperature; log(eta_cutoff); top_p; and one that
              the filters do not read

Some rows may lack a filter that others have. It leaves all tokens of such a row: the goal of a search is then more
than all tokens weigh, or 0 for tokens that are left at least; logarithms are -inf, and top_p is 1.

A search finds the largest key k with (sum of the weights of all tokens of k or more) >= goal; a weight is 1 or the
mass. It takes eight levels, each of which decides four bits of k: a program sums up its block of the vocabulary for 17
candidates, and the programs of the next level add the blocks. No level launches atomic operations.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_exact import exact_exp, exact_log

SETTINGS = tl.constexpr(6)
CANDIDATES = tl.constexpr(17)  # of a level: k, k + 1 unit, ..., k + 16 units
_PADDED = tl.constexpr(32)
_LAST_ID = tl.constexpr(4294967295)
_OFFSET = tl.constexpr(2147483648)  # from a number with sign to a key
_NONE = tl.constexpr(2147483647)  # larger than every token id
NO_CUT = tl.constexpr(-9223372036854775808)
UNREACHED = tl.constexpr(9223372036854775807)  # a goal that no sum reaches, and a cut in front of all tokens


@triton.jit
def order_of(logit, token):
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # -0 equals 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) + (_LAST_ID - token.to(tl.int64))


@triton.jit
def logit_of(key):
    """The logit of a key. It inverts `order_of`."""
    bits = (key - _OFFSET).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def best_score_of(bests, row, settings, num_blocks, BLOCKS: tl.constexpr):
    """The best score of a row, from the largest logit of each block."""
    block = tl.arange(0, BLOCKS)
    best = tl.max(tl.load(bests + row * num_blocks + block, mask=block < num_blocks, other=float("-inf")), 0)
    return best.to(tl.float64) / tl.load(settings + 2)


@triton.jit
def mass_of(gap):
    """The mass of a token, from how far its score is below the best one (float64, not negative)."""
    near = gap < 32.0
    return tl.where(near, (exact_exp(-tl.where(near, gap, 32.0)) * 17592186044416.0 + 0.5).to(tl.int64), 0)


@triton.jit
def is_in_support(logit, token, row, best, cuts, floors, leasts, settings, HAS_CUT: tl.constexpr,
                  HAS_MIN_P: tl.constexpr, HAS_ETA: tl.constexpr, HAS_FLOOR: tl.constexpr):
    """Which tokens of a row the filters leave.

    best    the best score
    cuts    [R] int64: the last token that top-k and top-p leave
    floors  [R] int64: the last of the tokens that min-p and eta leave at least
    leasts  [R] float64: the least score that eta leaves
    """
    is_inside = logit > float("-inf")
    order = order_of(logit, token)
    if HAS_CUT:
        is_inside = is_inside & (order >= tl.load(cuts + row))
    if HAS_MIN_P or HAS_ETA:
        score = logit.to(tl.float64) / tl.load(settings + 2)
        reaches = is_inside
        if HAS_MIN_P:
            reaches = score >= best + tl.load(settings + 1)
        if HAS_ETA:
            reaches = reaches & (score >= tl.load(leasts + row))
        if HAS_FLOOR:
            reaches = reaches | (order >= tl.load(floors + row))
        is_inside = is_inside & reaches
    return is_inside


@triton.jit
def _candidate_sums(sums, row, num_blocks, BLOCKS: tl.constexpr):
    """What the programs of a level summed up: [32, BLOCKS] int64."""
    candidate, block = tl.arange(0, _PADDED)[:, None], tl.arange(0, BLOCKS)[None, :]
    return tl.load(sums + (row * CANDIDATES + candidate) * num_blocks + block,
                   mask=(candidate < CANDIDATES) & (block < num_blocks), other=0)


@triton.jit
def _reached(totals, goal):
    """The last candidate after the first one that reaches the goal, or 0."""
    candidate = tl.arange(0, _PADDED)
    return tl.sum(((candidate > 0) & (candidate < CANDIDATES - 1) & (totals >= goal)).to(tl.int64), 0)


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def search_level_kernel(logits, bests, settings, goals, cuts, keys, before, sums, vocabulary, num_blocks,
                        LEVEL: tl.constexpr, BY_MASS: tl.constexpr, HAS_CUT: tl.constexpr,
                        BLOCK: tl.constexpr, BLOCKS: tl.constexpr, IS_CHAINED: tl.constexpr):
    """One level of a search, 7 first and 0 last. Grid (R, num_blocks).

    goals   [R] int64
    cuts    tokens after the row's cut weigh nothing
    keys    [8, R] int64: gets the key of each level
    before  [R, 17, num_blocks] int64: the sums of the level before
    sums    as `before`, of this level
    """
    wait_for_inputs(IS_CHAINED)
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    settings += row * SETTINGS
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    order = order_of(logit, token)
    is_inside = logit > float("-inf")
    if HAS_CUT:
        is_inside = is_inside & (order >= tl.load(cuts + row))
    weight = is_inside.to(tl.int64)
    if BY_MASS:
        gap = best_score_of(bests, row, settings, num_blocks, BLOCKS) - logit.to(tl.float64) / tl.load(settings + 2)
        weight = tl.where(is_inside, mass_of(gap), 0)
    key = row * 0
    if LEVEL < 7:
        totals = tl.sum(_candidate_sums(before, row, num_blocks, BLOCKS), 1)
        key = tl.load(keys + (LEVEL + 1) * num_rows + row)
        key += _reached(totals, tl.load(goals + row)) << (4 * LEVEL + 4)
    if tl.program_id(1) == 0:
        tl.store(keys + LEVEL * num_rows + row, key)
    own = (order >> 32) + _OFFSET
    at = sums + row * CANDIDATES * num_blocks + tl.program_id(1)
    for candidate in tl.static_range(17):
        least = key + (candidate << (4 * LEVEL))
        tl.store(at + candidate * num_blocks, tl.sum(tl.where(own >= least, weight, 0), 0))


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def end_search_kernel(logits, bests, settings, goals, cuts, keys, sums, found, vocabulary, num_blocks,
                      BY_MASS: tl.constexpr, HAS_CUT: tl.constexpr, BLOCK: tl.constexpr,
                      BLOCKS: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The cut of a search: of the tokens with the key that was found, the first ones with which the goal is reached.

    found  [R] int64; NO_CUT where all tokens do not reach it, UNREACHED for a goal of 0; not after the row's own cut

    Arguments as in `search_level_kernel`, `sums` of level 0. Grid (R,).
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    settings += row * SETTINGS
    goal = tl.load(goals + row)
    part = _candidate_sums(sums, row, num_blocks, BLOCKS)
    totals = tl.sum(part, 1)
    candidate = tl.arange(0, _PADDED)
    reached = _reached(totals, goal)
    key = tl.load(keys + row) + reached
    logit = logit_of(key)
    weight = row * 0 + 1
    if BY_MASS:
        gap = best_score_of(bests, row, settings, num_blocks, BLOCKS) - logit.to(tl.float64) / tl.load(settings + 2)
        weight = tl.maximum(mass_of(gap), 1)
    above = tl.sum(tl.where(candidate == reached + 1, totals, 0), 0)
    wanted = (goal - above + weight - 1) // weight
    sign = (candidate == reached).to(tl.int64) - (candidate == reached + 1).to(tl.int64)
    equals = tl.sum(part * sign[:, None], 0) // weight
    behind = tl.cumsum(equals, 0)  # equal logits up to the end of each block
    block = tl.sum((behind < wanted).to(tl.int64), 0)
    before = tl.max(tl.where(behind < wanted, behind, 0), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    each = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    is_equal = (each == logit) & (each > float("-inf"))
    if HAS_CUT:
        is_equal = is_equal & (order_of(each, token) >= tl.load(cuts + row))
    rank = before + tl.cumsum(is_equal.to(tl.int64), 0)
    last = tl.min(tl.where(is_equal & (rank == wanted), token, _NONE), 0)
    cut = ((key - _OFFSET) << 32) + (_LAST_ID - last)
    cut = tl.where(last == _NONE, NO_CUT, cut)
    if HAS_CUT:
        cut = tl.maximum(cut, tl.load(cuts + row))
    tl.store(found + row, tl.where(goal > 0, cut, UNREACHED))


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def support_sums_kernel(logits, bests, settings, cuts, floors, leasts, sums, vocabulary, num_blocks,
                        HAS_CUT: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_ETA: tl.constexpr, HAS_FLOOR: tl.constexpr,
                        DIVISOR: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                        IS_CHAINED: tl.constexpr):
    """Sums over what the filters leave: of the masses, and of mass * gap. Grid (R, num_blocks).

    sums     [R, 2, num_blocks] int64
    DIVISOR  which setting is the temperature: 2 that of the filters, 0 the final one
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    settings += row * SETTINGS
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    is_inside = is_in_support(logit, token, row, best_score_of(bests, row, settings, num_blocks, BLOCKS), cuts, floors,
                              leasts, settings, HAS_CUT, HAS_MIN_P, HAS_ETA, HAS_FLOOR)
    best = best_score_of(bests, row, settings + DIVISOR - 2, num_blocks, BLOCKS)
    gap = best - logit.to(tl.float64) / tl.load(settings + DIVISOR)
    mass = tl.where(is_inside, mass_of(gap), 0)
    weighted = (mass.to(tl.float64) * tl.where(mass > 0, gap, 0.0)).to(tl.int64)
    at = sums + row * 2 * num_blocks + tl.program_id(1)
    tl.store(at, tl.sum(mass, 0))
    tl.store(at + num_blocks, tl.sum(weighted, 0))


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def support_orders_kernel(logits, bests, settings, cuts, floors, leasts, orders, vocabulary, num_blocks,
                          HAS_CUT: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_ETA: tl.constexpr,
                          HAS_FLOOR: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                          IS_CHAINED: tl.constexpr):
    """The order of each token that the filters leave, and NO_CUT for all others: [R, V]. Grid (R, num_blocks)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    settings += row * SETTINGS
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * vocabulary + token
    logit = tl.load(logits + at, mask=token < vocabulary, other=float("-inf"))
    best = best_score_of(bests, row, settings, num_blocks, BLOCKS)
    is_inside = is_in_support(logit, token, row, best, cuts, floors, leasts, settings, HAS_CUT, HAS_MIN_P, HAS_ETA,
                              HAS_FLOOR)
    tl.store(orders + at, tl.where(is_inside, order_of(logit, token), NO_CUT), mask=token < vocabulary)


@triton.jit
def _total(sums, row, part: tl.constexpr, num_blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    at = sums + (row * 2 + part) * num_blocks
    return tl.sum(tl.load(at + block, mask=block < num_blocks, other=0), 0)


@triton.jit(do_not_specialize=["num_blocks"])
def top_p_goal_kernel(sums, settings, goals, num_blocks, BLOCKS: tl.constexpr,
                      IS_CHAINED: tl.constexpr):
    """The mass that top-p keeps at least, from the sums of `support_sums_kernel`. Without top-p UNREACHED. Grid
    (R,)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    total = _total(sums, row, 0, num_blocks, BLOCKS)
    top_p = tl.load(settings + row * SETTINGS + 4)
    goal = tl.maximum(tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total), 1)
    tl.store(goals + row, tl.where(top_p < 1, goal, UNREACHED))


@triton.jit(do_not_specialize=["num_blocks"])
def eta_kernel(bests, sums, settings, leasts, num_blocks, BLOCKS: tl.constexpr,
               IS_CHAINED: tl.constexpr):
    """The least score that eta leaves, from the sums of `support_sums_kernel`. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    settings += row * SETTINGS
    total = _total(sums, row, 0, num_blocks, BLOCKS).to(tl.float64)
    log_total = exact_log(total * 5.684341886080802e-14)  # 2**-44
    entropy = log_total + _total(sums, row, 1, num_blocks, BLOCKS).to(tl.float64) / total
    log_epsilon = tl.load(settings + 3)
    cutoff = tl.minimum(log_epsilon, 0.5 * log_epsilon - entropy)
    tl.store(leasts + row, best_score_of(bests, row, settings, num_blocks, BLOCKS) + log_total + cutoff)
