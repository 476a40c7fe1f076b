"""The drafter that chooses: whichever of several has been writing the most tokens per second.

Which one pays depends on the machine, the model, the length of the context and the text, so it is measured
while writing: every PROBE_EVERY tokens each of the others drafts for PROBE_STEPS steps (one that was far behind
only in every fourth round), and the fastest drafts until the next round. Speeds of earlier rounds count half as
much in each later one. Plain decoding is the first candidate and keeps the lead against less than MARGIN, so that
drafting which does not pay stops soon. The clock may decide, because no choice can change the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from longdraft.core import Context
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.tree import Tree

PROBE_STEPS = 12  # steps of a probe; the first is not counted, it may have to catch up
PROBE_EVERY = 768  # tokens from one round of probes to the next
MARGIN = 1.05  # how much faster than plain decoding another must be
FAR_BEHIND = 0.8  # of the fastest's speed: probed less often


class _Speed:
    """Tokens and seconds of one candidate, earlier rounds fading."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self.seconds = 0.0

    def fade(self) -> None:
        self.tokens /= 2
        self.seconds /= 2

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class AutoDrafter:
    """Drafts with one of `candidates` (name -> drafter, plain decoding first) at a time."""

    def __init__(self, candidates: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafters = dict(candidates)
        self._plain = next(iter(self._drafters))
        self._round = 0
        self._clock = clock
        self._queue: list[str] = []  # candidates still to be probed in this round
        self._active = ""
        self._speeds = {name: _Speed() for name in self._drafters}
        self._steps = 0  # of the active one since it was made active
        self._tokens = 0  # written since the last round of probes began
        self._since = 0.0
        self.turns: dict[str, int] = dict.fromkeys(self._drafters, 0)  # tokens written with each

    def begin(self, context: Context, verified: Verified | None) -> None:
        for drafter in self._drafters.values():
            drafter.begin(context, verified)
        self._start_round()

    def propose(self, context: Context, max_depth: int) -> Tree:
        self._since = self._clock()
        return self._drafters[self._active].propose(context, max_depth)

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._drafters[self._active].observe(context, accepted)
        count = len(accepted.tokens)
        self._steps += 1
        self._tokens += count
        self.turns[self._active] += count
        if self._steps > 1:
            speed = self._speeds[self._active]
            speed.tokens += count
            speed.seconds += self._clock() - self._since
        before = self._active
        if self._queue and self._steps > PROBE_STEPS:
            self._next()
        elif not self._queue and self._tokens >= PROBE_EVERY:
            self._start_round()
        if self._active != before:  # who takes over has missed what was written meanwhile
            self._drafters[self._active].observe(context, accepted)

    def _start_round(self) -> None:
        """Probe the candidates anew, the fastest first (it goes on without a break)."""
        order = sorted(self._drafters, key=lambda name: -self._merit(name))
        near = FAR_BEHIND * self._merit(order[0])
        self._queue = [name for name in order if self._round % 4 == 0 or self._merit(name) >= near]
        for speed in self._speeds.values():
            speed.fade()
        self._round += 1
        self._tokens = self._steps = 0
        self._active = self._queue[0]

    def _next(self) -> None:
        self._queue.remove(self._active)
        self._active = self._queue[0] if self._queue else max(self._drafters, key=self._merit)
        self._steps = 0

    def _merit(self, name: str) -> float:
        """Tokens per second, with plain decoding's head start."""
        return self._speeds[name].tokens_per_second * (MARGIN if name == self._plain else 1.0)
