"""The channels of gpt-oss's answers (OpenAI's harmony format): thinking and answer are messages with headers.

    <|channel|>analysis<|message|>The user ...<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>

The text of a stream has no special tokens, but it has the words of headers, such as `analysis`. A reader of channels
removes them, and separates the thinking from the other text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from longdraft.text.stream import TokenMarker, marked_text
from longdraft.text.tokenizer import Tokenizer

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
# Each special token of MARKS is one character in the marked text: a half of a surrogate pair, which no text has.
_START, _CHANNEL, _MESSAGE, _END = "\ud800", "\ud801", "\ud802", "\ud803"
_PARTS = re.compile(f"([{_START}{_CHANNEL}{_MESSAGE}{_END}])")
_THINKING = "analysis"
_ANSWER = "final"
_RECIPIENT = re.compile(r"to=functions\.(\S+)")  # in the header of a call
# In the content of a reader that shows calls, before the name of a function and before its arguments.
CALL_MARK, ARGUMENTS_MARK = "\ud810", "\ud811"
_LONGEST_HEADER = 256  # characters; longer text after <|start|> or <|channel|> is no header


ANSWER_HEADER = "<|channel|>final<|message|>"  # of the message that is the answer


class ChannelText(NamedTuple):
    """The new text of an answer: of its thinking, and of all other channels."""

    reasoning: str
    content: str


class Harmony(NamedTuple):
    """The format of a model. marks: the character of each special token, by its id, in the order of `MARKS`

    shows_calls  calls of functions are part of the content, with marks for their headers
    """

    tokenizer: Tokenizer
    marks: Mapping[int, str]
    shows_calls: bool = False

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> Harmony | None:
        """The format; None for a model whose tokenizer lacks one of the special tokens."""
        ids = map(tokenizer.token_id, MARKS)
        marks = {token: mark for token, mark in zip(ids, (_START, _CHANNEL, _MESSAGE, _END), strict=True)
                 if token is not None and tokenizer.is_silent(token)}
        return cls(tokenizer, marks) if len(marks) == len(MARKS) else None

    def begins_message(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of a message of the assistant, whose channel is open."""
        role = self.tokenizer.encode("assistant", add_special_tokens=False)
        end = list(prompt[-len(role) - 1 :])
        return end[1:] == role and self.marks.get(end[0]) == _START

    def reader(self, prompt: Sequence[int], begun: str = "", thought: str = "") -> ChannelReader:
        """A reader for the answer to a prompt, which may end within a message: its header names the channel of `begun`
        or `thought`, the answer's beginning in the prompt."""
        reader = ChannelReader(self)
        starts = [position for position, token in enumerate(prompt) if self.marks.get(token) == _START]
        if starts:
            reader.skip(marked_text(self.tokenizer, self.marks, prompt[starts[-1] :]))
        return reader


class ChannelReader:
    """The channels of one answer. Text that belongs to no message, which only a broken answer has, is content."""

    def __init__(self, form: Harmony) -> None:
        self._marker = TokenMarker(form.tokenizer, form.marks)
        self._shows_calls = form.shows_calls
        self._recipient = ""  # the function that the header names
        self._channel = _ANSWER
        self._header: str | None = None  # text after <|start|> or <|channel|> so far; None: of no header
        self._is_channel = False  # whether the header names a channel

    def skip(self, begun: str) -> None:
        """Read the beginning of a message, with its marks. Its text is part of the prompt."""
        self._read(begun)
        if not self._is_channel and not self._shows_calls:  # after the role, an answer without a channel is content
            self._header = None

    def push(self, tokens: Sequence[int], text: str) -> ChannelText:
        """The new text by channel. text: what the stream returned for these tokens"""
        return self._read(self._marker.add_marks(tokens, text))

    def finish(self) -> ChannelText:
        """Nothing: what is held back at the end of the answer is an unfinished header."""
        return ChannelText("", "")

    def _read(self, text: str) -> ChannelText:
        reasoning = content = ""
        for part in _PARTS.split(text):
            if part in (_START, _CHANNEL):
                self._recipient = self._read_recipient() if part == _CHANNEL else ""
                self._header, self._is_channel = "", part == _CHANNEL
            elif part == _MESSAGE:
                words = (self._header or "").split() if self._is_channel else []
                if self._shows_calls and (name := self._read_recipient()):
                    content += f"{CALL_MARK}{name}{ARGUMENTS_MARK}"
                self._end_header(words[0] if words else _ANSWER)
            elif part == _END:
                self._end_header(_ANSWER)
            elif self._header is not None:
                self._header += part
                if len(self._header) > _LONGEST_HEADER:
                    content += self._header
                    self._end_header(_ANSWER)
            elif self._channel == _THINKING:
                reasoning += part
            else:
                content += part
        return ChannelText(reasoning, content)

    def _read_recipient(self) -> str:
        """The function that a call is for, from its header so far; "" for other messages."""
        match = _RECIPIENT.search(self._header or "")
        return match[1] if match else self._recipient

    def _end_header(self, channel: str) -> None:
        self._header, self._is_channel = None, False
        self._channel = channel
