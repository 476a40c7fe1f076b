"""The tensors of a model in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longdraft.checkpoint.tensor_file import stored_bytes
from longdraft.checkpoint.tensor_source import TensorSource
from longdraft.errors import UsageError
from longdraft.model.config import ModelConfig
from longdraft.parallel import Pick

_STACKED = re.compile(r"(model\.layers\.\d+\.)(?:mlp\.)?experts\.(gate_up|down)_proj(_bias)?")


class StateDict(TensorSource):
    """The tensors of a model in memory.

    folder  the model's folder; drafting parts in it are found as by `longdraft.load`
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        self.folder = folder
        self._tensors = dict(tensors)

    def release_tensors(self) -> None:
        """Drop the references to the tensors, so that the caller can free them."""
        self._tensors = {}
        self.sha256 = None  # their owner may change them from here on

    def names(self) -> set[str]:
        return set(self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def wrong_type(self, name: str) -> str:
        return "" if self._tensors[name].is_floating_point() else f"{name} holds {self._tensors[name].dtype}"

    def read(self, name: str, pick: Pick | None = None, dtype: torch.dtype | None = None) -> Tensor:
        whole = self._tensors[name].detach()
        return whole if pick is None else pick(whole)

    def stack(self, names: Sequence[str], dtype: torch.dtype | None, picks: Sequence[Pick | None] = ()) -> Tensor:
        picks = picks or [None] * len(names)
        return torch.cat([self.read(name, pick).to("cpu", dtype) for name, pick in zip(names, picks, strict=True)])

    def stored(self, name: str) -> tuple[str, Tensor]:
        return stored_bytes(self.read(name).cpu())

    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint, as long as the tensors are unchanged."""
        if not self._tensors:
            raise UsageError("a journal names the weights it belongs to, and those of a model in memory are not kept; "
                             "save it, and give its folder to longdraft.load")
        return super().fingerprint()


def with_single_experts(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors with a matrix for each expert, as in checkpoints. In memory those of a layer are one tensor.

    Its outputs are those of gate, then those of up. In gpt-oss they alternate, and inputs come before outputs: see
    longdraft/checkpoint/gpt_oss.py.
    """
    form = config.experts
    if form is None:
        return dict(tensors)
    single: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            single[name.replace(".mlp.gate.", f".{form.path('gate')}.")] = tensor
            continue
        layer, which, bias = match.groups()
        is_oss = form.has_bias
        stacked = tensor.transpose(1, 2) if is_oss and not bias else tensor  # [experts, outputs, ...]
        names = form.names[:2] if which == "gate_up" else form.names[2:]
        parts = [stacked[:, i :: len(names)] for i in range(len(names))] if is_oss else stacked.chunk(len(names), 1)
        for part_name, part in zip(names, parts, strict=True):
            single |= {f"{layer}{form.path(f'experts.{expert}')}.{part_name}.{'bias' if bias else 'weight'}": matrix
                       for expert, matrix in enumerate(part)}
    return single
