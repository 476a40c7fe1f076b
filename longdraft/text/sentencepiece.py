"""SentencePiece's byte-pair encoding as a tokenizer of the `tokenizers` library, with equal results.

A SentencePiece model has pieces with scores instead of a list of merges: of all pairs of neighbours that form a piece,
the one with the best score is joined first. So the merges are all ways to cut a piece into two, best score first.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

SPACE = "\u2581"
# Characters of all pieces, of all merges, and of a piece; the largest vocabularies have a third of the first two.
_MAX_CHARACTERS = 1 << 24
_MAX_MERGED = 1 << 24
_MAX_PIECE = 1 << 10


class Kind(IntEnum):
    """The types of pieces, in SentencePiece and in GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """A token of the vocabulary; its id is its index."""

    text: str
    score: float
    kind: int


def new_tokenizer(pieces: Sequence[Piece], add_prefix: bool, has_bytes: bool) -> HFTokenizer:
    """The tokenizer of these pieces. It adds no special tokens; see `add_specials`.

    add_prefix  each stretch of text gets a space in front
    has_bytes   characters without a piece become bytes, which have pieces such as <0x0A>
    """
    vocabulary = {piece.text: i for i, piece in enumerate(pieces)}
    unknown = next((piece.text for piece in pieces if piece.kind == Kind.UNKNOWN), None)
    model = models.BPE(vocab=vocabulary, merges=merges_of(pieces), unk_token=unknown, fuse_unk=True,
                       byte_fallback=has_bytes)
    tokenizer = HFTokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(" ", 1, 0)] if add_prefix else [])])
    add_tokens(tokenizer, pieces)
    return tokenizer


def prefix_first_only(tokenizer: HFTokenizer) -> None:
    """Let only the beginning of a whole text get a space in front, not each stretch after a special token.

    A text that begins with a space gets none either, as in `transformers`.
    """
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


def merges_of(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every cut of a piece into two pieces: by falling score, then by id, then by the length of the left part.

    Raises ValueError for pieces that are too long, or have too many cuts: those of q, qq, qqq, ... are quadratic.
    """
    if (characters := sum(len(piece.text) for piece in pieces)) > _MAX_CHARACTERS:
        raise ValueError(f"its pieces have {characters:,} characters; allowed: {_MAX_CHARACTERS:,}")
    if (longest := max((len(piece.text) for piece in pieces), default=0)) > _MAX_PIECE:
        raise ValueError(f"it has a piece of {longest:,} characters; allowed: {_MAX_PIECE:,}")
    joined = (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED)
    usable = {piece.text for piece in pieces if piece.kind in joined}
    ranked = sorted((-piece.score, i) for i, piece in enumerate(pieces) if piece.kind in joined)
    merges = []
    merged = 0  # characters
    for text in (pieces[i].text for _, i in ranked):
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        own = [pair for pair in pairs if pair[0] in usable and pair[1] in usable]
        merges += own
        merged += len(text) * len(own)
        if merged > _MAX_MERGED:
            raise ValueError(f"its pieces can be joined in ways of more than {_MAX_MERGED:,} characters")
    return merges


def add_tokens(tokenizer: HFTokenizer, pieces: Sequence[Piece]) -> None:
    """Make control pieces special tokens and user-defined ones plain added tokens, both found before all others."""
    tokenizer.add_special_tokens([AddedToken(piece.text, special=True, normalized=False) for piece in pieces
                                  if piece.kind == Kind.CONTROL])
    tokenizer.add_tokens([AddedToken(piece.text, special=False, normalized=False) for piece in pieces
                          if piece.kind == Kind.USER_DEFINED])


def add_ends(tokenizer: HFTokenizer, first: int | None, last: int | None) -> None:
    """Let the tokenizer put the token `first` before each text and `last` after it; None: none."""
    tokens = [(tokenizer.id_to_token(i), i) for i in (first, last) if i is not None]
    if tokens:
        before = [f"{tokenizer.id_to_token(first)}:0"] if first is not None else []
        after = [f"{tokenizer.id_to_token(last)}:0"] if last is not None else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *after], pair=[*before, "$A:0", *after, *before, "$B:1", *after],
            special_tokens=list(dict.fromkeys(tokens)))
