"""The drafters by name, with their options. Nothing here can change a text, only the time it takes."""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialCache
from longdraft.core import SamplingParams
from longdraft.drafters import magicdec
from longdraft.drafters.auto import AutoDrafter
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.cost_model import SharedStatistics
from longdraft.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from longdraft.drafters.glide import GlideDrafter, GlideOptions
from longdraft.drafters.magicdec import MagicDecDrafter, MagicDecOptions
from longdraft.drafters.medusa import MedusaDrafter, MedusaOptions
from longdraft.drafters.ngram import NgramDrafter, NgramOptions
from longdraft.drafters.plain import PlainDrafter
from longdraft.drafters.suffix import SuffixDrafter, SuffixOptions
from longdraft.drafters.tokenswift import TokenSwiftDrafter, TokenSwiftOptions
from longdraft.drafters.triforce import TriForceDrafter, TriForceOptions
from longdraft.errors import UsageError
from longdraft.model.glide import Glide
from longdraft.model.heads import Heads
from longdraft.model.routine import CostClock
from longdraft.model.transformer import Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Drafter

AUTO = "auto"


class Resources(NamedTuple):
    """What a drafter of one request may use. `draft` is the smaller model that the option `model` names; `partial` a
    partial cache that is kept up already, for drafters that serve one text in turns; `meter` says what time the text
    takes (none: the clock, as where a text is alone); `experience` is what the engine's texts have learned."""

    model: Transformer
    cache: FullCache
    sampler: Sampler
    params: SamplingParams
    heads: Heads | None
    glide: Glide | None = None
    corpora: Corpora | None = None
    draft: Transformer | None = None
    partial: PartialCache | None = None
    clock: CostClock | None = None
    experience: SharedStatistics | None = None


@dataclass(frozen=True)
class NoOptions:
    """`plain` and `auto` have no options."""


class Kind(NamedTuple):
    options: type[Any]
    build: Callable[[Any, Resources], Drafter]
    needs: Literal["", "heads", "glide", "draft"]  # what must have been trained for it
    summary: str
    in_auto: Mapping[str, Any] | None = None  # options with which `auto` tries it, where there is what it needs


def _heads(name: str, given: Resources) -> Heads:
    if given.heads is None:
        raise UsageError(f"drafter {name!r} needs trained heads; give --heads or train them")
    return given.heads


def _glide(options: GlideOptions, given: Resources) -> Drafter:
    if given.glide is None:
        raise UsageError("drafter 'glide' needs a trained layer; give --heads or use `longdraft train glide`")
    return GlideDrafter(options, given.glide, given.model, given.cache, given.sampler, given.params)


def _tokenswift(options: TokenSwiftOptions, given: Resources) -> Drafter:
    heads = _heads("tokenswift", given)
    return TokenSwiftDrafter(options, given.model, given.cache, given.sampler, given.params, heads, given.partial)


def _medusa(options: MedusaOptions, given: Resources) -> Drafter:
    return MedusaDrafter(options, given.sampler, _heads("medusa", given))


def _magicdec(options: MagicDecOptions, given: Resources) -> Drafter:
    return MagicDecDrafter(options, given.model, given.cache, given.sampler, given.params, given.partial)


def _draft_model(options: DraftModelOptions, given: Resources) -> Drafter:
    if given.draft is None:
        raise UsageError("drafter 'draft-model' needs a smaller model; give its option model")
    return DraftModelDrafter(options, given.draft, given.model, given.sampler)


def _triforce(options: TriForceOptions, given: Resources) -> Drafter:
    return TriForceDrafter(options, given.model, given.cache, given.sampler, given.params, given.draft)


def _suffix(options: SuffixOptions, given: Resources) -> Drafter:
    corpus = None
    if options.corpus:
        assert given.corpora, "the engine knows how to read a corpus"
        corpus = given.corpora.index(options.corpus, options.max_match)
    return SuffixDrafter(options, given.params, corpus)


def _auto(options: NoOptions, given: Resources) -> Drafter:
    """Every drafter that is worth a try and for which there is what it needs. Those that draft with the model itself
    share a partial cache, so that who takes over finds it as the last one left it."""
    given = given._replace(partial=magicdec.new_partial(MagicDecOptions(), given.model, given.cache))
    if given.draft is not None and given.draft.config.max_positions < DraftModelOptions().budget:
        given = given._replace(draft=None)
    candidates = {name: kind.build(kind.options(**kind.in_auto), given) for name, kind in KINDS.items()
                  if kind.in_auto is not None and (not kind.needs or getattr(given, kind.needs))}
    return AutoDrafter(candidates, given.experience, given.clock)


KINDS: dict[str, Kind] = {
    AUTO: Kind(NoOptions, _auto, "", "whichever of the others is fastest here and now, measured while writing"),
    "plain": Kind(NoOptions, lambda options, given: PlainDrafter(), "",
                  "no drafting: one token for each forward", {}),
    "ngram": Kind(NgramOptions, lambda options, given: NgramDrafter(options, given.params), "",
                  "continuations of the last token from a table of the text's 4-grams"),
    "suffix": Kind(SuffixOptions, _suffix, "",
                   "what followed the longest suffix of the text before, from a suffix automaton; a corpus beside it",
                   {}),
    "tokenswift": Kind(TokenSwiftOptions, _tokenswift, "heads",
                       "the model on a partial cache, three trained heads, n-grams, one tree",
                       {"chain": 16}),
    "medusa": Kind(MedusaOptions, _medusa, "heads", "trained heads on the last verified row, one static tree", {}),
    "magicdec": Kind(MagicDecOptions, _magicdec, "", "the model itself on a compressed cache", {"chain": 16}),
    "draft-model": Kind(DraftModelOptions, _draft_model, "draft", "a smaller model with the same vocabulary", {}),
    "glide": Kind(GlideOptions, _glide, "glide", "one trained layer that reads the model's own cache", {}),
    "triforce": Kind(TriForceOptions, _triforce, "",
                     "a smaller model for the model on a retrieval cache for the model"),
}


WITH_HEADS = (AUTO, *(name for name, kind in KINDS.items() if kind.needs in ("heads", "glide")))
WITH_DRAFT = (AUTO, "draft-model", "triforce")


def draft_model_of(options: Any) -> str:
    """The smaller model that a drafter's options name; empty: none."""
    return str(getattr(options, "model", ""))


def reads(name: str, options: Any) -> int:
    """Tokens that a drafter's own smaller model reads at most; 0: all of the text."""
    return int(getattr(DraftModelOptions() if name == AUTO else options, "reads", 0))


def partial_rows(options: Any) -> int:
    """Rows of the model's own cache that a drafter holds besides."""
    return int(options.budget) if isinstance(options, TokenSwiftOptions | MagicDecOptions | TriForceOptions) else 0


def check_heads(name: str, heads: str | None) -> None:
    """UsageError where heads are named for a drafter that uses none."""
    if heads is not None and name not in WITH_HEADS:
        raise UsageError(f"drafter {name!r} uses no heads; leave --heads out, or use --drafter tokenswift")


def parse_options(name: str, given: Mapping[str, Any]) -> Any:
    """Options of a drafter from KEY -> value; values may be texts, as on the command line.

    UsageError for an unknown drafter or key (listing the known ones), a value of the wrong kind or out of range.
    """
    if name not in KINDS:
        raise UsageError(f"unknown drafter {name!r}; known: {', '.join(KINDS)}")
    kind = KINDS[name].options
    hints = typing.get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            raise UsageError(f"drafter {name!r} has no option {key!r}; known: {', '.join(known) or 'none'}")
    return kind(**{key: _parse(key, value, hints[key]) for key, value in given.items()})


def _parse(key: str, value: Any, hint: Any) -> Any:
    read, allowed = _KINDS.get(hint, (_text, "a text"))  # of what is one of several texts, the options see to the rest
    try:
        return read(value)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"option {key} is {value!r}; allowed: {allowed}") from error


def _whole(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or (not isinstance(value, str) and number != value):
        raise ValueError("it would become another")
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("true is no number")
    return float(value)


def _truth(value: Any) -> bool:
    return value if isinstance(value, bool) else {"true": True, "false": False}[_text(value).lower()]


def _wholes(value: Any) -> tuple[int, ...]:
    return tuple(_whole(part) for part in (value.strip("[]").split(",") if isinstance(value, str) else value))


def _text(value: Any) -> str:
    if not isinstance(text := os.fspath(value), str):
        raise TypeError("it is bytes")
    return text


_KINDS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_whole, "a whole number"), float: (_number, "a number"), bool: (_truth, "true or false"),
    tuple[int, ...]: (_wholes, "whole numbers such as 1,3,3,3")}
