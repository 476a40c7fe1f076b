"""The expert matrices of gpt-oss under the names of other mixtures: a gate, an up and a down matrix for each expert.

The files have one tensor for all experts of a layer. It holds numbers, with inputs before outputs, or MXFP4: blocks of
32 inputs in 4 bits, with a power of two for each. Outputs of gate and up alternate.

    gate_up_proj        [E, hidden, 2 I]            gate_up_proj_blocks [E, 2 I, hidden / 32, 16]  uint8
    gate_up_proj_bias   [E, 2 I]                    gate_up_proj_scales [E, 2 I, hidden / 32]      uint8
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.checkpoint.memory import temporary
from longdraft.checkpoint.tensor_file import Entry, StoredTensors, TensorFile, stored_bytes
from longdraft.errors import ModelError
from longdraft.kernels.formats import mxfp4
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight

METHOD = "mxfp4"
_STEM = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj(_blocks|_bias|_scales|)")


class OssTensors(StoredTensors):
    """The tensors of a file of gpt-oss. Parts of a matrix may be in other files."""

    def __init__(self, file: TensorFile, files: Sequence[TensorFile]) -> None:
        self.path = file.path
        self.stat = file.stat
        self._file = file
        self._owners = {name: each for each in files for name in each.entries}
        self.entries: dict[str, Entry] = {}
        self._parts: dict[str, tuple[str, int, slice]] = {}  # our name -> stored name, expert, its outputs
        for name, entry in file.entries.items():
            match = _STEM.fullmatch(name)
            if match is None:
                self.entries[name] = entry
            elif match[3] != "_scales":
                self._add(name, entry, match)

    def _add(self, name: str, entry: Entry, match: re.Match[str]) -> None:
        """The matrices, or biases, of all experts in a tensor."""
        stem, which, kind = match.groups()
        count = self._checked_shape(name, entry.shape, kind)
        size = (entry.stop - entry.start) // count[0]
        sides = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if which == "gate_up" else {"down": slice(None)}
        for expert in range(count[0]):
            start = entry.start + expert * size
            for side, outputs in sides.items():
                ours = f"{stem}.{expert}.{side}_proj.{'bias' if kind == '_bias' else 'weight'}"
                shape = (count[1] // len(sides), *count[2:])
                # Each is counted with its share of the bytes, which lie among those of the other side.
                self.entries[ours] = Entry(entry.dtype if kind != "_blocks" else METHOD, shape, start,
                                           start + size // len(sides))
                self._parts[ours] = name, expert, outputs

    def _checked_shape(self, name: str, shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
        """(experts, outputs), and inputs of matrices. Raises ModelError for other shapes."""
        rank = {"_blocks": 4, "_bias": 2, "": 3}[kind]
        even = 2 if "gate_up" in name else 1
        outputs = shape[-1] if not kind and len(shape) == 3 else shape[1] if len(shape) > 1 else 0
        if len(shape) != rank or not all(shape) or outputs % even or (kind == "_blocks" and shape[3] != 16):
            raise ModelError(f"{self.path}: {name} has shape {list(shape)}, which is none of gpt-oss; the checkpoint "
                             "is damaged")
        if kind == "_blocks":
            scales = name.replace("_blocks", "_scales")
            if scales not in self._owners or self._owners[scales].entries[scales].shape != shape[:3]:
                raise ModelError(f"{self.path}: {name} has no scales {list(shape[:3])} in {scales}; the checkpoint is "
                                 "incomplete")
            return shape[0], shape[1], 32 * shape[2]
        return (shape[0], shape[2], shape[1]) if not kind else shape

    def float_dtype(self, name: str) -> torch.dtype | None:
        if name not in self._parts:
            return self._file.float_dtype(name)
        return torch.float32 if self.entries[name].dtype == METHOD else self._file.float_dtype(self._parts[name][0])

    def view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._parts:
            return self._file.view(name)
        stored, expert, outputs = self._parts[name]
        packed = self.mxfp4(name)
        if packed is None:
            whole = self._file.view(stored)[expert]
            return whole[outputs] if stored.endswith("_bias") else whole.T[outputs]
        out = temporary(self.entries[name].shape, dtype or torch.float32)
        out.copy_(mxfp4.dequantise(packed))
        return out

    def mxfp4(self, name: str) -> Mxfp4Weight | None:
        stored, expert, outputs = self._parts.get(name, ("", 0, slice(None)))
        if not stored.endswith("_blocks"):
            return None
        scales = stored.replace("_blocks", "_scales")
        codes = self._file.view(stored)[expert][outputs].flatten(1)
        return Mxfp4Weight(codes, self._owners[scales].view(scales)[expert][outputs])

    def stored(self, name: str) -> tuple[str, Tensor]:
        if name not in self._parts:
            return self._file.stored(name)
        stored, expert, outputs = self._parts[name]
        if not stored.endswith("_blocks"):
            return stored_bytes(self.view(name))
        scales = stored.replace("_blocks", "_scales")
        parts = (self._file.view(stored)[expert][outputs], self._owners[scales].view(scales)[expert][outputs])
        return self.entries[name].dtype, torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def forget(self, name: str) -> None:
        self._file.forget(self._parts[name][0] if name in self._parts else name)
