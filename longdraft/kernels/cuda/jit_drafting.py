"""Triton kernels that rank a drafter's guesses, and lead a chain of drafts from one token to the next.

longdraft/sampling/sampler.py (`Sampler.ranked`) defines the ranking. These kernels compute the same scores from the
same logits, as those of `jit_choice`, whose helpers they use.

    settings  float64 [6]: as in jit_support, and the largest gap between a guess's score and the best one's
    state  int64 [6]: tokens of the text, drafted ones included; the bits of splitmix64(seed); tokens that must still be
           written before the text may end; place of the next token in the chain; places of the chain; guesses that are
           wanted at each

The chains of several texts (`shared_chain`) have a row each. STRIDE is the distance of their states, and of their
settings: these are parts of the entries of `jit_shared_choice`, in which the address of a text's tokens comes before
its state. STRIDE is 0 for a single text.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_choice import best_and_first_id, noisy_scores
from longdraft.kernels.cuda.jit_rows import embedding_of

_NONE = tl.constexpr(2147483647)  # larger than every token id
_SLOTS = tl.constexpr(18)  # int64 of a place's outcome: number of guesses; bits of the lead; up to 16 guesses
_IS_GREEDY = tl.constexpr(11)  # place in the state of one of several texts; see `jit_shared_choice`


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def best_in_blocks_kernel(logits, bests, state, settings, cuts, floors, leasts, scores, ids, vocabulary, num_blocks,
                          BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
                          HAS_NOISE: tl.constexpr, HAS_CUT: tl.constexpr, HAS_MIN_P: tl.constexpr,
                          HAS_ETA: tl.constexpr, HAS_FLOOR: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The WIDTH best tokens of each block: scores float64 and ids int32 [R, num_blocks, WIDTH], best first.

    bests  [R, num_blocks] float32: the largest logit of each block

    The score is that of `noisy_block_maxima_kernel`, or without HAS_NOISE the logit. It is -inf where the filters, or
    the block, leave fewer tokens. Grid (num_blocks, R).
    """
    wait_for_inputs(IS_CHAINED)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state += row * STRIDE
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    total = logit.to(tl.float64)
    if HAS_NOISE:
        total = noisy_scores(logit, token, row, tl.load(state), bests, state + 1, settings + row * STRIDE, cuts, floors,
                             leasts, num_blocks, BLOCKS, HAS_CUT, HAS_MIN_P, HAS_ETA, HAS_FLOOR)
    if STRIDE > 0:
        total = tl.where(tl.load(state + _IS_GREEDY) > 0, logit.to(tl.float64), total)
    at = (row * num_blocks + block) * WIDTH
    for place in tl.static_range(WIDTH):
        best_score, best_id = best_and_first_id(total, token)
        tl.store(scores + at + place, best_score)
        tl.store(ids + at + place, best_id)
        total = tl.where(token == best_id, float("-inf"), total)


@triton.jit(do_not_specialize=["num_blocks"])
def rank_kernel(bests, scores, ids, state, settings, outcome, num_blocks, BLOCKS: tl.constexpr,
                CANDIDATES: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The best guesses of all blocks. Grid (R,).

    outcome  int64 [places, R, 18]: the row of the place state[3] gets the number of guesses, the bits of the lead
             (float64), and the guesses, best first. A guess is within settings[5] of the best one's score

    There are no guesses where the largest logit is not finite.
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    state += row * STRIDE
    block = tl.arange(0, BLOCKS)
    best = tl.load(bests + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    is_sound = tl.max((best != best).to(tl.int32), 0) == 0
    top = tl.max(best, 0)
    is_sound = is_sound & (top > float("-inf")) & (top < float("inf"))
    candidate = tl.arange(0, CANDIDATES)
    inside = candidate < num_blocks * WIDTH
    at = row * num_blocks * WIDTH + candidate
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    token = tl.load(ids + at, mask=inside, other=_NONE)
    out = outcome + (tl.load(state + 3) * tl.num_programs(0) + row) * _SLOTS
    num_wanted = tl.load(state + 5)
    first = tl.max(score, 0)
    least = first - tl.load(settings + row * STRIDE + 5)
    lead = first - first + float("inf")
    count = 0
    for place in tl.static_range(WIDTH):
        best_score, best_id = best_and_first_id(score, token)
        if place == 1:
            lead = first - best_score
        is_guess = is_sound & (best_score > float("-inf")) & (best_score >= least) & (place < num_wanted)
        tl.store(out + 2 + place, tl.where(is_guess, best_id, -1).to(tl.int64))
        count += is_guess.to(tl.int32)
        score = tl.where(token == best_id, float("-inf"), score)
    tl.store(out, count.to(tl.int64))
    lead = tl.where(is_sound, lead, float("inf"))
    tl.store(out + 1, lead.to(tl.int64, bitcast=True))


@triton.jit
def begin_place_kernel(text, state, table, scale, rotations, x, cos, sin, factor, HIDDEN: tl.constexpr,
                       HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
                       HAS_SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The first layer's input for the text's last token: its embedding, and the rotation of its place in the chain.

    text       int32: the tokens of a single text
    table      see `embedding_of`
    rotations  [places, R, 2, HALF] float32: cos and sin
    x          [R, HIDDEN]; cos, sin [R, HALF]

    Grid (HIDDEN / BLOCK, R).
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(1).to(tl.int64)
    state += row * STRIDE
    if STRIDE > 0:
        text = tl.load(state - 1).to(text.dtype)
    token = tl.load(text + tl.load(state) - 1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    value = embedding_of(token, table, scale, column, mask, factor, x, HIDDEN, HAS_SCALE, HAS_FACTOR)
    tl.store(x + row * HIDDEN + column, value, mask=mask)
    if tl.program_id(0) == 0:
        half = tl.arange(0, PADDED)
        is_half = half < HALF
        at = rotations + (tl.load(state + 3) * tl.num_programs(1) + row) * 2 * HALF + half
        tl.store(cos + row * HALF + half, tl.load(at, mask=is_half, other=0.0), mask=is_half)
        tl.store(sin + row * HALF + half, tl.load(at + HALF, mask=is_half, other=0.0), mask=is_half)


@triton.jit
def end_place_kernel(text, state, where, outcome, STRIDE: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Append the best guess to the text, and go on to the next place of the chain, if there is one. Grid (R,).

    where  int64 [R, 2]: committed rows of the cache, and the slot of the next row: the row after them

    After its chain a text stays where it is, while other texts go on. What it then computes is not read.
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    state += row * STRIDE
    where += row * 2
    if STRIDE > 0:
        text = tl.load(state - 1).to(text.dtype)
    length, place = tl.load(state), tl.load(state + 3)
    token = tl.load(outcome + (place * tl.num_programs(0) + row) * _SLOTS + 2)
    if place < tl.load(state + 4):
        # Without a guess the chain has ended: what follows is not read, but must be a token.
        tl.store(text + length, tl.maximum(token, 0).to(tl.int32))
        tl.store(state, length + 1)
        tl.store(state + 2, tl.load(state + 2) - 1)
        tl.store(state + 3, place + 1)
        committed = tl.load(where)
        tl.store(where, committed + 1)
        tl.store(where + 1, committed + 1)
