"""Glide (LongSpec, arXiv 2502.17421): one decoder layer that drafts, and reads the target's own KV cache.

    x = embedding of the token
    x = x + attention over the last `window` rows of this layer
    x = x + attention of a separate query over the keys and values of the target's last layer that has some
    x = x + MLP                                 logits = LM_head(RMSNorm(x)), with the target's LM_head

In a hybrid, delta layers have none. Heads are rotated as the target's are, wholly or in part.

Its own cache has `window` rows, whatever the length of the text. It is a ring buffer: each new row replaces the oldest.
The order of rows in it does not matter, because keys are stored with their rotation.

A folder has config.json (kind, window, sizes and hash of the target) and model.safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint.checkpoint import head_order
from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.kernels import KV, KVStore, Linear
from longdraft.kernels.interface import LayerOperations
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer
from longdraft.parallel import RowParallel, shard_of

GLIDE_KIND = "glide"
_NORMS = ("input_layernorm", "cross_layernorm", "post_attention_layernorm", "norm")


class GlideWeights(NamedTuple):
    """The packed weights of the layer."""

    qkv: Linear
    out: Linear
    cross_q: Linear
    cross_out: Linear
    gate_up: Linear
    down: Linear
    norms: tuple[Tensor, ...]  # in the order of _NORMS


def glide_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a glide file for a target of this configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in _NORMS}
    return norms | {
        "self_attn.q_proj.weight": (q, hidden), "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden), "self_attn.o_proj.weight": (hidden, q),
        "cross_attn.q_proj.weight": (q, hidden), "cross_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


class GlideRows(NamedTuple):
    """Output [T, hidden] of the layer for T rows, and their keys and values [T, Hkv, D]."""

    hidden: Tensor
    k: Tensor
    v: Tensor


class Glide:
    """The layer. It holds no state of any text."""

    def __init__(self, weights: GlideWeights, window: int, target: Transformer) -> None:
        self.window = window
        self._weights = weights
        self._target = target

    def forward(self, tokens: Sequence[int], start: int, target: Transformer, own: KVStore, own_length: int,
                keys: KVStore, num_keys: int) -> GlideRows:
        """Run tokens at positions start, start + 1, ...

        target      the target model with the rotations of this text (`Transformer.for_length`)
        own         this layer's cache, of which the first `own_length` rows are visible
        keys        the target's last cache; every row sees its first `num_keys` positions
        """
        kernels, config = target.kernels, target.config
        # As the target rotates these keys.
        cos, sin = (torch.split(part, config.head_dim // 2, 1)[config.kv_attention[-1].ropes[1]]
                    for part in target.rotations(range(start, start + len(tokens))))
        return self._run(kernels, target.embed(tokens), (cos, sin), own, own_length, keys, num_keys)

    decoder_layers = model_layers = None

    def next_row(self, ops: LayerOperations, row: Tensor, embedded: Tensor, rotations: tuple[Tensor, Tensor],
                 stores: Sequence[KVStore]) -> Tensor:
        """See `longdraft.kernels.chain_plan.DraftLayers`. The last store is the target's."""
        return self._run(ops, embedded, rotations, stores[0], 0, stores[1], None).hidden

    @property
    def embedding(self) -> tuple[Linear, float]:
        """The table of token embeddings, and the factor that multiplies these."""
        return self._target.weights.embedding, self._target.embedding_factor

    @property
    def vocabulary(self) -> int:
        """Number of logits: those of the target."""
        return self._target.config.vocab_size

    def _run(self, ops: LayerOperations, x: Tensor, rotations: tuple[Tensor, Tensor], own: KVStore, own_length: int,
             keys: KVStore, num_keys: int | None) -> GlideRows:
        """`forward`, from the tokens' embeddings. num_keys: None where the operations know it."""
        (cos, sin), kernels, config, weights = rotations, self._target.kernels, self._target.config, self._weights
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = kernels.linear(self._norm(x, 0), weights.qkv).view(len(x), -1, config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        q, k = kernels.rope(q.contiguous(), cos, sin), kernels.rope(k.contiguous(), cos, sin)
        v = v.contiguous()
        parents = torch.arange(-1, len(x) - 1, dtype=torch.int32)
        x = x + kernels.linear(ops.attention(q, KV(own, own_length, k, v), parents).output.flatten(1), weights.out)
        if num_keys != 0:
            x = x + self._cross(ops, self._norm(x, 1), cos, sin, keys, num_keys)
        inner = kernels.swiglu(kernels.linear(self._norm(x, 2), weights.gate_up))
        return GlideRows(x + kernels.linear(inner, weights.down), k, v)

    def _cross(self, ops: LayerOperations, x: Tensor, cos: Tensor, sin: Tensor, keys: KVStore,
               num_keys: int | None) -> Tensor:
        """Attention over the target's cache.

        The kernels' attention always includes a row's own key and value. The last row of the target takes their place.
        """
        kernels, config = self._target.kernels, self._target.config
        q = kernels.linear(x, self._weights.cross_q).view(len(x), -1, config.head_dim)
        kv = KV(keys, 0, q, q)
        if num_keys is not None:
            last = torch.full((config.num_kv_heads, 1), num_keys - 1)
            k, v = (part.transpose(0, 1).expand(len(x), -1, -1).contiguous() for part in keys.read(last))
            kv = KV(keys, num_keys - 1, k, v)
        parents = torch.full((len(x),), -1, dtype=torch.int32)
        attended = ops.attention(kernels.rope(q, cos, sin), kv, parents)
        return kernels.linear(attended.output.flatten(1), self._weights.cross_out)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32 of the layer's output [R, hidden]."""
        return self._target.head(self._norm(hidden, 3))

    def _norm(self, x: Tensor, index: int) -> Tensor:
        return self._target.kernels.rms_norm(x, self._weights.norms[index], self._target.config.rms_norm_eps)


def require_supported(config: ModelConfig) -> None:
    """ModelError for a model with which glide does not draft."""
    if config.is_interleaved or config.has_two_head_sizes:
        what = "turns adjacent dimensions of a head" if config.is_interleaved else "has heads of two sizes"
        raise ModelError(f"glide does not draft for a model that {what}; choose another drafter for this model")


def is_glide(folder: Path) -> bool:
    """Whether a folder has a glide layer."""
    return (folder / "config.json").exists() and read_json(folder / "config.json").get("kind") == GLIDE_KIND


def load_glide(folder: Path, target: Transformer, check: Callable[[Path, dict[str, Any]], None]) -> Glide:
    """A glide layer from a folder. Raises ModelError if it does not fit the target.

    check  raises ModelError if the folder's config.json records another target
    """
    config = read_json(folder / "config.json")
    check(folder, config)
    window = config.get("window")
    if not isinstance(window, int) or not 1 <= window <= 4096:
        raise ModelError(f"{folder}: window is {window!r} in config.json; allowed: 1 to 4096")
    require_supported(target.whole)
    files = TensorFiles(folder)
    expected = glide_shapes(target.whole)
    files.check(expected, files.names(), "its config.json and this model")
    kernels, shard, order = target.kernels, shard_of(target.kernels), head_order(target.config)

    def ordered(name: str, rows: Tensor) -> Tensor:
        """Rows of queries or keys in the order in which the target has the dimensions of a head; others unchanged."""
        if order is None or not name.endswith(("q_proj", "k_proj")):
            return rows
        return rows.view(-1, len(order), rows.shape[1])[:, order].flatten(0, 1)

    def pack(*names: str) -> Linear:
        """One matrix from several tensors; for a rank, its share, as for the target's layers."""
        keys = [f"{name}.weight" for name in names]
        is_row_parallel = names[0].endswith(("o_proj", "down_proj")) and shard.size > 1
        picks = [shard.columns() if is_row_parallel else shard.rows(expected[key][:1]) for key in keys]
        parts = [ordered(name, files.stack([key], kernels.dtype, [pick]))
                 for name, key, pick in zip(names, keys, picks, strict=True)]
        packed = kernels.pack(parts[0] if len(parts) == 1 else torch.cat(parts))
        return RowParallel(packed) if is_row_parallel else packed

    norms = tuple(files.read(f"{name}.weight").to(kernels.device, kernels.dtype, copy=True) for name in _NORMS)
    weights = GlideWeights(
        pack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), pack("self_attn.o_proj"),
        pack("cross_attn.q_proj"), pack("cross_attn.o_proj"), pack("mlp.gate_proj", "mlp.up_proj"),
        pack("mlp.down_proj"), norms)
    return Glide(weights, window, target)
