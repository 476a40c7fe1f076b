"""The drafters by name, with their options. Nothing here can change a text, only the time it takes."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from longdraft.cache.full import FullCache
from longdraft.core import SamplingParams
from longdraft.drafters.auto import AutoDrafter
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.ngram import NgramDrafter, NgramOptions
from longdraft.drafters.plain import PlainDrafter
from longdraft.drafters.suffix import SuffixDrafter, SuffixOptions
from longdraft.drafters.tokenswift import TokenSwiftDrafter, TokenSwiftOptions
from longdraft.errors import UsageError
from longdraft.model.heads import Heads
from longdraft.model.transformer import Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Drafter

AUTO = "auto"


class Resources(NamedTuple):
    """What a drafter of one request may use."""

    model: Transformer
    cache: FullCache
    sampler: Sampler
    params: SamplingParams
    heads: Heads | None
    corpora: Corpora | None = None


@dataclass(frozen=True)
class NoOptions:
    """`plain` and `auto` have no options."""


class Kind(NamedTuple):
    options: type[Any]
    build: Callable[[Any, Resources], Drafter]
    needs_heads: bool
    summary: str


def _tokenswift(options: TokenSwiftOptions, given: Resources) -> Drafter:
    if given.heads is None:
        raise UsageError("drafter 'tokenswift' needs trained heads; give --heads or train them")
    return TokenSwiftDrafter(options, given.model, given.cache, given.sampler, given.params, given.heads)


def _suffix(options: SuffixOptions, given: Resources) -> Drafter:
    corpus = None
    if options.corpus:
        assert given.corpora, "the engine knows how to read a corpus"
        corpus = given.corpora.index(options.corpus, options.max_match)
    return SuffixDrafter(options, given.params, corpus)


def _auto(options: NoOptions, given: Resources) -> Drafter:
    """Every drafter for which there is what it needs, with its default options."""
    return AutoDrafter({name: kind.build(kind.options(), given) for name, kind in KINDS.items()
                        if name != AUTO and (given.heads or not kind.needs_heads)})


KINDS: dict[str, Kind] = {
    AUTO: Kind(NoOptions, _auto, False, "whichever of the others is fastest here and now, measured while writing"),
    "plain": Kind(NoOptions, lambda options, given: PlainDrafter(), False,
                  "no drafting: one token for each forward"),
    "ngram": Kind(NgramOptions, lambda options, given: NgramDrafter(options, given.params), False,
                  "continuations of the last token from a table of the text's 4-grams"),
    "suffix": Kind(SuffixOptions, _suffix, False,
                   "what followed the longest suffix of the text before, from a suffix automaton; a corpus beside it"),
    "tokenswift": Kind(TokenSwiftOptions, _tokenswift, True,
                       "the model on a partial cache, three trained heads, n-grams, one tree"),
}


WITH_HEADS = (AUTO, *(name for name, kind in KINDS.items() if kind.needs_heads))


def check_name(name: str) -> None:
    """UsageError, listing the known drafters, for a name that is none of them."""
    if name not in KINDS:
        raise UsageError(f"unknown drafter {name!r}; known: {', '.join(KINDS)}")


def parse_options(name: str, given: Mapping[str, Any]) -> Any:
    """Options of a drafter from KEY -> value; values may be texts, as on the command line.

    UsageError for an unknown key (listing the known ones), a value of the wrong kind or out of range.
    """
    kind = KINDS[name].options
    hints = typing.get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            raise UsageError(f"drafter {name!r} has no option {key!r}; known: {', '.join(known) or 'none'}")
    return kind(**{key: _parse(key, value, hints[key]) for key, value in given.items()})


def _parse(key: str, value: Any, hint: Any) -> Any:
    try:
        if isinstance(hint, types.GenericAlias):  # tuple[int, ...]
            parts = value.strip("[]").split(",") if isinstance(value, str) else value
            return tuple(int(part) for part in parts)
        if hint in (int, float):
            return hint(value)
        if hint is bool and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
        return value
    except (KeyError, TypeError, ValueError) as error:
        names = {bool: "true or false", int: "a whole number", float: "a number"}
        raise UsageError(f"option {key} is {value!r}; allowed: "
                         f"{names.get(hint, 'whole numbers such as 1,3,3,3')}") from error
