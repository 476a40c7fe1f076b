"""Checkpoints in safetensors whose matrices are whole numbers of 4 or 8 bits, with a scale for each group of inputs:
AWQ (Lin et al. 2023), GPTQ (Frantar et al. 2022), and the format of compressed-tensors.

A matrix X [N, K] is stored as several tensors (`_PARTS`). Here it is one tensor again, `X.weight`:

    weight[n, k] = (whole[n, k] - zero[n, g]) * scale[n, g]

The group g is k // group size, or in GPTQ with `desc_act` the one that `X.g_idx` names for k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint.memory import temporary
from longdraft.checkpoint.packed_format import COMPRESSED, METHODS, PackedFormat
from longdraft.checkpoint.tensor_file import CPU, Entry, StoredTensors, TensorFile
from longdraft.errors import ModelError
from longdraft.kernels.formats.int4 import GROUP, Int4Weight
from longdraft.kernels.formats.int8 import Quantised
from longdraft.kernels.weights import FILE, QuantisedWeight

# The parts of a matrix, and the one of them that holds the whole numbers.
_PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    COMPRESSED: ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
}
_MAIN = {"awq": "qweight", "gptq": "qweight", COMPRESSED: "weight_packed"}
_OF_INPUTS = ("input_scale", "input_zero_point")  # how another program quantises rows; here they are not needed
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each 4 bits of a word, from the lowest on
_WORD = 32  # bits


class _Numbers(NamedTuple):
    """A matrix [N, K] of whole numbers."""

    values: Tensor  # uint8 [N, K]
    scale: Tensor  # [N, G], of any floating dtype
    zero: Tensor  # uint8 [N, G]
    groups: Tensor | None = None  # int64 [K], the group of each input; None: K / G inputs for each, one after another

    def by_input(self, of_groups: Tensor) -> Tensor:
        """Numbers of groups [N, G] as [N, K]."""
        if self.groups is not None:
            return of_groups[:, self.groups]
        return of_groups.repeat_interleave(self.values.shape[1] // of_groups.shape[1], 1)


class PackedTensors(StoredTensors):
    """The tensors of a quantised checkpoint.

    It stands for one of the checkpoint's files; the parts of a matrix may be in different ones.
    """

    def __init__(self, file: TensorFile, files: Sequence[TensorFile], form: PackedFormat) -> None:
        self.path = file.path
        self.stat = file.stat
        self._file = file
        self._form = form
        self._owners = {name: each for each in files for name in each.entries}
        self.entries: dict[str, Entry] = {}
        for name, entry in file.entries.items():
            stem, _, part = name.rpartition(".")
            is_bytes = part == "weight" and f"{stem}.weight_scale" in self._owners  # 8 bits, not in words
            if part == _MAIN[form.method] or is_bytes:
                self.entries[f"{stem}.weight"] = Entry(form.method, self._shape(stem), entry.start, entry.stop)
            elif part not in (*_PARTS[form.method], *_OF_INPUTS):
                self.entries[name] = entry

    @property
    def has_own_numbers(self) -> bool:
        return any(map(self._is_packed, self.entries))

    def float_dtype(self, name: str) -> torch.dtype | None:
        return torch.float32 if self._is_packed(name) else self._file.float_dtype(name)

    def view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        if not self._is_packed(name):
            return self._file.view(name)
        numbers = self._numbers(name)
        out = temporary(tuple(numbers.values.shape), dtype or torch.float32)
        offset = numbers.values.float() - numbers.by_input(numbers.zero.float())
        out.copy_(offset * numbers.by_input(numbers.scale.float()))
        return out

    def exact(self, name: str, quantize: str, device: torch.device = CPU) -> QuantisedWeight | None:
        """The whole numbers of a matrix in the format int4 or int8, or in that of its bits with `file`; None where it
        cannot hold them.

        int4 holds 4 bits in groups of a multiple of 32 with scales that float16 holds; int8 holds 8 bits with one scale
        for each row and no zero points.
        """
        if not self._is_packed(name):
            return None
        numbers = self._numbers(name, device)
        bits = self._bits(name)
        if quantize not in (f"int{bits}", FILE):
            return None
        return _as_int4(numbers) if bits == 4 else _as_int8(numbers)

    def stored(self, name: str) -> tuple[str, Tensor]:
        if not self._is_packed(name):
            return self._file.stored(name)
        parts = self._stored_parts(name)
        stem = name.removesuffix(".weight")
        if self._form.method != COMPRESSED and self._word_groups(stem) is None:
            # The hash that journals have, which were written when longdraft knew no other order.
            parts = [part for part in parts if not part.endswith("g_idx")]
        tensors = [self._owners[part].view(part).contiguous().view(-1).view(torch.uint8) for part in parts]
        return self._form.in_fingerprints, torch.cat(tensors)

    def forget(self, name: str) -> None:
        for part in self._stored_parts(name) if self._is_packed(name) else [name]:
            self._owners[part].forget(part)

    def _is_packed(self, name: str) -> bool:
        return self.entries[name].dtype in METHODS

    def _stored_parts(self, name: str) -> list[str]:
        stem = name.removesuffix(".weight")
        parts = [f"{stem}.{part}" for part in ("weight", *_PARTS[self._form.method])]
        return [part for part in parts if part in self._owners]

    def _part(self, stem: str, part: str) -> Tensor:
        name = f"{stem}.{part}"
        if name not in self._owners:
            raise ModelError(f"{self.path}: {stem}.{_MAIN[self._form.method]} has no {name} beside it; the checkpoint "
                             "is incomplete")
        return self._owners[name].view(name)

    def _optional(self, stem: str, part: str) -> Tensor | None:
        return self._part(stem, part) if f"{stem}.{part}" in self._owners else None

    def _bits(self, name: str) -> int:
        stem = name.removesuffix(".weight")
        if self._form.method != COMPRESSED:
            return 4
        packed = self._optional(stem, "weight_packed")
        return 8 if packed is None or packed.shape[1] != _words(self._shape(stem)[1], 4) else 4

    def _shape(self, stem: str) -> tuple[int, int]:
        """[N, K] of a matrix. Raises ModelError unless its parts fit together."""
        return self._compressed_shape(stem) if self._form.method == COMPRESSED else self._word_shape(stem)

    def _numbers(self, name: str, device: torch.device = CPU) -> _Numbers:
        stem = name.removesuffix(".weight")
        return self._compressed(stem, device) if self._form.method == COMPRESSED else self._of_words(stem, device)

    def _word_shape(self, stem: str) -> tuple[int, int]:
        """Of AWQ and GPTQ."""
        weight, zeros, scales = (self._part(stem, part) for part in ("qweight", "qzeros", "scales"))
        if any(part.ndim != 2 for part in (weight, zeros, scales)):
            raise ModelError(f"{self.path}: {stem} does not consist of matrices; the checkpoint is damaged")
        inputs, outputs = weight.shape
        inputs, outputs = (inputs, outputs * 8) if self._form.method == "awq" else (inputs * 8, outputs)
        group = inputs if self._form.group == -1 else self._form.group
        shapes = tuple(zeros.shape), tuple(scales.shape)
        wanted = (inputs // group, outputs // 8), (inputs // group, outputs)
        is_whole = weight.dtype == zeros.dtype == torch.int32 and scales.is_floating_point()
        if inputs % group or outputs % 8 or shapes != wanted or not is_whole:
            raise ModelError(f"{self.path}: {stem} has zeros {list(shapes[0])} and scales {list(shapes[1])} of "
                             f"{zeros.dtype} and {scales.dtype} for {outputs} x {inputs} numbers in groups of {group}; "
                             "the checkpoint is damaged")
        return outputs, inputs

    def _of_words(self, stem: str, device: torch.device) -> _Numbers:
        """The numbers of AWQ and GPTQ."""
        weight, zeros, scales = (self._part(stem, part).to(device) for part in ("qweight", "qzeros", "scales"))
        is_awq = self._form.method == "awq"
        values = _unpacked(weight, 4, _AWQ_ORDER) if is_awq else _unpacked(weight.T, 4).T
        zero = _unpacked(zeros, 4, _AWQ_ORDER if is_awq else ()) + self._form.zero_step
        return _Numbers(values.T.contiguous(), scales.T.contiguous(), zero.T.contiguous(), self._word_groups(stem))

    def _word_groups(self, stem: str) -> Tensor | None:
        if self._form.method == "awq":
            return None
        return self._groups(stem, "g_idx", len(self._part(stem, "qweight")) * 8, len(self._part(stem, "scales")))

    def _compressed_shape(self, stem: str) -> tuple[int, int]:
        scale = self._part(stem, "weight_scale")
        packed = self._optional(stem, "weight_packed")
        if packed is None:
            whole = self._part(stem, "weight")
            outputs, inputs = whole.shape if whole.ndim == 2 else (0, 0)
            fits = whole.dtype == torch.int8
        else:
            shape = self._part(stem, "weight_shape").tolist()
            outputs, inputs = shape if len(shape) == 2 else (0, 0)
            fits = packed.dtype == torch.int32 and tuple(packed.shape) in [(outputs, _words(inputs, bits))
                                                                          for bits in (4, 8)]
        groups = scale.numel() // max(outputs, 1)
        fits = fits and scale.is_floating_point() and outputs > 0 and inputs > 0 and (
            scale.numel() == 1 or (groups > 0 and groups * outputs == scale.numel() and inputs % groups == 0))
        if not fits:
            raise ModelError(f"{self.path}: {stem} has scales {list(scale.shape)} of {scale.dtype} for {outputs} x "
                             f"{inputs} numbers of 4 or 8 bits; the checkpoint is damaged")
        return outputs, inputs

    def _compressed(self, stem: str, device: torch.device) -> _Numbers:
        """The numbers of compressed-tensors, which stores signed ones: 8 or 128 is added to make them positive."""
        outputs, inputs = self._shape(stem)
        bits = self._bits(f"{stem}.weight")
        packed = self._optional(stem, "weight_packed")
        middle = 1 << bits - 1
        values = (self._part(stem, "weight").to(device).view(torch.uint8) ^ middle if packed is None
                  else _unpacked(packed.to(device), bits)[:, :inputs].contiguous())
        scale = self._part(stem, "weight_scale").to(device)
        scale = scale.expand(outputs, 1) if scale.numel() == 1 else scale.reshape(outputs, -1)
        zero = torch.full(scale.shape, middle, dtype=torch.uint8, device=device)
        stored = self._optional(stem, "weight_zero_point")
        stored = None if stored is None else stored.to(device)
        if stored is not None and packed is None:
            zero = (stored.to(torch.int8).view(torch.uint8) ^ middle).reshape(-1, 1).expand(zero.shape)
        elif stored is not None:
            if stored.dtype != torch.int32 or tuple(stored.shape) != (_words(outputs, bits), scale.shape[1]):
                raise ModelError(f"{self.path}: {stem} has zero points {list(stored.shape)} of {stored.dtype} for "
                                 f"scales {list(scale.shape)}; the checkpoint is damaged")
            zero = _unpacked(stored.T, bits).T[:outputs]
        return _Numbers(values, scale, zero, self._groups(stem, "weight_g_idx", inputs, scale.shape[1]))

    def _groups(self, stem: str, part: str, inputs: int, count: int) -> Tensor | None:
        """The group of each input; None if they are one after another."""
        groups = self._optional(stem, part)
        if groups is None or torch.equal(groups.long(), torch.arange(inputs) // (inputs // count)):
            return None
        if groups.shape != (inputs,) or int(groups.min()) < 0 or int(groups.max()) >= count:
            raise ModelError(f"{self.path}: {stem}.{part} must name one of {count} groups for each of {inputs} inputs; "
                             "the checkpoint is damaged")
        return groups.long()


def _as_int4(numbers: _Numbers) -> Int4Weight | None:
    inputs = numbers.values.shape[1]
    count = numbers.scale.shape[1]
    group = inputs // count
    scale = numbers.scale.half()
    if group % GROUP or not torch.equal(scale.float(), numbers.scale.float()):
        return None
    values = numbers.values
    order = None
    if numbers.groups is not None:
        if not torch.equal(numbers.groups.bincount(minlength=count), torch.full((count,), group)):
            return None
        order = numbers.groups.argsort(stable=True)
        values = values[:, order]
    times = group // GROUP
    return Int4Weight(values, scale.repeat_interleave(times, 1), numbers.zero.repeat_interleave(times, 1),
                      None if order is None else order.int())


def _as_int8(numbers: _Numbers) -> Quantised | None:
    if numbers.scale.shape[1] != 1 or not (numbers.zero == 128).all():
        return None
    return Quantised((numbers.values ^ 128).view(torch.int8), numbers.scale[:, 0].float())


def _words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)


def _unpacked(words: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Words of 32 bits [A, B] to whole numbers [A, B * 32 / bits] uint8.

    order  the position of each of a word's numbers, from its lowest bits on; empty: ascending
    """
    count = _WORD // bits
    out = torch.empty(*words.shape, count, dtype=torch.uint8, device=words.device)
    for i, position in enumerate(order or range(count)):
        out[..., position] = (words >> bits * i & (1 << bits) - 1).to(torch.uint8)
    return out.flatten(1)


def wrap(folder: Path, files: Sequence[TensorFile],
         config: Mapping[str, object]) -> Sequence[StoredTensors]:
    """The files of a folder, those of a quantised checkpoint with whole matrices."""
    marks = (".qweight", ".weight_packed", ".weight_scale")
    if not any(name.endswith(marks) for file in files for name in file.entries):
        return files
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        raise ModelError(f"{folder} has quantised weights, but its config.json has no quantization_config")
    form = PackedFormat.parse(settings)
    return [PackedTensors(file, files, form) for file in files]
