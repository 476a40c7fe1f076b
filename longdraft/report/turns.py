"""The record of a text while it is written: the steps of each turn, for tables and figures.

A turn is a stretch of a text that one drafting system writes. Its record holds the tokens written, the seconds, and
the counts of its steps.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longdraft.request.events import Event

Record = dict[str, Any]


class StepCounts:
    """Counts of the steps of one turn."""

    def __init__(self) -> None:
        self._depth = self._drafted = self._accepted = 0
        self._lengths: Counter[int] = Counter()
        self._by_source: Counter[str] = Counter()

    def add(self, event: Event) -> None:
        self._depth += event.depth
        self._drafted += event.drafted
        self._accepted += event.num_accepted
        self._lengths[len(event.tokens)] += 1
        self._by_source.update(source for source in event.sources if source)

    def record(self) -> Record:
        """The counts by name.

        steps               verification forwards
        drafted, accepted   draft tokens
        depth               sum over the steps of the depth of the draft tree
        lengths             tokens written by a step -> number of such steps
        accepted_by_source  drafter -> accepted tokens
        """
        return {"steps": self._lengths.total(), "drafted": self._drafted, "depth": self._depth,
                "accepted": self._accepted,
                "lengths": {str(length): count for length, count in sorted(self._lengths.items())},
                "accepted_by_source": dict(self._by_source)}


@dataclass
class MeasuredText:
    """One text, written by one or more systems that took turns.

    about  its prompt length, sampling, systems and reference system
    turns  system -> records of its turns, in order
    stats  system -> statistics of its finished generation
    """

    about: Record
    turns: dict[str, list[Record]] = field(default_factory=dict)
    stats: dict[str, Record] = field(default_factory=dict)

    def tokens(self, system: str) -> NDArray[np.int32]:
        """The new token ids that a system wrote, as far as its turns are recorded.

        Systems write the same tokens as the reference, except for those marked `own_text`.
        """
        owner = system if self.about["systems"][system]["own_text"] else self.about["reference"]
        parts = [unpack_tokens(turn["ids"]) for turn in self.turns.get(owner, [])]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def seeds_of(sessions: Iterable[Record]) -> list[int]:
    """The seeds of these sessions, each once, in their order. A session of a single text names none."""
    return list(dict.fromkeys(seed for session in sessions for seed in session.get("seeds", ())))


def pack_tokens(tokens: Sequence[int] | NDArray[np.int32]) -> str:
    """Token ids as text: little-endian int32, deflated, base64."""
    return base64.b64encode(zlib.compress(np.asarray(tokens, dtype="<i4").tobytes(), 9)).decode()


def unpack_tokens(text: str) -> NDArray[np.int32]:
    tokens: NDArray[np.int32] = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i4").astype(np.int32)
    return tokens
