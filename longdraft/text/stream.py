"""The text of the new tokens, where it ends, and where its special tokens are.

All of these depend on the tokens and the settings alone. The same tokens give the same text and the same end, whether
they are pushed at once, step by step, or after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from longdraft.errors import JournalError
from longdraft.request.events import Finish
from longdraft.request.loops import Loop, LoopGuard
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.thought import AFTER, CLOSING, INSIDE, Thought
from longdraft.text.tokenizer import StopText, Tokenizer

_REPLAYED = 512  # tokens; some 8 ms


class DecodedTokens(NamedTuple):
    """Tokens, and the piece of text that each of them adds."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> set[int]:
    """Token ids that end the text: the request's stop ids, and the model's end-of-text ids unless it ignores them."""
    return set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))


class TextStream:
    """The text so far.

    eos_token_ids  the model's end-of-text ids
    thought        follows the thought of the text; None: the model marks none
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: Iterable[int],
                 thought: Thought | None = None) -> None:
        self.finish_reason: Finish | None = None
        self.num_tokens = 0
        self._params = params
        self._eos = set() if params.ignore_eos else set(eos_token_ids)
        self._stop_ids = stop_ids(params, self._eos)
        self._text = tokenizer.stream()
        self._stops = StopText(params.stop)
        self._guard = LoopGuard() if params.on_loop != "off" else None
        self._loop: Loop | None = None  # of the thought, after it
        self.thought = thought

    @property
    def loop(self) -> Loop | None:
        """The first loop in the text, if any."""
        return self._loop or (self._guard.loop if self._guard else None)

    @property
    def distinct(self) -> float | None:
        """Distinct 4-grams divided by 4-grams of the latest tokens; None with on_loop "off"."""
        return self._guard.distinct if self._guard else None

    def push(self, tokens: Sequence[int]) -> DecodedTokens:
        """The tokens of a step, up to the end of the text if it is among them; sets `finish_reason` there."""
        pieces: list[str] = []
        for count, token in enumerate(tokens, 1):
            self.num_tokens += 1
            is_long_enough = self.num_tokens >= self._params.min_new_tokens
            if self._guard:
                self._guard.push(token)
            is_inside, is_searched = self._follow(token) if self.thought else (False, True)
            if token in self._stop_ids:
                pieces.append("")
                self.finish_reason = "eos" if token in self._eos else "stop"
            else:
                text, is_stopped = self._text.push(token), False
                if not is_searched:  # the search begins anew afterwards
                    text = self._stops.flush() + text
                elif is_long_enough:
                    text, is_stopped = self._stops.push(text)
                pieces.append(text)
                if is_stopped:
                    self.finish_reason = "stop"
                    return DecodedTokens(tuple(tokens[:count]), tuple(pieces))
            if self.finish_reason is None and self.num_tokens == self._params.max_new_tokens:
                self.finish_reason = "length"
            ends_loops = self._params.on_loop == "stop" or (self._params.on_loop == "answer" and not is_inside)
            stops = ends_loops and is_long_enough and self._guard and self._guard.is_looping
            if self.finish_reason is None and stops:
                self.finish_reason = "loop"
            if self.finish_reason:
                text, is_stopped = self._flush()
                pieces[-1] += text
                if is_stopped:
                    self.finish_reason = "stop"
                return DecodedTokens(tuple(tokens[:count]), tuple(pieces))
        return DecodedTokens(tuple(tokens), tuple(pieces))

    def _follow(self, token: int) -> tuple[bool, bool]:
        """Follow the thought. Returns whether the token is part of it, its markers included, and whether stop texts
        apply to the token."""
        assert self.thought is not None
        before = self.thought.state.phase
        after = self.thought.push(token).phase
        is_inside = before in (INSIDE, CLOSING) or after in (INSIDE, CLOSING)
        if self._guard and is_inside and after == AFTER and self._params.on_loop == "answer":
            self._loop, self._guard = self.loop, LoopGuard()
        return is_inside, before != CLOSING and (not is_inside or self._params.stop_in_thinking)

    def thinking(self) -> dict[str, Any] | None:
        """The figures of the thought; None for a model that marks none."""
        return self.thought.figures() if self.thought else None

    def replay(self, tokens: Sequence[int], pieces: list[str]) -> Iterator[None]:
        """Push the tokens of an earlier run, of which there may be very many, in parts of a few milliseconds.

        Appends the tokens' pieces of text to `pieces`, and yields after each part. Raises JournalError for tokens that
        go on after the text's end.
        """
        for start in range(0, len(tokens), _REPLAYED):
            part = tokens[start : start + _REPLAYED]
            new = self.push(part).pieces if self.finish_reason is None else ()
            if len(new) < len(part):
                raise JournalError("the journal holds tokens after the end of the text; it cannot be used")
            pieces += new
            yield

    def flush(self) -> str:
        """The text that was held back, up to a stop text in it. Call it last: no token can be pushed after it."""
        return self._flush()[0]

    def _flush(self) -> tuple[str, bool]:
        """The held text, and whether it reached a stop text."""
        text, is_stopped = self._text.flush(), False
        if self.num_tokens >= self._params.min_new_tokens:
            text, is_stopped = self._stops.push(text)
        return text + self._stops.flush(), is_stopped


class TokenMarker:
    """Inserts a mark into the text of an answer for each of some special tokens, which have no text.

    Tokens may arrive before the text before them, because stop texts and characters of several tokens are held back. So
    this decodes the tokens itself, and counts characters.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str]) -> None:
        self._marks = marks
        self._decoder = tokenizer.stream()
        self._num_decoded = 0  # characters of the tokens so far
        self._num_passed = 0  # characters of the text that has arrived
        self._waiting: deque[tuple[int, str]] = deque()  # characters before a mark, and the mark

    def add_marks(self, tokens: Sequence[int], text: str) -> str:
        """The text with its marks. text: what the stream returned for these tokens"""
        for token in tokens:
            if token in self._marks:
                self._waiting.append((self._num_decoded, self._marks[token]))
            else:
                self._num_decoded += len(self._decoder.push(token))
        parts = []
        start, done = self._num_passed, 0
        self._num_passed += len(text)
        while self._waiting and self._waiting[0][0] <= self._num_passed:
            position, mark = self._waiting.popleft()
            end = max(done, position - start)
            parts += [text[done:end], mark]
            done = end
        return "".join([*parts, text[done:]])


def marked_text(tokenizer: Tokenizer, marks: Mapping[int, str], tokens: Sequence[int]) -> str:
    """The text of tokens, with the marks of special tokens."""
    return "".join(marks.get(token) or tokenizer.text_of(token) for token in tokens)
