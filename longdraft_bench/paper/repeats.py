"""Passages of a text that occurred in it before, for the case studies of reports (figures 5 and 6 of TokenSwift)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longdraft.text.tokenizer import Tokenizer

REPEATED, NEW = "repeated", "new"
LEAST = 8  # tokens of a passage that counts as repeated


def repeated(tokens: Sequence[int], least: int = LEAST) -> list[bool]:
    """For each token, whether it is part of `least` tokens or more that occurred earlier in the text."""
    seen: set[tuple[int, ...]] = set()
    is_repeated = [False] * len(tokens)
    for end in range(least, len(tokens) + 1):
        passage = tuple(tokens[end - least : end])
        if passage in seen:
            is_repeated[end - least : end] = [True] * least
        seen.add(passage)
    return is_repeated


def marked_pieces(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """The text in pieces, each REPEATED or NEW."""
    stream = tokenizer.stream()
    for token, is_repeated in zip(tokens, repeated(tokens), strict=True):
        yield stream.push(token), REPEATED if is_repeated else NEW
    yield stream.flush(), NEW
