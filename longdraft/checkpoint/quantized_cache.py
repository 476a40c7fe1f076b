"""Where quantised weights are cached: one file for each model, dtype and format in the user's cache folder.

A file's name contains a hash of all that its bytes depend on: the weights, the model's shape, the dtype, and what these
kernels make of a small matrix, which changes with their layout and with the way they quantise.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from longdraft.checkpoint.fingerprint import cache_dir, weights_sha256
from longdraft.checkpoint.packed_file import PackedFile
from longdraft.checkpoint.sizing import fine_mlps
from longdraft.checkpoint.tensor_source import TensorSource
from longdraft.kernels import Kernels
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.weights import FILE
from longdraft.model.config import ModelConfig

CACHE_VARIABLE = "LONGDRAFT_QUANTIZED_CACHE"  # the environment variable that names the folder, or "none"
NONE = "none"
_MIN_BYTES = 1 << 27  # smaller weights are quantised in a fraction of a second


def chosen_folder(given: str | Path | None) -> Path | None:
    """The folder of the cached files; None: nothing is cached.

    given  a folder or "none"; None: that of LONGDRAFT_QUANTIZED_CACHE, else the user's cache folder
    """
    asked = str(given or os.environ.get(CACHE_VARIABLE, ""))
    if asked:
        return None if asked == NONE else Path(asked).expanduser()
    try:
        return cache_dir("quantized")
    except RuntimeError:  # the user has no home folder
        return None


def open_packed(folder: Path | None, files: TensorSource, config: ModelConfig, kernels: Kernels, quantize: str,
                purpose: str) -> PackedFile | None:
    """The file of these weights, quantised. None for small weights, for those that keep the numbers of their own
    file, and for kernels whose layout is not stored.

    purpose  "target" or "draft": a draft copy lacks the embedding table, which it shares
    """
    is_large = bool(files.files) and files.nbytes >= _MIN_BYTES
    if folder is None or quantize in (NONE, FILE) or not is_large or not isinstance(kernels, CpuKernels):
        return None
    weights = weights_sha256(files)
    dtype = str(kernels.dtype).removeprefix("torch.")
    fine = fine_mlps(config) if (purpose, quantize) == ("draft", "int4") else range(0)
    key = hashlib.sha256(f"{weights} {config} {dtype} {quantize} {purpose} {fine or ''}{_layout(kernels)}".encode())
    name = f"{weights[:16]}-{dtype}-{quantize}-{purpose}-{key.hexdigest()[:16]}.safetensors"
    return PackedFile(folder / name, kernels)


def _layout(kernels: CpuKernels) -> str:
    """A hash of what these kernels make of a small matrix."""
    weight = (torch.arange(70 * 100).view(70, 100) * 7919 % 1009 - 504) / 504
    digest = hashlib.sha256()
    for quantize in ("int8", "int4"):
        packed = kernels.pack(weight, torch.arange(70.0), quantize=quantize)
        for memory in packed.memory():
            digest.update(memory)
    return digest.hexdigest()
