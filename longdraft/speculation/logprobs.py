"""Log-probabilities of the tokens that a step accepts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from longdraft.request.context import Context
from longdraft.request.events import TokenLogprob
from longdraft.request.tree import Tree
from longdraft.sampling.process import Support
from longdraft.sampling.sampler import Sampler


def path_logprobs(sampler: Sampler, logits: Tensor, tree: Tree, path: Sequence[int], tokens: Sequence[int],
                  context: Context, num: int) -> tuple[TokenLogprob, ...]:
    """The log-probability of each token, and the `num` likeliest tokens beside it.

    logits   [nodes, V] of the whole tree
    path     accepted nodes, root first; tokens[i] is the target's choice after path[i]
    context  the text before the step

    A token that a rule imposed has the log-probability 0.
    """
    if sampler.on_device:
        drafted = [tree.tokens[node] for node in path]
        return tuple(sampler.on_device.log_probabilities(logits[list(path)], drafted, tokens, context, num))
    prefixes = [[tree.tokens[node] for node in path[1 : depth + 1]] for depth in range(len(path))]
    supports = sampler.log_probabilities(logits[list(path)], context, prefixes)
    return tuple(TokenLogprob(token, 0.0) if node in sampler.imposed else _entry(token, support, num)
                 for node, token, support in zip(path, tokens, supports, strict=True))


def _entry(token: int, support: Support, num: int) -> TokenLogprob:
    index = int(np.searchsorted(support.ids, token))
    assert support.ids[index] == token, "the sampler chose a token outside its own support"
    return TokenLogprob(token, float(support.scores[index]), likeliest(support, num))


def likeliest(support: Support, num: int) -> tuple[tuple[int, float], ...]:
    """The `num` likeliest (token id, log-probability) pairs, best first; the smaller id among equals."""
    pool: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]] = np.arange(len(support.ids))
    if num < len(support.ids):
        threshold = -np.partition(-support.scores, max(0, num - 1))[max(0, num - 1)]
        pool = np.flatnonzero(support.scores >= threshold)
    best = sorted((-float(support.scores[i]), int(support.ids[i])) for i in pool)[:num]
    return tuple((token, -score) for score, token in best)
