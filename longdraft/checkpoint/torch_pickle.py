"""The pickle in a PyTorch file, interpreted without running any code.

`load` knows the few instructions that descriptions of tensors need. It creates no objects but texts, numbers, tuples,
lists, dictionaries and the records below; every other instruction or name is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable
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


def load(content: bytes) -> Any:
    """What a pickle of protocol 2 describes: texts, numbers, tuples, lists, dictionaries and `View`s.

    Raises DamagedError, or IndexError for an instruction that finds nothing to work on.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        mark = marks.pop()
        values = stack[mark:]
        del stack[mark:]
        return values

    instructions: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(content)
    for count, (instruction, argument, _) in enumerate(instructions):
        if count > _MAX_INSTRUCTIONS:
            fail(f"its pickle has more than {_MAX_INSTRUCTIONS:,} instructions")
        match instruction.name:
            case "STOP":
                return stack.pop()
            case "PROTO":
                if argument != 2:
                    fail(f"its pickle has protocol {argument}; allowed: 2")
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[instruction.name])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(instruction.name[-1])
                if len(stack) < size:
                    fail("its pickle is damaged")
                stack[-size:] = [tuple(stack[-size:])]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                if argument not in memo:
                    fail("its pickle is damaged")
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_global(argument.replace(" ", ".")))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_called(stack.pop(), arguments))
            case "SETITEM":
                value = stack.pop()
                pair = [stack.pop(), value]
                _store(stack[-1], pair)
            case "SETITEMS":
                pairs = since_mark()
                _store(stack[-1], pairs)
            case "APPENDS":
                values = since_mark()
                if not isinstance(stack[-1], list):
                    fail("its pickle is damaged")
                stack[-1].extend(values)
            case "BUILD":  # attributes of a dictionary, which are not needed
                stack.pop()
                if not isinstance(stack[-1], dict):
                    fail("its pickle sets attributes of what is no dictionary")
            case name:
                fail(f"its pickle has the instruction {name}, which tensors do not need")
    fail("its pickle does not end")


def _global(name: str) -> GlobalName:
    if name not in _CALLS and name.removeprefix("torch.") not in STORAGES:
        fail(f"its pickle names {name[:80]!r}, which tensors do not need")
    return GlobalName(name)


def _storage(described: Any) -> Storage:
    """A storage, which is described by ('storage', class, key, device, number of numbers)."""
    match described:
        case ("storage", GlobalName(name), str(key), str(), int(count)) if 0 <= count < 1 << 48:
            return Storage(name.removeprefix("torch."), key, count)
    fail("a storage in its pickle is damaged")


def _called(name: Any, arguments: Any) -> Any:
    if not isinstance(name, GlobalName) or name.name not in _CALLS:
        fail("its pickle calls what is no function")
    return _CALLS[name.name](arguments)


def _store(target: Any, pairs: list[Any]) -> None:
    """Put keys and values, which take turns, into a dictionary."""
    if not isinstance(target, dict) or not all(isinstance(key, str | int) for key in pairs[::2]):
        fail("its pickle is damaged")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if key in target:
            fail(f"the name {str(key)[:80]!r} occurs twice")
        target[key] = value


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
