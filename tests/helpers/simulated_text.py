"""Texts that `auto` writes by a clock that only the drafters and the forwards move."""

from __future__ import annotations

import random
from types import SimpleNamespace

from longdraft.drafters.auto.costs import Costs, DraftCosts, ForwardCosts
from longdraft.drafters.auto.drafter import AutoDrafter
from longdraft.drafters.auto.shared import Guesser, SharedStatistics
from longdraft.request.context import Context
from longdraft.request.tree import chain, root_only
from longdraft.speculation.drafter import Accepted
from longdraft.speculation.routine import atomic, run_alone

FORWARD = ForwardCosts(0.0, (1.0, 1.02, 1.05, 1.075, 1.1, 1.2, 1.4), 1e6)  # seconds by rows; the text costs nothing


class Clock:
    """A clock of a request that shows `now`."""

    batch_size = together = sharers = 1

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Chained:
    """Drafts a chain at a price for each token; each guess is right with probability `rate`."""

    def __init__(self, clock: Clock, seconds: float, rate: float) -> None:
        self.clock, self.seconds, self.rate = clock, seconds, rate
        self.observed = 0

    def begin(self, context, verified):
        self.observed = len(context)

    @atomic
    def propose(self, context, max_depth):
        assert self.observed == len(context), "the drafter has seen the whole text"
        depth = min(max_depth, 16) if self.rate is not None else 0
        self.clock.now += self.seconds * depth
        return chain(context.last, [2] * depth, "self") if depth else root_only(context.last)

    def observe(self, context, accepted):
        self.observed = len(context)


class Text:
    """A text that `auto` writes with the given drafters: name -> (seconds for each drafted token, rate).

    is_ahead  its steps of plain decoding are computed ahead where they may be
    """

    is_ahead = True

    def __init__(self, drafters: dict[str, tuple[float, float]], *, forward: ForwardCosts = FORWARD, seed: int = 1,
                 shared: SharedStatistics | None = None, clock: Clock | None = None, prior: float = 0.8,
                 believed: dict[str, float] | None = None, believed_forward: ForwardCosts | None = None,
                 reader: str = "", between: float = 0.0) -> None:
        self.between = between
        self.clock, self.forward, self.numbers = clock or Clock(), forward, random.Random(seed)
        self.drafters = {"plain": Chained(self.clock, 0.0, None)} | {
            name: Chained(self.clock, *given) for name, given in drafters.items()}
        if reader:
            self.drafters[reader].reads_text_only = True
        shared = shared or SharedStatistics()
        seconds = {name: drafter.seconds for name, drafter in self.drafters.items()} | (believed or {})
        self.costs = Costs(believed_forward or forward,
                           {name: DraftCosts(0.0, seconds[name], 1.0, 16) for name in self.drafters})

        def calibrate() -> None:
            shared.begin(self.costs, {name: Guesser(name, prior) for name in self.drafters})

        self.has_forgotten = False
        self.auto = AutoDrafter(self.drafters, calibrate, self.forget, shared, self.clock)
        self.context = Context([2])
        self.auto.begin(self.context, None)
        self.ends = [0.0]  # when each token was written
        self.rows = []

    def forget(self) -> None:
        self.has_forgotten = True

    def step(self) -> None:
        drafter = self.drafters[self.auto.policy.active]
        tree = run_alone(self.auto.propose(self.context, 99))
        is_ahead = self.is_ahead and self.auto.plain_steps > 0 and self.clock.batch_size == 1
        self.clock.now += float(self.forward.at([len(tree)], len(self.context), self.clock.batch_size)[0])
        self.clock.now -= is_ahead * self.forward.ahead
        deepest = max(tree.depths)
        right = next((d for d in range(deepest) if self.numbers.random() > drafter.rate), deepest)
        path = tuple(range(right + 1))
        self.context.extend([2] * len(path))
        verified = None if is_ahead else SimpleNamespace()
        self.auto.observe(self.context, Accepted((2,) * len(path), path, ("self",) * right, verified))
        self.clock.now += self.between
        self.ends += [self.clock.now] * len(path)
        self.rows.append(len(tree))

    def write(self, tokens: int) -> float:
        """Tokens for each second, over the next `tokens` tokens."""
        began, first = self.clock.now, len(self.context)
        while len(self.context) < first + tokens:
            self.step()
        return (len(self.context) - first) / (self.clock.now - began)

    def slowest(self, tokens: int) -> float:
        """Tokens for each second, in the slowest part of `tokens` tokens."""
        return min(tokens / (end - begin) for begin, end in zip(self.ends, self.ends[tokens:]))
