"""The channels of gpt-oss's answers (OpenAI's harmony format): thinking and answer are messages with headers.

    <|channel|>analysis<|message|>The user ...<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>

The text of a stream has no special tokens, but it has the words of headers, such as `analysis`. A reader of channels
takes them out, and says which part of the text is thinking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from longdraft.text.tokenizer import Tokenizer

_START, _CHANNEL, _MESSAGE, _END = MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_THINKING = "analysis"
_ANSWER = "final"
_LONGEST_HEADER = 256  # characters; longer text after <|start|> or <|channel|> is no header
_REASONING, _CONTENT, _HEADER, _DROPPED = range(4)  # what a run of text is


class ChannelText(NamedTuple):
    """The new text of an answer: of its thinking, and of all other channels."""

    reasoning: str
    content: str


class Harmony(NamedTuple):
    """The format of a model. marks: the special tokens of `MARKS`, by their ids."""

    tokenizer: Tokenizer
    marks: Mapping[int, str]

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> Harmony | None:
        """The format; None for a model whose tokenizer lacks one of the special tokens."""
        ids = tokenizer.vocabulary()
        marks = {ids[mark]: mark for mark in MARKS if mark in ids and tokenizer.is_silent(ids[mark])}
        return cls(tokenizer, marks) if len(marks) == len(MARKS) else None

    def reader(self, prompt: Sequence[int], begun: str = "") -> ChannelReader:
        """A reader for the answer to a prompt, which may end within a message: its header names the channel of `begun`,
        the answer's beginning in the prompt."""
        starts = [place for place, token in enumerate(prompt) if self.marks.get(token) == _START]
        reader = ChannelReader(self)
        if starts:
            reader.skip(prompt[starts[-1] :])
        return reader


class ChannelReader:
    """The channels of one answer, token by token.

    The text of an answer may arrive later than its tokens, because stop texts and characters of several tokens are held
    back. So the reader decodes the tokens itself, and counts the characters of each channel. Text that belongs to no
    message, which only a broken answer has, is content.
    """

    def __init__(self, form: Harmony) -> None:
        self._marks, self._stream = form.marks, form.tokenizer.stream()
        self._channel = _ANSWER
        self._header: str | None = None  # text after <|start|> or <|channel|> so far; None: of no header
        self._is_channel = False  # whether the header names a channel
        self._runs: deque[list[int]] = deque()  # [what, characters] that no text was taken for
        self._text = ""  # whose runs are unknown
        self._latest = _CONTENT  # what the latest token's text is, of which the end may be held back

    def skip(self, tokens: Sequence[int]) -> None:
        """Read the beginning of a message, whose text is none of the answer's."""
        for token in tokens:
            self._read(token)
        if not self._is_channel:  # after the role, an answer that does not name its channel is content
            self._header = None
        self._runs.clear()

    def push(self, tokens: Sequence[int], text: str) -> ChannelText:
        """The new text by channel. text: what the stream returned for these tokens"""
        for token in tokens:
            self._read(token)
        self._text += text
        found = {_REASONING: "", _CONTENT: "", _DROPPED: ""}
        while self._text and self._runs and self._runs[0][0] != _HEADER:
            what, count = self._runs[0]
            part, self._text = self._text[:count], self._text[count:]
            found[what] += part
            self._runs[0][1] -= len(part)
            if not self._runs[0][1]:
                self._runs.popleft()
        if self._text and not self._runs:  # the end of a character that never came
            found[self._latest] += self._text
            self._text = ""
        return ChannelText(found[_REASONING], found[_CONTENT])

    def finish(self) -> ChannelText:
        """Nothing: what is held back at the end of the answer is an unfinished header."""
        return ChannelText("", "")

    @property
    def _what(self) -> int:
        """The kind of the text that comes next."""
        if self._header is not None:
            return _DROPPED
        return _REASONING if self._channel == _THINKING else _CONTENT

    def _read(self, token: int) -> None:
        mark, text = self._marks.get(token), self._stream.push(token)
        if mark in (_START, _CHANNEL):
            self._settle(_DROPPED)
            self._header, self._is_channel = "", mark == _CHANNEL
        elif mark == _MESSAGE:
            words = (self._header or "").split() if self._is_channel else []
            self._channel = words[0] if words else _ANSWER
            self._settle(_DROPPED)
            self._header, self._is_channel = None, False
        elif mark == _END:
            self._settle(_DROPPED)
            self._header, self._is_channel, self._channel = None, False, _ANSWER
        else:
            self._latest = self._what
        if not text:
            return
        if self._header is not None:
            self._header += text
            self._runs.append([_HEADER, len(text)])
            if len(self._header) > _LONGEST_HEADER:
                self._settle(_CONTENT)
                self._header, self._is_channel, self._channel = None, False, _ANSWER
        else:
            self._runs.append([self._what, len(text)])

    def _settle(self, what: int) -> None:
        """Say what the text of the header was."""
        for run in self._runs:
            if run[0] == _HEADER:
                run[0] = what
