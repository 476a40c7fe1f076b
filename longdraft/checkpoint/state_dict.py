"""The tensors of a model in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longdraft.checkpoint.tensor_file import stored_bytes
from longdraft.checkpoint.tensor_source import TensorSource
from longdraft.errors import UsageError
from longdraft.model.config import ModelConfig
from longdraft.model.experts_config import ExpertsConfig
from longdraft.parallel import Pick


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


def with_single_experts(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors with a matrix for each expert, as in checkpoints. In memory those of a layer are one tensor."""
    form = config.experts
    single = dict(tensors)
    if form is None:
        return single
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        if form.is_beside:
            single |= _halves(single, f"{layer}experts.", form)
        if f"{layer}mlp.experts.down_proj" not in single:
            continue
        if form.has_bias:
            single |= _alternating(single, f"{layer}mlp.experts.", form.count)
            continue
        single[f"{layer}{form.prefix}.gate.weight"] = single.pop(f"{layer}mlp.gate.weight")
        single |= _halves(single, f"{layer}mlp.experts.", form, f"{layer}{form.prefix}.experts.")
    return single


def _halves(tensors: dict[str, Tensor], stem: str, form: ExpertsConfig, ours: str = "") -> dict[str, Tensor]:
    """The experts of a layer one by one, taken from `tensors`, where gate is the first half of the outputs.

    ours  the beginning of their names; default: that of their tensors
    """
    single: dict[str, Tensor] = {}
    gate_up, down = (tensors.pop(f"{stem}{name}") for name in ("gate_up_proj", "down_proj"))
    for expert in range(form.count):
        matrices = (gate_up[expert, : form.size], gate_up[expert, form.size :], down[expert])
        single |= {f"{ours or stem}{expert}.{name}.weight": matrix
                  for name, matrix in zip(form.names, matrices, strict=True)}
    return single


def _alternating(tensors: dict[str, Tensor], stem: str, count: int) -> dict[str, Tensor]:
    """The experts of a layer of gpt-oss one by one, taken from `tensors`. See longdraft/checkpoint/gpt_oss.py."""
    single: dict[str, Tensor] = {}
    for part, suffix in (("weight", ""), ("bias", "_bias")):
        gate_up, down = (tensors.pop(f"{stem}{name}_proj{suffix}") for name in ("gate_up", "down"))
        for expert in range(count):
            both, last = (x[expert].T if part == "weight" else x[expert] for x in (gate_up, down))
            sides = {"gate": both[::2], "up": both[1::2], "down": last}
            single |= {f"{stem}{expert}.{side}_proj.{part}": matrix for side, matrix in sides.items()}
    return single
