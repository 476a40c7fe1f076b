"""The text so far as token ids, and the forms in which a prompt is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]  # a text, or its token ids


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
