"""What a step costs on this machine, measured once for each model and kept in the user's cache folder.

    seconds of a step  =  ForwardCosts.at(rows, context, requests)  +  DraftCosts.at(depth)

`measure` runs real steps over a cache of random keys and values: trees of 1 to 32 guesses that no drafter drafted, then
each drafter at two depths. It takes a second or two for a model of 500 million parameters. The guesses are
different tokens, because rows of one token would choose the same experts. Otherwise times do not depend on what the
tokens are, so these costs serve every text. `Pace` (longdraft/drafters/auto/knowledge.py)
notices while writing that they are off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.cache.full import FullCache
from longdraft.checkpoint.fingerprint import cache_dir, write_cached
from longdraft.kernels import threads
from longdraft.kernels.launched import HostWork
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.request.tree import Tree, chain
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.speculation.routine import CostClock, atomic, run_alone
from longdraft.speculation.step import Step, Tally, Timings

log = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

ROWS = (1, 2, 4, 6, 8, 16, 32)  # of the forwards that are timed; products of more than six rows take several passes
_ROWS = np.array(ROWS, dtype=np.float64)
_DEPTHS = (4, 12)  # depths of the drafts that are timed
_SHORT = 256  # positions of the text after which they are timed
_MOST_BYTES = 1 << 28  # of the cache of random positions
_UNCACHED_BYTES = 3 << 25  # so many do not stay in the processor's caches
_ENOUGH_S, _LEAST_REPEATS, _MOST_REPEATS = 0.06, 2, 8  # noise disturbs short times more
_PLAIN_STEPS = 4  # short steps of one row, one after another
_MOST_WARM_UPS = 4  # steps in which a drafter may read the text before it drafts
_SLOW_S = 0.2  # what takes longer is timed once
_USUAL_STEPS, _LONG_S = 40, 4.0  # a measurement takes as long as so many steps; a line announces one that takes longer
_FORMAT = 8
_STRIDE = 9973  # between the guesses' token ids; a prime, so that they differ
_SEVERAL = 8  # rows by which the growth of the text's part is measured
_GROWTH = 0.02  # where it is not


class ForwardCosts(NamedTuple):
    """Seconds of a step without its draft: the forward, the sampler and the commit.

    host       seconds of a request's own work, which no other request shares
    rows       seconds of a forward of ROWS rows after an empty text, without `host`
    positions  number of positions of the text that take as long to read as one row's forward after an empty text
    growth     share of the time for the text that each further row adds: little where memory is the limit, much where
               several query heads share keys and arithmetic is
    near, near_positions  the same as `positions` for the first `near` ones, which may stay in the processor's caches
    """

    host: float
    rows: tuple[float, ...]
    positions: float
    growth: float = _GROWTH
    near: float = 0.0
    near_positions: float = 1.0

    @classmethod
    def by_size(cls, weights_in_tokens: float) -> ForwardCosts:
        """Before anything was measured: a forward that reads its bytes once, and whose rows cost little."""
        return cls(0.0, tuple(1 + 0.02 * rows for rows in ROWS), weights_in_tokens)

    def at(self, rows: Sequence[float] | FloatArray, context: int | Sequence[int],
           requests: float | FloatArray = 1, batch_size: int = 1) -> FloatArray:
        """Seconds of one request's part of a forward, for each number of rows, after `context` tokens (one number, or
        one for each of rows), if each of `requests` requests (likewise) has so many rows: its own keys and values, and
        an equal share of the weights. batch_size: requests whose texts share the processor's caches"""
        own = np.asarray(rows, dtype=np.float64)
        near = np.minimum(context, self.near / batch_size)
        reads = near / self.near_positions + (context - near) / self.positions
        text = self.rows[0] * reads * (1 + self.growth * (own - 1))
        return self.host + self._line(own * requests) / requests + text

    def _line(self, rows: FloatArray) -> FloatArray:
        """Seconds after an empty text, along straight lines through the measurements. Beyond the last one, a row costs
        what the last ones do, or what all do if that is more: the difference of two numbers may be noise."""
        seconds, slope = _measured(self.rows)
        return np.interp(rows, _ROWS, seconds) + slope * np.maximum(0.0, rows - ROWS[-1])


@lru_cache(maxsize=8)
def _measured(rows: tuple[float, ...]) -> tuple[FloatArray, float]:
    """`ForwardCosts.rows`, and the seconds of each row beyond the last of ROWS."""
    *_, before, last = zip(ROWS, rows, strict=True)
    slope = max((last[1] - start[1]) / (last[0] - start[0]) for start in (before, (ROWS[0], rows[0])))
    return np.array(rows), slope


class DraftCosts(NamedTuple):
    """What drafts of one drafter cost.

    base   seconds of a draft of no tokens
    token  seconds for each token of depth
    nodes  guesses in the tree for each token of depth
    depth  depth of the deepest tree
    lanes  requests of a batch that draft at the same time, each on one thread; 1: their drafts are made in turn, or
           share forwards
    apart  seconds for each token of depth on one thread, with two lanes or more
    """

    base: float
    token: float
    nodes: float
    depth: int
    lanes: int = 1
    apart: float = 0.0

    def at(self, depth: int, requests: int = 1) -> float:
        """Seconds of one request's part of drafts of `requests` requests."""
        return self.base + self.token_of(requests) * depth

    def token_of(self, requests: int) -> float:
        """Seconds for each token of depth, where so many requests draft together."""
        if requests == 1 or self.lanes == 1:
            return self.token
        return self.apart * -(-requests // self.lanes) / requests


class Costs(NamedTuple):
    """Of a model and its drafters, by the drafters' names."""

    forward: ForwardCosts
    drafts: dict[str, DraftCosts]

    def numbers(self) -> list[float]:
        """All of them, in an order that `from_numbers` knows."""
        host, rows, *text = self.forward
        return [host, *rows, *text, *(float(number) for costs in self.drafts.values() for number in costs)]

    @classmethod
    def from_numbers(cls, names: Iterable[str], numbers: Sequence[float]) -> Costs:
        """ValueError if these are not numbers of costs of these drafters."""
        names, size = list(names), len(DraftCosts._fields)
        end = len(ROWS) + 5
        if len(numbers) != end + size * len(names) or not all(
                isinstance(number, float) and 0 <= number < 1e9 for number in numbers):
            raise ValueError("not the costs of these drafters")
        drafts = {}
        for place, name in enumerate(names):
            base, token, nodes, depth, lanes, apart = numbers[end + size * place : end + size * (place + 1)]
            drafts[name] = DraftCosts(base, token, nodes, int(depth), int(lanes), apart)
        return cls(ForwardCosts(numbers[0], tuple(numbers[1 : end - 4]), *numbers[end - 4 : end]), drafts)


def _typical(seconds: Sequence[float]) -> float:
    """The lower quartile. Noise adds to times, and the least of them is from a step whose weights happened to be in the
    processor's caches."""
    return float(np.percentile(seconds, 25))


class _Guesses:
    """A drafter that proposes a chain of different tokens, at no cost."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def begin(self, context: Context, verified: Verified | None) -> None:
        """Nothing: the chain does not depend on the text."""

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        return chain(context.last, [_STRIDE * place % self._vocabulary for place in range(1, max_depth + 1)], "")

    def observe(self, context: Context, accepted: Accepted) -> None:
        """Nothing, likewise."""


class _RandomText:
    """A text of random keys and values, and steps after it."""

    def __init__(self, model: Transformer, sampler: Sampler, agree: Callable[[float], float], positions: int) -> None:
        self.model, self.sampler, self._agree = model, sampler.of_another_text(is_structured=False), agree
        self.cache = model.random_cache(positions, 1024)
        self.context = Context([1] * (positions + 1))
        self.clock = CostClock(always=True)
        self.threads = int(agree(threads(model.kernels)))

    def step(self, drafter: Drafter, depth: int, on_one_thread: bool = False) -> tuple[Accepted, Timings]:
        timings = Timings()
        step = Step(self.model, self.cache, drafter, self.sampler, self.context, timings, Tally())
        return run_alone(step.run(depth + 1), on_one_thread), timings

    def seconds(self, *sizes: int) -> list[Timings]:
        """A step with each of these numbers of rows. The sizes take turns, because a machine may be slower for a while.
        So the step before has left other rows in the processor's caches, as a draft does; but short steps of one row
        come after others, as in plain decoding."""
        guesses = _Guesses(self.model.config.vocab_size)
        found = [[self.step(guesses, rows - 1)[1]] for rows in sizes]
        repeats = [self._repeats(of_size[0].verify) for of_size in found]
        for turn in range(max(repeats)):
            for of_size, rows, times in zip(found, sizes, repeats, strict=True):
                if turn == 0 and times:  # the processor's caches and clocks made the first one slower
                    of_size.clear()
                in_turn = _PLAIN_STEPS if rows == 1 and times == _MOST_REPEATS else 1
                if turn < times:
                    of_size += [self.step(guesses, rows - 1)[1] for _ in range(in_turn)]
        return [Timings(*(_typical([getattr(each, part.name) for each in of_size]) for part in fields(Timings)))
                for of_size in found]

    def _repeats(self, seconds: float) -> int:
        """How often to repeat what took so long, on all ranks."""
        seconds = self._agree(seconds)
        return 0 if seconds > _SLOW_S else int(max(_LEAST_REPEATS, min(_MOST_REPEATS, _ENOUGH_S / max(seconds, 1e-6))))

    def drafts(self, drafter: Drafter, on_one_thread: bool = False) -> list[tuple[Accepted, float]]:
        """For each of _DEPTHS one of the deepest drafts, and the time of these: a draft of nothing takes no time. The
        depths take turns, because a machine may be slower for a while."""
        found = [[self.step(drafter, depth, on_one_thread)] for depth in _DEPTHS]
        for _ in range(self._repeats(found[0][0][1].draft)):
            for of_depth, depth in zip(found, _DEPTHS, strict=True):
                of_depth.append(self.step(drafter, depth, on_one_thread))
        deepest = [max(of_depth, key=lambda each: each[0].depth)[0] for of_depth in found]
        return [(accepted, _typical([timings.draft for each, timings in of_depth if each.depth == accepted.depth]))
                for accepted, of_depth in zip(deepest, found, strict=True)]

    def drafts_apart(self, drafter: Drafter) -> bool:
        """Whether requests of a batch draft with this drafter at the same time."""
        self.clock.batch_size = 2
        draft = drafter.propose(self.context, _DEPTHS[0])
        try:
            return isinstance(next(draft, None), HostWork)
        finally:
            draft.close()
            self.clock.batch_size = 1


def measure(model: Transformer, sampler: Sampler, agree: Callable[[float], float],
            candidates: Callable[[FullCache, Sampler, CostClock], Mapping[str, Drafter]]) -> Costs:
    """Time steps of plain decoding, and drafts.

    candidates  makes the drafters for a text with this cache, this sampler and this clock
    agree       maps this rank's number to that of all ranks
    """
    short = _RandomText(model, sampler, agree, 0)
    plain, = short.seconds(1)
    if (expected := _USUAL_STEPS * plain.verify) > _LONG_S:
        log.warning("timing the drafters of this model on this machine, once: about %d s", expected)
    by_rows = short.seconds(*ROWS)
    host = min(timings.sample + timings.commit for timings in by_rows)
    seconds = [timings.verify + timings.sample + timings.commit - host for timings in by_rows]
    # More rows take no less time, and noise only adds to it: a time above that of more rows is noise.
    rising = [float(each) for each in np.minimum.accumulate(seconds[::-1])[::-1]]
    forward = ForwardCosts(host, tuple(rising), *_text_costs(model, sampler, agree, rising))
    text = _RandomText(model, sampler, agree, min(_SHORT, model.config.max_positions // 2))
    drafters = candidates(text.cache, text.sampler, text.clock)
    return Costs(forward, {name: _of_drafter(text, drafter) for name, drafter in drafters.items()})


def _text_costs(model: Transformer, sampler: Sampler, agree: Callable[[float], float], rows: Sequence[float]
                ) -> tuple[float, float, float, float]:
    """`ForwardCosts.positions`, `growth`, `near` and `near_positions`. They are measured where a cache of moderate size
    takes a good part of a step, else taken by size. rows: seconds of forwards after an empty text"""
    most = min(_MOST_BYTES // model.cache_bytes_per_token, model.config.max_positions // 2)
    weights = agree(model.weights_in_tokens)  # the last rank may hold fewer rows of the vocabulary
    near = int(min(weights, most))
    if near < _SHORT:
        return weights, _GROWTH, 0.0, 1.0

    def alone(text: _RandomText, length: int) -> float:
        """Seconds for the text itself."""
        by_size = rows[0] * length / weights
        is_small = length < weights / 4
        return by_size if is_small else max(text.seconds(1)[0].verify - rows[0], 0.1 * by_size)

    far = max(near, min(most, _UNCACHED_BYTES // model.cache_bytes_per_token))
    text = _RandomText(model, sampler, agree, far)
    far_s, several = alone(text, far), text.seconds(_SEVERAL)[0].verify - rows[ROWS.index(_SEVERAL)]
    growth = max(0.0, (several / far_s - 1) / (_SEVERAL - 1))
    if far == near:
        return near * rows[0] / far_s, growth, 0.0, 1.0
    near_s = min(alone(_RandomText(model, sampler, agree, near), near), far_s * near / far)
    return (far - near) * rows[0] / (far_s - near_s), growth, float(near), near * rows[0] / near_s


def _of_drafter(text: _RandomText, drafter: Drafter) -> DraftCosts:
    drafter.begin(text.context, None)
    for _ in range(_MOST_WARM_UPS):
        if text.step(drafter, _DEPTHS[0])[0].drafted:
            break
    (short, low), (long, high) = text.drafts(drafter)
    is_deeper, lanes, apart = long.depth > short.depth, 1, 0.0
    if is_deeper:
        token = max(0.0, (high - low) / (long.depth - short.depth))
        base = max(0.0, low - token * short.depth)
    else:
        base, token = min(low, high), 0.0
    if is_deeper and text.threads > 1 and text.drafts_apart(drafter):
        lanes = text.threads
        (_, low), (_, high) = text.drafts(drafter, on_one_thread=True)
        apart = max(token, (high - low) / (long.depth - short.depth))
    return DraftCosts(base, token, long.drafted / max(1, long.depth), long.depth, lanes, apart)


def load_or_measure(identity: Mapping[str, Any], names: Sequence[str], agree: Callable[[float], float],
                    measured: Callable[[], Costs]) -> Costs:
    """The costs that an earlier run of the same `identity` measured on this machine, else those of `measured()`, which
    are kept in the user's cache folder where that is possible. All ranks of a run get rank 0's costs."""
    file = _file(identity)
    found = _load(file, names)
    if not agree(float(found is not None)):
        log.info("timing the drafters, once for this model on this machine")
        found = measured()
        if file:
            write_cached(file, found.numbers())
    numbers = (found or Costs(ForwardCosts.by_size(1.0), {name: DraftCosts(0, 0, 0, 0) for name in names})).numbers()
    return Costs.from_numbers(names, [agree(number) for number in numbers])


def forget(identity: Mapping[str, Any]) -> None:
    """Have the next engine measure anew."""
    if file := _file(identity):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _file(identity: Mapping[str, Any]) -> Path | None:
    """None where the user has no home folder."""
    name = hashlib.sha256(json.dumps([_FORMAT, identity], sort_keys=True).encode()).hexdigest()[:32]
    with contextlib.suppress(RuntimeError):
        return cache_dir("drafting-costs") / f"{name}.json"
    return None


def _load(file: Path | None, names: Sequence[str]) -> Costs | None:
    """None for a file that is missing or damaged."""
    if file:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Costs.from_numbers(names, json.loads(file.read_text(encoding="utf-8")))
    return None
