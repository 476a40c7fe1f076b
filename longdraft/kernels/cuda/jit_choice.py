"""The token that the target takes behind each node of a tree, and the walk along the tree: what runs on the device.

The definition is longdraft/sampling (process, window, sampler) and longdraft/kernels/noise.py; the same bits come out
of the same logits: float64 arithmetic in the same order, without fused multiply-adds (launched with
enable_fp_fusion=False), the logarithm of longdraft/kernels/exact.py.

    about  int64 [4]: tokens of the text; mix(seed), its bits; tokens still to be written before it may end; not used
"""

import triton
import triton.language as tl

_NONE = tl.constexpr(2147483647)  # an id larger than any


@triton.jit
def mix(x):
    """The finaliser of splitmix64, as in noise.py; uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_bits(mixed_seed, position, token):
    """The 52 random bits of tokens at a position (both int64), as int64; mixed_seed: uint64."""
    key = mix(mixed_seed + position.to(tl.uint64) * 0xD1342543DE82EF95)
    return (mix(key + token.to(tl.uint64) * 0xAF251AF3B0F025B5) >> 12).to(tl.int64)


@triton.jit
def exact_log(x):
    """exact.log: natural logarithm of normal positive doubles."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    is_small = mantissa < 0.70710678118654752440
    mantissa = tl.where(is_small, mantissa * 2.0, mantissa)
    n = (exponent - is_small.to(tl.int64)).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * 0.0 + 2.0 / 23
    series = series * square + 2.0 / 21
    series = series * square + 2.0 / 19
    series = series * square + 2.0 / 17
    series = series * square + 2.0 / 15
    series = series * square + 2.0 / 13
    series = series * square + 2.0 / 11
    series = series * square + 2.0 / 9
    series = series * square + 2.0 / 7
    series = series * square + 2.0 / 5
    series = series * square + 2.0 / 3
    series = series * square + 2.0
    return n * 6.93147180369123816490e-01 + (n * 1.90821492927058770002e-10 + s * series)


@triton.jit
def gumbel(bits):
    """noise.from_bits."""
    u = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    return -exact_log(-exact_log(u))


@triton.jit
def first_best(score, token):
    """The best score and the smallest token that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, _NONE), 0)


@triton.jit(do_not_specialize=["window", "path_stride", "vocabulary"])
def read_window(logits, text, tokens, path, depths, about, found, values, window, path_stride, vocabulary,
                BLOCK: tl.constexpr):
    """Which tokens the penalty of each node sees, and their logits: found int32 and values float32, [R, window].

    text       ... a b c d e f g          a window of 4 ends with the root g
    at node y of g-x-y:  [f g x y]
    -1 where the text is shorter. Grid (R, window / BLOCK).
    """
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(about)
    end = length + tl.load(depths + row)
    position = end - 1 - place
    is_there = (place < window) & (position >= 0)
    is_text = is_there & (position < length)
    written = tl.load(text + position, mask=is_text, other=0)
    node = tl.load(path + row * path_stride + (position - length + 1), mask=is_there & (position >= length), other=0)
    drafted = tl.load(tokens + node, mask=is_there & (position >= length), other=0)
    token = tl.where(is_text, written, drafted)
    at = row.to(tl.int64) * window + place
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=is_there, other=0.0)
    tl.store(found + at, tl.where(is_there, token, -1), mask=place < window)
    tl.store(values + at, value, mask=place < window)


@triton.jit(do_not_specialize=["window", "vocabulary"])
def penalise(logits, found, values, window, penalty, vocabulary, BLOCK: tl.constexpr):
    """Write the penalised logits of found tokens. One that stands there twice is written twice, alike: all were read
    before. Grid (R, window / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * window + place
    token = tl.load(found + at, mask=place < window, other=-1)
    value = tl.load(values + at, mask=place < window, other=0.0)
    theta = tl.zeros([BLOCK], tl.float32) + penalty
    value = tl.where(value < 0, value * theta, tl.div_rn(value, theta))
    tl.store(logits + row * vocabulary + token, value, mask=token >= 0)


@triton.jit(do_not_specialize=["num_banned", "vocabulary"])
def ban(logits, banned, depths, about, num_banned, vocabulary, BLOCK: tl.constexpr):
    """-inf where a token would end the text too early. Grid (R,)."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    count = tl.where(tl.load(depths + row) < tl.load(about + 2), num_banned, 0)  # of tokens that would end it early
    token = tl.load(banned + index, mask=index < count, other=0)
    at = logits + row.to(tl.int64) * vocabulary + token
    tl.store(at, tl.zeros([BLOCK], tl.float32) + float("-inf"), mask=index < count)


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def largest(logits, bests, ids, vocabulary, num_blocks, BLOCK: tl.constexpr):
    """The largest logit of each block, NaN if there is one, and its smallest id. Grid (R, num_blocks)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    is_nan = tl.max((logit != logit).to(tl.int32), 0) > 0
    best, where = first_best(logit, token)
    at = row * num_blocks + tl.program_id(1)
    tl.store(bests + at, tl.where(is_nan, float("nan"), best))
    tl.store(ids + at, where)


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def with_noise(logits, bests, depths, about, settings, scores, ids, vocabulary, num_blocks, BLOCK: tl.constexpr,
               BLOCKS: tl.constexpr, HAS_LEAST: tl.constexpr):
    """The best of score + noise of each block over the support: scores float64, ids. Grid (R, num_blocks).

    settings  float64 [2]: temperature; log(min_p)
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    temperature = tl.load(settings)
    score = logit.to(tl.float64) / temperature
    is_inside = logit > float("-inf")
    if HAS_LEAST:
        block = tl.arange(0, BLOCKS)
        best = tl.max(tl.load(bests + row * num_blocks + block, mask=block < num_blocks, other=float("-inf")), 0)
        is_inside = is_inside & (score >= best.to(tl.float64) / temperature + tl.load(settings + 1))
    position = tl.load(about) + tl.load(depths + row)
    seed = tl.load(about + 1).to(tl.uint64, bitcast=True)
    total = score + gumbel(noise_bits(seed, position.to(tl.int64), token.to(tl.int64)))
    total = tl.where(is_inside, total, float("-inf"))
    best, where = first_best(total, token)
    at = row * num_blocks + tl.program_id(1)
    tl.store(scores + at, best)
    tl.store(ids + at, where)


@triton.jit(do_not_specialize=["num_blocks"])
def choose(bests, scores, ids, choices, num_blocks, BLOCKS: tl.constexpr):
    """The best of all blocks; -1 where the largest logit is not finite. Grid (R,)."""
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
    _, where = first_best(score, token)
    tl.store(choices + row, tl.where(is_sound, where, -1))


@triton.jit(do_not_specialize=["num_rows", "num_nodes"])
def walk(choices, tokens, parents, where, path, targets, outcome, num_rows, num_nodes, BLOCK: tl.constexpr):
    """From the root down while the choice is one of the children (the first of them). Grid (1,).

    path     int32 [num_rows]: the nodes, in order
    targets  int64 [num_rows]: where the cache keeps the rows of the path, from where[0] on; -1: it does not
    outcome  int32 [1 + 2 num_rows]: how many nodes; the nodes; the choices behind them
    """
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
