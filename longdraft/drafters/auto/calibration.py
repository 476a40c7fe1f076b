"""The measurement of `ForwardCosts` and `DraftCosts`, once for each model and machine.

`measure` runs real steps over a cache of random keys and values: trees of 1 to 32 rows that no drafter drafted, then
each drafter at two depths. It takes a second or two for a model of 500 million parameters. The guesses are different
tokens, because rows of one token would choose the same experts. Otherwise times do not depend on what the tokens are,
so these costs serve every text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from time import perf_counter

import numpy as np
import torch

from longdraft.cache.full import FullCache
from longdraft.drafters.auto.costs import DEFAULT_GROWTH, ROWS, Costs, DraftCosts, ForwardCosts
from longdraft.drafters.plain import PlainDrafter
from longdraft.kernels import Kernels, KVStore, threads
from longdraft.kernels.launched import HostWork
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.request.tree import Tree, chain
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.ahead import MOST, PlainAhead
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.speculation.routine import atomic, run_alone
from longdraft.speculation.step import Step, Tally, Timings

log = logging.getLogger(__name__)

_DEPTHS = (4, 12)  # depths of the drafts that are timed
_SHORT = 256  # positions of the text after which they are timed
_MAX_CACHE_BYTES = 1 << 28  # of random positions
_UNCACHED_BYTES = 3 << 25  # so many do not stay in the processor's caches
_ENOUGH_S = 0.06  # a step is repeated until its times add up to this: noise disturbs short times more
_MIN_REPEATS = 2
_MAX_REPEATS = 8
_PLAIN_STEPS = 4  # short steps of one row, one after another
_MAX_WARM_UPS = 4  # steps in which a drafter may read the text before it drafts
_SLOW_S = 0.2  # what takes longer is timed once
_USUAL_STEPS = 40  # a measurement takes as long as so many steps
_LONG_S = 4.0  # a line announces one that takes longer
_STRIDE = 9973  # between the guesses' token ids; a prime, so that they differ
_RANDOM_BLOCK = 4096  # positions with keys and values of their own
_SEVERAL = 8  # rows by which the growth of the text's part is measured


def _typical(seconds: Sequence[float]) -> float:
    """The lower quartile. Noise adds to times, and the least of them is from a step whose weights happened to be in the
    processor's caches."""
    return float(np.percentile(seconds, 25))


def _typical_timings(timings: Sequence[Timings]) -> Timings:
    return Timings(*(_typical([getattr(each, part.name) for each in timings]) for part in fields(Timings)))


def _deepest(steps: Sequence[tuple[Accepted, Timings]]) -> tuple[Accepted, float]:
    """The first of the steps with the deepest draft, and the typical time of such drafts."""
    deepest = max((accepted for accepted, _ in steps), key=lambda accepted: accepted.depth)
    return deepest, _typical([timings.draft for accepted, timings in steps if accepted.depth == deepest.depth])


def _in_turns(counts: Sequence[int]) -> Iterator[int]:
    """Indices of `counts`, in turns, each as often as its count: [2, 1, 3] gives 0 1 2 0 2 2."""
    for turn in range(max(counts)):
        yield from (index for index, count in enumerate(counts) if turn < count)


class _Guesses:
    """A drafter that proposes a chain of different tokens, at no cost."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def begin(self, context: Context, verified: Verified | None) -> None:
        """Nothing: the chain does not depend on the text."""

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        return chain(context.last, [_STRIDE * depth % self._vocabulary for depth in range(1, max_depth + 1)], "")

    def observe(self, context: Context, accepted: Accepted) -> None:
        """Nothing, likewise."""


def random_cache(model: Transformer, positions: int, room: int = 0) -> FullCache:
    """A cache of random keys and values, to time forwards after so many positions.

    room  positions for which memory is written besides: the system gives memory when it is first written to, and what
          is timed must not wait for that
    """
    cache = model.new_cache()
    cache.reserve(positions + room)
    for store in cache.stores:
        fill_randomly(store, positions + room, model.kernels)
    cache.skip(positions)
    if cache.taps:
        cache.taps.fill(positions)
    return cache


def fill_randomly(store: KVStore, positions: int, kernels: Kernels) -> None:
    """Write random keys and values of so many positions to a store. They repeat every 4,096 positions and are the same
    each time."""
    generator = torch.Generator(kernels.device).manual_seed(1)
    k, v = (torch.randn(min(positions, _RANDOM_BLOCK), *store.shape, generator=generator, device=kernels.device).to(
        kernels.dtype) for _ in range(2))
    for start in range(0, positions, _RANDOM_BLOCK):
        count = min(_RANDOM_BLOCK, positions - start)
        store.write(start, k[:count], v[:count])


class _RandomText:
    """A text of random keys and values, and steps after it."""

    def __init__(self, model: Transformer, sampler: Sampler, agree: Callable[[float], float], positions: int) -> None:
        self.model = model
        self.sampler = sampler.of_free_text()
        self._agree = agree
        self.cache = random_cache(model, positions, 1024)
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

        def timed(rows: int) -> Timings:
            return self.step(guesses, rows - 1)[1]

        first = [timed(rows) for rows in sizes]  # slower than the next ones, which find the memory in use
        repeats = [self._repeats(timings.verify) for timings in first]
        timings_of: list[list[Timings]] = [[] for _ in sizes]
        for index in _in_turns(repeats):
            is_short_plain = sizes[index] == 1 and repeats[index] == _MAX_REPEATS
            timings_of[index] += [timed(sizes[index]) for _ in range(_PLAIN_STEPS if is_short_plain else 1)]
        return [_typical_timings(timings_of[index] or [timings]) for index, timings in enumerate(first)]

    def saved_ahead(self, plain: float) -> float:
        """Seconds that a step of plain decoding saves where it is computed ahead. plain: of a single step"""
        ahead = PlainAhead(self.model, self.cache, self.sampler, is_long=True)
        single = Step(self.model, self.cache, PlainDrafter(), self.sampler, self.context, Timings(), Tally())
        if not (repeats := self._repeats(plain)):
            return 0.0
        tokens = MOST if ahead.spare else repeats  # of a turn

        def seconds(step: Step) -> tuple[float, bool]:
            """The seconds of a step, and whether it was computed ahead."""
            began = perf_counter()
            for left in range(tokens, 0, -1):
                accepted = run_alone(step.run(left + ahead.spare))
            return (perf_counter() - began) / tokens, accepted.verified is None

        of_ahead, of_single = list[float](), list[float]()
        for _ in range(1 + repeats):  # in the first turn it learns how many fit together
            each, is_ahead = seconds(single._replace(ahead=ahead))
            if not is_ahead:
                return 0.0
            of_ahead.append(each)
            of_single.append(seconds(single)[0])
        return max(0.0, _typical(of_single[1:]) - _typical(of_ahead[1:]))

    def _repeats(self, seconds: float) -> int:
        """How often to repeat what took so long, on all ranks."""
        seconds = self._agree(seconds)
        return 0 if seconds > _SLOW_S else int(max(_MIN_REPEATS, min(_MAX_REPEATS, _ENOUGH_S / max(seconds, 1e-6))))

    def drafts(self, drafter: Drafter, on_one_thread: bool = False) -> list[tuple[Accepted, float]]:
        """For each of _DEPTHS one of the deepest drafts, and the time of these: a draft of nothing takes no time. The
        depths take turns, because a machine may be slower for a while."""
        steps = [[self.step(drafter, depth, on_one_thread)] for depth in _DEPTHS]
        repeats = self._repeats(steps[0][0][1].draft)
        for index in _in_turns([repeats] * len(_DEPTHS)):
            steps[index].append(self.step(drafter, _DEPTHS[index], on_one_thread))
        return [_deepest(of_depth) for of_depth in steps]

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
    saved = min(short.saved_ahead(plain.verify), (rising[0] + host) / 2)
    forward = ForwardCosts(host, tuple(rising), *_text_costs(model, sampler, agree, rising), saved)
    text = _RandomText(model, sampler, agree, min(_SHORT, model.config.max_positions // 2))
    drafters = candidates(text.cache, text.sampler, text.clock)
    return Costs(forward, {name: _of_drafter(text, drafter) for name, drafter in drafters.items()})


def _text_costs(model: Transformer, sampler: Sampler, agree: Callable[[float], float], rows: Sequence[float]
                ) -> tuple[float, float, float, float]:
    """`ForwardCosts.positions`, `growth`, `near` and `near_positions`. They are measured where a cache of moderate size
    takes a good part of a step, else taken by size. rows: seconds of forwards after an empty text"""
    most = min(_MAX_CACHE_BYTES // model.cache_bytes_per_token, model.config.max_positions // 2)
    weights = agree(model.weights_in_tokens)  # the last rank may hold fewer rows of the vocabulary
    near = int(min(weights, most))
    if near < _SHORT:
        return weights, DEFAULT_GROWTH, 0.0, 1.0

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
    for _ in range(_MAX_WARM_UPS):
        if text.step(drafter, _DEPTHS[0])[0].drafted:
            break
    (short, low), (long, high) = text.drafts(drafter)
    nodes = long.drafted / max(1, long.depth)
    deeper = long.depth - short.depth
    if deeper <= 0:
        return DraftCosts(min(low, high), 0.0, nodes, long.depth)
    token = max(0.0, (high - low) / deeper)
    costs = DraftCosts(max(0.0, low - token * short.depth), token, nodes, long.depth)
    if text.threads == 1 or not text.drafts_apart(drafter):
        return costs
    (_, low), (_, high) = text.drafts(drafter, on_one_thread=True)
    return costs._replace(lanes=text.threads, apart=max(token, (high - low) / deeper))
