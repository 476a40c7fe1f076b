"""Triton kernels that rank a drafter's guesses, and lead a chain of drafts from one token to the next.

longdraft/sampling/sampler.py (`Sampler.ranked`) defines the ranking. These kernels compute the same scores from the
same logits, as those of `jit_choice`, whose helpers they use.

The chain of a text has one row. Its entry (`jit_choice`) has its settings, and says where it is: 1 is the number of the
text's tokens, drafted ones included, 3 the tokens that must still be written before the text may end, 4 the place of
the next token in the chain, 5 the places of the chain, 6 the guesses that are wanted at each.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_choice import _NONE, ENTRY, best_and_first_id, is_sound, tokens_at
from longdraft.kernels.cuda.jit_rows import embedding_of

# int64 of a place's outcome: number of guesses; bits of the lead; up to 16 guesses, and the bits of their scores
_SLOTS = tl.constexpr(34)
_SCORES = tl.constexpr(18)


@triton.jit(do_not_specialize=["num_blocks"])
def rank_kernel(bests, scores, ids, entries, numbers, outcome, num_blocks, BLOCKS: tl.constexpr,
                CANDIDATES: tl.constexpr, WIDTH: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The best guesses of all blocks. Grid (R,).

    outcome  int64 [places, R, 34]: the row of the chain's next place gets the number of guesses, the bits of the
             lead (float64), the guesses, best first, and the bits of their scores (float64)

    There are no guesses where the largest logit is not finite.
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    entry = entries + row * ENTRY
    has_guesses = is_sound(bests, row, num_blocks, BLOCKS)
    candidate = tl.arange(0, CANDIDATES)
    inside = candidate < num_blocks * WIDTH
    at = row * num_blocks * WIDTH + candidate
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    token = tl.load(ids + at, mask=inside, other=_NONE)
    out = outcome + (tl.load(entry + 4) * tl.num_programs(0) + row) * _SLOTS
    num_wanted = tl.load(entry + 6)
    first = tl.max(score, 0)
    least = first - tl.load(numbers + row * ENTRY + 18)
    lead = first - first + float("inf")
    count = 0
    for place in tl.static_range(WIDTH):
        best_score, best_id = best_and_first_id(score, token)
        if place == 1:
            lead = first - best_score
        is_guess = has_guesses & (best_score > float("-inf")) & (best_score >= least) & (place < num_wanted)
        tl.store(out + 2 + place, tl.where(is_guess, best_id, -1).to(tl.int64))
        tl.store(out + _SCORES + place, best_score.to(tl.int64, bitcast=True))
        count += is_guess.to(tl.int32)
        score = tl.where(token == best_id, float("-inf"), score)
    tl.store(out, count.to(tl.int64))
    lead = tl.where(has_guesses, lead, float("inf"))
    tl.store(out + 1, lead.to(tl.int64, bitcast=True))


@triton.jit
def begin_place_kernel(entries, table, scale, rotations, x, cos, sin, factor, HIDDEN: tl.constexpr,
                       HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALE: tl.constexpr,
                       HAS_FACTOR: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr,
                       IS_CHAINED: tl.constexpr):
    """The first layer's input for the text's last token: its embedding, and the rotation of its place in the chain.

    table      see `embedding_of`
    rotations  [places, R, 2, HALF] float32: cos and sin
    x          [R, HIDDEN]; cos, sin [R, HALF]

    Grid (HIDDEN / BLOCK, R).
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(1).to(tl.int64)
    entry = entries + row * ENTRY
    token = tl.load(tokens_at(entry, 0) + tl.load(entry + 1) - 1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    value = embedding_of(token, table, scale, column, mask, factor, x, HIDDEN, HAS_SCALE, HAS_FACTOR,
                         BITS, FORM, OFFSET)
    tl.store(x + row * HIDDEN + column, value, mask=mask)
    if tl.program_id(0) == 0:
        half = tl.arange(0, PADDED)
        is_half = half < HALF
        at = rotations + (tl.load(entry + 4) * tl.num_programs(1) + row) * 2 * HALF + half
        tl.store(cos + row * HALF + half, tl.load(at, mask=is_half, other=0.0), mask=is_half)
        tl.store(sin + row * HALF + half, tl.load(at + HALF, mask=is_half, other=0.0), mask=is_half)


@triton.jit
def end_place_kernel(entries, where, outcome, IS_CHAINED: tl.constexpr):
    """Append the best guess to the text, and go on to the next place of the chain, if there is one. Grid (R,).

    where  int64 [R, 2]: committed rows of the cache, and the slot of the next row: the row after them

    After its chain a text stays where it is, while other texts go on. What it then computes is not read.
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    entry = entries + row * ENTRY
    where += row * 2
    length, place = tl.load(entry + 1), tl.load(entry + 4)
    token = tl.load(outcome + (place * tl.num_programs(0) + row) * _SLOTS + 2)
    if place < tl.load(entry + 5):
        # Without a guess the chain has ended: what follows is not read, but must be a token.
        tl.store(tokens_at(entry, 0) + length, tl.maximum(token, 0).to(tl.int32))
        tl.store(entry + 1, length + 1)
        tl.store(entry + 3, tl.load(entry + 3) - 1)
        tl.store(entry + 4, place + 1)
        committed = tl.load(where)
        tl.store(where, committed + 1)
        tl.store(where + 1, committed + 1)
