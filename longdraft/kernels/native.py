"""The compiled module `_cpu`, or the reason why it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from longdraft.kernels import _cpu
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


class FitRules(NamedTuple):
    """The constants of longdraft/cache/remainder.py, where each is described."""

    decay_rows: float
    ridge: float
    ridge_rows: float
    least_spread: float
    log_zero: float


def fit_remainder(rules: FitRules, x: Tensor, y: Tensor, gram: Tensor, cross: Tensor) -> Tensor | None:
    """Add rows x, y [N, R, n] to the sums gram and cross [N, n, n], all float32, and solve: the fit [N, n, n].

    None, and nothing is done, on other devices than the CPU and where the compiled module is missing: then
    longdraft/cache/remainder.py computes it with PyTorch, which takes three to five times as long.
    """
    if not variants() or x.device.type != "cpu":
        return None
    x, y, fit = x.contiguous(), y.contiguous(), torch.empty_like(gram)
    count, rows, n = x.shape
    assert x.shape == y.shape and gram.shape == cross.shape == (count, n, n)
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in (x, y, gram, cross))
    _cpu.Kernels.get(variants()[0]).fit_remainder(
        count, rows, n, *rules, *(part.data_ptr() for part in (x, y, gram, cross, fit)))
    return fit
