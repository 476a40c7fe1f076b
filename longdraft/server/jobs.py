"""One text on its way: what the engine thread writes, and how that reaches a reader in the event loop."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longdraft.core import Event, SamplingParams
from longdraft.generation import Generation
from longdraft.server.acceptance import Acceptance

_RATE_S = 5.0  # over which the speed is told
_PROBED = 0.01  # share of a text's time that measuring plain decoding beside it may take
_PROBE_S = 0.5  # least time between two of these measurements
_PLAIN = 9  # times of plain steps that are told together, at least

Progress = Callable[[int, int], None]


class End(NamedTuple):
    """The last that a reader gets of a text: `error` where it did not come to its own end."""

    error: BaseException | None = None


class Plan(NamedTuple):
    """How a text is to be written.

    start      begins it, in the engine thread; is given the function that is told of the prefill
    num_bytes  the most that its cache will take
    journal    its folder, if it has one; `keeps`: that stays when the text is whole
    compares   time plain decoding beside it
    """

    start: Callable[[Progress], Generation]
    prompt_tokens: int
    params: SamplingParams
    num_bytes: int
    title: str = ""
    journal: Path | None = None
    keeps: bool = False
    compares: bool = False


class EventQueue:
    """Carries events from the engine thread to one reader, who takes all that has come at once: a slow one waits for
    nobody, nobody waits for it, and what it has missed it gets together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._items: list[tuple[Job, Event | End]] = []
        self._ready = asyncio.Event()
        self._is_told = False

    def put(self, job: Job, item: Event | End) -> None:
        with self._lock:
            self._items.append((job, item))
            is_first, self._is_told = not self._is_told, True
        if is_first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self, timeout_s: float) -> list[tuple[Job, Event | End]]:
        """What has come; nothing if nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return []
        with self._lock:
            items, self._items = self._items, []
            self._is_told = False
            self._ready.clear()
        return items


class Speed:
    """Tokens per second lately: of the clock on the wall, and of the text's own steps, which others do not slow."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, int]] = deque()  # when, seconds of its own, tokens

    def add(self, now: float, own_seconds: float, tokens: int) -> None:
        if self._seen and now - self._seen[-1][0] < _RATE_S / 50:
            return
        self._seen.append((now, own_seconds, tokens))
        while now - self._seen[0][0] > _RATE_S:
            self._seen.popleft()

    @property
    def wall(self) -> float:
        return self._rate(0)

    @property
    def own(self) -> float:
        return self._rate(1)

    def _rate(self, which: int) -> float:
        if len(self._seen) < 2:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        seconds = last[which] - first[which]
        return (last[2] - first[2]) / seconds if seconds > 0 else 0.0


@dataclass(eq=False)
class Job:
    """A text that waits, is written or has ended. Only the engine thread changes what is not marked otherwise."""

    id: str
    index: int  # among the texts of its request
    plan: Plan
    outlet: EventQueue
    deadline: float | None = None  # on the monotonic clock
    user: str | None = None
    generation: Generation | None = None
    state: str = "queued"  # queued | prefill | running | finished | cancelled | failed
    cancelled: BaseException | None = None  # any thread: why it is to be left
    arrived: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)  # for people
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    number: int = -1  # in the batch
    prefill: tuple[int, int] = (0, 0)
    num_tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    speed: Speed = field(default_factory=Speed)
    stats: dict[str, Any] | None = None
    _probed: tuple[float, float] = (0.0, 0.0)  # when last, seconds in all
    _plain: deque[tuple[float, float]] = field(default_factory=deque)  # when, seconds
    _noted: float | None = None  # when the last step was
    _metered: float = 0.0  # on the text's own clock when the last step was done

    def begin(self) -> Generation:
        """The text, of which nothing is written yet. Raises what `Engine.generate` and `Engine.resume` do."""
        self.state = "prefill"
        self.generation = self.plan.start(self._on_prefill)
        return self.generation

    def _on_prefill(self, done: int, total: int) -> None:
        self.prefill = done, total

    def note(self, event: Event) -> float | None:
        """Take in what a step brought: seconds since the last one, None for the first."""
        assert self.generation is not None
        now = time.monotonic()
        is_replay = self.num_tokens == 0 and self.generation.num_resumed > 0
        self.num_tokens += len(event.tokens)
        if is_replay:
            return None
        since, self._noted = self._noted, now
        self.state, is_first = "running", self.first_token is None  # the first step's clock has the prefill in it
        self.first_token = self.first_token or now
        self.acceptance.add(event)
        own = self.generation.clock()
        self.speed.add(now, own, self.num_tokens)
        seconds, self._metered = own - self._metered, own
        if event.drafted == 0 and not is_first:
            self._note_plain(now, seconds)
            self._probed = now, self._probed[1]
        elif self.plan.compares and not event.finish_reason:
            self._compare(now)
        return None if since is None else now - since

    def _compare(self, now: float) -> None:
        """Measure what plain decoding would take here, now and then."""
        assert self.generation is not None
        last, spent = self._probed
        if now - last >= _PROBE_S and spent <= _PROBED * self.generation.clock():
            seconds = self.generation.time_plain()
            self._probed = now, spent + seconds
            self._note_plain(now, seconds)

    def _note_plain(self, now: float, seconds: float) -> None:
        self._plain.append((now, seconds))
        while len(self._plain) > _PLAIN and now - self._plain[0][0] > _RATE_S:
            self._plain.popleft()

    @property
    def plain_seconds(self) -> float | None:
        """What plain decoding takes for a token here: the mean of steps without a draft and of those tried lately."""
        return statistics.fmean(seconds for _, seconds in list(self._plain)) if self._plain else None

    @property
    def remaining_tokens(self) -> int:
        return self.plan.params.max_new_tokens - self.num_tokens

    @property
    def eta_seconds(self) -> float | None:
        rate = self.speed.wall
        return self.remaining_tokens / rate if rate else None

    @property
    def resume_id(self) -> str | None:
        """By which the text can be gone on with."""
        return self.plan.journal.name if self.plan.journal else None

    def progress(self) -> dict[str, Any]:
        """How far it is, for comments in a stream and for the list."""
        return {
            "state": self.state,
            "prefill_tokens": self.prefill[0],
            "prompt_tokens": self.plan.prompt_tokens,
            "new_tokens": self.num_tokens,
            "max_new_tokens": self.plan.params.max_new_tokens,
            "tokens_per_second": self.speed.wall,
            "own_tokens_per_second": self.speed.own,
            "plain_tokens_per_second": 1 / self.plain_seconds if self.plain_seconds else None,
            "mean_accepted_length": self.acceptance.mean_length,
            "elapsed_seconds": (self.ended or time.monotonic()) - self.arrived,
            "eta_seconds": self.eta_seconds if self.ended is None else None,
        }
