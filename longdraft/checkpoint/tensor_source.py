"""What loading a model asks of its tensors, wherever they are: in files (`TensorFiles`) or in memory (`StateDict`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from longdraft.checkpoint.tensor_file import CPU, StoredTensors
from longdraft.errors import ModelError
from longdraft.kernels.formats.groups import BlockRows
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.interface import PartOfWeight
from longdraft.kernels.weights import QuantisedWeight
from longdraft.parallel import Pick

HEADS_PREFIX = "model.medusa_layers."  # TokenSwift's heads inside a whole-model checkpoint
Packed = TypeVar("Packed")  # a weight in the layout of some kernels


class TensorSource(Protocol):
    """The tensors of a model by name.

    folder  the model's folder, or its GGUF file; drafting parts in it are found as by `longdraft.load`
    files   the files that hold the tensors; empty for a model in memory
    sha256  set by `fingerprint.weights_sha256`
    """

    folder: Path
    files: Sequence[StoredTensors] = ()
    sha256: str | None = None

    def names(self) -> set[str]: ...

    @property
    def nbytes(self) -> int: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def wrong_type(self, name: str) -> str:
        """Why `read` refuses a tensor for its type; "": it does not."""

    def stored(self, name: str) -> tuple[str, Tensor]:
        """The name of a tensor's type, and its bytes, uint8."""

    def read(self, name: str, pick: Pick | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A floating-point tensor, or the part that `pick` selects, for immediate use.

        dtype  in which quantised tensors are returned; None: float32. Other tensors keep their own
        """

    def stack(self, names: Sequence[str], dtype: torch.dtype | None, picks: Sequence[Pick | None] = ()) -> Tensor:
        """Tensors, or the parts that `picks` select, concatenated along their rows in one dtype.

        dtype None: their own, or float32 if they differ.
        """

    def exact(self, names: Sequence[str], quantize: str, device: torch.device = CPU) -> QuantisedWeight | None:
        """Quantised matrices, one below another, with the numbers that they are stored with.

        quantize  none, int4, int8 or file: the format of the result
        device    that unpacks the numbers, and has the result

        None if it cannot hold one of them, or if the tensors are not quantised, as in memory.
        """
        return None

    def exact_parts(self, names: Sequence[str], quantize: str,
                    device: torch.device) -> Sequence[PartOfWeight] | None:
        """As `exact`, but only parts of one kind are joined, so that every number is kept. None also for int8."""
        return None

    def pack_blocks(self, names: Sequence[str], quantize: str,
                    pack: Callable[[BlockRows], tuple[Packed, int | None]]) -> Packed | None:
        """As `exact`, of GGUF files: gives `pack` the blocks where they are. It returns a packed weight, and the
        address of a damaged row or None."""
        return None

    def mxfp4(self, names: Sequence[str]) -> Mxfp4Weight | None:
        """Matrices that are stored in MXFP4, one below another, if all numbers are normal; None for others."""
        return None

    def second_reading(self) -> AbstractContextManager[None]:
        """A context in which the tensors are read again, for a quantised copy."""
        return nullcontext()

    def check(self, expected: Mapping[str, tuple[int, ...]], present: Set[str], what: str) -> None:
        """Raise ModelError unless the tensors `present` are those of `expected`, in name and shape.

        what  the source of `expected`, for the message, which lists up to eight differences
        """
        both = sorted(expected.keys() & present)
        problems = [f"missing {name}" for name in sorted(expected.keys() - present)]
        problems += [f"unexpected {name}" for name in sorted(present - expected.keys())]
        problems += [f"{name} has shape {list(self.shape(name))}, not {list(expected[name])}"
                     for name in both if self.shape(name) != expected[name]]
        problems += [problem for name in both if (problem := self.wrong_type(name))]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ModelError(f"{self.folder} does not match {what}: {shown}")

    def fingerprint(self) -> str:
        """SHA-256 over name, shape, dtype and stored bytes of every tensor, except those of heads."""
        digest = hashlib.sha256()
        for name in sorted(self.names()):
            if not name.startswith(HEADS_PREFIX):
                dtype, stored = self.stored(name)
                digest.update(f"{name} {self.shape(name)} {dtype}".encode())
                digest.update(stored.numpy().data)
        return digest.hexdigest()
