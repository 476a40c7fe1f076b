"""Triton kernels that choose the target's token at each node of a tree, and walk along the accepted path.

longdraft/sampling (process, window, sampler) and longdraft/kernels/noise.py define the result. These kernels compute
the same bits from the same logits: float64 arithmetic in the same order, without fused multiply-adds (they are launched
with enable_fp_fusion=False).

    scalars  int64 [4]: tokens of the request; the bits of splitmix64(seed); tokens that must still be written before
             the text may end; committed rows of the cache (`walk_tree_kernel` gets a pointer to this one)
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_exact import exact_log
from longdraft.kernels.cuda.jit_support import best_score_of, is_in_support

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
def read_window_kernel(logits, text, tokens, path, depths, scalars, found, values, window, path_stride, vocabulary,
                       BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The tokens in each node's penalty window, and their logits. Grid (R, window / BLOCK).

    text     [length] int32: the request's tokens, the root last
    tokens   [R] int32: the tree's tokens
    found    [R, window] int32: token ids, -1 where the text is shorter than the window
    values   [R, window] float32: their logits
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(scalars)
    token, is_there = token_before(text, tokens, path + row * path_stride, length, length + tl.load(depths + row),
                                   tl.where(place < window, place, _NONE))
    at = row.to(tl.int64) * window + place
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=is_there, other=0.0)
    tl.store(found + at, tl.where(is_there, token, -1), mask=place < window)
    tl.store(values + at, value, mask=place < window)


@triton.jit(do_not_specialize=["num_biased", "vocabulary"])
def add_bias_kernel(logits, biased, values, num_biased, vocabulary, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Add `logit_bias`: values [num_biased] float32 to the logits of the distinct tokens `biased`. Grid (R, blocks)."""
    wait_for_inputs(IS_CHAINED)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(biased + index, mask=index < num_biased, other=vocabulary)
    at = logits + tl.program_id(0).to(tl.int64) * vocabulary + token
    value = tl.load(values + index, mask=index < num_biased, other=0.0)
    tl.store(at, tl.load(at, mask=token < vocabulary, other=0.0) + value, mask=token < vocabulary)


@triton.jit
def penalised(value, theta):
    """Logits with the repetition penalty theta, both float32."""
    return tl.where(value < 0, value * theta, tl.div_rn(value, theta))


@triton.jit(do_not_specialize=["window", "vocabulary"])
def penalise_kernel(logits, found, values, window, penalty, vocabulary, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Write the penalised logits of the found tokens. Grid (R, window / BLOCK).

    A token that occurs twice is written twice with the same value, because all logits were read before.
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * window + place
    token = tl.load(found + at, mask=place < window, other=-1)
    value = tl.load(values + at, mask=place < window, other=0.0)
    value = penalised(value, tl.zeros([BLOCK], tl.float32) + penalty)
    tl.store(logits + row * vocabulary + token, value, mask=token >= 0)


@triton.jit(do_not_specialize=["num_banned", "vocabulary"])
def ban_kernel(logits, banned, depths, scalars, num_banned, vocabulary, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Set the logits of tokens that would end the text too early to -inf. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    count = tl.where(tl.load(depths + row) < tl.load(scalars + 2), num_banned, 0)
    token = tl.load(banned + index, mask=index < count, other=0)
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
    mixed = tl.load(seed).to(tl.uint64, bitcast=True)
    noise = gumbel_from_bits(noise_bits(mixed, position.to(tl.int64), token.to(tl.int64)))
    return tl.where(is_inside, logit.to(tl.float64) / tl.load(settings) + noise, float("-inf"))


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def noisy_block_maxima_kernel(logits, bests, depths, scalars, settings, cuts, floors, leasts, scores, ids, vocabulary,
                              num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HAS_CUT: tl.constexpr,
                              HAS_MIN_P: tl.constexpr, HAS_ETA: tl.constexpr, HAS_FLOOR: tl.constexpr,
                              IS_CHAINED: tl.constexpr):
    """The maximum of score + noise in each block, over the support: scores float64, ids. Grid (R, num_blocks)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    position = tl.load(scalars) + tl.load(depths + row)
    total = noisy_scores(logit, token, row, position, bests, scalars + 1, settings, cuts, floors, leasts, num_blocks,
                         BLOCKS, HAS_CUT, HAS_MIN_P, HAS_ETA, HAS_FLOOR)
    best, best_id = best_and_first_id(total, token)
    at = row * num_blocks + tl.program_id(1)
    tl.store(scores + at, best)
    tl.store(ids + at, best_id)


@triton.jit(do_not_specialize=["num_blocks"])
def choose_tokens_kernel(bests, scores, ids, choices, num_blocks, BLOCKS: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The id with the highest score of all blocks; -1 where the largest logit is not finite. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    at = row * num_blocks + block
    is_block = block < num_blocks
    best = tl.load(bests + at, mask=is_block, other=float("-inf"))
    is_sound = tl.max((best != best).to(tl.int32), 0) == 0
    top = tl.max(best, 0)
    is_sound = is_sound & (top > float("-inf")) & (top < float("inf"))
    score = tl.load(scores + at, mask=is_block, other=float("-inf"))
    token = tl.load(ids + at, mask=is_block, other=_NONE)
    _, best_id = best_and_first_id(score, token)
    tl.store(choices + row, tl.where(is_sound, best_id, -1))


@triton.jit(do_not_specialize=["num_rows", "num_nodes"])
def walk_tree_kernel(choices, tokens, parents, where, path, targets, outcome, num_rows, num_nodes, BLOCK: tl.constexpr,
                     IS_CHAINED: tl.constexpr):
    """Walk from the root to the child that holds the chosen token, as long as there is one. Grid (1,).

    Of several children with that token, the first is taken.

    where    int64 [1]: committed rows of the cache
    path     int32 [num_rows]: the nodes of the walk, in order
    targets  int64 [num_rows]: the cache positions of the path's rows, from where[0] on; -1 for the rest
    outcome  int32 [1 + 2 num_rows]: number of nodes; the nodes; the choices at them
    """
    wait_for_inputs(IS_CHAINED)
    index = tl.arange(0, BLOCK)
    is_node = (index > 0) & (index < num_nodes)
    parent = tl.load(parents + index, mask=is_node, other=-2)
    token = tl.load(tokens + index, mask=is_node, other=-2)
    tl.store(targets + index, tl.zeros([BLOCK], tl.int64) - 1, mask=index < num_rows)
    tl.store(path + index, tl.zeros([BLOCK], tl.int32), mask=index < num_rows)
    tl.debug_barrier()
    length = tl.load(where)
    node = 0
    count = 0
    while node != _NONE:
        choice = tl.load(choices + node)
        tl.store(path + count, node)
        tl.store(targets + count, length + count)
        tl.store(outcome + 1 + count, node)
        tl.store(outcome + 1 + num_rows + count, choice)
        count += 1
        node = tl.min(tl.where(is_node & (parent == node) & (token == choice), index, _NONE), 0)
    tl.store(outcome, count)
