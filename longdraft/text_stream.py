"""What a text's tokens show, and where it ends: a function of the tokens and the settings, of nothing else.

Whoever pushes the same tokens, at once or step by step, now or after a restart, gets the same text and the same end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from longdraft.core import Finish, SamplingParams
from longdraft.loops import Loop, LoopGuard
from longdraft.model.tokenizer import StopText, Tokenizer


class Written(NamedTuple):
    """Tokens, and what each added to the text."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class TextStream:
    """The text so far.

    eos_token_ids  the model's own ends of text
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
        self.finish_reason: Finish | None = None
        self.num_tokens = 0
        self._params = params
        self._eos = set() if params.ignore_eos else set(eos_token_ids)
        self.stop_ids = self._eos | set(params.stop_token_ids)
        self._text = tokenizer.stream()
        self._stops = StopText(params.stop)
        self._guard = LoopGuard() if params.on_loop != "off" else None

    @property
    def loop(self) -> Loop | None:
        """The first loop the text fell into, if any."""
        return self._guard.loop if self._guard else None

    @property
    def distinct(self) -> float | None:
        """Distinct 4-grams over 4-grams of the latest tokens; None where nobody looks for loops."""
        return self._guard.distinct if self._guard else None

    def push(self, tokens: Sequence[int]) -> Written:
        """Tokens and text of a step up to where the text ends; sets `finish_reason` there."""
        shown: list[str] = []
        for count, token in enumerate(tokens, 1):
            self.num_tokens += 1
            is_long_enough = self.num_tokens >= self._params.min_new_tokens
            if self._guard:
                self._guard.push(token)
            if token in self.stop_ids:
                shown.append("")
                self.finish_reason = "eos" if token in self._eos else "stop"
            else:
                text, stopped = self._text.push(token), False
                if is_long_enough:
                    text, stopped = self._stops.push(text)
                shown.append(text)
                if stopped:
                    self.finish_reason = "stop"
                    return Written(tuple(tokens[:count]), tuple(shown))
            if self.finish_reason is None and self.num_tokens == self._params.max_new_tokens:
                self.finish_reason = "length"
            stops = self._params.on_loop == "stop" and is_long_enough and self._guard and self._guard.is_looping
            if self.finish_reason is None and stops:
                self.finish_reason = "loop"
            if self.finish_reason:
                rest, stopped = self._rest()
                shown[-1] += rest
                if stopped:
                    self.finish_reason = "stop"
                return Written(tuple(tokens[:count]), tuple(shown))
        return Written(tuple(tokens), tuple(shown))

    def rest(self) -> str:
        """The text that was held back, up to a stop text in it. Nothing can be pushed after that."""
        return self._rest()[0]

    def _rest(self) -> tuple[str, bool]:
        """... and whether a stop text was reached."""
        text, stopped = self._text.flush(), False
        if self.num_tokens >= self._params.min_new_tokens:
            text, stopped = self._stops.push(text)
        return text + self._stops.flush(), stopped
