"""A model with the cost of a large one and the predictions of a small one, part by part.

benchmarks/stretched_model.py writes such a model to a folder, and says how each dimension is filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.kernels import Kernels
from longdraft.model import config as model_config
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer, chain_rows

CONSTANT = 1e-3  # of the constant channel
NEVER = -3e5  # weight of the constant channel in the logit of a new token
_CHUNK = 512  # positions that are read or filled at a time
_READING = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # the matrices that read a layer's input
SPREAD = 0.02  # standard deviation of random weights, as models are initialised


class Places:
    """Where a large model holds a small one.

    layers     large layer -> small layer, for the layers that do not add 0
    kv_heads   KV heads of the small model, which are the first ones of the large one
    head_rows  rows of a small head's queries and keys in a large head
    """

    def __init__(self, small: ModelConfig, large: ModelConfig) -> None:
        self.kv_heads = small.num_kv_heads
        half = torch.arange(small.head_dim // 2) * (large.head_dim // small.head_dim)
        self.head_rows = torch.cat([half, half + large.head_dim // 2])
        spacing = large.num_layers / small.num_layers
        self.layers = {round((i + 0.5) * spacing - 0.5): i for i in range(small.num_layers)}


class Stretch:
    """The tensors of a stretched checkpoint, part by part, in bfloat16.

    small, large  configurations of the two shapes
    weights       the small model's tensors by name, float32, on the device where the large ones are made
    """

    def __init__(self, small: ModelConfig, large: ModelConfig, weights: dict[str, Tensor], seed: int = 0) -> None:
        _require_fit(small, large)
        self._small, self._large, self._weights = small, large, weights
        self._device = next(iter(weights.values())).device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self.places = Places(small, large)

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """The tables and the final norm, then one layer after the other."""
        yield self.tables()
        for layer in range(self._large.num_layers):
            yield {f"model.layers.{layer}.{name}.weight": tensor.to(torch.bfloat16).contiguous()
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
        norm = self.norm(weights["model.norm.weight"]).to(torch.bfloat16)
        return {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": norm}

    def layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a layer by name, float32."""
        small = self._small
        norms = [self.norm(torch.ones(small.hidden_size, device=self._device))] * 2
        ours: dict[str, Tensor] | None = None
        if layer in self.places.layers:
            prefix = f"model.layers.{self.places.layers[layer]}."
            ours = {name.removeprefix(prefix).removesuffix(".weight"): tensor
                    for name, tensor in self._weights.items() if name.startswith(prefix)}
            norms = [self.norm(ours[name]) for name in ("input_layernorm", "post_attention_layernorm")]
        yield from (("input_layernorm", norms[0]), ("post_attention_layernorm", norms[1]))
        yield from self._matrices(ours, 1)

    def eagle_layer(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices of an EAGLE-3 layer by name, float32. Queries, keys and values read two rows side by side."""
        prefix = "layers.0."
        ours = {name.removeprefix(prefix).removesuffix(".weight"): tensor
                for name, tensor in self._weights.items() if name.startswith(prefix)}
        for name, tensor in self._matrices(ours, 2):
            yield name.rpartition(".")[2], tensor

    def _matrices(self, ours: dict[str, Tensor] | None, inputs: int) -> Iterator[tuple[str, Tensor]]:
        """The matrices of a layer. ours: those of the small layer; None: one that adds 0. Queries, keys and values read
        `inputs` rows side by side."""
        small, large = self._small, self._large
        width, inner = large.hidden_size, large.intermediate_size
        q, k, v = (self._random(heads * large.head_dim, inputs * width)
                   for heads in (large.num_heads, large.num_kv_heads, large.num_kv_heads))
        out = self._zeros(width, large.num_heads * large.head_dim)
        gate, up, down = self._random(inner, width), self._random(inner, width), self._zeros(width, inner)
        if ours is not None:
            for place in range(inputs):
                columns = slice(place * width, (place + 1) * width)
                own = slice(place * small.hidden_size, (place + 1) * small.hidden_size)
                read = {name: ours[name][:, own] for name in _READING}
                self._fill_attention(ours | read, q[:, columns], k[:, columns], v[:, columns], out)
            for large_weight, name in ((gate, "gate_proj"), (up, "up_proj")):
                large_weight[: small.intermediate_size] = 0
                large_weight[: small.intermediate_size, : small.hidden_size] = ours[f"mlp.{name}"]
            down[: small.hidden_size, : small.intermediate_size] = ours["mlp.down_proj"]
        yield from (("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", v),
                    ("self_attn.o_proj", out),
                    ("mlp.gate_proj", gate), ("mlp.up_proj", up), ("mlp.down_proj", down))

    def _fill_attention(self, ours: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Put the small model's heads into large weights of random values, in place."""
        small, large = self._small, self._large
        size, small_size, width = large.head_dim, small.head_dim, small.hidden_size
        group, small_group = large.num_heads // large.num_kv_heads, small.num_heads // small.num_kv_heads
        for head in range(small.num_heads):
            first = (head // small_group * group + head % small_group) * size
            rows = slice(head * small_size, (head + 1) * small_size)
            q[first : first + size] = 0
            q[first + self.places.head_rows, :width] = ours["self_attn.q_proj"][rows] * math.sqrt(size / small_size)
            out[:width, first : first + small_size] = ours["self_attn.o_proj"][:, rows]
        for head in range(small.num_kv_heads):
            first, rows = head * size, slice(head * small_size, (head + 1) * small_size)
            k[first : first + size] = 0
            k[first + self.places.head_rows, :width] = ours["self_attn.k_proj"][rows]
            v[first : first + size] = 0
            v[first : first + small_size, :width] = ours["self_attn.v_proj"][rows]

    def norm(self, weight: Tensor) -> Tensor:
        """The weight of a norm that gives the small row in a large one."""
        new = torch.ones(self._large.hidden_size, device=self._device)
        new[: len(weight)] = weight * math.sqrt(self._small.hidden_size / self._large.hidden_size)
        return new

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device).normal_(0, SPREAD, generator=self._generator)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._device)


def _require_fit(small: ModelConfig, large: ModelConfig) -> None:
    groups = [config.num_heads // config.num_kv_heads for config in (small, large)]
    fits = (small.num_kv_heads <= large.num_kv_heads and groups[0] <= groups[1] and small.num_layers <= large.num_layers
            and small.hidden_size < large.hidden_size and small.intermediate_size <= large.intermediate_size
            and large.head_dim % small.head_dim == 0 and small.vocab_size <= large.vocab_size)
    if not fits:
        raise ValueError("the large shape must have at least the small model's layers, KV heads, query heads per KV "
                         "head, inner size and vocabulary, a larger width, and a multiple of its head size")


def stretched_settings(settings: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a small model of these settings in the sizes of `shape`."""
    small = model_config.parse_config(settings)
    sizes = {name: shape[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                            "num_key_value_heads", "intermediate_size", "vocab_size")}
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


def stretched_rows(small: FullCache, places: Places, start: int, count: int, shape: tuple[int, ...],
                   kernels: Kernels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, rows, KV heads, head size] of the large model, from the small model's cache."""
    k, v = (torch.randn(shape, generator=generator, device=kernels.device).to(kernels.dtype) for _ in range(2))
    for large_layer, small_layer in places.layers.items():
        heads = places.kv_heads
        positions = torch.arange(start, start + count, device=kernels.device).expand(heads, -1)
        keys, values = (part.permute(1, 0, 2) for part in small.stores[small_layer].read(positions))
        k[large_layer][:, :heads], v[large_layer][:, :heads] = 0, 0
        k[large_layer][:, :heads, places.head_rows] = keys
        v[large_layer][:, :heads, : values.shape[2]] = values
    return k, v


def fill(cache: FullCache, small: FullCache, model: Transformer, places: Places) -> None:
    """Write the small model's rows to an empty cache of the large model."""
    config, generator = model.config, torch.Generator(model.kernels.device).manual_seed(1)
    for start in range(0, small.length, _CHUNK):
        count = min(_CHUNK, small.length - start)
        shape = (config.num_layers, count, config.num_kv_heads, config.head_dim)
        cache.append(*stretched_rows(small, places, start, count, shape, model.kernels, generator))
        cache.commit(range(count))
