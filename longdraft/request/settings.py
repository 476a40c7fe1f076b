"""Settings: each is declared once, and everything else about it follows from the declaration.

    top_k: int = setting(0, whole(0, cure="0 keeps every token"), "Keep the K likeliest tokens; 0: all.")

From such fields of a frozen dataclass (longdraft/request/sampling_params.py, longdraft/server/settings.py) and such
tables (longdraft/engine/settings.py) are made

    the options of the command line    longdraft/cli/options.py
    the members of request bodies      longdraft/server/body_types.py
    the names in rows of a batch       SamplingParams.from_names
    the checks of values               check_settings
    the tables of the documents        packaging/settings_tables.py
"""

from __future__ import annotations

import functools
import json
import math
import numbers
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Flag, auto
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from longdraft.errors import UsageError, check

T = TypeVar("T")


class SettingScope(Flag):
    """Where a setting may be given. In Python and in rows of a batch every sampling setting may be."""

    OPTION = auto()  # the command line
    BODY = auto()  # the top level of a request to the server
    EXTENSION = auto()  # the object `longdraft` of a request
    MODEL = auto()  # the model's own defaults: generation_config.json, metadata of a GGUF file


EVERYWHERE = SettingScope.OPTION | SettingScope.BODY | SettingScope.EXTENSION


class ValueKind:
    """The values of a setting: a text, unless a subclass says otherwise.

    option_type  of the option's value on the command line
    """

    option_type: ClassVar[Any] = str

    @property
    def allowed(self) -> str:
        """The range in words; "" if the help says enough."""
        return ""

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError, with the value and the range, for a value that is not allowed."""

    def convert(self, name: str, value: Any) -> Any:
        """The value from JSON, from another tool or from the command line, in the form that the dataclass has. None:
        nothing was asked for. name: the spelling of the setting. Raises UsageError, TypeError or ValueError.
        """
        return value


class FilePath(ValueKind):
    """A file or a folder."""

    option_type: ClassVar[Any] = Path


class Pairs(ValueKind):
    """KEY=VALUE texts, as an option that may be repeated."""

    option_type: ClassVar[Any] = list[str]


@dataclass(frozen=True)
class Truth(ValueKind):
    """True or false."""

    option_type: ClassVar[Any] = bool

    def check(self, name: str, value: Any) -> None:
        check(isinstance(value, bool), name, value, "true or false")


@dataclass(frozen=True)
class OneOf(ValueKind):
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return " or ".join([", ".join(self.words[:-1]), self.words[-1]])

    def check(self, name: str, value: Any) -> None:
        check(value in self.words, name, value, self.allowed)


@dataclass(frozen=True)
class Number(ValueKind):
    """A number of a range.

    low, high     the ends of the range, which `above` and `below` leave out
    others        single numbers that are allowed besides
    range_words   the range in words, where they do not follow from the ends
    cure          what to do instead of a wrong value
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    others: tuple[float, ...] = ()
    range_words: str = ""
    cure: str = ""
    option_type: ClassVar[Any] = float

    @property
    def allowed(self) -> str:
        if self.range_words:
            return self.range_words
        if self.high == math.inf:
            return f"more than {self.low:g}" if self.above else f"{self.low:g} or more"
        if self.above:
            return f"above {self.low:g}, at most {self.high:g}"
        return f"{self.low:g} to {'below ' if self.below else ''}{self.high:g}"

    def check(self, name: str, value: Any) -> None:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        is_finite = is_number and abs(value) <= sys.float_info.max  # false for integers too large for a float
        check(is_finite, name, value, "a finite number")
        self.check_range(name, value)

    def check_range(self, name: str, value: float) -> None:
        is_above = self.low < value if self.above else self.low <= value
        is_below = value < self.high if self.below else value <= self.high
        check((is_above and is_below) or value in self.others, name, value, self.allowed, self.cure)


@dataclass(frozen=True)
class WholeNumber(Number):
    """A whole number of a range."""

    option_type: ClassVar[Any] = int

    def check(self, name: str, value: Any) -> None:
        check(is_whole(value), name, value, "a whole number")
        self.check_range(name, value)


@dataclass(frozen=True)
class TextList(ValueKind):
    """Texts, none of them empty. A single text counts as a list of one.

    max_texts, max_length  most texts, and most characters of each; None: no limit but that of request bodies
    may_be_json            a text that begins with [ is a list in JSON, as SillyTavern sends it
    """

    max_texts: int | None = None
    max_length: int | None = None
    may_be_json: bool = False
    option_type: ClassVar[Any] = list[str]

    @property
    def allowed(self) -> str:
        return f"{self.max_texts} texts of {self.max_length} characters" if self.max_texts else ""

    def check(self, name: str, value: Any) -> None:
        check(isinstance(value, tuple), name, value, "a tuple of non-empty texts")
        for text in value:
            check(isinstance(text, str) and bool(text), name, text, "non-empty texts")
        if self.max_texts is not None and self.max_length is not None:
            too_long = next((text for text in value if len(text) > self.max_length), None)
            check(len(value) <= self.max_texts and too_long is None, name, too_long or f"a list of {len(value)}",
                  self.allowed)

    def convert(self, name: str, value: Any) -> Any:
        if self.may_be_json and isinstance(value, str) and value.startswith("["):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise UsageError(f"{name} is {value!r}; allowed: texts, or a JSON list of them", name) from error
        if isinstance(value, Mapping):
            raise TypeError("a list of texts is needed")
        return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class TokenIdList(ValueKind):
    """Token ids."""

    option_type: ClassVar[Any] = list[int]

    def check(self, name: str, value: Any) -> None:
        check(isinstance(value, tuple) and all(is_whole(token) and token >= 0 for token in value), name, value,
              "a tuple of token ids, 0 or more")

    def convert(self, name: str, value: Any) -> Any:
        return tuple(value)


@dataclass(frozen=True)
class TokenBias(ValueKind):
    """Pairs (token id, number within -limit and limit); a mapping in requests, whose keys are texts in JSON."""

    limit: float
    option_type: ClassVar[Any] = list[str]

    def check(self, name: str, value: Any) -> None:
        is_pairs = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
        check(is_pairs, name, value, "pairs of a token id and a number")
        for token, bias in value:
            check(is_whole(token) and token >= 0, name, token, "token ids, 0 or more")
            is_number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
            check(is_number and -self.limit <= bias <= self.limit, name, bias, f"{-self.limit:g} to {self.limit:g}")
        check(len({token for token, _ in value}) == len(value), name, value, "each token id once")

    def convert(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return tuple(sorted((int(token) if isinstance(token, str) else token, bias)
                                for token, bias in value.items()))
        if isinstance(value, list):
            return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
        return value


def is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Setting:
    """One setting.

    name       in Python, in rows and in bodies
    kind       its values
    default    without it; None: it depends, see `shown`
    help       one line, for --help and the documents
    aliases    names that other tools use for it
    scopes     where it may be given
    option     the option's name; default: `name` with hyphens
    shown      the default in words
    panel      the part of --help; default: that of the command's group
    has_env    LONGDRAFT_OPTION sets it too
    unit       what one unit of the option is in units of the field, such as 1048576 for bytes given in MiB
    """

    name: str
    kind: ValueKind
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    scopes: SettingScope = EVERYWHERE
    option: str = ""
    shown: str = ""
    panel: str = ""
    has_env: bool = False
    unit: float = 1

    @property
    def flag(self) -> str:
        """The option: --top-k."""
        return f"--{self.option or self.name.replace('_', '-')}"

    @property
    def parameter(self) -> str:
        """The option as a Python name: top_k."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    @property
    def option_default(self) -> Any:
        """The default in units of the option; None for an empty list."""
        if isinstance(self.default, bool) or not isinstance(self.default, int | float):
            return None if self.default == () else self.default
        number = self.default / self.unit
        return int(number) if number == int(number) else number

    @property
    def shown_default(self) -> str:
        """The default in words, in units of the option."""
        if self.shown:
            return self.shown
        default = self.option_default
        return "none" if default in (None, "") else str(default).lower() if isinstance(default, bool) else str(default)


def setting(default: T, kind: ValueKind, help: str, **about: Any) -> T:
    """A field of a dataclass that is a setting. about: further fields of `Setting`, without its name."""
    return field(default=default, metadata={"setting": Setting("", kind, default, help, **about)})


def settings_of(owner: type) -> dict[str, Setting]:
    """The settings among the fields of a dataclass, by name."""
    return _settings_of(owner)


def names_of(owner: type) -> dict[str, Setting]:
    """Every name of each setting of a dataclass, with those of other tools."""
    return _names_of(owner)


@functools.cache
def _settings_of(owner: type) -> dict[str, Setting]:
    return {entry.name: replace(entry.metadata["setting"], name=entry.name) for entry in fields(owner)
            if "setting" in entry.metadata}


@functools.cache
def _names_of(owner: type) -> dict[str, Setting]:
    return {name: each for each in _settings_of(owner).values() for name in each.names}


def check_settings(owner: Any) -> None:
    """Check each setting of a dataclass by itself. Raises UsageError for the first wrong one."""
    for name, each in settings_of(type(owner)).items():
        value = getattr(owner, name)
        if value is not None or each.default is not None:
            each.kind.check(name, value)


def parse_pairs(name: str, pairs: Iterable[str], shape: str = "KEY=VALUE, such as budget=256") -> dict[str, str]:
    """A mapping of KEY=VALUE texts of an option. Raises UsageError for other shapes and repeated keys."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"{name} is {pair!r}; allowed: {shape}")
        if key in parsed:
            raise UsageError(f"{name} {key} is given twice; give it once")
        parsed[key] = value
    return parsed


def described(table: Iterable[Setting]) -> str:
    """The settings of a table as lines of a docstring."""
    lines = [f"    {each.name:22} {each.help}{f' Allowed: {each.kind.allowed}.' if each.kind.allowed else ''}"
             for each in table]
    return "\n".join(lines) + "\n"


def markdown_table(table: Iterable[Setting]) -> str:
    """The settings of a table as a table of a document, with their other names."""
    lines = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for each in table:
        others = f" Also {', '.join(f'`{name}`' for name in each.aliases)}." if each.aliases else ""
        lines.append(f"| `{each.name}` | {each.shown_default} | {each.kind.allowed} | {each.help}{others} |")
    return _escaped(lines)


def options_table(table: Iterable[Setting]) -> str:
    """The options of a table as a table of a document."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for each in table:
        is_shown = each.shown or each.option_default not in (None, "")  # otherwise the help says what the default is
        lines.append(f"| `{each.flag}` | {each.shown_default if is_shown else ''} | {each.help} |")
    return _escaped(lines)


def _escaped(lines: list[str]) -> str:
    return "\n".join(lines).replace("*", r"\*") + "\n"
