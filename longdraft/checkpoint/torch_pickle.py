"""The pickle in a PyTorch file, interpreted without running any code.

The machine here knows the few instructions that descriptions of tensors need. It creates no objects but texts, numbers,
tuples, lists, dictionaries and the records below; every other instruction or name is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

_MAX_INSTRUCTIONS = 1 << 22  # a tensor takes some 45
STORAGES = {
    "FloatStorage": ("F32", torch.float32), "HalfStorage": ("F16", torch.float16),
    "BFloat16Storage": ("BF16", torch.bfloat16), "DoubleStorage": ("F64", torch.float64),
    "LongStorage": ("I64", torch.int64), "IntStorage": ("I32", torch.int32), "ShortStorage": ("I16", torch.int16),
    "CharStorage": ("I8", torch.int8), "ByteStorage": ("U8", torch.uint8), "BoolStorage": ("BOOL", torch.bool)}


class GlobalName(NamedTuple):
    """A global name of the pickle. It stands for nothing."""

    name: str


class Storage(NamedTuple):
    """Numbers of a type that STORAGES names, in the archive's entry `key`."""

    kind: str
    key: str
    size: int


class View(NamedTuple):
    """A tensor: a view of a storage, in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class DamagedError(Exception):
    """The file contradicts itself, or has what longdraft does not read."""


def fail(problem: str) -> NoReturn:
    raise DamagedError(problem)


class Machine:
    """Interprets the instructions of a pickle that describes tensors (protocol 2)."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
            if count > _MAX_INSTRUCTIONS:
                fail(f"its pickle has more than {_MAX_INSTRUCTIONS:,} instructions")
            name = instruction.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _ARGUMENTS:
                self._stack.append(argument)
            elif name in _INSTRUCTIONS:
                _INSTRUCTIONS[name](self, argument)
            else:
                fail(f"its pickle has the instruction {name}, which tensors do not need")
        fail("its pickle does not end")

    def _protocol(self, version: int) -> None:
        if version != 2:
            fail(f"its pickle has protocol {version}; allowed: 2")

    def _mark(self, _: None) -> None:
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _tuple(self, _: None) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _short_tuple(self, count: int) -> None:
        parts = self._stack[len(self._stack) - count :]
        if len(parts) != count:
            fail("its pickle is damaged")
        self._stack[len(self._stack) - count :] = [tuple(parts)]

    def _put(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _get(self, key: int) -> None:
        if key not in self._memo:
            fail("its pickle is damaged")
        self._stack.append(self._memo[key])

    def _global(self, name: str) -> None:
        name = name.replace(" ", ".")
        if name not in _CALLS and name.removeprefix("torch.") not in STORAGES:
            fail(f"its pickle names {name[:80]!r}, which tensors do not need")
        self._stack.append(GlobalName(name))

    def _persistent(self, _: None) -> None:
        """A storage, which is described by ('storage', class, key, device, number of numbers)."""
        match self._stack.pop():
            case ("storage", GlobalName(name), str(key), str(), int(count)) if 0 <= count < 1 << 48:
                self._stack.append(Storage(name.removeprefix("torch."), key, count))
            case _:
                fail("a storage in its pickle is damaged")

    def _call(self, _: None) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, GlobalName) or name.name not in _CALLS:
            fail("its pickle calls what is no function")
        self._stack.append(_CALLS[name.name](arguments))

    def _set_items(self, _: None) -> None:
        self._store(self._since_mark())

    def _set_item(self, _: None) -> None:
        value = self._stack.pop()
        self._store([self._stack.pop(), value])

    def _store(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str | int) for key in pairs[::2]):
            fail("its pickle is damaged")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if key in target:
                fail(f"the name {str(key)[:80]!r} occurs twice")
            target[key] = value

    def _extend(self, _: None) -> None:
        values = self._since_mark()
        if not isinstance(self._stack[-1], list):
            fail("its pickle is damaged")
        self._stack[-1].extend(values)

    def _build(self, _: None) -> None:
        """Attributes of a dictionary, which are not needed."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            fail("its pickle sets attributes of what is no dictionary")


def _rebuilt_tensor(arguments: Any) -> View:
    match arguments:
        case (Storage() as storage, int(offset), tuple(shape), tuple(strides), *_):
            numbers = (offset, *shape, *strides)
            if len(shape) == len(strides) <= 8 and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
                return View(storage, offset, shape, strides)
    fail("a tensor in its pickle is damaged")


def _rebuilt_parameter(arguments: Any) -> View:
    match arguments:
        case (View() as view, *_):
            return view
    fail("a parameter in its pickle is damaged")


def _ordered(arguments: Any) -> dict[str, Any]:
    return {} if arguments == () else fail("a dictionary in its pickle is damaged")


_CALLS: dict[str, Callable[[Any], Any]] = {
    "collections.OrderedDict": _ordered, "torch._utils._rebuild_tensor_v2": _rebuilt_tensor,
    "torch._utils._rebuild_parameter": _rebuilt_parameter}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "NONE": lambda: None, "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False}
_ARGUMENTS = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_INSTRUCTIONS: dict[str, Callable[[Machine, Any], None]] = {
    "PROTO": Machine._protocol, "MARK": Machine._mark, "TUPLE": Machine._tuple,
    "TUPLE1": lambda machine, _: machine._short_tuple(1), "TUPLE2": lambda machine, _: machine._short_tuple(2),
    "TUPLE3": lambda machine, _: machine._short_tuple(3), "BINPUT": Machine._put, "LONG_BINPUT": Machine._put,
    "BINGET": Machine._get, "LONG_BINGET": Machine._get, "GLOBAL": Machine._global,
    "BINPERSID": Machine._persistent, "REDUCE": Machine._call, "SETITEM": Machine._set_item,
    "SETITEMS": Machine._set_items, "APPENDS": Machine._extend, "BUILD": Machine._build,
}
