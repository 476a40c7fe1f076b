"""Hybrids: models in which most layers are gated delta nets (longdraft/kernels/delta.py), the others have attention.

Qwen3-Next, Qwen3.5 and Qwen3.6. This file reads their configuration, and says which tensors a delta layer has and how
their rows are ordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.kernels.delta import DeltaShape, DeltaWeights

HybridFormat = Literal["split", "fused"]  # of the projections: one tensor for each, or two, ordered by key heads
_KINDS = ("linear_attention", "full_attention")
_PREFIX = "linear_attn."
_STEP = 16  # the compiled kernels work on as many numbers of a head at a time
CONVERTED = "is_converted"  # a key that the configurations of GGUF files have
DRAFT_LAYERS = "mtp."  # prefix of native multi-token prediction layers (native_heads.py)


@dataclass(frozen=True)
class HybridConfig:
    """The delta layers of a hybrid. Its attention layers have gates, and its norms a weight of 1 + w.

    is_delta  for each layer: whether it is a delta layer
    is_fused  the file has one tensor for q, k, v and z, and one for b and a, ordered by key heads
    is_converted  the file is a GGUF: norms have the weight 1 + w, the factor of the decay is stored instead of its
                  logarithm, and q, k, v and z are never fused
    """

    is_delta: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    is_fused: bool
    is_converted: bool = False

    @property
    def shape(self) -> DeltaShape:
        return DeltaShape(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.width)

    @property
    def projections(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names of the tensors of q, k, v and z, and the lengths of the segments of their rows, in each of which heads
        follow one another."""
        shape = self.shape
        if self._has_fused_projections:
            return ((f"{_PREFIX}in_proj_qkvz", (shape.channels + shape.values,)),)
        return ((f"{_PREFIX}in_proj_qkv", self._channels), (f"{_PREFIX}in_proj_z", (shape.values,)))

    @property
    def _channels(self) -> tuple[int, ...]:
        """Rows of q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.shape.values

    @property
    def _has_fused_projections(self) -> bool:
        return self.is_fused and not self.is_converted

    @property
    def decay_name(self) -> str:
        return f"{_PREFIX}{'decay' if self.is_converted else 'A_log'}"

    @property
    def gate_names(self) -> tuple[str, ...]:
        return (f"{_PREFIX}in_proj_ba",) if self.is_fused else (f"{_PREFIX}in_proj_b", f"{_PREFIX}in_proj_a")

    @property
    def gate_rows(self) -> int:
        """Rows of each of these tensors, in the order of heads."""
        return 2 * self.value_heads // len(self.gate_names)

    @property
    def out_name(self) -> str:
        return f"{_PREFIX}out_proj"

    def small_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The tensors of a delta layer that are never quantised, by name in the layer."""
        return {f"{name}.weight": (self.gate_rows, hidden) for name in self.gate_names} | {
            f"{_PREFIX}conv1d.weight": (self.shape.channels, 1, self.width), f"{_PREFIX}dt_bias": (self.value_heads,),
            self.decay_name: (self.value_heads,), f"{_PREFIX}norm.weight": (self.value_dim,)}

    def segments(self, name: str) -> tuple[int, ...]:
        """The rows of one of these tensors, other than the gates, that belong to heads; (): they belong to all."""
        if name.endswith("conv1d.weight"):
            return self._channels
        return () if name.endswith("norm.weight") else (self.value_heads,)

    def share(self, ranks: int) -> HybridConfig:
        """The heads of one of so many ranks."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def projection_order(self) -> Tensor | None:
        """The rows of the projections in the order q, k, v, z of all heads; None: they are in that order."""
        per_head = self.value_heads // self.key_heads * self.value_dim
        return self._by_part([self.key_dim, self.key_dim, per_head, per_head]) if self._has_fused_projections else None

    def gate_order(self) -> Tensor | None:
        """The same for the rows of b and a."""
        return self._by_part([self.value_heads // self.key_heads] * 2) if self.is_fused else None

    def _by_part(self, sizes: list[int]) -> Tensor:
        """Rows of parts of these sizes for each key head, reordered: all rows of the first part come first."""
        rows = torch.arange(self.key_heads * sum(sizes)).view(self.key_heads, -1)
        return torch.cat([part.flatten() for part in torch.split(rows, sizes, 1)])


def parse_hybrid(config: Mapping[str, Any], form: HybridFormat | None, num_layers: int) -> HybridConfig | None:
    """From the values of a config.json. None for a model without delta layers. ModelError for sizes that do not fit."""
    if form is None:
        return None
    every = int(config.get("full_attention_interval") or 4)
    types = config.get("layer_types") or [_KINDS[(index + 1) % every == 0] for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _KINDS for kind in types):
        raise ModelError(f"layer_types in config.json must be a list of {num_layers} values, each one of {_KINDS}")
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
             "linear_conv_kernel_dim")
    shape = DeltaShape(*(int(config[name]) for name in names))
    if min(shape) < 1 or shape.width < 2 or shape.value_heads % shape.key_heads:
        raise ModelError(f"config.json: {', '.join(names)} are {tuple(shape)}; allowed: 1 or more, a convolution of 2 "
                         "or more, and value heads that are a multiple of the key heads")
    if shape.key_dim % _STEP or shape.value_dim % _STEP or shape.key_dim > 1024 or shape.width > 16:
        raise ModelError(f"config.json: linear_key_head_dim is {shape.key_dim}, linear_value_head_dim "
                         f"{shape.value_dim} and linear_conv_kernel_dim {shape.width}; supported: multiples of "
                         f"{_STEP}, key heads of at most 1024, convolutions of at most 16")
    if types.count(_KINDS[0]) in (0, num_layers):
        raise ModelError("layer_types in config.json names layers of one kind only; supported: delta layers "
                         "(linear_attention) together with full_attention")
    return HybridConfig(tuple(kind == _KINDS[0] for kind in types), *shape, form == "fused",
                        config.get(CONVERTED) is True)


def delta_weights(config: HybridConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, eps: float) -> DeltaWeights:
    """The small weights of a layer from its tensors, by the names of `small_shapes`."""
    def rounded(name: str) -> Tensor:
        return tensors[_PREFIX + name].to(dtype).float()

    conv = rounded("conv1d.weight")[:, 0].T.contiguous()
    decay = tensors[config.decay_name].to(torch.float32, copy=True)
    decay = decay if config.is_converted else -decay.exp()
    bias = tensors[f"{_PREFIX}dt_bias"].to(torch.float32, copy=True)
    return DeltaWeights(config.shape, conv, decay, bias, rounded("norm.weight").clone(), eps)
