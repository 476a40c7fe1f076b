"""Options of drafters: their base class, the ranges that several of them share, and reading them from text.

    parse_fields("ngram", NgramOptions, {"order": "5"})        # NgramOptions(order=5)
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from longdraft.errors import UsageError, check
from longdraft.model.transformer import Transformer


@dataclass(frozen=True)
class DrafterOptions:
    """Base of every drafter's options.

    A subclass is a frozen dataclass whose docstring has one line for each option and whose `__post_init__` checks the
    ranges. The properties below say what the drafter needs besides; a subclass overrides those that differ.
    """

    @property
    def draft_model(self) -> str:
        """Name of the draft model that the options ask for; empty: none, or the one in the model's own folder."""
        return ""

    @property
    def draft_window(self) -> int:
        """Tokens that the draft model reads at most; 0: the whole text, as far as its context allows."""
        return 0

    @property
    def copy_weights(self) -> str:
        """Weights that self-drafting chains use (longdraft/parts/draft_copy.py); "same": the target's own."""
        return "same"

    @property
    def head_weights(self) -> str:
        """Format of the layers of an EAGLE or block head (longdraft/parts/draft_copy.py); "same": that of its file."""
        return "same"

    @property
    def may_use_head(self) -> bool:
        """Whether the drafter uses trained heads of the target, if it is one of those that can."""
        return True

    def partial_rows(self, model: Transformer) -> int:
        """Rows of a partial KV cache of the target, for each layer and KV head. model: drafts on it"""
        return 0


def check_chain(chain: int, width: int, margin: float = 0.0) -> None:
    """Raise UsageError unless these options of a drafted chain (longdraft/drafters/chain.py) are in range."""
    check(1 <= chain <= 64, "chain", chain, "1 to 64")
    check(1 <= width <= 16, "width", width, "1 to 16")
    check(margin >= 0, "margin", margin, "0 or more")


@dataclass(frozen=True)
class ChainOptions(DrafterOptions):
    """Options of drafters whose chain may have further guesses and suffix matches beside it.

    chain   tokens drafted, one after the other
    width   guesses at each place of the chain at most; the chain continues with the best one
    margin  largest gap between a further guess's score and the best one's, in nats (1: exp(1) times less likely)
    suffix  add what followed the longest suffix of the text earlier, after the root
    """

    chain: int
    width: int = 2
    margin: float = 0.5
    suffix: bool = True

    def __post_init__(self) -> None:
        check_chain(self.chain, self.width, self.margin)


def check_window(budget: int, sinks: int, refresh: int, name: str = "budget") -> None:
    """Raise UsageError unless a draft model's window (longdraft/drafters/streaming_model.py) can have these sizes.

    name  of the option that is its budget
    """
    check(sinks >= 0, "sinks", sinks, "0 or more")
    check(refresh >= 1, "refresh", refresh, "1 or more")
    check(budget > sinks + refresh, name, budget, f"more than sinks + refresh ({sinks + refresh})")


Options = TypeVar("Options", bound=DrafterOptions)


def parse_fields(drafter: str, options: type[Options], given: Mapping[str, Any]) -> Options:
    """The options of `drafter` from KEY -> value. A value may be text, as on the command line.

    Raises UsageError for an unknown key, a value of the wrong type and a value out of range.
    """
    hints = typing.get_type_hints(options)
    known = [field.name for field in fields(options)]
    for key in given:
        if key not in known:
            raise UsageError(f"drafter {drafter!r} has no option {key!r}; known: {', '.join(known) or 'none'}")
    return options(**{key: _parse_value(key, value, hints[key]) for key, value in given.items()})


def _parse_value(key: str, value: Any, hint: Any) -> Any:
    parser, allowed = _PARSERS.get(hint, (_text, "a text"))  # a Literal is text; `__post_init__` checks its value
    try:
        return parser(value)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"option {key} is {value!r}; allowed: {allowed}") from error


def _integer(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or (not isinstance(value, str) and number != value):
        raise ValueError("the conversion would change the value")
    return number


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("a truth value is not a number")
    return float(value)


def _bool(value: Any) -> bool:
    return value if isinstance(value, bool) else {"true": True, "false": False}[_text(value).lower()]


def _integer_or_word(value: Any) -> int | str:
    try:
        return _integer(value)
    except ValueError:
        return _text(value)


def _integers(value: Any) -> tuple[int, ...]:
    parts: Iterable[Any] = value.strip("[]").split(",") if isinstance(value, str) else value
    return tuple(_integer(part) for part in parts)


def _text(value: Any) -> str:
    if not isinstance(text := os.fspath(value), str):
        raise TypeError("a path of bytes is not text")
    return text


_PARSERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_integer, "a whole number"), float: (_float, "a number"), bool: (_bool, "true or false"),
    int | str: (_integer_or_word, "a whole number or a word"),
    tuple[int, ...]: (_integers, "whole numbers such as 1,3,3,3")}
