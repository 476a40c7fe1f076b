"""One safetensors file, memory-mapped. The format's own library validates the header before it is used here.

Tensors are views of the mapping. Pages that were read count as memory of this process until `forget` releases them.
A view stays valid after that; its pages are read again on use.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longdraft.checkpoint.memory import forget_pages, mapped_numbers, require_content
from longdraft.errors import ModelError
from longdraft.kernels.formats.groups import BlockRows
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.weights import QuantisedWeight

_MAX_HEADER = 1 << 25  # bytes of JSON; a 400-billion-parameter model's shard has some 100 KB
CPU = torch.device("cpu")
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {**FLOATS, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
          "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}

T = TypeVar("T")
# Prefixes of a wrapped language model's tensors and what they are in a model of its own: the layouts before and since
# transformers 5; and those of image input.
_WRAPPERS = (("language_model.", ""), ("model.language_model.", "model."))
_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
                "model.visual.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
                "model.vision_embedder.")


class Entry(NamedTuple):
    """A tensor of the file, in bytes [start, stop)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class StoredTensors(Protocol):
    """The tensors of one file by name. Views are read-only: writing to one crashes the process.

    path     of the file
    stat     its status when it was opened, to notice if it is replaced
    entries  type, shape and bytes of each tensor
    """

    path: Path
    stat: os.stat_result
    entries: dict[str, Entry]

    @property
    def has_own_numbers(self) -> bool:
        """Whether a matrix is quantised in a type that `exact` keeps."""
        return False

    def float_dtype(self, name: str) -> torch.dtype | None:
        """The type of a tensor's floating-point numbers, float32 for quantised ones; None: it holds other values, or
        of an unsupported type."""

    def view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor: a view of the file, or the numbers of a quantised one in `dtype` (default: float32)."""

    def forget(self, name: str) -> None:
        """Release the pages of a tensor, except those that it shares with its neighbours."""

    def stored(self, name: str) -> tuple[str, Tensor]:
        """The name of a tensor's type, and its bytes, uint8: those of all its parts."""
        return stored_bytes(self.view(name))

    def exact(self, name: str, quantize: str, device: torch.device = CPU) -> QuantisedWeight | None:
        """The numbers of a quantised matrix in the format `quantize`; None for others, and where it cannot hold
        them."""
        return None

    def blocks(self, name: str, quantize: str) -> BlockRows | None:
        """The rows of a matrix that `exact` keeps, where they are; None for others."""
        return None

    def mxfp4(self, name: str) -> Mxfp4Weight | None:
        """A matrix that the file has in MXFP4; None for other formats."""
        return None


class TensorFile(StoredTensors):
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_file(path)
        require_content(path)
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > _MAX_HEADER:
                    raise ModelError(f"{path} is not a readable safetensors file: its header has {length:,} bytes; "
                                     f"allowed: at most {_MAX_HEADER:,}")
                with safe_open(path, framework="pt"):  # validates lengths, offsets and shapes
                    pass
                self.stat = os.fstat(file.fileno())  # to notice if the file is replaced
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                header = json.loads(file.read(length))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}; it is damaged or incomplete, "
                             "get it again") from error
        header.pop("__metadata__", None)
        self.entries = {name: Entry(entry["dtype"], tuple(entry["shape"]), *(8 + length + offset for offset in
                                                                              entry["data_offsets"]))
                        for name, entry in header.items()}
        self.entries = _with_single_experts(text_entries(self.entries))

    def view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor as it is stored. Raises ModelError for a dtype that PyTorch does not have, and for a cut file.

        dtype  not used here: files with quantised tensors convert to it
        """
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise ModelError(f"{name} in {self.path} has dtype {entry.dtype}; allowed: {', '.join(DTYPES)}")
        return mapped_numbers(self._map, entry.start, entry.stop, DTYPES[entry.dtype], self.path).view(entry.shape)

    def float_dtype(self, name: str) -> torch.dtype | None:
        return FLOATS.get(self.entries[name].dtype)

    def forget(self, name: str) -> None:
        forget_pages(self._map, self.entries[name].start, self.entries[name].stop)


def text_entries(entries: dict[str, T]) -> dict[str, T]:
    """The entries of the language model, by its own names, where a model with image input wraps it; else all."""
    for outer, inner in _WRAPPERS:
        if any(name.startswith(outer) for name in entries):
            inside = {inner + name.removeprefix(outer): entry for name, entry in entries.items()
                     if name.startswith(outer)}
            return inside | {name: entry for name, entry in entries.items() if name == "lm_head.weight"}
    if any(name.startswith(_IMAGE_PARTS) for name in entries):  # a shard of nothing but image input
        return {name: entry for name, entry in entries.items() if not name.startswith(_IMAGE_PARTS)}
    return entries


def _with_single_experts(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries with a matrix for each expert, where a file has those of a layer in one tensor (Qwen3.5, Gemma 4)."""
    single: dict[str, Entry] = {}
    if any(".mlp.router." in name or name.endswith("_proj_bias") for name in entries):  # gpt-oss: see gpt_oss.py
        return entries
    for name, entry in entries.items():
        start, mark, part = name.partition(".experts.")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part)
        if not mark or names is None or len(entry.shape) != 3 or not all(entry.shape) or entry.shape[1] % len(names):
            single[name] = entry
            continue
        rows = entry.shape[1] // len(names)
        size = (entry.stop - entry.start) // entry.shape[0] // len(names)
        for index in range(entry.shape[0] * len(names)):
            expert, which = divmod(index, len(names))
            first = entry.start + index * size
            single[f"{start}{mark}{expert}.{names[which]}.weight"] = Entry(
                entry.dtype, (rows, entry.shape[2]), first, first + size)
    return single


def stored_bytes(tensor: Tensor) -> tuple[str, Tensor]:
    """The name of a tensor's type, and its bytes, uint8."""
    return str(tensor.dtype), tensor.contiguous().view(-1).view(torch.uint8)


def require_file(path: Path) -> None:
    """Raise ModelError unless the path is a regular file, or a link to one, as in the hub's cache.

    Pipes and devices are not opened, because reading one may block or never end.
    """
    try:
        is_file, exists = path.is_file(), path.exists()
    except OSError as error:  # the name is too long
        raise ModelError(f"{str(path)[:200]!r} is not a valid file name: {error.strerror}") from error
    if is_file:
        return
    if exists:
        raise ModelError(f"{path} is not a file")
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.parent.glob(pattern))
    if pickles:
        raise ModelError(f"{path} is missing; {pickles[0]} is a pickle, which can run code; of those only "
                         "pytorch_model.bin and its shards are read, without running any; save the model again with "
                         "save_pretrained, which writes safetensors")
    raise ModelError(f"{path} is missing; a model folder has config.json, tokenizer.json and "
                     "model.safetensors (or shards with their index)")
