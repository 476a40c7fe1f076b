"""Triton kernels that choose the target's tokens at the nodes of trees, and walk along the accepted paths.

longdraft/sampling (process, window, sampler) and longdraft/kernels/noise.py define the result. These kernels compute
the same bits from the same logits: float64 arithmetic in the same order, without fused multiply-adds (they are launched
with enable_fp_fusion=False).

    rows     [ tree of text 0 | tree of text 1 | ... | padding ]     `texts` int32 [R]: the text of each row
    entries  int64 [T, ENTRY], one for each text; a padding text has no rows:

         0  the address of its tokens, int32                9  the address of banned tokens, int32
         1  their number, those of `fresh` included        10  their number
         2  the bits of splitmix64(seed)                   11  tokens of `fresh`
         3  tokens before the text may end                 12  whether the likeliest token is chosen (temperature 0)
         4  committed rows of the cache                    13  the temperature; 1 where the likeliest token is chosen
         5  the first of its rows                          14  log(min_p)
         6  their number                                   15  the filters' temperature
         7  the penalty's window; 0: no penalty            16  log(eta_cutoff)
         8  the penalty                                    17  top_p
        18  of guesses: the largest gap to the best one's score
        19  top_k, and                                     21  the address of tokens with a bias, int32
        20  tokens that are left at least: see             22  the address of the biases, float32
            `support.FilterRules.goals`                    23  their number

    8 and 13 to 18 are float64, which `numbers` points to. From 13 on an entry is the `settings` of `jit_support`. In
    chains of drafts (`jit_drafting`), 4 to 6 have another meaning.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_exact import exact_log
from longdraft.kernels.cuda.jit_support import SETTINGS, best_score_of, is_in_support

ENTRY = tl.constexpr(24)
_NONE = tl.constexpr(2147483647)  # larger than every token id and node


@triton.jit
def splitmix64(x):
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), as in noise.py; x is uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_bits(mixed_seed, position, token):
    """The 52 random bits of each token at a position: int64. mixed_seed is uint64, position and token are int64."""
    key = splitmix64(mixed_seed + position.to(tl.uint64) * 0xD1342543DE82EF95)
    return (splitmix64(key + token.to(tl.uint64) * 0xAF251AF3B0F025B5) >> 12).to(tl.int64)


@triton.jit
def gumbel_from_bits(bits):
    """As `noise.from_bits`: float64 Gumbel noise."""
    u = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    return -exact_log(-exact_log(u))


@triton.jit
def best_and_first_id(score, token):
    """The highest score, and the smallest token id that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, _NONE), 0)


@triton.jit
def tokens_at(entry, place: tl.constexpr):
    """The int32 whose address an entry holds."""
    return tl.load(entry + place).to(tl.pointer_type(tl.int32))


@triton.jit
def append_tokens_kernel(entries, fresh, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Write the tokens of fresh [T, BLOCK] int32 to the end of each text. Grid (T,)."""
    wait_for_inputs(IS_CHAINED)
    text = tl.program_id(0)
    entry = entries + text * ENTRY
    place, count = tl.arange(0, BLOCK), tl.load(entry + 11)
    token = tl.load(fresh + text * BLOCK + place, mask=place < count, other=0)
    tl.store(tokens_at(entry, 0) + (tl.load(entry + 1) - count) + place, token, mask=place < count)


@triton.jit
def read_filters_kernel(entries, numbers, texts, settings, most, fewest, IS_CHAINED: tl.constexpr):
    """What a search of `jit_support` reads of each row: settings float64 [R, 6], and goals int64 [R]. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, 8)
    entry = tl.load(texts + row).to(tl.int64) * ENTRY
    setting = tl.load(numbers + entry + 13 + place, mask=place < SETTINGS, other=0.0)
    tl.store(settings + row * SETTINGS + place, setting, mask=place < SETTINGS)
    tl.store(most + row, tl.load(entries + entry + 19))
    tl.store(fewest + row, tl.load(entries + entry + 20))


@triton.jit(do_not_specialize=["vocabulary"])
def add_bias_kernel(logits, entries, texts, vocabulary, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Add `logit_bias` to the logits of its distinct tokens. Grid (R, blocks of the longest bias)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    entry = entries + tl.load(texts + row).to(tl.int64) * ENTRY
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(entry + 23)
    token = tl.load(tokens_at(entry, 21) + index, mask=index < count, other=vocabulary)
    at = logits + row.to(tl.int64) * vocabulary + token
    value = tl.load(tl.load(entry + 22).to(tl.pointer_type(tl.float32)) + index, mask=index < count, other=0.0)
    tl.store(at, tl.load(at, mask=token < vocabulary, other=0.0) + value, mask=token < vocabulary)


@triton.jit
def token_before(text, tokens, path, length, end, place):
    """The tokens `place` before the end of a node's path, and where there are any.

    text    [length] int32: the request's tokens, the root last
    tokens  int32: the tree's tokens
    path    of the node
    end     tokens up to the node

        text ... a b c d e f g, drafted path g - x - y, window of 4     at node y: [y x g f]
    """
    position = end - 1 - place
    is_drafted = position >= length
    written = tl.load(text + position, mask=(position >= 0) & (position < length), other=0)
    node = tl.load(path + (position - length + 1), mask=is_drafted, other=0)
    drafted = tl.load(tokens + node, mask=is_drafted, other=0)
    return tl.where(is_drafted, drafted, written), position >= 0


@triton.jit(do_not_specialize=["window", "path_stride", "vocabulary"])
def read_window_kernel(logits, tokens, path, depths, entries, texts, found, values, window, path_stride, vocabulary,
                        BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The tokens in each node's penalty window, and their logits. Grid (R, window / BLOCK).

    tokens   [R] int32: of the trees
    path     int32 [R, path_stride]: of each row, the rows from its root to it
    window   the longest one of all texts, with which `found` is laid out
    found    [R, window] int32: token ids, -1 where the text is shorter than its window
    values   [R, window] float32: their logits
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = entries + tl.load(texts + row).to(tl.int64) * ENTRY
    length = tl.load(entry + 1)
    token, is_there = token_before(tokens_at(entry, 0), tokens, path + row * path_stride, length,
                                   length + tl.load(depths + row), tl.where(place < tl.load(entry + 7), place, _NONE))
    at = row.to(tl.int64) * window + place
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=is_there, other=0.0)
    tl.store(found + at, tl.where(is_there, token, -1), mask=place < window)
    tl.store(values + at, value, mask=place < window)


@triton.jit
def penalised(value, theta):
    """Logits with the repetition penalty theta, both float32."""
    return tl.where(value < 0, value * theta, tl.div_rn(value, theta))


@triton.jit(do_not_specialize=["window", "vocabulary"])
def penalise_kernel(logits, entries, numbers, texts, found, values, window, vocabulary, BLOCK: tl.constexpr,
                    IS_CHAINED: tl.constexpr):
    """Write the penalised logits of the found tokens. Grid (R, window / BLOCK).

    A token that occurs twice is written twice with the same value, because all logits were read before.
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(texts + row).to(tl.int64) * ENTRY
    is_inside = place < tl.load(entries + entry + 7)
    at = row * window + place
    token = tl.load(found + at, mask=is_inside, other=-1)
    value = tl.load(values + at, mask=is_inside, other=0.0)
    penalty = tl.load(numbers + entry + 8).to(tl.float32)
    value = penalised(value, tl.zeros([BLOCK], tl.float32) + penalty)
    tl.store(logits + row * vocabulary + token, value, mask=token >= 0)


@triton.jit(do_not_specialize=["vocabulary"])
def ban_kernel(logits, depths, entries, texts, vocabulary, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Set the logits of tokens that would end a text too early to -inf. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    entry = entries + tl.load(texts + row).to(tl.int64) * ENTRY
    count = tl.where(tl.load(depths + row) < tl.load(entry + 3), tl.load(entry + 10), 0)
    token = tl.load(tokens_at(entry, 9) + index, mask=index < count, other=0)
    at = logits + row.to(tl.int64) * vocabulary + token
    tl.store(at, tl.zeros([BLOCK], tl.float32) + float("-inf"), mask=index < count)


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def block_maxima_kernel(logits, bests, ids, vocabulary, num_blocks, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The largest logit of each block (NaN if the block has one) and its smallest id. Grid (R, num_blocks)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    is_nan = tl.max((logit != logit).to(tl.int32), 0) > 0
    best, best_id = best_and_first_id(logit, token)
    at = row * num_blocks + tl.program_id(1)
    tl.store(bests + at, tl.where(is_nan, float("nan"), best))
    tl.store(ids + at, best_id)


@triton.jit
def noisy_scores(logit, token, row, position, bests, seed, settings, cuts, floors, leasts, num_blocks,
                 BLOCKS: tl.constexpr, HAS_CUT: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_ETA: tl.constexpr,
                 HAS_FLOOR: tl.constexpr):
    """Score + noise of a row's tokens at a position, float64; -inf where the filters remove the token.

    seed  a pointer to the bits of splitmix64(seed). The rest is as in `jit_support`
    """
    best = best_score_of(bests, row, settings, num_blocks, BLOCKS)
    is_inside = is_in_support(logit, token, row, best, cuts, floors, leasts, settings, HAS_CUT, HAS_MIN_P, HAS_ETA,
                              HAS_FLOOR)
    total = tl.where(is_inside, 0.0, float("-inf")).to(tl.float64)
    if tl.max(is_inside.to(tl.int32), 0) > 0:  # logarithms in float64 are slow on GeForce cards
        mixed = tl.load(seed).to(tl.uint64, bitcast=True)
        noise = gumbel_from_bits(noise_bits(mixed, position.to(tl.int64), token.to(tl.int64)))
        total = tl.where(is_inside, logit.to(tl.float64) / tl.load(settings) + noise, total)
    return total


@triton.jit(do_not_specialize=["vocabulary", "num_blocks", "ahead"])
def best_in_blocks_kernel(logits, bests, depths, entries, numbers, texts, cuts, floors, leasts, scores, ids,
                          vocabulary, num_blocks, ahead, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                          WIDTH: tl.constexpr, HAS_NOISE: tl.constexpr, HAS_CUT: tl.constexpr,
                          HAS_MIN_P: tl.constexpr, HAS_ETA: tl.constexpr, HAS_FLOOR: tl.constexpr,
                          IS_CHAINED: tl.constexpr):
    """The WIDTH best tokens of each block, best first: scores float64 and ids int32 [R, num_blocks, WIDTH].

    ahead  unknown tokens between the text and the rows: the noise is that of the rows' own positions

    The score is the logit / temperature + noise of the tokens that the filters leave, or the logit where the likeliest
    token is chosen, or where no text has noise (HAS_NOISE). It is -inf where the filters, or the block, leave fewer
    tokens. Grid (R, num_blocks).
    """
    wait_for_inputs(IS_CHAINED)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    total = logit.to(tl.float64)
    if HAS_NOISE:
        place = tl.load(texts + row).to(tl.int64) * ENTRY
        entry, settings = entries + place, numbers + place + 13
        position = tl.load(entry + 1) + tl.load(depths + row) + ahead
        total = noisy_scores(logit, token, row, position, bests, entry + 2, settings, cuts, floors, leasts, num_blocks,
                             BLOCKS, HAS_CUT, HAS_MIN_P, HAS_ETA, HAS_FLOOR)
        total = tl.where(tl.load(entry + 12) > 0, logit.to(tl.float64), total)
    at = (row * num_blocks + block) * WIDTH
    for place_of_token in tl.static_range(WIDTH):
        best_score, best_id = best_and_first_id(total, token)
        tl.store(scores + at + place_of_token, best_score)
        tl.store(ids + at + place_of_token, best_id)
        total = tl.where(token == best_id, float("-inf"), total)


@triton.jit
def is_sound(bests, row, num_blocks, BLOCKS: tl.constexpr):
    """Whether the largest logit of a row is finite, from the largest one of each block."""
    block = tl.arange(0, BLOCKS)
    best = tl.load(bests + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    top = tl.max(best, 0)
    return (tl.max((best != best).to(tl.int32), 0) == 0) & (top > float("-inf")) & (top < float("inf"))


@triton.jit(do_not_specialize=["num_blocks"])
def choose_tokens_kernel(bests, scores, ids, choices, num_blocks, BLOCKS: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The id with the highest score of all blocks; -1 where the largest logit is not finite. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    at = row * num_blocks + block
    is_block = block < num_blocks
    score = tl.load(scores + at, mask=is_block, other=float("-inf"))
    token = tl.load(ids + at, mask=is_block, other=_NONE)
    _, best_id = best_and_first_id(score, token)
    tl.store(choices + row, tl.where(is_sound(bests, row, num_blocks, BLOCKS), best_id, -1))


@triton.jit(do_not_specialize=["num_rows"])
def walk_trees_kernel(choices, tokens, parents, entries, path, targets, outcome, num_rows, BLOCK: tl.constexpr,
                      IS_CHAINED: tl.constexpr):
    """Walk each tree from the root to the child that holds the chosen token, as long as there is one. Grid (T,).

    Of several children with that token, the first is taken.

    parents  int32 [R]: rows, of all texts
    path     int32 [R]: in the rows of each text the rows of its walk, in order; then the first of its rows
    targets  int64 [R]: the positions of those rows in the text's cache; -1 for the rest
    outcome  int32 [T + 2 R]: the length of each walk; its rows; the choices at them
    """
    wait_for_inputs(IS_CHAINED)
    text, num_texts = tl.program_id(0), tl.num_programs(0)
    entry = entries + text * ENTRY
    first, count = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
    index = tl.arange(0, BLOCK)
    is_own = (index >= first) & (index < first + count)
    parent = tl.load(parents + index, mask=is_own, other=-2)
    token = tl.load(tokens + index, mask=is_own, other=-2)
    tl.store(targets + index, tl.zeros([BLOCK], tl.int64) - 1, mask=is_own)
    tl.store(path + index, tl.zeros([BLOCK], tl.int32) + first, mask=is_own)
    tl.debug_barrier()
    length = tl.load(entry + 4)
    node = tl.where(count > 0, first, _NONE)
    walked = 0
    while node != _NONE:
        choice = tl.load(choices + node)
        at = first + walked
        tl.store(path + at, node)
        tl.store(targets + at, length + walked)
        tl.store(outcome + num_texts + at, node)
        tl.store(outcome + num_texts + num_rows + at, choice)
        walked += 1
        node = tl.min(tl.where(is_own & (parent == node) & (token == choice), index, _NONE), 0)
    tl.store(outcome + text, walked)
