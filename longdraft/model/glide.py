"""Glide (LongSpec, arXiv 2502.17421): one decoder layer that drafts for a target, and reads the target's own cache.

    x = embedding of the token
    x = x + attention over the `window` rows of this layer before it
    x = x + attention of a query of its own over the target's last layer's keys and values
    x = x + MLP                                 logits = LM_head(RMSNorm(x)), the target's

Its memory is `window` rows whatever the length of the text: a ring, in which a row takes the place of the one that has
left the window. The order of rows in it does not matter, since each key carries its rotation.

A folder holds config.json (kind, window, sizes and hash of the target) and model.safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.kernels import KV, KVStore, Linear
from longdraft.model.checkpoint import TensorFiles
from longdraft.model.config import ModelConfig, read_json
from longdraft.model.transformer import Transformer
from longdraft.parallel import RowParallel, part_of

GLIDE_KIND = "glide"
_NORMS = ("input_layernorm", "cross_layernorm", "post_attention_layernorm", "norm")


class GlideWeights(NamedTuple):
    qkv: Linear
    out: Linear
    cross_q: Linear
    cross_out: Linear
    gate_up: Linear
    down: Linear
    norms: tuple[Tensor, ...]  # in the order of _NORMS


def glide_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a glide file for this target."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in _NORMS}
    return found | {
        "self_attn.q_proj.weight": (q, hidden), "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden), "self_attn.o_proj.weight": (hidden, q),
        "cross_attn.q_proj.weight": (q, hidden), "cross_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


class GlideRows(NamedTuple):
    """A layer's rows [T, hidden] and their keys and values [T, Hkv, D]."""

    hidden: Tensor
    k: Tensor
    v: Tensor


class Glide:
    """The layer. Holds no state of any text."""

    def __init__(self, weights: GlideWeights, window: int, target: Transformer) -> None:
        self.window = window
        self._weights = weights
        self._target = target

    def forward(self, tokens: Sequence[int], start: int, target: Transformer, own: KVStore, own_length: int,
                keys: KVStore, num_keys: int) -> GlideRows:
        """Rows of a chain of tokens at positions start, start + 1, ...

        target    the model with the rotations of this text (`Transformer.for_length`)
        own       this layer's rows that are seen, in slots 0 .. own_length
        keys      the target's last layer's, positions 0 .. num_keys; every row sees all of them
        """
        kernels, config, weights = target.kernels, target.config, self._weights
        cos, sin = target.rotations(range(start, start + len(tokens)))
        x = target.embed(tokens)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = kernels.linear(self._norm(x, 0), weights.qkv).view(len(x), -1, config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        q, k = kernels.rope(q.contiguous(), cos, sin), kernels.rope(k.contiguous(), cos, sin)
        v = v.contiguous()
        parents = torch.arange(-1, len(tokens) - 1, dtype=torch.int32)
        x = x + kernels.linear(kernels.attention(q, KV(own, own_length, k, v), parents).output.flatten(1), weights.out)
        if num_keys:
            x = x + self._cross(self._norm(x, 1), cos, sin, keys, num_keys)
        inner = kernels.swiglu(kernels.linear(self._norm(x, 2), weights.gate_up))
        return GlideRows(x + kernels.linear(inner, weights.down), k, v)

    def _cross(self, x: Tensor, cos: Tensor, sin: Tensor, keys: KVStore, num_keys: int) -> Tensor:
        """The kernels' attention ends at a row's own key: the target's last one takes that place."""
        kernels, config = self._target.kernels, self._target.config
        q = kernels.linear(x, self._weights.cross_q).view(len(x), -1, config.head_dim)
        last = torch.full((config.num_kv_heads, 1), num_keys - 1)
        k, v = (part.transpose(0, 1).expand(len(x), -1, -1).contiguous() for part in keys.read(last))
        alone = torch.full((len(x),), -1, dtype=torch.int32)
        seen = kernels.attention(kernels.rope(q, cos, sin), KV(keys, num_keys - 1, k, v), alone)
        return kernels.linear(seen.output.flatten(1), self._weights.cross_out)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32 of rows [R, hidden]."""
        return self._target.head(self._norm(hidden, 3))

    def _norm(self, x: Tensor, index: int) -> Tensor:
        return self._target.kernels.rms_norm(x, self._weights.norms[index], self._target.config.rms_norm_eps)


def is_glide(folder: Path) -> bool:
    return (folder / "config.json").exists() and read_json(folder / "config.json").get("kind") == GLIDE_KIND


def load_glide(folder: Path, target: Transformer, check: Callable[[Path, dict[str, Any]], None]) -> Glide:
    """From a folder; what does not fit the target is a ModelError. `check` compares what config.json says of it."""
    config = read_json(folder / "config.json")
    check(folder, config)
    window = config.get("window")
    if not isinstance(window, int) or not 1 <= window <= 4096:
        raise ModelError(f"{folder}: window is {window!r} in config.json; allowed: 1 to 4096")
    if target.config.rope.dims != target.config.head_dim:
        raise ModelError(f"{folder}: glide needs a model that rotates whole heads; this one rotates a part of each")
    files = TensorFiles(folder)
    expected = glide_shapes(target.whole)
    files.check(expected, files.names(), "its config.json and this model")
    kernels, shares = target.kernels, part_of(target.kernels)

    def pack(*names: str) -> Linear:
        """Shared out like the target's: this rank's heads and inner width."""
        files_names = [f"{name}.weight" for name in names]
        is_summed = names[0].endswith(("o_proj", "down_proj")) and shares.size > 1
        picks = [shares.columns() if is_summed else shares.rows(expected[name][:1]) for name in files_names]
        packed = kernels.pack(files.stack(files_names, kernels.dtype, picks))
        return RowParallel(packed) if is_summed else packed

    norms = tuple(files.read(f"{name}.weight").to(kernels.device, kernels.dtype, copy=True) for name in _NORMS)
    weights = GlideWeights(
        pack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), pack("self_attn.o_proj"),
        pack("cross_attn.q_proj"), pack("cross_attn.o_proj"), pack("mlp.gate_proj", "mlp.up_proj"),
        pack("mlp.down_proj"), norms)
    return Glide(weights, window, target)
