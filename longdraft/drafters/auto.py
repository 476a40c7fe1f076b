"""The drafter that chooses: whichever of several has been writing the most tokens per second.

Which one pays depends on the machine, the model, the length of the context and the text, so it is measured
while writing: in rounds, each candidate drafts for PROBE_STEPS steps (one that was far behind only in every
fourth round), and the fastest drafts until it falls behind or the next round begins. Plain decoding is the
first candidate, is in every round and keeps the lead against less than MARGIN, so that drafting which does
not pay stops soon. Rounds are close to one another at the beginning of a text, when measurements are cold,
and PROBE_EVERY apart later. The clock may decide, because no choice can change the text.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

from longdraft.core import Context
from longdraft.speculation.drafter import Accepted, Drafter, Verified, memory_of
from longdraft.tree import Tree

PROBE_STEPS = 12  # steps of a probe; the first two are not counted, they may have to catch up and warm up
PROBE_FIRST = 96  # tokens to the second round; the distance doubles from there ...
PROBE_EVERY = 768  # ... up to this
MARGIN = 1.05  # how much faster than plain decoding another must be
FAR_BEHIND = 0.8  # of the fastest's speed: probed less often
_REMEMBERED = 64  # last steps that a speed is computed from


class _Speed:
    """Tokens and seconds of a candidate's last counted steps."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=_REMEMBERED)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    @property
    def tokens_per_second(self) -> float:
        """Mean tokens over the median time of a step: one hiccup of the machine decides nothing."""
        if not self._tokens:
            return 0.0
        return statistics.fmean(self._tokens) / max(statistics.median(self._seconds), 1e-9)


class AutoDrafter:
    """Drafts with one of `candidates` (name -> drafter, plain decoding first) at a time."""

    def __init__(self, candidates: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafters = dict(candidates)
        self._plain = next(iter(self._drafters))
        self._clock = clock
        self._speeds = {name: _Speed() for name in self._drafters}
        self._queue: list[str] = []  # candidates still to be probed in this round
        self._active = self._plain
        self._round = 0
        self._distance = PROBE_FIRST  # tokens from this round to the next
        self._steps = 0  # of the active one since it was made active
        self._tokens = 0  # written since this round began
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
        before = self._active
        self._drafters[before].observe(context, accepted)
        self._count(len(accepted.tokens))
        if self._queue and self._steps >= PROBE_STEPS:
            self._next()
        elif not self._queue and self._tokens >= self._distance:
            self._distance = min(2 * self._distance, PROBE_EVERY)
            self._start_round()
        elif not self._queue and self._steps % PROBE_STEPS == 0:
            self._lead()  # a lucky probe does not last
        if self._active != before:  # who takes over has missed what was written meanwhile
            self._drafters[self._active].observe(context, accepted)

    @property
    def nbytes(self) -> int:
        return sum(memory_of(drafter) for drafter in self._drafters.values())

    def _count(self, tokens: int) -> None:
        self._steps += 1
        self._tokens += tokens
        self.turns[self._active] += tokens
        if self._steps > 2:
            self._speeds[self._active].add(tokens, self._clock() - self._since)

    def _start_round(self) -> None:
        """Probe the candidates anew, the fastest first (it goes on without a break)."""
        order = sorted(self._drafters, key=lambda name: -self._merit(name))
        near = FAR_BEHIND * self._merit(order[0])
        self._queue = [name for name in order
                       if self._round % 4 == 0 or name == self._plain or self._merit(name) >= near]
        self._round += 1
        self._tokens = self._steps = 0
        self._active = self._queue[0]

    def _next(self) -> None:
        self._queue.remove(self._active)
        if self._queue:
            self._active, self._steps = self._queue[0], 0
        else:
            self._lead()

    def _lead(self) -> None:
        """Let the fastest draft."""
        fastest = max(self._drafters, key=self._merit)
        if fastest != self._active:
            self._active, self._steps = fastest, 0

    def _merit(self, name: str) -> float:
        """Tokens per second, with plain decoding's head start."""
        return self._speeds[name].tokens_per_second * (MARGIN if name == self._plain else 1.0)
