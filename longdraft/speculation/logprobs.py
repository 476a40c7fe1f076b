"""Log-probabilities of the tokens that a step accepts, and of those of a given text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from longdraft.errors import NumericalError
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.request.events import TokenLogprob
from longdraft.request.tree import Tree
from longdraft.sampling.process import Support
from longdraft.sampling.sampler import Sampler

_PIECE = 32  # rows whose logits are held together: 20 MB for a vocabulary of 152,000 tokens


def text_logprobs(model: Transformer, hidden: Tensor, tokens: Sequence[int], num: int) -> Iterator[TokenLogprob]:
    """The log-probability of each token of a given text, and the `num` likeliest tokens beside it, as the model has
    them: without penalty, temperature or filter.

    hidden  [R, hidden], the last layer's output for the token before each of `tokens`
    """
    for start in range(0, len(tokens), _PIECE):
        piece = slice(start, start + _PIECE)
        rows = model.logits(hidden[piece]).log_softmax(-1)
        following = torch.tensor(tokens[piece], device=rows.device)
        own, best = rows.gather(1, following[:, None])[:, 0], rows.topk(num)
        if not own.isfinite().all():
            raise NumericalError
        for token, logprob, ids, values in zip(tokens[piece], own.tolist(), best.indices.tolist(),
                                               best.values.tolist(), strict=True):
            top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            yield TokenLogprob(token, logprob, tuple(top))


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
