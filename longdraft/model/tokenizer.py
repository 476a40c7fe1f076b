"""Text to token ids and back, and the stream that never shows half a character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from longdraft.errors import ModelError, UsageError
from longdraft.model.config import read_json

_BROKEN = "\ufffd"  # how a decoder shows bytes that are not (yet) a character
_SHOWN = 3  # differing tokens that an error names
_MAX_PENDING = 16  # tokens held back for a character; no character has more bytes than 4


class Tokenizer:
    """A model's `tokenizer.json` and, where there is one, its chat template."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():  # nor is a pipe or a device opened, which may never end
            raise ModelError(f"{path} is missing; longdraft needs the model's tokenizer.json")
        try:
            self._tokenizer = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ModelError(f"{path} is not a readable tokenizer: {error}") from error
        self._folder = folder

    @property
    def size(self) -> int:
        """One more than the largest token id it can give."""
        return max(self.vocabulary().values(), default=-1) + 1

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, added ones included."""
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that form no character show as U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        return TextStream(self)

    def chat(self, message: str) -> str:
        """One user message in the model's chat template, ready for the answer. UsageError without one."""
        settings = self._settings()
        template = settings.get("chat_template")
        file = self._folder / "chat_template.jinja"
        if file.exists():
            template = file.read_text(encoding="utf-8")
        if not isinstance(template, str):
            raise UsageError(f"the model in {self._folder} has no chat template; leave --chat out")
        return _render(template, message, settings)

    def _settings(self) -> dict[str, Any]:
        path = self._folder / "tokenizer_config.json"
        return read_json(path) if path.exists() else {}


def _render(template: str, message: str, settings: dict[str, Any]) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def token(name: str) -> str:
        value = settings.get(name) or ""
        return str(value.get("content", "")) if isinstance(value, dict) else str(value)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": message}], add_generation_prompt=True,
            bos_token=token("bos_token"), eos_token=token("eos_token"))
    except TemplateError as error:
        raise ModelError(f"the model's chat template fails: {error}") from error


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


class TextStream:
    """Decodes token by token; holds tokens back while they end in the middle of a character.

    The texts that `push` returns, joined, are the decoded whole (but for a character cut at the end).
    Work for each token is bounded: only the tokens shown last are decoded again, for their spacing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The whole characters that `token` completes."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._shown + self._pending)
        if text.endswith(_BROKEN) and len(self._pending) < _MAX_PENDING:
            return ""
        before = self._tokenizer.decode(self._shown)
        self._shown, self._pending = self._pending, []
        return text[len(before):]


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
