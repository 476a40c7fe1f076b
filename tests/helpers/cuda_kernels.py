"""The device of the CUDA kernels' tests, and their rows and kernels.

Without a CUDA device, Triton's interpreter runs them on the CPU: small shapes, float32 and float16 (it gets a bfloat16
product wrong). `make test-cuda` runs the same on a device, bfloat16 too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect

import pytest
import torch

from longdraft.kernels.cuda.attention import Splits
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.reference import ReferenceKernels

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
SPLITS = Splits(128, 2, 256)  # so that few positions are several splits
DTYPES = ["float32", "float16", *(["bfloat16"] if HAS_CUDA else [])]
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def kernels(dtype: str = "float32", name: str = "triton-16") -> CudaKernels:
    return CudaKernels(DEVICE, dtype, name, SPLITS)


def rows_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def reference(dtype: str) -> ReferenceKernels:
    """The reference, with rounding to `dtype`: also float16, which `kernels.choose` does not offer on the CPU."""
    kernel = ReferenceKernels(DEVICE, "float32")
    kernel.dtype = getattr(torch, dtype)
    return kernel


def close(got: torch.Tensor, expected: torch.Tensor, dtype: str, times: float = 1.0) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=times * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@functools.cache
def _builtin_names(owner: object) -> list[str]:
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]


def hurry_the_interpreter() -> None:
    """Leave out two things that Triton's interpreter does without effect, which take a third of its time.

    In each call of a kernel it searches Triton's modules for their built-in functions. For each operation on integers
    it computes whether the result overflows, and discards the answer unless the option `debug` is set.
    """
    from triton.runtime import interpreter

    def patch_builtin(owner: object, *arguments: object) -> None:
        for name in _builtin_names(owner):
            if interpreter.tl.core.is_builtin(member := getattr(owner, name)):  # otherwise it is replaced already
                interpreter._patch_attr(owner, name, member, *arguments)

    interpreter._patch_builtin = patch_builtin
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if not HAS_CUDA:
    hurry_the_interpreter()
