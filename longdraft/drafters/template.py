"""Static trees of guesses, and their guesses from trained heads: which ranks of the guesses at each depth are combined.

    "1,3"                  widths: the best first token, its three best successors
    "0 0.0 1 0.1"          Medusa's choices: each node as the ranks from the root (0 is the best)
    "mc_sim_7b_63"         Medusa's published choices for Vicuna 7B
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor

from longdraft.errors import UsageError, check
from longdraft.kernels.chain_plan import ChainPlan, Heads, TrainedHeads
from longdraft.kernels.launched import LaunchedWork
from longdraft.request.context import Context
from longdraft.sampling.sampler import Sampler

MAX_NODES = 1024
# 63 nodes (10, 28, 23 and 2 at depths 1 to 4), grown by expected acceptance on a calibration set (Medusa, 2.1.2).
PUBLISHED = {"mc_sim_7b_63": (
    "0 1 2 3 4 5 6 7 8 9 "
    "0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0 1.1 1.2 1.3 1.4 1.5 1.6 2.0 2.1 2.2 3.0 3.1 4.0 5.0 6.0 7.0 8.0 9.0 "
    "0.0.0 0.0.1 0.0.2 0.0.3 0.0.4 0.0.5 0.0.6 0.0.7 0.0.8 0.0.9 0.1.0 0.1.1 0.1.2 0.2.0 0.2.1 0.3.0 0.4.0 0.5.0 "
    "0.6.0 0.7.0 1.0.0 1.0.1 2.0.0 "
    "0.0.0.0 0.0.0.1")}

Choices = tuple[tuple[int, ...], ...]


def parse_template(text: str) -> Choices:
    """The nodes of a template as paths of ranks, parents first. UsageError for a text that is no template."""
    text = PUBLISHED.get(text, text)
    try:
        if "." in text or " " in text.strip():
            choices = {tuple(int(rank) for rank in word.split(".")) for word in text.split()}
        else:
            choices = set(_product([int(width) for width in text.strip("[]").split(",")]))
    except ValueError as error:
        raise UsageError(f"tree is {text!r}; allowed: widths such as 1,3, choices such as '0 1 0.0', or "
                         f"{', '.join(PUBLISHED)}") from error
    check(0 < len(choices) <= MAX_NODES, "tree", text, f"1 to {MAX_NODES} nodes")
    check(all(rank >= 0 for path in choices for rank in path), "tree", text, "ranks of 0 or more")
    orphan = next((path for path in sorted(choices) if len(path) > 1 and path[:-1] not in choices), None)
    check(orphan is None, "tree", text, f"each node's parent, that of {orphan} too")
    return tuple(sorted(choices, key=lambda path: (len(path), path)))


def _product(widths: list[int]) -> Iterable[tuple[int, ...]]:
    """Every combination of ranks below the widths, depth by depth."""
    total = 0
    for depth in range(1, len(widths) + 1):
        check(widths[depth - 1] >= 1, "tree", widths, "whole numbers of 1 or more, such as 1,3")
        for path in itertools.product(*(range(width) for width in widths[:depth])):
            total += 1
            check(total <= MAX_NODES, "tree", widths, f"at most {MAX_NODES} nodes")
            yield path


def depth(choices: Choices) -> int:
    """Depth of the deepest node."""
    return len(choices[-1])


def ranked_heads(sampler: Sampler, heads: Heads | None, hidden: Tensor, first: Tensor | None, context: Context,
                 path: Sequence[int], widths: Sequence[int]) -> LaunchedWork[list[list[int]]]:
    """The guesses of heads after `path`, place by place: widths[i] at place i, best first.

    hidden  [1, hidden], the last layer's output of the row in front of the first place
    first   logits [1, V] of the first place, if it is not predicted by a head
    path    drafted tokens after the text, without the root

    Step by step, the sampler ranks a row of logits at a time.
    """
    if heads:
        ranker = sampler.ranker(context, heads.vocabulary, max(widths))
        plan = ChainPlan(TrainedHeads(heads, hidden, first), (context.last, *path), len(widths))
        ranked = None if ranker is None else (yield from ranker.draft(plan))
        if ranked is not None:
            return [tokens[:width] for (tokens, _), width in zip(ranked, widths, strict=True)]
    logits = [] if first is None else [*first]
    if heads and len(widths) > len(logits):
        logits += [*heads.logits(hidden)]
    return [sampler.ranked(row, context, path, width, ahead).tokens
            for ahead, (row, width) in enumerate(zip(logits, widths, strict=False))]
