"""What a step costs on this machine: the model of its seconds, and the file in the user's cache folder that keeps it.

    seconds of a step  =  ForwardCosts.at(rows, context, requests)  +  DraftCosts.at(depth)

calibration.py measures these once for each model. `Pace` (pace.py) notices while writing that they are off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.checkpoint.fingerprint import cache_dir, write_cached

log = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

ROWS = (1, 2, 4, 6, 8, 16, 32)  # of the forwards that are timed; products of more than six rows take several passes
DEFAULT_GROWTH = 0.02  # of `ForwardCosts`, where it is not measured
_ROWS = np.array(ROWS, dtype=np.float64)
_FORMAT = 9


class ForwardCosts(NamedTuple):
    """Seconds of a step without its draft: the forward, the sampler and the commit.

    host       seconds of a request's own work, which no other request shares
    rows       seconds of a forward of ROWS rows after an empty text, without `host`
    positions  number of positions of the text that take as long to read as one row's forward after an empty text
    growth     share of the time for the text that each further row adds: little where memory is the limit, much where
               several query heads share keys and arithmetic is
    near, near_positions  the same as `positions` for the first `near` ones, which may stay in the processor's caches
    ahead      seconds that a step of plain decoding saves where it is computed ahead (`PlainAhead`)
    """

    host: float
    rows: tuple[float, ...]
    positions: float
    growth: float = DEFAULT_GROWTH
    near: float = 0.0
    near_positions: float = 1.0
    ahead: float = 0.0

    @classmethod
    def by_size(cls, weights_in_tokens: float) -> ForwardCosts:
        """Before anything was measured: a forward that reads its bytes once, and whose rows cost little."""
        return cls(0.0, tuple(1 + 0.02 * rows for rows in ROWS), weights_in_tokens)

    def at(self, rows: Sequence[float] | FloatArray, context: int | Sequence[int], requests: float | FloatArray = 1,
           batch_size: int = 1) -> FloatArray:
        """Seconds of one request's part of a forward, for each number of its rows:

            host  +  line(rows * requests) / requests  +  rows_1 * reads * (1 + growth * (rows - 1))

        its own work, an equal share of the weights, and its own keys and values. line: seconds after an empty text.
        reads: of the keys and values, in forwards of one row after an empty text.

        context     tokens of its text; one number, or one for each of rows
        requests    that have so many rows each, likewise
        batch_size  requests whose texts share the processor's caches
        """
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
    """The costs of a model and of its drafters, by the drafters' names."""

    forward: ForwardCosts
    drafts: dict[str, DraftCosts]

    def numbers(self) -> list[float]:
        """All of them, in an order that `from_numbers` knows."""
        host, rows, *others = self.forward
        return [host, *rows, *others, *(float(number) for costs in self.drafts.values() for number in costs)]

    @classmethod
    def from_numbers(cls, names: Iterable[str], numbers: Sequence[float]) -> Costs:
        """ValueError if these are not numbers of costs of these drafters."""
        names = list(names)
        size = len(DraftCosts._fields)
        end = len(ROWS) + len(ForwardCosts._fields) - 1
        if len(numbers) != end + size * len(names) or not all(
                isinstance(number, float) and 0 <= number < 1e9 for number in numbers):
            raise ValueError("not the costs of these drafters")
        drafts = {}
        for index, name in enumerate(names):
            base, token, nodes, depth, lanes, apart = numbers[end + size * index : end + size * (index + 1)]
            drafts[name] = DraftCosts(base, token, nodes, int(depth), int(lanes), apart)
        host, *others = numbers[:end]
        return cls(ForwardCosts(host, tuple(others[: len(ROWS)]), *others[len(ROWS) :]), drafts)


def load_or_measure(identity: Mapping[str, Any], names: Sequence[str], agree: Callable[[float], float],
                    measured: Callable[[], Costs]) -> Costs:
    """The costs that an earlier run of the same `identity` measured on this machine, else those of `measured()`, which
    are kept in the user's cache folder where that is possible. All ranks of a run get rank 0's costs."""
    file = _file(identity)
    costs = _load(file, names)
    if not agree(float(costs is not None)):
        log.info("timing the drafters, once for this model on this machine")
        costs = measured()
        if file:
            write_cached(file, costs.numbers())
    numbers = (costs or Costs(ForwardCosts.by_size(1.0), {name: DraftCosts(0, 0, 0, 0) for name in names})).numbers()
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
