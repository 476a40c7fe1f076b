"""Plain data types of the whole package: sampling parameters, the text so far, and the events of a generation.

    params = SamplingParams(max_new_tokens=1000, min_p=0.1, seed=7)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.sampling_params import ALIASES, MAX_SEED, SamplingParams

__all__ = ["ALIASES", "MAX_SEED", "Context", "Event", "Finish", "Prompt", "SamplingParams", "TokenLogprob",
           "lone_surrogate"]

Finish = Literal["length", "eos", "stop", "loop", "cancelled"]
Prompt = str | Sequence[int] | NDArray[np.integer[Any]]  # a text, or its token ids


def lone_surrogate(text: str) -> int | None:
    """The index of the first lone surrogate, or None. JSON escapes can contain one, and Python represents bytes that
    are not UTF-8 by them (PEP 383), but valid text has none."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


class Context:
    """The text so far as token ids (int32): the prompt, then the new tokens. Append-only, amortised O(1)."""

    def __init__(self, prompt: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        self.prompt_length = len(prompt)
        self._ids: NDArray[np.int32] = np.zeros(max(1024, 2 * len(prompt)), dtype=np.int32)
        self._ids[: len(prompt)] = prompt
        self._length = len(prompt)

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> int:
        """The last token: the root of the next tree. Its cache row does not exist yet."""
        return int(self._ids[self._length - 1])

    @property
    def num_new(self) -> int:
        return self._length - self.prompt_length

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._length == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._ids[self._length] = token
            self._length += 1

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on, which is after the prompt."""
        assert self.prompt_length <= length <= self._length
        self._length = length

    def slice(self, start: int, stop: int) -> NDArray[np.int32]:
        """A read-only view of positions [start, stop), clipped to the text."""
        view = self._ids[max(0, start) : max(0, min(stop, self._length))]
        view.flags.writeable = False
        return view


class TokenLogprob(NamedTuple):
    """A chosen token, its log-probability among the tokens that sampling could choose, and the likeliest of these."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """The result of one step of a generation.

    tokens         the new token ids
    text           the new complete characters
    finish_reason  why the text ended; set on the last event only
    stats          the statistics of the run; set on the last event only
    error          in a batch: the error that ended this text; set on the last event only, which has no finish
                   reason then (a text that is generated alone raises it instead)
    pieces         the part of `text` that each token added
    sources        name of each token's drafter; "" for tokens that the target added, and for those of an earlier run
    drafted        number of draft tokens verified in this step
    depth          depth of the draft tree, tokens
    logprobs       log-probabilities for each token, if requested
    seconds        wall-clock time of the step; in a batch it includes the work on other texts
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: Finish | None = None
    stats: dict[str, Any] | None = None
    error: Exception | None = None
    pieces: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    drafted: int = 0
    depth: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    seconds: float = 0.0

    @property
    def num_accepted(self) -> int:
        """Number of draft tokens that were accepted into the text."""
        return sum(source != "" for source in self.sources)
