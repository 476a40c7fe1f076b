"""Triton kernels that choose the tokens of several texts at once: `jit_choice` with settings that a table holds.

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

    8 and 13 to 18 are float64, which `numbers` points to. From 13 on an entry is the `settings` of `jit_support` and
    `jit_drafting`. A chain of drafts has one row for each text. From 1 on its entry is the `state` of `jit_drafting`: 4
    is the place in the chain, 5 the number of its places, 6 the number of guesses.

Both files call the same functions for a number, so a text has the tokens that it has alone.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_choice import _NONE, best_and_first_id, noisy_scores, penalised, token_before

ENTRY = tl.constexpr(24)
_SETTINGS = tl.constexpr(6)


@triton.jit
def _tokens_at(entry, place: tl.constexpr):
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
    tl.store(_tokens_at(entry, 0) + (tl.load(entry + 1) - count) + place, token, mask=place < count)


@triton.jit
def read_filters_kernel(entries, numbers, texts, settings, most, fewest, IS_CHAINED: tl.constexpr):
    """What a search of `jit_support` reads of each row: settings float64 [R, 6], and goals int64 [R]. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, 8)
    entry = tl.load(texts + row).to(tl.int64) * ENTRY
    setting = tl.load(numbers + entry + 13 + place, mask=place < _SETTINGS, other=0.0)
    tl.store(settings + row * _SETTINGS + place, setting, mask=place < _SETTINGS)
    tl.store(most + row, tl.load(entries + entry + 19))
    tl.store(fewest + row, tl.load(entries + entry + 20))


@triton.jit(do_not_specialize=["vocabulary"])
def add_biases_kernel(logits, entries, texts, vocabulary, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """As `jit_choice.add_bias_kernel`. Grid (R, blocks)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    entry = entries + tl.load(texts + row).to(tl.int64) * ENTRY
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(entry + 23)
    token = tl.load(_tokens_at(entry, 21) + index, mask=index < count, other=vocabulary)
    at = logits + row.to(tl.int64) * vocabulary + token
    value = tl.load(tl.load(entry + 22).to(tl.pointer_type(tl.float32)) + index, mask=index < count, other=0.0)
    tl.store(at, tl.load(at, mask=token < vocabulary, other=0.0) + value, mask=token < vocabulary)


@triton.jit(do_not_specialize=["window", "path_stride", "vocabulary"])
def read_windows_kernel(logits, tokens, path, depths, entries, texts, found, values, window, path_stride, vocabulary,
                        BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """As `jit_choice.read_window_kernel`. window: the longest one of all texts, with which `found` is laid out."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = entries + tl.load(texts + row).to(tl.int64) * ENTRY
    length = tl.load(entry + 1)
    token, is_there = token_before(_tokens_at(entry, 0), tokens, path + row * path_stride, length,
                                   length + tl.load(depths + row), tl.where(place < tl.load(entry + 7), place, _NONE))
    at = row.to(tl.int64) * window + place
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=is_there, other=0.0)
    tl.store(found + at, tl.where(is_there, token, -1), mask=place < window)
    tl.store(values + at, value, mask=place < window)


@triton.jit(do_not_specialize=["window", "vocabulary"])
def penalise_texts_kernel(logits, entries, numbers, texts, found, values, window, vocabulary, BLOCK: tl.constexpr,
                          IS_CHAINED: tl.constexpr):
    """As `jit_choice.penalise_kernel`."""
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
def ban_texts_kernel(logits, depths, entries, texts, vocabulary, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """As `jit_choice.ban_kernel`. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    entry = entries + tl.load(texts + row).to(tl.int64) * ENTRY
    count = tl.where(tl.load(depths + row) < tl.load(entry + 3), tl.load(entry + 10), 0)
    token = tl.load(_tokens_at(entry, 9) + index, mask=index < count, other=0)
    at = logits + row.to(tl.int64) * vocabulary + token
    tl.store(at, tl.zeros([BLOCK], tl.float32) + float("-inf"), mask=index < count)


@triton.jit(do_not_specialize=["vocabulary", "num_blocks"])
def noisy_maxima_of_texts_kernel(logits, bests, depths, entries, numbers, texts, cuts, floors, leasts, scores, ids,
                                 vocabulary, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                                 HAS_CUT: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_ETA: tl.constexpr,
                                 HAS_FLOOR: tl.constexpr, IS_CHAINED: tl.constexpr):
    """As `jit_choice.noisy_block_maxima_kernel`; the largest logits where the likeliest token is chosen. Grid
    (R, num_blocks)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(texts + row).to(tl.int64) * ENTRY
    entry, settings = entries + place, numbers + place + 13
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    position = tl.load(entry + 1) + tl.load(depths + row)
    total = noisy_scores(logit, token, row, position, bests, entry + 2, settings, cuts, floors, leasts, num_blocks,
                         BLOCKS, HAS_CUT, HAS_MIN_P, HAS_ETA, HAS_FLOOR)
    total = tl.where(tl.load(entry + 12) > 0, logit.to(tl.float64), total)
    best, best_id = best_and_first_id(total, token)
    at = row * num_blocks + tl.program_id(1)
    tl.store(scores + at, best)
    tl.store(ids + at, best_id)


@triton.jit(do_not_specialize=["num_rows"])
def walk_trees_kernel(choices, tokens, parents, entries, path, targets, outcome, num_rows, BLOCK: tl.constexpr,
                      IS_CHAINED: tl.constexpr):
    """As `jit_choice.walk_tree_kernel`, for the tree of each text. Grid (T,).

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
