"""What the small files beside a folder's tokenizer say: its special tokens, and tokens that it lacks.

    tokenizer_config.json    bos_token, eos_token and others; added_tokens_decoder; the chat template
    special_tokens_map.json  an older place of the special tokens
    added_tokens.json        an older place of added tokens, which counts where the first file has none
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from longdraft.checkpoint.config_file import read_json
from longdraft.errors import ModelError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_ADDED = 1 << 16  # tokens; the largest known files have some 6,000


class Change(NamedTuple):
    """A token that the files beside tokenizer.json add to it, or whose text they show or hide."""

    id: int
    text: str
    is_special: bool


class SideFiles:
    """The small files beside the tokenizer of a folder. Each is read when it is needed, once.

    Raises ModelError for files that hold no JSON object.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty if there is no such file."""
        path = self.folder / name
        return read_json(path) if path.exists() else {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What tokenizer_config.json holds."""
        return self.read("tokenizer_config.json")

    @cached_property
    def special(self) -> dict[str, str]:
        """The special tokens by name. Others stay undefined, which templates can test."""
        settings = self.read("special_tokens_map.json") | self.settings
        values = ((name, settings.get(name)) for name in SPECIAL_TOKENS)
        texts = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in values)
        return {name: text for name, text in texts if isinstance(text, str)}


def add_tokens(tokenizer: HFTokenizer, beside: SideFiles) -> list[Change]:
    """Give a tokenizer the added tokens of its folder, with their flags, as `transformers` does.

    Raises ModelError for tokens that are malformed, or too many.
    """
    folder = beside.folder
    added: list[tuple[int, AddedToken]]
    if isinstance(decoder := beside.settings.get("added_tokens_decoder"), dict):
        added = [(_id(number, folder), _token(token, folder)) for number, token in decoder.items()]
    else:
        own = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        special = set(beside.special.values())
        added = [(_id(number, folder), AddedToken(text, special=text in special, normalized=text not in special))
                 for text, number in beside.read("added_tokens.json").items() if text not in own]
    if len(added) > _MAX_ADDED:
        raise ModelError(f"{folder} adds {len(added):,} tokens to its tokenizer; allowed: {_MAX_ADDED:,}")
    before = tokenizer.get_added_tokens_decoder()
    known = {repr(token) for token in before.values()}
    tokenizer.add_tokens([token for _, token in sorted(added, key=lambda pair: pair[0]) if repr(token) not in known])
    was_special = {i: token.special for i, token in before.items()}
    return [Change(i, token.content, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()
            if was_special.get(i) != token.special]


def _id(number: Any, folder: Path) -> int:
    if isinstance(number, int) or (isinstance(number, str) and number.isascii() and number.isdigit()):
        return int(number)
    raise ModelError(f"an added token of {folder} has the id {str(number)[:80]!r}; allowed: whole numbers")


def _token(given: Any, folder: Path) -> AddedToken:
    """A token of added_tokens_decoder."""
    if not isinstance(given, Mapping) or not isinstance(text := given.get("content"), str) or not all(
            isinstance(given.get(flag, False), bool) for flag in _FLAGS):
        raise ModelError(f"{folder / 'tokenizer_config.json'} has the added token {str(given)[:80]}; allowed: content, "
                         f"which is a text, and {', '.join(_FLAGS)}, which are true or false")
    return AddedToken(text, **{flag: given[flag] for flag in _FLAGS if flag in given})
