"""The compiled module `_cpu`, or the reason why it is missing."""

from __future__ import annotations

from collections.abc import Sequence

try:
    from longdraft.kernels.cpu import _cpu
except ImportError as error:  # built without a compiler, or for another version of Python
    IMPORT_ERROR = str(error)
else:
    IMPORT_ERROR = ""


def variants() -> list[str]:
    """The variants that this processor can run, fastest first; empty where the compiled module is missing."""
    return [] if IMPORT_ERROR else _cpu.variants()


def threads() -> int:
    """The number of threads of the compiled kernels."""
    return 1 if IMPORT_ERROR else _cpu.threads()


def set_threads(count: int) -> None:
    """Set the number of threads of the compiled kernels. Does nothing where the compiled module is missing."""
    if not IMPORT_ERROR:
        _cpu.set_threads(count)


def workspace_bytes() -> int:
    """Bytes that the compiled kernels hold for intermediate values, in all threads."""
    return 0 if IMPORT_ERROR else _cpu.workspace_bytes()


def new_choice(temperature: float, lowest: float, least: float, filter_temperature: float, penalty: float, window: int,
               seed: int, top_k: int, top_p: float, vocabulary: int, banned: Sequence[int]) -> _cpu.Choice:
    """The compiled sampler of one request. See `csrc/choice.h` for the arguments."""
    return _cpu.Choice(temperature, lowest, least, filter_temperature, penalty, window, seed, top_k, top_p,
                       vocabulary, banned)
