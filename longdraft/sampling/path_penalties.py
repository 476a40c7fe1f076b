"""Penalties that depend on the tokens before a position: presence and frequency, DRY, and repeated n-grams.

    penalties = new_path_penalties(params, vocabulary=4096, prompt_length=3, breakers=[13], is_fast=True)
    penalties.extend(np.array([5, 6, 7, 5, 6], np.int32))
    tokens, amounts = penalties.edits([], follows=True)     # 7 would continue a repeat of two tokens

They are functions of the text and a node's path, so they are exact at every node of a draft tree. csrc/path_penalties.h
holds the definitions and the compiled class, which searches by a suffix automaton. The reference searches the text from
the beginning; the tests compare the two, and the reference serves where the compiled module is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from longdraft.request.sampling_params import LONGEST_REPEAT, SamplingParams

try:
    from longdraft.kernels.cpu._cpu import PathPenalties as CompiledPenalties
except ImportError:
    CompiledPenalties = None  # type: ignore[assignment, misc]

HOPELESS = 4.0  # logits: a draft token that DRY lowers by this much is not verified
_LONGEST = 2**31 - 1  # tokens: the largest C++ int; no text is longer
_MOST = 1e30  # a finite amount below which no logit is chosen


class PathPenalties(Protocol):
    """The penalties of one text."""

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Add the next tokens of the text, the prompt included."""

    def truncate(self, length: int) -> None:
        """Take back the tokens from this place on."""

    def edits(self, path: Sequence[int], follows: bool) -> tuple[list[int], list[float]]:
        """Tokens and the amounts to subtract from their logits one after the other, in float32, after `path`.

        follows  whether the next token directly follows the path; if not, only presence and frequency apply
        """

    def hopeful(self, tokens: Sequence[int], parents: Sequence[int], most: float) -> list[bool]:
        """For each node of a tree, whether DRY and the n-grams lower its token's logit by less than `most`."""

    def __len__(self) -> int:
        """Tokens of the text."""


def new_path_penalties(params: SamplingParams, vocabulary: int, prompt_length: int, breakers: Iterable[int],
                       is_fast: bool) -> PathPenalties:
    """The penalties of a text that is still empty.

    breakers  ids of the tokens that end a repeated passage
    is_fast   use the compiled class where it exists
    """
    breakers = sorted(token for token in breakers if token < vocabulary)
    if CompiledPenalties is None or not is_fast:
        return ReferencePathPenalties(params, prompt_length, breakers)
    window, range_ = (min(max(0, length), _LONGEST) for length in (params.penalty_window, params.dry_penalty_last_n))
    held = max(map(len, params.banned_strings), default=0)  # a cut takes back the tokens of a phrase
    return CompiledPenalties(params.presence_penalty, params.frequency_penalty, window, dry_amounts(params),
                             params.dry_allowed_length, range_, params.no_repeat_ngram_size, held, vocabulary,
                             prompt_length, breakers)


def dry_amounts(params: SamplingParams) -> list[float]:
    """What DRY subtracts for a repeat of l tokens, for l of 0 to LONGEST_REPEAT; empty where it is off."""
    if not params.dry_multiplier:
        return []
    amounts = [0.0] * params.dry_allowed_length
    amount = float(params.dry_multiplier)
    while len(amounts) <= LONGEST_REPEAT:  # by multiplication, which gives the same bits on every machine
        amounts.append(min(amount, _MOST))
        amount *= params.dry_base
    return amounts


class ReferencePathPenalties:
    """The definition. Its time grows with the length of the text."""

    def __init__(self, params: SamplingParams, prompt_length: int, breakers: Iterable[int]) -> None:
        self._params = params
        self._prompt_length = prompt_length
        self._breakers = frozenset(breakers)
        self._dry = dry_amounts(params)
        self._text: list[int] = []

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        self._text += tokens.tolist()

    def truncate(self, length: int) -> None:
        del self._text[length:]

    def edits(self, path: Sequence[int], follows: bool) -> tuple[list[int], list[float]]:
        text = [*self._text, *path]
        edits = self._presence_and_frequency(text)
        if follows:
            edits += self._repeats(text)
        return [token for token, _ in edits], [float(np.float32(amount)) for _, amount in edits]

    def hopeful(self, tokens: Sequence[int], parents: Sequence[int], most: float) -> list[bool]:
        kept, paths = [True], [list[int]()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            amounts = [amount for other, amount in self._repeats([*self._text, *paths[parent]]) if other == token]
            kept.append(max(amounts, default=0.0) < most)
            paths.append([*paths[parent], token])
        return kept

    def _presence_and_frequency(self, text: list[int]) -> list[tuple[int, float]]:
        presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
        if not presence and not frequency:
            return []
        counts = Counter(text[max(self._prompt_length, len(text) - self._params.penalty_window) :])
        return [(token, presence + frequency * count) for token, count in counts.items()]

    def _repeats(self, text: list[int]) -> list[tuple[int, float]]:
        repeats = list(self._dry_repeats(text).items())
        known = self._params.no_repeat_ngram_size - 1
        if known >= 0 and len(text) > known:
            tail = text[len(text) - known :]
            banned = {text[i] for i in range(known, len(text)) if text[i - known : i] == tail}
            repeats += [(token, math.inf) for token in banned]
        return repeats

    def _dry_repeats(self, text: list[int]) -> dict[int, float]:
        """Token -> amount."""
        if not self._dry:
            return {}
        if self._params.dry_penalty_last_n > 0:
            text = text[-self._params.dry_penalty_last_n :]
        most = 0
        while most < min(len(text), LONGEST_REPEAT) and text[-1 - most] not in self._breakers:
            most += 1
        longest: Counter[int] = Counter()
        for i in range(len(text) - 1):
            length = 0
            while length < min(most, i + 1) and text[i - length] == text[-1 - length]:
                length += 1
            if text[i + 1] not in self._breakers:
                longest[text[i + 1]] = max(longest[text[i + 1]], length)
        return {token: self._dry[length] for token, length in longest.items()
                if length >= self._params.dry_allowed_length}
