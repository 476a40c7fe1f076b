"""The one loop's body: propose, forward, choose, walk, commit, observe."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from longdraft.cache.full import KVCache
from longdraft.core import Context
from longdraft.errors import NumericalError
from longdraft.model.routine import Routine
from longdraft.model.transformer import ForwardRequest, Transformer, tree_rows
from longdraft.sampling.sampler import NO_TOKEN, Sampler
from longdraft.speculation.drafter import Accepted, Counts, Drafter, Verified
from longdraft.speculation.verify import decide


@dataclass
class Timings:
    """Seconds spent in each part of the steps so far (monotonic wall clock; among other texts, with theirs)."""

    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    commit: float = 0.0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)


@dataclass
class Tally:
    """Counts of the steps so far, by the drafter that made each guess."""

    steps: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)


class Step(NamedTuple):
    """The moving parts of one request."""

    model: Transformer
    cache: KVCache
    drafter: Drafter
    sampler: Sampler
    context: Context
    timings: Timings
    tally: Tally

    def uncount(self, accepted: Accepted, count: int) -> None:
        """The last `count` tokens of the last step lie behind the text's end."""
        self.tally.accepted.subtract(accepted.sources[len(accepted.tokens) - count :])
        if isinstance(self.drafter, Counts):
            self.drafter.cut(count)

    def run(self, max_tokens: int) -> Routine[Accepted]:
        """One step: at least one token, at most `max_tokens`, appended to the context."""
        model, cache, drafter, sampler, context, timings, tally = self
        with timings.measure("draft"):
            tree = (yield from drafter.propose(context, max_tokens - 1)).pruned(max_tokens - 1)
            assert tree.tokens[0] == context.last, "a tree grows on the last token of the text"
        with timings.measure("verify"):
            result = yield ForwardRequest(model, tree_rows(tree, len(context) - 1), cache, len(tree))
        with timings.measure("sample"):
            path, choices = decide(sampler, result.logits, tree, context, cache)
            if NO_TOKEN in choices:
                raise NumericalError("the model's logits are not finite; its weights may be damaged")
        with timings.measure("commit"):
            cache.commit(path)
            context.extend(choices)
        accepted = Accepted(tuple(choices), tuple(path),
                            tuple(tree.sources[node] for node in path[1:]), Verified(result, path),
                            len(tree) - 1, max(tree.depths))
        with timings.measure("draft"):
            drafter.observe(context, accepted)
        tally.steps += 1
        tally.drafted.update(tree.sources[1:])
        tally.accepted.update(accepted.sources)
        return accepted
