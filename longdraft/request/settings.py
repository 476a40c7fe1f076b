"""Settings: each is declared once, as a field of a frozen dataclass or as a row of a table.

    top_k: int = setting(0, "Keep the K likeliest tokens; 0: all.", Range(0, cure="0 keeps every token"))

From longdraft/request/sampling_params.py, longdraft/engine/settings.py and longdraft/server/settings.py are made

    the options of the command line    longdraft/cli/options.py
    the members of request bodies      longdraft/server/body_types.py
    the names in rows of a batch       SamplingParams.from_names
    the tables of the documents        packaging/settings_tables.py
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Flag, auto
from typing import Any, TypeVar, get_args, get_type_hints

from longdraft.errors import UsageError, check

T = TypeVar("T")


class SettingScope(Flag):
    """Where a sampling setting may be given, besides Python and rows of a batch."""

    OPTION = auto()  # the command line
    BODY = auto()  # the top level of a request to the server
    EXTENSION = auto()  # the object `longdraft` of a request
    MODEL = auto()  # the model's own defaults: generation_config.json, metadata of a GGUF file
    ANY_REQUEST = OPTION | BODY | EXTENSION


@dataclass(frozen=True)
class Range:
    """The numbers from low to high, without low itself if `above`, without high if `below`, and with the `others`.

    words  the range in words, where they do not follow from its ends
    cure   what to do instead of giving a wrong number
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    others: tuple[float, ...] = ()
    words: str = ""
    cure: str = ""

    def __str__(self) -> str:
        if self.words or self.high == math.inf:
            return self.words or f"{self.low:g} or more"
        if self.above:
            return f"above {self.low:g}, at most {self.high:g}"
        return f"{self.low:g} to {'below ' * self.below}{self.high:g}"

    def check(self, name: str, value: float) -> None:
        is_inside = self.low <= value <= self.high and not (self.above and value == self.low) and not (
            self.below and value == self.high)
        check(is_inside or value in self.others, name, value, str(self), self.cure)

    def require(self, name: str, value: Any, kind: type = int) -> None:
        """Raise UsageError unless the value is a number of this kind, int or float, in the range."""
        if kind is int:
            check(is_whole(value), name, value, f"a whole number, {self}")
        else:
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            try:
                is_finite = is_number and math.isfinite(value)
            except OverflowError:  # an integer too large for a float
                is_finite = False
            check(is_finite, name, value, "a finite number")
        self.check(name, value)


@dataclass(frozen=True)
class Setting:
    """One setting."""

    name: str  # in Python, in rows and in bodies
    type: Any  # of its values
    default: Any  # without it; None: it depends, see `shown`
    help: str  # one line, for --help and the documents
    allowed: Range | tuple[str, ...] | None = None  # numbers or words; None: `check` decides, or the setting's user
    aliases: tuple[str, ...] = ()  # names that other tools use for it
    scopes: SettingScope = SettingScope.ANY_REQUEST
    # (spelling, value from JSON or another tool) -> value, or None if it asks for nothing. Default: as it is.
    convert: Callable[[str, Any], Any] | None = None
    check: Callable[[str, Any], None] | None = None  # raises UsageError for (name, a wrong value)
    limits: tuple[int, int] = (16, 1024)  # texts of a list in a request, characters of each
    has_json_lists: bool = False  # a text may be a list of texts in JSON
    option: str = ""  # its name, if it is not `name` with hyphens
    shown: str = ""  # the default in words
    panel: str = ""  # the part of --help, if it is not that of the command's group
    has_env: bool = False  # LONGDRAFT_OPTION sets it too
    unit: float = 1  # one unit of the option in units of the field: 1048576 for bytes that are given in MiB

    @property
    def is_negated(self) -> bool:
        """Whether the option only turns the setting off. Two names for it would narrow every line of --help."""
        return self.type is bool and self.default is True

    @property
    def flag(self) -> str:
        """The option: --top-k."""
        return f"--{'no-' * self.is_negated}{self.option or self.name.replace('_', '-')}"

    @property
    def option_help(self) -> str:
        return "Turns this off: " * self.is_negated + self.help

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    @property
    def allowed_words(self) -> str:
        """The range in words; "" if the help says enough."""
        words = self.allowed
        return " or ".join([", ".join(words[:-1]), words[-1]]) if isinstance(words, tuple) else str(words or "")

    @property
    def option_default(self) -> Any:
        """The default in units of the option; None for an empty list."""
        if self.default in (None, ()):
            return None
        if self.unit != 1 or isinstance(self.default, float):
            return int(self.default / self.unit) if self.default % self.unit == 0 else self.default / self.unit
        return self.default

    @property
    def shown_default(self) -> str:
        """The default in words, in units of the option."""
        default = self.option_default
        shown = "none" if default in (None, "") else str(default).lower() if isinstance(default, bool) else str(default)
        return self.shown or shown

    def require(self, value: Any, name: str = "") -> None:
        """Raise UsageError, with the value and the range, unless it is allowed. name: in the message."""
        name = name or self.name
        if value is None and self.default is None:
            return
        if self.check is not None:
            self.check(name, value)
        elif self.type is bool:
            check(isinstance(value, bool), name, value, "true or false")
        elif isinstance(self.allowed, tuple):
            check(value in self.allowed, name, value, self.allowed_words)
        elif isinstance(self.allowed, Range):
            self.allowed.require(name, value, self.type)


def in_python_types(value: Any) -> Any:
    """A number of NumPy as Python's, which JSON can hold; a list as a tuple, which can be hashed."""
    if getattr(value, "shape", None) == ():  # NumPy is not imported for `--help`
        return value.item()
    return tuple(map(in_python_types, value)) if isinstance(value, list | tuple) else value


def is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def setting(default: T, help: str, allowed: Range | tuple[str, ...] | None = None, **about: Any) -> T:
    """A field of a dataclass that is a setting. about: further fields of `Setting`."""
    return field(default=default, metadata={"setting": Setting("", None, default, help, allowed, **about)})


def settings_of(owner: type) -> dict[str, Setting]:
    """The settings among the fields of a dataclass, by name."""
    return _settings_of(owner)


def names_of(owner: type) -> dict[str, Setting]:
    """Every name of each setting of a dataclass, with those of other tools."""
    return _names_of(owner)


@functools.cache
def _settings_of(owner: type) -> dict[str, Setting]:
    hints = get_type_hints(owner)
    return {each.name: replace(each.metadata["setting"], name=each.name, type=_without_none(hints[each.name]))
            for each in fields(owner) if "setting" in each.metadata}


@functools.cache
def _names_of(owner: type) -> dict[str, Setting]:
    return {name: each for each in _settings_of(owner).values() for name in each.names}


def _without_none(hint: Any) -> Any:
    """int for `int | None`."""
    kinds = [each for each in get_args(hint) if each is not type(None)]
    return kinds[0] if type(None) in get_args(hint) else hint


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
