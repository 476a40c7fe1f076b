"""The drafter that chooses: whichever of several has been writing the most tokens per second.

Which one pays depends on the machine, the model, the length of the context and the text, so it is measured
while writing: every PROBE_EVERY tokens each of the others drafts for PROBE_STEPS steps, and the fastest drafts
until the next probe. Plain decoding is among the candidates, so drafting that does not pay stops within a probe
and costs about PROBE_STEPS / PROBE_EVERY of the time. The clock may decide, because no choice can change the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from longdraft.core import Context
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.tree import Tree

PROBE_STEPS = 12  # steps of a probe; the first is not counted, it may have to catch up
PROBE_EVERY = 768  # tokens between probes


class _Speed:
    """Tokens and seconds of one candidate's last probe or turn."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class AutoDrafter:
    """Drafts with one of `candidates` (name -> drafter) at a time."""

    def __init__(self, candidates: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafters = dict(candidates)
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
        if self._queue and self._steps > PROBE_STEPS:
            self._next()
        elif not self._queue and self._tokens >= PROBE_EVERY:
            self._start_round()
        else:
            return
        # Whoever takes over has missed what was written meanwhile, and takes it in at once.
        self._drafters[self._active].observe(context, accepted)

    def _start_round(self) -> None:
        """Probe every candidate anew, the fastest of the last round first (it goes on without a break)."""
        order = sorted(self._drafters, key=lambda name: -self._speeds[name].tokens_per_second)
        self._speeds = {name: _Speed() for name in self._drafters}
        self._queue = order
        self._tokens = self._steps = 0
        self._active = order[0]

    def _next(self) -> None:
        self._queue.remove(self._active)
        fastest = max(self._drafters, key=lambda name: self._speeds[name].tokens_per_second)
        self._active = self._queue[0] if self._queue else fastest
        self._steps = 0
