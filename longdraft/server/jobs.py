"""A text as the scheduler handles it, and the queue that carries its events to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from longdraft.engine.generation import Generation
from longdraft.errors import JournalError, OutputError
from longdraft.journal.format import journal_exists
from longdraft.journal.writer import remove_journal
from longdraft.request.events import Event
from longdraft.request.sampling_params import SamplingParams
from longdraft.server.job_statistics import DraftAcceptance, PlainProbes, Throughput
from longdraft.speculation.plain_speed import PlainSpeed, measure_plain_step

# Settings that may have megabytes, which a hundred ended texts would keep in memory.
_LONG_SETTINGS = ("structured_outputs", "banned_strings", "dry_sequence_breakers", "stop", "stop_token_ids",
                  "logit_bias")
_SHOWN_ITEMS, _SHOWN_CHARACTERS = 16, 100


class EventQueue:
    """Carries the events of one request's jobs from the engine thread to the event loop.

    `put` never blocks and `take` returns everything at once, so a slow client delays no other text.

    wakes_at   number of events that wakes `take`; the end of a job always does. Set it before `take`
    key_label  label of the request's API key; None: it has none
    charge     counts tokens that are read or written for the key
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, key_label: str | None = None,
                 charge: Callable[[int], None] = lambda tokens: None) -> None:
        self.wakes_at = 1
        self.key_label = key_label
        self.charge = charge
        self._loop = loop
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_events = 0
        self._news = News({}, {})
        self._ready = asyncio.Event()

    def put(self, job: GenerationJob, event: Event) -> None:
        """Add an event. Any thread may call this."""
        with self._lock:
            if not self._is_closed:
                self._news.events.setdefault(job, []).append(event)
                self._num_events += 1
                self._wake(self._num_events == self.wakes_at)

    def end(self, job: GenerationJob, error: BaseException | None) -> None:
        """The job has ended; `error` says why its text did not finish. Any thread may call this."""
        with self._lock:
            if not self._is_closed:
                self._news.ended[job] = error
                self._wake(True)

    def _wake(self, is_due: bool) -> None:
        if is_due and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self, timeout_s: float) -> News:
        """All that is new, at least one event or end; nothing after `timeout_s` seconds without any."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return News({}, {})
        with self._lock:
            news, self._news = self._news, News({}, {})
            self._num_events = 0
            self._ready.clear()
        return news

    def close(self) -> None:
        """The request has ended: drop the news that were not taken, and ignore later ones."""
        with self._lock:
            self._news = News({}, {})
            self._is_closed = True


class News(NamedTuple):
    """New events by job, and the jobs that ended, each with its error or None."""

    events: dict[GenerationJob, list[Event]]
    ended: dict[GenerationJob, BaseException | None]


@dataclass(eq=False)
class GenerationJob:
    """One text of a request: what to write, and how far it is.

    The first group of fields is fixed, but for `journal`. The engine thread changes the others, and the thread that
    begins the job does so while `beginning` is not done. Any thread sets `cancelled`, and ends a job that still waits.

    id             the request's id, with a number where the request has several texts
    index          number of the text within its request
    events         receives the text's events, then its end
    start          creates the generation, in the engine thread or in that of `begins_apart`; takes `on_prefill` and
                   `cache_salt` as Engine.generate does
    num_bytes      upper bound of the memory for caches, which the scheduler reserves
    title          end of the prompt, for lists of texts
    journal        folder of the journal, if the text has one
    keeps_journal  the journal remains when the text is finished
    may_journal    a journal may be made if the server itself ends the text
    times_plain    measure plain decoding now and then, for comparison
    deadline       monotonic time at which the text is cancelled
    user           label for the log, as the request gives it
    cache_salt     the text shares rows of the prefix tree with texts of the same salt and API key; None: with none
    begins_apart   `start` reads a journal, compiles a grammar or prepares phrases, which may take seconds: it runs in a
                   thread of its own
    message_at     returns the index of the message at a token of a chat's prompt, for the statistics
    """

    id: str
    index: int
    events: EventQueue
    start: Callable[..., Generation]
    params: SamplingParams
    prompt_tokens: int
    num_bytes: int
    title: str = ""
    journal: Path | None = None
    keeps_journal: bool = False
    may_journal: bool = True
    times_plain: bool = False
    deadline: float | None = None
    user: str | None = None
    cache_salt: str | None = ""
    begins_apart: bool = False
    message_at: Callable[[int], int] | None = None

    generation: Generation | None = None
    beginning: Future[Generation] | None = None  # of `start` in a thread of its own
    number: int = -1  # in the batch; -1: not there yet
    is_slow: bool = False  # its own work was long in the latest round that it took part in
    turn: float = 0.0  # monotonic time of its latest turn among slow texts
    state: str = "queued"  # queued | prefill | running | finished | cancelled | failed
    cancelled: BaseException | None = None  # the reason; any thread may set it
    created: float = field(default_factory=time.time)  # Unix time; the next ones are monotonic times
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    ended: float | None = None
    prefill: tuple[int, int] = (0, 0)  # prompt tokens done, in all
    num_tokens: int = 0
    stats: dict[str, Any] | None = None  # of the finished text, as in the `--stats` file
    acceptance: DraftAcceptance = field(default_factory=DraftAcceptance)
    throughput: Throughput = field(default_factory=Throughput)
    plain_speed: PlainSpeed | None = None  # None before the text has begun
    plain_probes: PlainProbes = field(default_factory=PlainProbes)
    _last_step: float | None = None  # monotonic time
    _own_seconds: float = 0.0  # the text's own time up to its last step

    def begin(self) -> Generation:
        """Create the generation, which has written nothing yet. Raises what Engine.generate and Engine.resume do."""
        self.state = "prefill"
        self.events.charge(self.prompt_tokens)
        # The label keeps keys apart: no key can measure what another key's prompts were.
        salt = None if self.cache_salt is None else f"{self.events.key_label or ''}:{self.cache_salt}"
        self.generation = self.start(on_prefill=self._on_prefill, cache_salt=salt)
        self.plain_speed = self.generation.statistics.plain_speed
        return self.generation

    def release(self) -> None:
        """The job has ended: forget its prompt, its caches and long settings. Lists of texts show it for a while."""
        self.start = _never_start
        self.beginning = self.message_at = None
        self.params = replace(self.params, **{name: _shortened(getattr(self.params, name)) for name in _LONG_SETTINGS})
        if self.stats is not None:
            self.stats = {**self.stats, "sampling": asdict(self.params)}

    def finish(self, stats: dict[str, Any] | None) -> None:
        """Note the statistics of a text that is finished, with the message at which its prompt parts from others."""
        self.stats = stats
        prefix = (stats or {}).get("prefix")
        if prefix and prefix["parted_at"] is not None and self.message_at:
            prefix["message"] = self.message_at(prefix["parted_at"])

    def drop_journal(self) -> None:
        """Begin without a journal."""
        assert not self.keeps_journal
        self.start = partial(self.start, journal=None)

    def remove_journal(self) -> None:
        """Remove the text's journal, if it has one and no other process uses it."""
        with suppress(OutputError, JournalError):
            if self.journal:
                remove_journal(self.journal)

    def thinking(self) -> dict[str, Any] | None:
        """The figures of the thought so far; None for a model that marks none."""
        if self.stats is not None:
            thinking: dict[str, Any] | None = self.stats["thinking"]
            return thinking
        return self.generation.stream.thinking() if self.generation else None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thought so far, with those that closed it."""
        thinking = self.thinking()
        return thinking["tokens"] + thinking["forced"] if thinking else 0

    def _on_prefill(self, done: int, total: int) -> None:
        self.prefill = done, total

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose rows came from the prefix tree."""
        if self.stats is not None:
            return int(self.stats["cached_tokens"])
        return self.generation.reuse.cached_tokens if self.generation else 0

    def record_step(self, event: Event) -> float | None:
        """Update the statistics with a step's event. Returns the seconds since the last step, None for the first."""
        assert self.generation is not None
        now = time.monotonic()
        is_replay = self.num_tokens == 0 and self.generation.num_resumed > 0
        self.num_tokens += len(event.tokens)
        if is_replay:
            return None
        last, self._last_step, self.state = self._last_step, now, "running"
        own = self.generation.clock()
        seconds, self._own_seconds = own - self._own_seconds, own
        self.acceptance.add(event)
        self.throughput.add(now, own, self.num_tokens)
        if event.drafted == 0 and last is not None:  # the first step's time includes the prefill
            self.generation.statistics.plain_speed.add_latest(self._context_length, seconds)
            self.plain_probes.postpone(now)
        elif self.times_plain and not event.finish_reason and self.plain_probes.is_due(now, own):
            seconds = measure_plain_step(self.generation.step, self.generation.statistics.decode_seconds)
            self.generation.statistics.plain_speed.add_latest(self._context_length, seconds)
            self.plain_probes.postpone(now, seconds)
        return None if last is None else now - last

    @property
    def _context_length(self) -> int:
        return self.prompt_tokens + self.num_tokens

    @property
    def remaining_tokens(self) -> int:
        return self.params.max_new_tokens - self.num_tokens

    @property
    def eta_seconds(self) -> float | None:
        rate = self.throughput.wall
        return self.remaining_tokens / rate if rate else None

    @property
    def resume_id(self) -> str | None:
        """The id under which the text can be resumed; None without a journal."""
        return self.journal.name if self.journal else None

    @property
    def resume_hint(self) -> str:
        """How to resume the text, if its journal exists: a job in the queue has none yet."""
        exists = self.journal is not None and journal_exists(self.journal)
        return f"; resume it with POST /v1/longdraft/generations/{self.resume_id}/resume" if exists else ""

    @property
    def finish_reason(self) -> str | None:
        """Why the text finished; None while it has not."""
        return (self.stats or {}).get("finish_reason")

    def progress(self) -> dict[str, Any]:
        """The progress, for comments in a stream and for lists of texts."""
        plain = self.plain_speed and self.plain_speed.seconds_at(self._context_length)
        return {
            "state": self.state,
            "prefill_tokens": self.prefill[0],
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.num_tokens,
            "max_new_tokens": self.params.max_new_tokens,
            "tokens_per_second": self.throughput.wall,
            "own_tokens_per_second": self.throughput.own,
            "plain_tokens_per_second": 1 / plain if plain else None,
            "mean_accepted_length": self.acceptance.mean_length,
            "thinking": self.thinking(),
            "thinking_budget": self.params.thinking_budget if self.params.thinking_budget >= 0 else None,
            "elapsed_seconds": (self.ended or time.monotonic()) - self.arrived,
            "eta_seconds": self.eta_seconds if self.ended is None else None,
        }


def _shortened(value: Any) -> Any:
    """The beginning of a setting: of its texts, and of its list."""
    if isinstance(value, tuple):
        return tuple(map(_shortened, value[:_SHOWN_ITEMS]))
    return value[:_SHOWN_CHARACTERS] + "…" if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS else value


def _never_start(**options: Any) -> Generation:
    raise AssertionError("a job that has ended was started")
