"""Text to token ids and back, and the stream that never shows half a character."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from longdraft.core import lone_surrogate
from longdraft.errors import ModelError, UsageError
from longdraft.model.chat_template import ChatTemplate, Message

_BROKEN = "\ufffd"  # how a decoder shows bytes that are not (yet) a character
_SHOWN = 3  # differing tokens that an error names
_LONGEST = 4  # bytes of a character, hence tokens
_MAX_PENDING = 16  # tokens held back; more are no character
_OTHER_FORMS = ("tokenizer.model", "tekken.json", "vocab.json")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CONVERT = ("`pip install transformers sentencepiece tiktoken protobuf`, then `python -c \"from transformers import "
            "AutoTokenizer as T; T.from_pretrained('MODEL').save_pretrained('FOLDER')\"`")


class Tokenizer:
    """A model's `tokenizer.json` and, where there is one, its chat template. `sha256` is that of the file's bytes."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():  # nor is a pipe or a device opened, which may never end
            other = next((name for name in _OTHER_FORMS if (folder / name).is_file()), None)
            raise ModelError(f"{path} is missing" + (f" (there is {other})" if other else "")
                             + f"; longdraft reads no other form; to write it: {_CONVERT}")
        try:
            content = path.read_bytes()
            self._tokenizer = HFTokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ModelError(f"{path} is not a readable tokenizer: {error}") from error
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._folder = folder

    @property
    def size(self) -> int:
        """One more than the largest token id it can give."""
        return max(self.vocabulary().values(), default=-1) + 1

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, added ones included."""
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return found

    def vocabulary_sha256(self) -> str:
        """Which token has which id, as one hash."""
        return vocabulary_sha256(self.vocabulary())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. UsageError where there is half a surrogate pair in the text, which is no character."""
        if (place := lone_surrogate(text)) is not None:
            raise UsageError(f"the text has half a surrogate pair, {text[place]!a}, as its character {place + 1}; "
                             "allowed: whole characters")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that form no character show as U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def text_of(self, token: int) -> str:
        """What a token adds behind another one; at a text's beginning a decoder may drop the space in front of it."""
        ids, before = self._neutral
        both = self.decode([*ids, token])
        return both[len(before) :] if both.startswith(before) else self.decode([token])

    @cached_property
    def _neutral(self) -> tuple[list[int], str]:
        ids = self.encode("a", add_special_tokens=False)[-1:]
        return ids, self.decode(ids)

    def letters(self, token: int) -> str:
        """A token as the vocabulary writes it; empty for ids that have no text."""
        return self._tokenizer.id_to_token(token) or ""

    def is_silent(self, token: int) -> bool:
        """Whether `decode` passes over it: special tokens, and ids that have no text."""
        return token in self._special or not self._tokenizer.id_to_token(token)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def byte_fallbacks(self) -> frozenset[int]:
        """Ids of tokens such as `<0xE2>` that stand for one byte; none unless the decoder knows of them."""
        if "ByteFallback" not in repr(self._tokenizer.decoder):
            return frozenset()
        return frozenset(i for token, i in self.vocabulary().items() if _BYTE.fullmatch(token))

    def stream(self) -> IncrementalDecoder:
        return IncrementalDecoder(self)

    def chat(self, messages: str | Sequence[Message], /, **options: Any) -> str:
        """Messages (a text: one of the user's) in the model's chat template, ready for the answer.

        UsageError where there is no template, for options it does not have and for messages it refuses.
        """
        if self.chat_template is None:
            raise UsageError(f"the model in {self._folder} has no chat template; give an instruction-tuned model, or "
                             "use `longdraft generate` without --chat")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.chat_template.render(messages, **options)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        return ChatTemplate.find(self._folder)


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """Which token has which id, as one hash: what is trained for a model names its vocabulary so."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def require_same_vocabulary(ours: Tokenizer, theirs: Tokenizer, name: str) -> None:
    """UsageError unless both give every token the same id; `name` is what the user calls the second."""
    first, second = ours.vocabulary(), theirs.vocabulary()
    if first == second:
        return
    differing = sorted((token for token in first.keys() | second.keys() if first.get(token) != second.get(token)),
                       key=lambda token: first.get(token, second.get(token, 0)))
    shown = ", ".join(f"{token!r} is {first.get(token, 'missing')} here and {second.get(token, 'missing')} there"
                      for token in differing[:_SHOWN])
    raise UsageError(f"draft model {name!r} has another vocabulary, {len(differing)} tokens differ: {shown}; "
                     "give a model with the same tokenizer")


class IncrementalDecoder:
    """Decodes token by token; holds tokens back while they may end in the middle of a character.

    What `push` returns, joined, and what `flush` adds at the end is the decoded whole (but for a character cut at
    the end). Work for each token is bounded: only the tokens shown last are decoded again, because a decoder treats
    the first token of what it is given in its own way (the space in front of it).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._pending: list[int] = []
        self._given = 0  # characters of the decoded `_shown + _pending` that were returned

    def push(self, token: int) -> str:
        """The whole characters that `token` completes."""
        if self._tokenizer.is_silent(token):  # would make the next token the first of what is decoded
            return ""
        self._pending.append(token)
        if token in self._tokenizer.byte_fallbacks:  # one wrong byte spoils the run it is in, so its end is awaited
            return ""
        text = self._tokenizer.decode(self._shown + self._pending)
        is_whole = not text.endswith(_BROKEN)  # else bytes to come may turn that one, and no other, into a character
        new = text[self._given : len(text) if is_whole else -1]
        if is_whole:
            self._shown, self._pending = self._pending, []
            self._given = len(self._tokenizer.decode(self._shown))
        elif len(self._pending) > _MAX_PENDING:  # bytes that are no text; a character's have their first among these
            self._shown, self._pending = [], self._pending[-_LONGEST:]
            self._given = len(self._tokenizer.decode(self._pending)) - 1
        else:
            self._given += len(new)
        return new

    def flush(self) -> str:
        """What was held back, once nothing can follow, but for a character that was cut."""
        held, self._pending = self._pending, []
        for cut in range(min(_LONGEST, len(held) + 1)):
            text = self._tokenizer.decode(self._shown + held[: len(held) - cut])
            if not text.endswith(_BROKEN):
                return text[self._given :]
        return self._tokenizer.decode(self._shown + held)[self._given :]


class StopText:
    """Finds stop texts in a stream and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown, and whether a stop text was reached (it and what follows are not shown)."""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        keep = next((n for n in range(min(longest, len(text)), 0, -1)
                     if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once nothing can follow (or stop texts do not count yet)."""
        held, self._held = self._held, ""
        return held
