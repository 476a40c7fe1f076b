"""Banned phrases: the text goes back to where a banned phrase began, and another token is chosen there.

    Each position of the text has a set of banned tokens, empty at first. Tokens are taken in order. When the text
    completes a phrase that began within token a, the text is cut before a, that token joins the set of its position,
    the sets after it are emptied, and the position is chosen again.

Letter case does not matter. A phrase that began in the prompt is cut at the first new token. After MAX_BANS phrases at
one position the next one there is let through, so that the text goes on. The rule depends on tokens only, so it gives
the same text whatever drafts and steps were.

The tokens that close a thought are given, so no cut goes back before them: a phrase that they are part of is let
through. So is one in a thought, unless phrases are banned there. The search begins anew behind them.

A token is *held* while it may be part of a phrase: it is neither shown nor written to a journal. A resumed text
repeats the tokens that were held, with the same outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from longdraft.request.events import TokenLogprob
from longdraft.request.sampling_params import SamplingParams
from longdraft.text.tokenizer import IncrementalDecoder, Tokenizer, stop_states

MAX_BANS = 64  # tokens banned at one position
_TAIL = 4  # tokens of the prompt for each character of the longest phrase, at least


class ChosenToken(NamedTuple):
    """A token of a step, with what is reported about it. is_free: no phrase contains it"""

    token: int
    source: str = ""
    logprob: TokenLogprob | None = None
    is_free: bool = False


class _Held(NamedTuple):
    """A token that may be taken back, and the state before it."""

    chosen: ChosenToken
    decoder: IncrementalDecoder
    state: int
    num_characters: int


class PhraseFilter:
    """The tokens of one text, in order; each is held until no phrase can contain it.

    written  tokens of earlier runs, with their `is_free`
    ends     token ids that end the text: no phrase continues after one
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int],
                 written: Iterable[tuple[int, bool]], ends: Iterable[int]) -> None:
        phrases = tuple(folded(phrase) for phrase in params.banned_strings)
        self._ends = frozenset(ends)
        self._max_new_tokens = params.max_new_tokens
        self._decoder = tokenizer.stream()
        self._states = stop_states(phrases)
        self._state = 0
        self._num_characters = 0  # of the new text
        self._held: deque[_Held] = deque()
        self._num_tokens = 0  # new ones, held ones included
        self._bans: dict[int, set[int]] = {}  # by number of new tokens before the position, which may be cut again
        self.num_rewinds = 0
        for token in prompt[-_TAIL * max(map(len, phrases)) :]:
            self._advance(self._decoder.push(token))
        self._num_characters = 0
        for token, is_free in written:  # they were settled, so phrases in them were let through
            self._advance(self._decoder.push(int(token)))
            self._state = 0 if is_free else self._state
            self._num_tokens += 1

    def push(self, chosen: Sequence[ChosenToken]) -> tuple[list[ChosenToken], int | None]:
        """Add the tokens of a step. Returns the tokens that are settled now, and the number of new tokens at which the
        text is cut; None if it is not. Tokens after a cut, or after an end of the text, are dropped."""
        for each in chosen:
            self._held.append(_Held(each, self._decoder.copy(), self._state, self._num_characters))
            self._num_tokens += 1
            began = self._advance(self._decoder.push(each.token))
            if each.is_free:
                began, self._state = None, 0
            if began is not None and (cut := self._cut(began)) is not None:
                return self._settled(), cut
            if each.token in self._ends or self._num_tokens == self._max_new_tokens:
                settled = [held.chosen for held in self._held]
                self._held.clear()
                return settled, None
        return self._settled(), None

    @property
    def banned_tokens(self) -> list[int]:
        """Tokens that are banned at the next position."""
        return sorted(self._bans.get(self._num_tokens, ()))

    @property
    def earliest_cut(self) -> int:
        """The number of new tokens that no later cut goes below."""
        return self._num_tokens - len(self._held)

    def _advance(self, text: str) -> int | None:
        """Follow the text; returns the character at which a phrase that it completes began, the first such phrase."""
        began = None
        for letter in folded(text):
            self._state = self._states.after(self._state, letter)
            self._num_characters += 1
            if began is None and (length := self._states.stop_lengths[self._state]):
                began = self._num_characters - length
        return began

    def _cut(self, began: int) -> int | None:
        """Take back the tokens from the one that has character `began` on; None if its phrase is let through."""
        kept = max((i for i, held in enumerate(self._held) if held.num_characters <= began), default=0)
        cut = self._num_tokens - len(self._held) + kept
        banned = self._bans.setdefault(cut, set())
        if len(banned) >= MAX_BANS:
            return None
        first = self._held[kept]
        banned.add(first.chosen.token)
        self._bans = {place: tokens for place, tokens in self._bans.items() if place <= cut}
        self._decoder = first.decoder
        self._state = first.state
        self._num_characters = first.num_characters
        while len(self._held) > kept:
            self._held.pop()
        self._num_tokens = cut
        self.num_rewinds += 1
        return cut

    def _settled(self) -> list[ChosenToken]:
        """The tokens that cannot be taken back any more; they are held no longer.

        A phrase may have begun as far back as the state is deep. If it completes, the text is cut somewhere after
        there, and the phrases that were possible at that character are possible again.
        """
        depths = self._states.depths
        reach, end = self._num_characters - depths[self._state], self._num_characters
        count = len(self._held)
        for held in reversed(self._held):
            if end <= reach:
                break
            end, reach = held.num_characters, min(reach, held.num_characters - depths[held.state])
            count -= 1
        settled = [self._held.popleft().chosen for _ in range(count)]
        self._bans = {place: tokens for place, tokens in self._bans.items() if place >= self.earliest_cut}
        return settled


def folded(text: str) -> str:
    """The text without differences of letter case, character by character."""
    return "".join(letter.casefold() for letter in text)
