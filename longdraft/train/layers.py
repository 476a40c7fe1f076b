"""The trained layers that draft for a frozen model, and the files of trained parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longdraft.checkpoint.tensor_files import TensorFiles, dump_json
from longdraft.train.checkpoint import write_tensors
from longdraft.train.frozen_model import FrozenModel


class StoredTensor(NamedTuple):
    """A tensor of a part's file: its name and parameter, and what the parameter is multiplied by in the file."""

    name: str
    parameter: nn.Parameter
    factor: float = 1.0

    def value(self, dtype: torch.dtype) -> Tensor:
        """For the file."""
        return (self.parameter.detach() * self.factor).to("cpu", dtype)


@torch.no_grad()
def read_part(files: TensorFiles, tensors: Iterable[StoredTensor], names: Mapping[str, str] | None = None) -> None:
    """Set the parameters of a part from the file of an earlier one. Raises ModelError if tensors are missing or have
    other shapes.

    names  our names of the file's tensors -> its own; None: the same ones
    """
    present = {name: name for name in files.names()} if names is None else names
    tensors = list(tensors)
    wanted = {present.get(each.name, each.name): tuple(each.parameter.shape) for each in tensors}
    files.check(wanted, files.names() & wanted.keys(), "the part to train; give --start a part of the same kind and "
                "sizes")
    for each in tensors:
        each.parameter.copy_(files.read(present[each.name]).float() / each.factor)


def write_part(path: Path, tensors: Iterable[StoredTensor], dtype: torch.dtype, config: Mapping[str, Any]) -> None:
    """Write the file of a part, and config.json beside it."""
    write_tensors(path, {each.name: each.value(dtype) for each in tensors}, {"format": "pt"})
    dump_json(path.with_name("config.json"), config)


class LayerModule(nn.Module):
    """Trained layers that draft for a frozen model, in float32, with the names of their file.

    shapes  of the tensors, by name. Vectors start as ones, output maps as zeros, other matrices are random by `seed`
    """

    def __init__(self, base: FrozenModel, shapes: Mapping[str, Sequence[int]], seed: int) -> None:
        super().__init__()
        self._base = base
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for name, shape in shapes.items():
            tensor = torch.ones(shape)
            if len(shape) > 1:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                tensor = torch.zeros(shape) if is_output else torch.randn(shape, generator=generator) * shape[1] ** -0.5
            self.weights[name.replace(".", "/")] = nn.Parameter(tensor)
        with torch.no_grad():
            self._weight("norm").copy_(base.final_norm)

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = self.weights[f"{name}.weight".replace(".", "/")]
        return weight

    def stored(self) -> list[StoredTensor]:
        return [StoredTensor(name.replace("/", "."), p) for name, p in self.weights.items()]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        dtype = self._base.head_weight.dtype
        return functional.linear(x.to(dtype), self._weight(name).to(dtype))

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """The heads [B, H, L, D] of a product of x [B, L, ...]."""
        return self._linear(x, name).view(*x.shape[:2], -1, self._base.config.head_dim).transpose(1, 2)

    def _merge(self, heads: Tensor, name: str) -> Tensor:
        """The product [B, L, hidden] float32 of heads [B, H, L, D]."""
        return self._linear(heads.transpose(1, 2).flatten(2), name).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weight(name)
        return functional.rms_norm(x, weight.shape, weight, self._base.config.rms_norm_eps)

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        """The output [B, L, hidden] float32 of the MLP and the norm before it."""
        normed = self._norm(x, f"{prefix}post_attention_layernorm")
        inner = functional.silu(self._linear(normed, f"{prefix}mlp.gate_proj"))
        return self._linear(inner * self._linear(normed, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj").float()
