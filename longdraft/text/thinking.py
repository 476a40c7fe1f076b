"""Thinking between tags, such as <think>...</think>: the tags of a model, and the parts of its answers.

    form = thinking.find_format(tokenizer)      # None: the model's answers have no parts
    reader = form.reader(prompt)                # for the answer to a prompt, given as token ids
    reasoning, content = reader.push(tokens, text)

An answer has at most one block of thinking, at its beginning. White space around the tags belongs to neither part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from longdraft.text.harmony import ChannelText, Harmony
from longdraft.text.stream import TokenMarker, marked_text
from longdraft.text.tokenizer import Tokenizer


class _Tag(NamedTuple):
    """The text or token that begins a block, the one that ends it, and a name after the first, as Gemma 4 writes it."""

    opening: str
    closing: str
    name: str = ""


_TAGS = (
    _Tag("<think>", "</think>"),  # Qwen3, DeepSeek-R1, QwQ, GLM-4.5, SmolLM3, OLMo 3, Granite
    _Tag("<thinking>", "</thinking>"),
    _Tag("<reasoning>", "</reasoning>"),
    _Tag("<seed:think>", "</seed:think>"),  # Seed-OSS
    _Tag("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    _Tag("<|channel>", "<channel|>", "thought"),  # Gemma 4
)
_CLOSING = {tag.opening + tag.name: tag.closing for tag in _TAGS}
_OPENED = re.compile(rf"(?P<opening>{'|'.join(map(re.escape, _CLOSING))})\s*\Z")
TAG_TOKENS = 16  # tokens at the end of a prompt that are searched for an opening tag with its white space
_MAX_HELD = 256  # characters of white space before a tag; more of it is shown before the next text is known
# Special tokens have no text. Halves of surrogate pairs, which no decoded text has, stand for them.
_OPENING_MARK, _CLOSING_MARK = "\ud800", "\udc00"
_NO_MARKS = str.maketrans("", "", _OPENING_MARK + _CLOSING_MARK)


def opened_thinking(prompt: str) -> str:
    """The part of the answer that the template has already opened: `<think>` with its white space, or nothing."""
    match = _OPENED.search(prompt)
    return match.group() if match else ""


def closed_thinking(prompt: str) -> str:
    """The tag that ends the thinking which the end of a prompt has opened, such as `</think>`; or nothing."""
    match = _OPENED.search(prompt)
    return _CLOSING[match["opening"]] if match else ""


class AnswerReader(Protocol):
    """Divides one answer into thinking and content while it is written."""

    def push(self, tokens: Sequence[int], text: str) -> ChannelText:
        """The new text by part. text: what the stream returned for these tokens"""

    def finish(self) -> ChannelText:
        """The text that was held back, at the end of the answer."""


class AnswerFormat(Protocol):
    """How the answers of a model show which part of them is thinking."""

    def reader(self, prompt: Sequence[int], begun: str = "", thought: str = "") -> AnswerReader:
        """A reader for the answer to a prompt.

        begun, thought  the beginning of the answer's content, or of its thinking, if the prompt ends with one
        """


def find_format(tokenizer: Tokenizer) -> AnswerFormat | None:
    """The format of a model's answers; None if its tokenizer and chat template show no thinking."""
    return Harmony.find(tokenizer) or ThinkingTags.find(tokenizer)


def divide(form: AnswerFormat | None, prompt: Sequence[int], tokens: Sequence[int], text: str) -> ChannelText:
    """The parts of a complete answer."""
    if form is None:
        return ChannelText("", text)
    reader = form.reader(prompt)
    shown = reader.push(tokens, text)
    held = reader.finish()
    return ChannelText(shown.reasoning + held.reasoning, shown.content + held.content)


class ThinkingTags(NamedTuple):
    """The tags of a model. marks: the character in `opening` and `closing` for a special token, by its id"""

    tokenizer: Tokenizer
    opening: str
    closing: str
    marks: Mapping[int, str]

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> ThinkingTags | None:
        """The tags that are tokens of the model, or that its chat template looks for in answers; None without any."""
        template = tokenizer.chat_template
        for tag in _TAGS:
            ids = {text: tokenizer.token_id(text) for text in (tag.opening, tag.closing)}
            is_tokens = None not in ids.values()
            if not is_tokens and (template is None or tag.closing not in template.source):
                continue
            marks: dict[int, str] = {}
            texts = []
            for (text, token), mark in zip(ids.items(), (_OPENING_MARK, _CLOSING_MARK), strict=True):
                is_special = token is not None and tokenizer.is_silent(token)
                if token is not None and is_special:
                    marks[token] = mark
                texts.append(mark if is_special else text)
            return cls(tokenizer, texts[0] + tag.name, texts[1], marks)
        return None

    @property
    def texts(self) -> tuple[str, str]:
        """What begins the thinking and what ends it, as they are written."""
        names = {mark: self.tokenizer.letters(token) for token, mark in self.marks.items()}
        opening, closing = ("".join(names.get(letter, letter) for letter in text)
                            for text in (self.opening, self.closing))
        return opening, closing

    def reader(self, prompt: Sequence[int], begun: str = "", thought: str = "") -> ThinkingReader:
        """A reader for the answer to a prompt, which may end within the thinking."""
        end = marked_text(self.tokenizer, self.marks, prompt[-TAG_TOKENS:])
        reader = ThinkingReader(self, is_open=not (begun or thought) and end.rstrip().endswith(self.opening))
        for token, mark in self.marks.items():
            begun = begun.replace(self.tokenizer.letters(token), mark)
        begun = begun or (self.opening + thought if thought else "")
        if begun:
            reader.skip(begun)
        return reader


class ThinkingReader:
    """The parts of one answer. is_open: the prompt has opened the block"""

    def __init__(self, tags: ThinkingTags, *, is_open: bool) -> None:
        self._tags = tags
        self._is_open = is_open
        self._marker = TokenMarker(tags.tokenizer, tags.marks) if tags.marks else None
        self._has_begun = False  # whether the opening tag, or text in its place, has come
        self._is_thinking = False
        self._skips_space = False  # after a tag
        self._held = ""  # text that may be a tag with white space before it

    def skip(self, begun: str) -> None:
        """Read the beginning of the answer, which the prompt has, with marks for its special tokens."""
        self._held = begun
        self._read(is_end=True)

    def push(self, tokens: Sequence[int], text: str) -> ChannelText:
        """The new text by part. text: what the stream returned for these tokens"""
        self._held += self._marker.add_marks(tokens, text) if self._marker else text
        return self._read(is_end=False)

    def finish(self) -> ChannelText:
        """The text that was held back, at the end of the answer. An unfinished block is thinking."""
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> ChannelText:
        reasoning = content = ""
        if not self._has_begun:
            self._begin(is_end)
        if self._has_begun and self._is_thinking:
            reasoning = self._read_thinking(is_end)
        if self._has_begun and not self._is_thinking:
            content = self._read_content()
        return ChannelText(reasoning.translate(_NO_MARKS), content.translate(_NO_MARKS))

    def _begin(self, is_end: bool) -> None:
        """Look for the opening tag. A model may write it even if the prompt ends with one."""
        text, opening = self._held.lstrip(), self._tags.opening
        if text.startswith(opening):
            self._held = text.removeprefix(opening)
            self._has_begun = self._is_thinking = self._skips_space = True
        elif is_end or len(self._held) > _MAX_HELD or not opening.startswith(text):
            self._has_begun = True
            self._is_thinking = self._skips_space = self._is_open

    def _read_thinking(self, is_end: bool) -> str:
        text = self._held = self._without_space(self._held)
        before, tag, after = text.partition(self._tags.closing)
        if tag:
            self._held, self._is_thinking, self._skips_space = after, False, True
            return before.rstrip()
        shown = len(text)
        if not is_end:
            shown -= begun_length(text, self._tags.closing)
            num_words = len(text[:shown].rstrip())
            shown = num_words if shown - num_words <= _MAX_HELD else shown
        self._held = text[shown:]
        return text[:shown]

    def _read_content(self) -> str:
        text, self._held = self._without_space(self._held), ""
        return text

    def _without_space(self, text: str) -> str:
        """A text without white space at its beginning, if nothing but white space has come since a tag."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text


def begun_length(text: str, tag: str) -> int:
    """The length of the longest beginning of a tag, less than the whole, that a text ends with."""
    return next((count for count in range(len(tag) - 1, 0, -1) if text.endswith(tag[:count])), 0)
