"""The device of the CUDA kernels' tests, and their rows and kernels.

Without a CUDA device, Triton's interpreter runs them on the CPU: small shapes, float32 and float16 (it gets a bfloat16
product wrong). CUDA graphs are records there (helpers.recorded_graphs). `make test-cuda` runs the same on a device,
bfloat16 too.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.recorded_graphs import RecordedGraphs
from longdraft.kernels.cuda import operations
from longdraft.kernels.cuda.attention import Splits
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.interface import KVStore
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


def fill(store: KVStore, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write rows [length, KV heads, D] from position 0 on.

    The interpreter takes a millisecond for each row of the kernel that writes. Rows that are stored as they are need no
    kernel; `test_rows_are_read_kept_and_copied_as_they_were_written` tests it.
    """
    if HAS_CUDA or not isinstance(store, CudaStore) or store.format.is_scaled:
        store.write(0, k, v)
        return
    store.reserve(len(k))
    store.k[:, : len(k)], store.v[:, : len(v)] = k.transpose(0, 1), v.transpose(0, 1)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: str, times: float = 1.0) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=times * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def hurry_the_interpreter() -> None:
    """Leave out work that Triton's interpreter repeats without effect. It takes two thirds of its time.

    - Each call of a kernel replaces the functions of Triton's modules and restores them. Here they stay replaced.
    - Each operation builds its types again. Here equal types share their shape, size and name.
    - Each operation on integers computes whether the result overflows, and discards the answer unless `debug` is set.
    """
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.9."):
        return  # its parts have other names

    tl = interpreter.tl
    patched = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(patched)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    numpy_dtype = interpreter._get_np_dtype
    names: dict[str, object] = {}

    def named_dtype(type_: object) -> object:
        if type_.name not in names:
            names[type_.name] = numpy_dtype(type_)
        return names[type_.name]

    interpreter._get_np_dtype = named_dtype

    new_block, new_tensor, equals = tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__
    blocks: dict[object, dict[str, object]] = {}

    def shape_of(type: object) -> dict[str, object]:
        tensor = object.__new__(tl.tensor)
        new_tensor(tensor, None, type)
        return dict(shape=tensor.shape, numel=tensor.numel)

    of_scalars = shape_of(tl.int32)

    def init_block(self: object, element_ty: object, shape: object) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            new_block(self, element_ty, shape)
            blocks[key] = dict(shape=self.shape, numel=self.numel, name=self.name, of_tensors=shape_of(self))
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def init_tensor(self: object, handle: object, type: object) -> None:
        self.__dict__.update(type.of_tensors if type.is_block() else of_scalars, handle=handle, type=type,
                             dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor
    tl.dtype.__eq__ = lambda self, other: self is other or equals(self, other)


def sum_products_in_float64() -> None:
    """Have the interpreter sum products in float64 and round the sums to float32.

    It takes NumPy's products. On some processors (Zen 5) the order of their sums depends on the row and on the shape. A
    device's order is the same for all rows of a tile.
    """
    from triton.runtime import interpreter

    def product(self: object, a: Any, b: Any, d: Any, *precision: object) -> Any:
        if d.data.dtype != np.float32 or 1 in (a.data.itemsize, b.data.itemsize):
            return create_dot(self, a, b, d, *precision)
        sums = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    create_dot, builder.create_dot = builder.create_dot, product


if not HAS_CUDA:
    hurry_the_interpreter()
    sum_products_in_float64()
    operations.GraphCache = RecordedGraphs


class OperationRecorder(TorchDispatchMode):
    """The names of PyTorch's operations that are not views."""

    VIEWS = ("slice", "view", "split", "split_with_sizes", "expand", "detach", "lift_fresh", "alias", "as_strided",
             "select", "t", "transpose", "unsqueeze", "_unsafe_view", "empty", "unbind")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        if name not in self.VIEWS:
            self.names.append(name)
        return function(*args, **kwargs or {})
