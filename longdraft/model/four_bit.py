"""4-bit checkpoints in safetensors: AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022).

A matrix X [N, K] is stored as three tensors: `X.qweight` and `X.qzeros`, eight whole numbers of 4 bits to a word of 32,
and `X.scales` float16, one for each output and each group of inputs. Here it is one tensor again, `X.weight`:

    weight[n, k] = (whole[n, k] - zero[n, g]) * scale[n, g]     with the group g = k // group size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.kernels.int4 import GROUP, Int4Weight
from longdraft.model.memory import temporary
from longdraft.model.tensor_file import Entry, TensorFile

METHODS = ("awq", "gptq")
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each 4 bits of a word, from the lowest on
_IN_WORD = 8


@dataclass(frozen=True)
class FourBitFormat:
    """How a checkpoint packs its numbers. `quantization_config` of config.json says it.

    method     awq or gptq
    group      inputs that share a scale; -1: all
    zero_step  what is added to stored zero points: 1 in GPTQ's first format
    """

    method: str
    group: int
    zero_step: int = 0

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> FourBitFormat:
        """Raises ModelError for formats that longdraft does not have."""
        method, bits = settings.get("quant_method"), settings.get("bits", settings.get("w_bit"))
        group = settings.get("group_size", settings.get("q_group_size", 128))
        if method not in METHODS or bits != 4:
            raise ModelError(f"the checkpoint is quantised ({method!r}, {bits!r} bits); supported: awq and gptq with 4 "
                             "bits; load the original model, with --quantize to save memory")
        if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and (group < 1 or group % GROUP)):
            raise ModelError(f"group_size is {group!r} in quantization_config; allowed: -1 or a multiple of {GROUP}")
        version = str(settings.get("version", "gemm")).lower()
        if method == "awq" and (version != "gemm" or not settings.get("zero_point", True)):
            raise ModelError(f"the AWQ checkpoint has version {version!r}; supported: gemm with zero points")
        packed = settings.get("checkpoint_format", "gptq")
        if method == "gptq" and packed not in ("gptq", "gptq_v2"):
            raise ModelError(f"checkpoint_format is {packed!r} in quantization_config; supported: gptq, gptq_v2")
        return cls(method, group, int(method == "gptq" and packed == "gptq"))


class FourBitTensors:
    """The tensors of a 4-bit checkpoint. See :class:`longdraft.model.tensor_file.TensorFile`.

    It stands for one of the checkpoint's files; the parts of a matrix may be in different ones.
    """

    def __init__(self, file: TensorFile, files: Sequence[TensorFile], form: FourBitFormat) -> None:
        self.path, self.stat = file.path, file.stat
        self._file, self._form = file, form
        self._owners = {name: each for each in files for name in each.entries}
        self.entries: dict[str, Entry] = {}
        for name, entry in file.entries.items():
            stem, _, part = name.rpartition(".")
            if part == "qweight":
                self.entries[f"{stem}.weight"] = Entry(form.method, self._shape(stem), entry.start, entry.stop)
            elif part not in _PARTS:
                self.entries[name] = entry

    def float_dtype(self, name: str) -> torch.dtype | None:
        """The floating-point type of a tensor's numbers. float32 for 4-bit matrices."""
        return torch.float32 if self._is_packed(name) else self._file.float_dtype(name)

    def view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor: a view of the file, or the numbers of a 4-bit matrix in `dtype` (default: float32)."""
        if not self._is_packed(name):
            return self._file.view(name)
        values, scale, zero = self._numbers(name.removesuffix(".weight"))
        group = values.shape[1] // scale.shape[1]
        whole = values.view(len(values), -1, group).float() - zero[..., None].float()
        out = temporary(tuple(values.shape), dtype or torch.float32)
        out.copy_((whole * scale[..., None].float()).flatten(1))
        return out

    def int4(self, name: str) -> Int4Weight | None:
        """The numbers of a 4-bit matrix in groups of 32, unchanged; None for other tensors."""
        if not self._is_packed(name):
            return None
        values, scale, zero = self._numbers(name.removesuffix(".weight"))
        if not torch.equal(scale.half().float(), scale.float()) or values.shape[1] % GROUP:
            return None
        times = values.shape[1] // scale.shape[1] // GROUP
        return Int4Weight(values, scale.half().repeat_interleave(times, 1), zero.repeat_interleave(times, 1))

    def stored(self, name: str) -> tuple[str, Tensor]:
        """The name of a tensor's type, and its bytes, uint8: those of all its parts."""
        if not self._is_packed(name):
            return self._file.stored(name)
        stem = name.removesuffix(".weight")
        parts = [self._part(stem, part) for part in ("qweight", "qzeros", "scales")]
        return f"{self._form}", torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def forget(self, name: str) -> None:
        """Release the pages of a tensor, except those that it shares with its neighbours."""
        stem = name.removesuffix(".weight")
        for part in [f"{stem}.{part}" for part in _PARTS] if self._is_packed(name) else [name]:
            if part in self._owners:
                self._owners[part].forget(part)

    def _is_packed(self, name: str) -> bool:
        return self.entries[name].dtype in METHODS

    def _part(self, stem: str, part: str) -> Tensor:
        name = f"{stem}.{part}"
        if name not in self._owners:
            raise ModelError(f"{self.path}: {stem}.qweight has no {name} beside it; the checkpoint is incomplete")
        return self._owners[name].view(name)

    def _shape(self, stem: str) -> tuple[int, int]:
        """[N, K] of a matrix. Raises ModelError unless its parts fit together."""
        weight, zeros, scales = (self._part(stem, part) for part in ("qweight", "qzeros", "scales"))
        if any(part.ndim != 2 for part in (weight, zeros, scales)):
            raise ModelError(f"{self.path}: {stem} does not consist of matrices; the checkpoint is damaged")
        inputs, outputs = weight.shape
        inputs, outputs = (inputs, outputs * _IN_WORD) if self._form.method == "awq" else (inputs * _IN_WORD, outputs)
        group = inputs if self._form.group == -1 else self._form.group
        shapes = tuple(zeros.shape), tuple(scales.shape)
        wanted = (inputs // group, outputs // _IN_WORD), (inputs // group, outputs)
        is_whole = weight.dtype == zeros.dtype == torch.int32 and scales.is_floating_point()
        if inputs % group or outputs % _IN_WORD or shapes != wanted or not is_whole:
            raise ModelError(f"{self.path}: {stem} has zeros {list(shapes[0])} and scales {list(shapes[1])} of "
                             f"{zeros.dtype} and {scales.dtype} for {outputs} x {inputs} numbers in groups of {group}; "
                             "the checkpoint is damaged")
        return outputs, inputs

    def _numbers(self, stem: str) -> Int4Weight:
        """Whole numbers [N, K], scales and zero points [N, groups] of a matrix."""
        weight, zeros, scales = (self._part(stem, part) for part in ("qweight", "qzeros", "scales"))
        is_awq = self._form.method == "awq"
        values = _unpacked(weight, _AWQ_ORDER) if is_awq else _unpacked(weight.T, range(_IN_WORD)).T
        zero = _unpacked(zeros, _AWQ_ORDER if is_awq else range(_IN_WORD)) + self._form.zero_step
        if f"{stem}.g_idx" in self._owners:
            groups = self._part(stem, "g_idx")
            group = len(values) // len(scales)
            if not torch.equal(groups.long(), torch.arange(len(values)) // group):
                raise ModelError(f"{self.path}: the inputs of {stem} are not in the order of their groups (desc_act); "
                                 "get a checkpoint without it")
        return Int4Weight(values.T.contiguous(), scales.T.contiguous(), zero.T.contiguous())


def _unpacked(words: Tensor, order: Sequence[int]) -> Tensor:
    """Words of 32 bits [A, B] to whole numbers of 4 bits [A, 8 B] uint8.

    order  the place of each 4 bits of a word, from the lowest on, among its eight numbers
    """
    out = torch.empty(*words.shape, _IN_WORD, dtype=torch.uint8)
    for i, place in enumerate(order):
        out[..., place] = (words >> 4 * i & 15).to(torch.uint8)
    return out.flatten(1)


def wrap(folder: Path, files: Sequence[TensorFile], config: Mapping[str, Any]) -> Sequence[TensorFile | FourBitTensors]:
    """The files of a folder, those of a 4-bit checkpoint as one with whole matrices."""
    if not any(name.endswith(".qweight") for file in files for name in file.entries):
        return files
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        raise ModelError(f"{folder} has 4-bit weights, but its config.json has no quantization_config")
    form = FourBitFormat.parse(settings)
    return [FourBitTensors(file, files, form) for file in files]
