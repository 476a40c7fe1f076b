"""A model with the cost of a large one and the predictions of a small one, part by part.

stretched_model.py writes such a model to a folder, and says how each dimension is filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.checkpoint import config_file
from longdraft.kernels import Kernels
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer, chain_rows

CONSTANT = 1e-3  # of the constant channel
NEVER = -3e5  # weight of the constant channel in the logit of a new token
_CHUNK = 512  # positions that are read or filled at a time
_READING = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # the matrices that read a layer's input
_DELTA = "linear_attn."
_BARE = (f"{_DELTA}A_log", f"{_DELTA}dt_bias")  # tensors that are not called weights
SPREAD = 0.02  # standard deviation of random weights, as models are initialised


class Correspondence:
    """Where a large model holds a small one.

    layers     large layer -> small layer of the same kind, for the layers that do not add 0
    kv_heads   KV heads of the small model, which are the first ones of the large one
    head_rows  rows of a small head's queries and keys in a large head
    """

    def __init__(self, small: ModelConfig, large: ModelConfig) -> None:
        self.kv_heads = small.num_kv_heads
        dims, large_dims = small.rope.dims, large.rope.dims  # other channels are not rotated
        half = torch.arange(dims // 2) * (large_dims // dims)
        self.head_rows = torch.cat([half, half + large_dims // 2, torch.arange(small.head_dim - dims) + large_dims])
        self.layers = _matching_layers(small, large)


def _matching_layers(small: ModelConfig, large: ModelConfig) -> dict[int, int]:
    """Large layers of the small layers' kinds, in their order, about evenly spaced. Empty if the kinds do not fit."""
    ours, theirs = ([layer.delta is not None for layer in config.layers] for config in (small, large))

    def is_room(layer: int, first: int) -> bool:
        """Whether the small layers from `layer` on find their kinds in the large ones from `first` on."""
        left = iter(theirs[first:])
        return all(kind in left for kind in ours[layer:])

    matches: dict[int, int] = {}
    if is_room(0, 0):
        for i, kind in enumerate(ours):
            ideal = round((i + 0.5) * large.num_layers / small.num_layers - 0.5)
            candidates = [layer for layer in range(max(matches, default=-1) + 1, large.num_layers)
                          if theirs[layer] == kind and is_room(i + 1, layer + 1)]
            matches[min((abs(layer - ideal), layer) for layer in candidates)[1]] = i
    return matches


class Stretch:
    """The tensors of a stretched checkpoint, part by part, in bfloat16. What hybrids keep in float32 is float32.

    small, large  configurations of the two shapes
    weights       the small model's tensors by name, float32, on the device where the large ones are made
    """

    def __init__(self, small: ModelConfig, large: ModelConfig, weights: dict[str, Tensor], seed: int = 0) -> None:
        _require_fit(small, large)
        self._small, self._large, self._weights = small, large, weights
        self._device = next(iter(weights.values())).device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self.held = Correspondence(small, large)

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """The tables and the final norm, then one layer after the other."""
        yield self.tables()
        for layer in range(self._large.num_layers):
            yield {f"model.layers.{layer}.{name}{'' if name in _BARE else '.weight'}": self._rounded(tensor)
                   for name, tensor in self.layer(layer)}

    def tables(self) -> dict[str, Tensor]:
        """The embedding, the head and the final norm."""
        small, large, weights = self._small, self._large, self._weights
        embedding = self._zeros(large.vocab_size, large.hidden_size).bfloat16()
        head = torch.zeros_like(embedding)
        table = weights["model.embed_tokens.weight"]
        embedding[: small.vocab_size, : small.hidden_size] = table
        embedding[:, small.hidden_size] = CONSTANT
        head[: small.vocab_size, : small.hidden_size] = weights.get("lm_head.weight", table)
        head[small.vocab_size :, small.hidden_size] = NEVER
        norm = self._rounded(self.norm(weights["model.norm.weight"]))
        return {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": norm}

    def layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a layer by name, float32."""
        small, ours = self._small, self._of_small(layer)
        norms = [self.norm(torch.full((small.hidden_size,), 1 - self._large.norm_offset, device=self._device))] * 2
        if ours:
            norms = [self.norm(ours[name]) for name in ("input_layernorm", "post_attention_layernorm")]
        yield from (("input_layernorm", norms[0]), ("post_attention_layernorm", norms[1]))
        yield from self._matrices(ours, 1, self._large.layers[layer].delta is not None)

    def eagle_layer(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices of an EAGLE-3 layer by name, float32. Queries, keys and values read two rows side by side."""
        prefix = "layers.0."
        ours = {name.removeprefix(prefix).removesuffix(".weight"): tensor
                for name, tensor in self._weights.items() if name.startswith(prefix)}
        for name, tensor in self._matrices(ours, 2):
            yield name.rpartition(".")[2], tensor

    def _matrices(self, ours: dict[str, Tensor] | None, inputs: int, is_delta: bool = False
                  ) -> Iterator[tuple[str, Tensor]]:
        """The matrices of a layer, and what belongs to its heads. ours: those of the small layer; None: one that adds
        0. Queries, keys and values read `inputs` rows side by side."""
        small, large = self._small, self._large
        width, inner = large.hidden_size, large.intermediate_size
        mixing = self._delta(ours) if is_delta else self._attention(ours, inputs)
        gate, up, down = self._random(inner, width), self._random(inner, width), self._zeros(width, inner)
        if ours is not None:
            for large_weight, name in ((gate, "gate_proj"), (up, "up_proj")):
                large_weight[: small.intermediate_size] = 0
                large_weight[: small.intermediate_size, : small.hidden_size] = ours[f"mlp.{name}"]
            down[: small.hidden_size, : small.intermediate_size] = ours["mlp.down_proj"]
        yield from (*mixing.items(),
                    ("mlp.gate_proj", gate), ("mlp.up_proj", up), ("mlp.down_proj", down))

    def _of_small(self, layer: int) -> dict[str, Tensor] | None:
        """The tensors of the small model's layer that a large layer holds, by name. None: it adds 0."""
        if layer not in self.held.layers:
            return None
        prefix = f"model.layers.{self.held.layers[layer]}."
        return {name.removeprefix(prefix).removesuffix(".weight"): tensor
                for name, tensor in self._weights.items() if name.startswith(prefix)}

    def _attention(self, ours: dict[str, Tensor] | None, inputs: int) -> dict[str, Tensor]:
        small, large, width = self._small, self._large, self._large.hidden_size
        gates = 2 if large.hybrid else 1  # the rows of a head's gate follow those of its queries
        q, k, v = (self._random(heads * large.head_dim, inputs * width)
                   for heads in (gates * large.num_heads, large.num_kv_heads, large.num_kv_heads))
        out = self._zeros(width, large.num_heads * large.head_dim)
        for side in range(inputs if ours else 0):
            assert ours
            columns = slice(side * width, (side + 1) * width)
            own = slice(side * small.hidden_size, (side + 1) * small.hidden_size)
            read = {name: ours[name][:, own] for name in _READING}
            self._fill_attention(ours | read, q[:, columns], k[:, columns], v[:, columns], out)
        norms = {}
        if large.hybrid:
            one = torch.zeros(small.head_dim, device=self._device)
            norms = {name: self._head_norm(ours[name] if ours else one, name)
                     for name in ("self_attn.q_norm", "self_attn.k_norm")}
        return {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": out} | norms

    def _fill_attention(self, ours: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Put the small model's heads into large weights of random values, in place."""
        small, large = self._small, self._large
        size, small_size, width = large.head_dim, small.head_dim, small.hidden_size
        group, small_group = large.num_heads // large.num_kv_heads, small.num_heads // small.num_kv_heads
        gates = 2 if large.hybrid else 1
        factor = 1.0 if large.hybrid else math.sqrt(size / small_size)  # a hybrid's is in the norm of its queries
        for head in range(small.num_heads):
            large_head = head // small_group * group + head % small_group
            first = large_head * size * gates
            small_first = head * small_size * gates
            q[first : first + size * gates] = 0
            q[first + self.held.head_rows, :width] = ours["self_attn.q_proj"][
                small_first : small_first + small_size] * factor
            if large.hybrid:
                q[first + size : first + size + small_size, :width] = ours["self_attn.q_proj"][
                    small_first + small_size : small_first + 2 * small_size]
            out[:width, large_head * size : large_head * size + small_size] = ours["self_attn.o_proj"][
                :, head * small_size : (head + 1) * small_size]
        for head in range(small.num_kv_heads):
            first, rows = head * size, slice(head * small_size, (head + 1) * small_size)
            k[first : first + size] = 0
            k[first + self.held.head_rows, :width] = ours["self_attn.k_proj"][rows]
            v[first : first + size] = 0
            v[first : first + small_size, :width] = ours["self_attn.v_proj"][rows]

    def _delta(self, ours: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The tensors of a delta layer. In heads of the small layer, channels beyond its own are 0, and so is what the
        state and the output have there."""
        assert self._large.hybrid
        large, width = self._large.hybrid.shape, self._large.hidden_size
        tensors = {name: self._random(rows, width) for name, rows in (
            ("in_proj_qkv", large.channels), ("in_proj_z", large.values), ("in_proj_b", large.value_heads),
            ("in_proj_a", large.value_heads))}
        tensors |= {name: self._zeros(large.value_heads) for name in ("A_log", "dt_bias")} | {
            "out_proj": self._zeros(width, large.values), "norm": torch.ones(large.value_dim, device=self._device),
            "conv1d": self._random(large.channels, 1, large.width)}
        if ours:
            self._fill_delta({name.removeprefix(_DELTA): tensor for name, tensor in ours.items()}, tensors)
        return {f"{_DELTA}{name}": tensor for name, tensor in tensors.items()}

    def _fill_delta(self, ours: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        """Put the small layer's heads into a large layer, in place."""
        assert self._small.hybrid and self._large.hybrid
        small, large, width = self._small.hybrid.shape, self._large.hybrid.shape, self._small.hidden_size
        keys, each = torch.arange(small.key_heads), small.value_heads // small.key_heads
        heads = torch.arange(small.value_heads)
        heads = heads // each * (large.value_heads // large.key_heads) + heads % each

        def rows(heads: Tensor, size: int, taken: int) -> Tensor:
            """The first `taken` rows of these heads of `size` rows."""
            return (heads[:, None] * size + torch.arange(taken)).flatten()

        def channels(key_rows: int, value_rows: int) -> Tensor:
            key, value = rows(keys, large.key_dim, key_rows), rows(heads, large.value_dim, value_rows)
            offset = large.key_heads * large.key_dim
            return torch.cat([key, key + offset, value + 2 * offset])

        values = rows(heads, large.value_dim, small.value_dim)
        held_rows = {"in_proj_qkv": channels(small.key_dim, small.value_dim), "in_proj_z": values, "in_proj_b": heads,
                     "in_proj_a": heads}
        tensors["in_proj_qkv"][channels(large.key_dim, large.value_dim)] = 0
        for name, held in held_rows.items():
            tensors[name][held] = 0
            tensors[name][held, :width] = ours[name]
        tensors["conv1d"][held_rows["in_proj_qkv"]] = ours["conv1d"]
        tensors["A_log"][heads], tensors["dt_bias"][heads] = ours["A_log"], ours["dt_bias"]
        tensors["norm"][: small.value_dim] = ours["norm"] * math.sqrt(small.value_dim / large.value_dim)
        tensors["out_proj"][:width, values] = ours["out_proj"]

    def norm(self, weight: Tensor) -> Tensor:
        """The weight of a norm that gives the small row in a large one. Hybrids, whose norms weigh 1 + w, store w."""
        offset = self._large.norm_offset
        new = torch.full((self._large.hidden_size,), 1 - offset, device=self._device)
        new[: len(weight)] = (weight + offset) * math.sqrt(self._small.hidden_size / self._large.hidden_size) - offset
        return new

    def _head_norm(self, weight: Tensor, name: str) -> Tensor:
        """The norm of a head's queries or keys. Attention divides by the root of the head size: queries keep theirs."""
        size, small_size = self._large.head_dim, self._small.head_dim
        offset, factor = self._large.norm_offset, 1.0 if name.endswith("q_norm") else math.sqrt(small_size / size)
        new = torch.full((size,), 1 - offset, device=self._device)
        new[self.held.head_rows] = (weight + offset) * factor - offset
        return new

    def _rounded(self, tensor: Tensor) -> Tensor:
        is_float = self._large.hybrid is not None and tensor.ndim == 1
        return tensor.to(torch.float32 if is_float else torch.bfloat16, copy=True).contiguous()

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device).normal_(0, SPREAD, generator=self._generator)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._device)


def _require_fit(small: ModelConfig, large: ModelConfig) -> None:
    groups = [config.num_heads // config.num_kv_heads for config in (small, large)]
    fits = (small.num_kv_heads <= large.num_kv_heads and groups[0] <= groups[1] and small.num_layers <= large.num_layers
            and small.hidden_size < large.hidden_size and small.intermediate_size <= large.intermediate_size
            and large.head_dim % small.head_dim == 0 and small.vocab_size <= large.vocab_size
            and large.rope.dims % small.rope.dims == 0 and _delta_fits(small, large)
            and len(_matching_layers(small, large)) == small.num_layers)
    if not fits:
        raise ValueError("the large shape must have at least the small model's layers, KV heads, query heads per KV "
                         "head, inner size and vocabulary, a larger width, a multiple of its head size, and delta "
                         "layers with as much room if the small model has delta layers")


def _delta_fits(small: ModelConfig, large: ModelConfig) -> bool:
    """Whether the delta layers fit. Only Qwen3.5's dense kind is known here."""
    if not small.hybrid or not large.hybrid:
        return small.hybrid is None and large.hybrid is None
    ours, theirs = small.hybrid.shape, large.hybrid.shape
    groups = [shape.value_heads // shape.key_heads for shape in (ours, theirs)]
    return (not small.experts and not small.hybrid.is_fused and ours.width == theirs.width and groups[0] <= groups[1]
            and all(our <= their for our, their in zip(ours, theirs, strict=True)))


def stretched_settings(settings: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a small model of these settings in the sizes of `shape`."""
    small = config_file.parse_config(settings)
    sizes = {name: shape[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                            "num_key_value_heads", "intermediate_size", "vocab_size")}
    if small.hybrid:
        sizes |= {name: value for name, value in shape.items() if name.startswith("linear_") or name == "layer_types"}
    head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    epsilon = settings["rms_norm_eps"] * small.hidden_size / shape["hidden_size"]
    return settings | sizes | {"head_dim": head_dim, "rms_norm_eps": epsilon, "tie_word_embeddings": False}


def read_by(model: Transformer, tokens: Sequence[int]) -> FullCache:
    """The cache of a text."""
    cache = model.new_cache()
    for start in range(0, len(tokens), _CHUNK):
        some = list(tokens[start : start + _CHUNK])
        model.forward(chain_rows(some, start), cache, is_prompt=True)
        cache.commit(range(len(some)))
    return cache


def stretched_rows(small: FullCache, held: Correspondence, start: int, count: int, shape: tuple[int, ...],
                   kernels: Kernels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, rows, KV heads, head size] of the large model, from the small model's cache."""
    k, v = (torch.randn(shape, generator=generator, device=kernels.device).to(kernels.dtype) for _ in range(2))
    for large_layer, small_layer in held.layers.items():
        heads = held.kv_heads
        positions = torch.arange(start, start + count, device=kernels.device).expand(heads, -1)
        keys, values = (part.permute(1, 0, 2) for part in small.stores[small_layer].read(positions))
        k[large_layer][:, :heads], v[large_layer][:, :heads] = 0, 0
        k[large_layer][:, :heads, held.head_rows] = keys
        v[large_layer][:, :heads, : values.shape[2]] = values
    return k, v


def fill(cache: FullCache, small: FullCache, model: Transformer, held: Correspondence) -> None:
    """Write the small model's rows to an empty cache of the large model."""
    config, generator = model.config, torch.Generator(model.kernels.device).manual_seed(1)
    for start in range(0, small.length, _CHUNK):
        count = min(_CHUNK, small.length - start)
        shape = (config.num_layers, count, config.num_kv_heads, config.head_dim)
        cache.append(*stretched_rows(small, held, start, count, shape, model.kernels, generator))
        cache.commit(range(count))
