"""The compiled module `_cpu`, or the reason why it is missing."""

from __future__ import annotations

from collections.abc import Sequence

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


def solve_spd(a: Tensor, b: Tensor) -> Tensor:
    """The solutions X of A X = B, for symmetric positive definite matrices A [N, n, n] and B [N, n, n], all float32.

    PyTorch solves them on other devices than the CPU, and where the compiled module is missing. For many small matrices
    it takes ten times as long as the compiled module. A matrix that is not positive definite gives NaN or nonsense.
    """
    if not variants() or a.device.type != "cpu":
        found: Tensor = torch.cholesky_solve(b, torch.linalg.cholesky_ex(a)[0])
        return found.contiguous()
    a, x = a.contiguous(), b.clone(memory_format=torch.contiguous_format)
    assert a.dtype == x.dtype == torch.float32 and a.shape == x.shape and a.shape[1] == a.shape[2]
    _cpu.Kernels.get(variants()[0]).solve_spd(a.data_ptr(), x.data_ptr(), len(a), a.shape[1])
    return x
