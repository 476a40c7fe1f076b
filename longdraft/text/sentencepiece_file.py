"""A folder's `tokenizer.model`, SentencePiece's own file, as a tokenizer of the `tokenizers` library.

The file is a protocol buffer. Only a few fields matter, and they are read here without the library of the format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.memory import require_content
from longdraft.errors import ModelError
from longdraft.text import sentencepiece
from longdraft.text.sentencepiece import Kind, Piece

NAME = "tokenizer.model"
_MAX_FILE = 1 << 26  # bytes; the largest known have a sixteenth of this
_MAX_PIECES = 1 << 21
_BPE = 2  # of trainer_spec.model_type

# Fields of the messages (sentencepiece_model.proto).
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _BOS_ID, _EOS_ID = 3, 35, 41, 42
_CHARACTER_MAP, _ADDS_PREFIX, _REMOVES_SPACES, _ESCAPES_SPACES = 2, 3, 4, 5


class _DamagedError(Exception):
    """The file is no protocol buffer of a SentencePiece model."""


def read_tokenizer(folder: Path) -> HFTokenizer:
    """The tokenizer of a folder with a `tokenizer.model`.

    `added_tokens.json` and `tokenizer_config.json` add tokens and say which tokens a text begins and ends with.

    Raises ModelError for a damaged file, and for models other than byte-pair encoding without a character map.
    """
    path = folder / NAME
    try:
        if (size := path.stat().st_size) > _MAX_FILE:
            raise ModelError(f"{path} has {size:,} bytes; allowed: {_MAX_FILE:,}")
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    others = read_json(folder / "added_tokens.json") if (folder / "added_tokens.json").is_file() else {}
    try:
        tokenizer, ends = _parse(content, is_legacy=settings.get("legacy", True) is not False)
        _add_tokens(tokenizer, settings, others)
        first, last = (_end(tokenizer, settings, name, default, i)
                       for (name, default), i in zip((("bos", True), ("eos", False)), ends, strict=True))
        sentencepiece.add_ends(tokenizer, first, last)
    except (_DamagedError, struct.error, IndexError, ValueError) as error:
        require_content(path)
        raise ModelError(f"{path} is not a readable SentencePiece model: {error}; get it again") from error
    return tokenizer


def _parse(content: bytes, is_legacy: bool) -> tuple[HFTokenizer, tuple[int, int]]:
    """The tokenizer, and the ids of BOS and EOS."""
    pieces, trainer, normalizer = [], dict[int, Any](), dict[int, Any]()
    for field, value in _fields(content):
        if field == _PIECES:
            pieces.append(_piece(_message(value)))
            if len(pieces) > _MAX_PIECES:
                raise _DamagedError(f"it has more than {_MAX_PIECES:,} pieces")
        elif field in (_TRAINER, _NORMALIZER):
            (trainer if field == _TRAINER else normalizer).update(_message(value))
    if not pieces or len({piece.text for piece in pieces}) != len(pieces):
        raise _DamagedError("it has no pieces, or one twice")
    if trainer.get(_MODEL_TYPE, 1) != _BPE:
        raise _DamagedError(f"its model type is {trainer.get(_MODEL_TYPE, 1)}; supported: {_BPE} (byte-pair encoding)")
    if normalizer.get(_CHARACTER_MAP) or normalizer.get(_REMOVES_SPACES, 1) or not normalizer.get(_ESCAPES_SPACES, 1):
        raise _DamagedError("it normalises characters or removes spaces, which is not supported")
    adds_prefix = bool(normalizer.get(_ADDS_PREFIX, 1))
    tokenizer = sentencepiece.new_tokenizer(pieces, adds_prefix, bool(trainer.get(_BYTE_FALLBACK, 0)))
    if adds_prefix and not is_legacy:
        sentencepiece.prefix_first_only(tokenizer)
    return tokenizer, (trainer.get(_BOS_ID, 1), trainer.get(_EOS_ID, 2))


def _piece(fields: Mapping[int, Any]) -> Piece:
    text, score, kind = fields.get(_TEXT, b""), fields.get(_SCORE, b"\0\0\0\0"), fields.get(_KIND, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or kind not in list(Kind):
        raise _DamagedError("a piece is damaged")
    return Piece(text.decode(), struct.unpack("<f", score)[0], kind)


def _message(value: int | bytes) -> dict[int, Any]:
    """The fields of a message; of repeated ones the last."""
    if not isinstance(value, bytes):
        raise _DamagedError("a number is where a message must be")
    return dict(_fields(value))


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields: whole numbers, or bytes."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind, -1)
        if kind == 2:
            size, at = _varint(content, at)
        if size < 0 or at + size > len(content):
            raise _DamagedError("a field reaches beyond its end")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (content[at] & 127) << shift
        at += 1
        if content[at - 1] < 128:
            return value, at
    raise _DamagedError("a number has more than ten bytes")


def _add_tokens(tokenizer: HFTokenizer, settings: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Tokens after those of the file, in the order of their ids, which must follow each other."""
    added = {content: (i, False) for content, i in others.items() if isinstance(i, int)}
    for i, token in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and str(i).isdigit():
            added[token["content"]] = int(i), bool(token.get("special", False))
    for content, (i, is_special) in sorted(added.items(), key=lambda pair: pair[1][0]):
        token = AddedToken(content, special=is_special, normalized=False)
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(content) != i:
            raise _DamagedError(f"the added token {content[:80]!r} has the id {i}, which does not follow the others")


def _end(tokenizer: HFTokenizer, settings: Mapping[str, Any], name: str, default: bool, given: int) -> int | None:
    """The id of the token that texts begin or end with; None: with none."""
    if not settings.get(f"add_{name}_token", default):
        return None
    token = settings.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    token_id = tokenizer.token_to_id(token) if isinstance(token, str) else given
    return token_id if isinstance(token_id, int) and tokenizer.id_to_token(token_id) is not None else None
