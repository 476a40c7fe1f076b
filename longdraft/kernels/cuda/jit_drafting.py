"""Triton kernels that rank a drafter's guesses, and lead a chain of drafts from one token to the next.

longdraft/sampling/sampler.py (`Sampler.ranked`) defines the ranking. These kernels compute the same scores from the
same logits, as those of `jit_choice`, whose helpers they use.

    settings  float64 [6]: as in jit_support, and the largest gap between a guess's score and the best one's
    state  int64 [8]: tokens of the text, drafted ones included; the bits of splitmix64(seed); tokens that must still be
           written before the text may end; place of the next token in the chain
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_choice import best_and_first_id, noisy_scores
from longdraft.kernels.cuda.jit_rows import embedding_of

_NONE = tl.constexpr(2147483647)  # larger than every token id
_SLOTS = tl.constexpr(18)  # int64 of a place's outcome: number of guesses; bits of the lead; up to 16 guesses


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def best_in_blocks_kernel(logits, bests, state, settings, cuts, floors, leasts, scores, ids, vocabulary, num_blocks,
                          BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, HAS_NOISE: tl.constexpr,
                          HAS_CUT: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_ETA: tl.constexpr,
                          HAS_FLOOR: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The WIDTH best tokens of each block: scores float64 and ids int32 [num_blocks, WIDTH], best first.

    bests  [num_blocks] float32: the largest logit of each block

    The score is that of `noisy_block_maxima_kernel`, or without HAS_NOISE the logit. It is -inf where the filters, or
    the block, leave fewer tokens. Grid (num_blocks,).
    """
    wait_for_inputs(IS_CHAINED)
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
    total = logit.to(tl.float64)
    if HAS_NOISE:
        total = noisy_scores(logit, token, 0, tl.load(state), bests, state + 1, settings, cuts, floors, leasts,
                             num_blocks, BLOCKS, HAS_CUT, HAS_MIN_P, HAS_ETA, HAS_FLOOR)
    for place in tl.static_range(WIDTH):
        best_score, best_id = best_and_first_id(total, token)
        tl.store(scores + block * WIDTH + place, best_score)
        tl.store(ids + block * WIDTH + place, best_id)
        total = tl.where(token == best_id, float("-inf"), total)


@triton.jit(do_not_specialize=["num_blocks", "num_wanted"])
def rank_kernel(bests, scores, ids, state, settings, outcome, num_blocks, num_wanted, BLOCKS: tl.constexpr,
                CANDIDATES: tl.constexpr, WIDTH: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The best guesses of all blocks. Grid (1,).

    outcome  int64 [places, 18]: the row of the place state[3] gets the number of guesses, the bits of the lead
             (float64), and the guesses, best first. A guess is within settings[5] of the best one's score

    There are no guesses where the largest logit is not finite.
    """
    wait_for_inputs(IS_CHAINED)
    block = tl.arange(0, BLOCKS)
    best = tl.load(bests + block, mask=block < num_blocks, other=float("-inf"))
    is_sound = tl.max((best != best).to(tl.int32), 0) == 0
    top = tl.max(best, 0)
    is_sound = is_sound & (top > float("-inf")) & (top < float("inf"))
    candidate = tl.arange(0, CANDIDATES)
    inside = candidate < num_blocks * WIDTH
    score = tl.load(scores + candidate, mask=inside, other=float("-inf"))
    token = tl.load(ids + candidate, mask=inside, other=_NONE)
    row = outcome + tl.load(state + 3) * _SLOTS
    first = tl.max(score, 0)
    least = first - tl.load(settings + 5)
    lead = first - first + float("inf")
    count = 0
    for place in tl.static_range(WIDTH):
        best_score, best_id = best_and_first_id(score, token)
        if place == 1:
            lead = first - best_score
        is_guess = is_sound & (best_score > float("-inf")) & (best_score >= least) & (place < num_wanted)
        tl.store(row + 2 + place, tl.where(is_guess, best_id, -1).to(tl.int64))
        count += is_guess.to(tl.int32)
        score = tl.where(token == best_id, float("-inf"), score)
    tl.store(row, count.to(tl.int64))
    lead = tl.where(is_sound, lead, float("inf"))
    tl.store(row + 1, lead.to(tl.int64, bitcast=True))


@triton.jit
def begin_place_kernel(text, state, table, scale, rotations_cos, rotations_sin, x, cos, sin, factor,
                       HIDDEN: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
                       HAS_SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The first layer's input for the text's last token: its embedding, and the rotation of its place in the chain.

    table      see `embedding_of`
    rotations  cos, sin [places, HALF] float32
    x          [1, HIDDEN]; cos, sin [1, HALF]

    Grid (HIDDEN / BLOCK,).
    """
    wait_for_inputs(IS_CHAINED)
    token = tl.load(text + tl.load(state) - 1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    value = embedding_of(token, table, scale, column, mask, factor, x, HIDDEN, HAS_SCALE, HAS_FACTOR)
    tl.store(x + column, value, mask=mask)
    if tl.program_id(0) == 0:
        half = tl.arange(0, PADDED)
        at = tl.load(state + 3) * HALF + half
        tl.store(cos + half, tl.load(rotations_cos + at, mask=half < HALF, other=0.0), mask=half < HALF)
        tl.store(sin + half, tl.load(rotations_sin + at, mask=half < HALF, other=0.0), mask=half < HALF)


@triton.jit
def end_place_kernel(text, state, where, outcome, IS_CHAINED: tl.constexpr):
    """Append the best guess to the text, and go on to the next place of the chain. Grid (1,).

    where  int64 [2]: committed rows of the cache, and the slot of the next row: the row after them
    """
    wait_for_inputs(IS_CHAINED)
    length, place = tl.load(state), tl.load(state + 3)
    token = tl.load(outcome + place * _SLOTS + 2)
    # Without a guess the chain has ended: what follows is not read, but must be a token.
    tl.store(text + length, tl.maximum(token, 0).to(tl.int32))
    tl.store(state, length + 1)
    tl.store(state + 2, tl.load(state + 2) - 1)
    tl.store(state + 3, place + 1)
    committed = tl.load(where)
    tl.store(where, committed + 1)
    tl.store(where + 1, committed + 1)
