"""A sampler that remembers how likely the tokens were that became text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from longdraft.core import Context, SamplingParams, TokenLogprob
from longdraft.sampling.process import Support
from longdraft.sampling.sampler import NO_TOKEN, Sampler
from longdraft.speculation.verify import walk
from longdraft.tree import Tree


class Recorder(Sampler):
    """Chooses as `Sampler` does. For the target's own choices only: a drafter that asks would be recorded too.

    num  likeliest tokens to remember beside each chosen one
    """

    def __init__(self, params: SamplingParams, banned: Iterable[int], is_fast: bool, num: int) -> None:
        super().__init__(params, banned, is_fast)
        self._num = num
        self.last: list[TokenLogprob] = []  # of the tokens of the last step

    def choose(self, logits: Tensor, tree: Tree, context: Context) -> list[int]:
        choices = super().choose(logits, tree, context)
        path = walk(tree, choices)
        paths = [[tree.tokens[node] for node in path[1 : depth + 1]] for depth in range(len(path))]
        tokens = [choices[node] for node in path]
        if NO_TOKEN not in tokens:  # else the step raises
            kept = self.log_probabilities(logits[list(path)], context, paths)
            self.last = [_entry(token, support, self._num) for token, support in zip(tokens, kept, strict=True)]
        return choices


def _entry(token: int, kept: Support, num: int) -> TokenLogprob:
    place = int(np.searchsorted(kept.ids, token))
    assert kept.ids[place] == token, "the law chose what it may not choose"
    return TokenLogprob(token, float(kept.scores[place]), likeliest(kept, num))


def likeliest(kept: Support, num: int) -> tuple[tuple[int, float], ...]:
    """The `num` likeliest (id, log-probability), best first; the smaller id among equals."""
    pool: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]] = np.arange(len(kept.ids))
    if num < len(kept.ids):
        pool = np.flatnonzero(kept.scores >= -np.partition(-kept.scores, max(0, num - 1))[max(0, num - 1)])
    best = sorted((-float(kept.scores[i]), int(kept.ids[i])) for i in pool)[:num]
    return tuple((token, -score) for score, token in best)
