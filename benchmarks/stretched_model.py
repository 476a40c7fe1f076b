"""Write a model with the cost of a large one and the predictions of a small one.

    python benchmarks/stretched_model.py --like qwen2.5-1.5b OUT
    python benchmarks/stretched_model.py --like yarn-llama-2-7b-128k --source longdraft/bundled/novelist OUT
    longdraft generate "It was" --model OUT

The checkpoint has the large model's shape (weights, layers, KV cache) and computes the small model's function, up to
rounding. So speeds measured on it are those of the large shape, while acceptance is that of a small trained model.
Random weights predict nothing and could show neither. The small model's weights quantise worse than those of a large
model, so drafts with quantised weights are accepted less often here than on a real model of this size.

How each dimension is filled:

    width       The new channels of the residual stream stay 0 (one holds a small constant). RMSNorm divides by the root
                of the mean square, so its weight is multiplied by sqrt(d / D) and its epsilon by d / D.
    inner size  New gate and up rows are random, new down columns are 0.
    heads       A small head becomes the first heads of a group; new heads have random queries and zero outputs.
    head size   Rotary frequency j of a head of size h is frequency j H / h of a head of size H. Queries are multiplied
                by sqrt(H / h), because attention divides by sqrt(H).
    layers      New layers have random weights and zero output projections: they cost what any layer costs, and add 0.
    vocabulary  New tokens get a large negative logit from the constant channel.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from random_model import SPREAD, write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from longdraft.bench.shapes import SHAPES
from longdraft.model import config as model_config
from longdraft.model import hub
from longdraft.model.config import ModelConfig
from longdraft.model.tensor_files import INDEX, dump_json

CONSTANT = 1e-3  # of the constant channel
NEVER = -3e5  # weight of the constant channel in the logit of a new token
COPIED = ("tokenizer_config.json", "generation_config.json")


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
    weights       the small model's tensors by name, float32
    """

    def __init__(self, small: ModelConfig, large: ModelConfig, weights: dict[str, Tensor], seed: int = 0) -> None:
        _require_fit(small, large)
        self._small, self._large, self._weights = small, large, weights
        self._generator = torch.Generator().manual_seed(seed)
        self._places = Places(small, large)

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """The tables and the final norm, then one layer after the other."""
        yield self._tables()
        for layer in range(self._large.num_layers):
            yield {f"model.layers.{layer}.{name}.weight": tensor.to(torch.bfloat16).contiguous()
                   for name, tensor in self._layer(layer)}

    def _tables(self) -> dict[str, Tensor]:
        small, large, weights = self._small, self._large, self._weights
        embedding = torch.zeros(large.vocab_size, large.hidden_size, dtype=torch.bfloat16)
        head = torch.zeros_like(embedding)
        table = weights["model.embed_tokens.weight"]
        embedding[: small.vocab_size, : small.hidden_size] = table
        embedding[:, small.hidden_size] = CONSTANT
        head[: small.vocab_size, : small.hidden_size] = weights.get("lm_head.weight", table)
        head[small.vocab_size :, small.hidden_size] = NEVER
        norm = self._norm(weights["model.norm.weight"]).to(torch.bfloat16)
        return {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": norm}

    def _layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        small, large = self._small, self._large
        width, inner = large.hidden_size, large.intermediate_size
        q, k, v = (self._random(heads * large.head_dim, width)
                   for heads in (large.num_heads, large.num_kv_heads, large.num_kv_heads))
        out = torch.zeros(width, large.num_heads * large.head_dim)
        gate, up, down = self._random(inner, width), self._random(inner, width), torch.zeros(width, inner)
        norms = [self._norm(torch.ones(small.hidden_size))] * 2
        if layer in self._places.layers:
            prefix = f"model.layers.{self._places.layers[layer]}."
            ours = {name.removeprefix(prefix).removesuffix(".weight"): tensor
                    for name, tensor in self._weights.items() if name.startswith(prefix)}
            norms = [self._norm(ours[name]) for name in ("input_layernorm", "post_attention_layernorm")]
            self._fill_attention(ours, q, k, v, out)
            for large_weight, name in ((gate, "gate_proj"), (up, "up_proj")):
                large_weight[: small.intermediate_size] = 0
                large_weight[: small.intermediate_size, : small.hidden_size] = ours[f"mlp.{name}"]
            down[: small.hidden_size, : small.intermediate_size] = ours["mlp.down_proj"]
        yield from (("input_layernorm", norms[0]), ("post_attention_layernorm", norms[1]),
                    ("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", v),
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
            q[first + self._places.head_rows, :width] = ours["self_attn.q_proj"][rows] * math.sqrt(size / small_size)
            out[:width, first : first + small_size] = ours["self_attn.o_proj"][:, rows]
        for head in range(small.num_kv_heads):
            first, rows = head * size, slice(head * small_size, (head + 1) * small_size)
            k[first : first + size] = 0
            k[first + self._places.head_rows, :width] = ours["self_attn.k_proj"][rows]
            v[first : first + size] = 0
            v[first : first + small_size, :width] = ours["self_attn.v_proj"][rows]

    def _norm(self, weight: Tensor) -> Tensor:
        new = torch.ones(self._large.hidden_size)
        new[: len(weight)] = weight * math.sqrt(self._small.hidden_size / self._large.hidden_size)
        return new

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape).normal_(0, SPREAD, generator=self._generator)


def _require_fit(small: ModelConfig, large: ModelConfig) -> None:
    groups = [config.num_heads // config.num_kv_heads for config in (small, large)]
    fits = (small.num_kv_heads <= large.num_kv_heads and groups[0] <= groups[1] and small.num_layers <= large.num_layers
            and small.hidden_size < large.hidden_size and small.intermediate_size <= large.intermediate_size
            and large.head_dim % small.head_dim == 0 and small.vocab_size <= large.vocab_size)
    if not fits:
        raise ValueError("the large shape must have at least the small model's layers, KV heads, query heads per KV "
                         "head, inner size and vocabulary, a larger width, and a multiple of its head size")


def stretch(source: Path, shape: dict[str, int], target: Path) -> None:
    """Write the model of `source` in the shape of a Llama `shape` to the new folder `target`, a file for each part."""
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    small = model_config.read_config(source)
    sizes = {name: shape[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                            "num_key_value_heads", "intermediate_size", "vocab_size")}
    head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    epsilon = settings["rms_norm_eps"] * small.hidden_size / shape["hidden_size"]
    large = settings | sizes | {"head_dim": head_dim, "rms_norm_eps": epsilon, "tie_word_embeddings": False}
    weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    parts = Stretch(small, model_config.parse_config(large), weights)
    target.mkdir(parents=True)
    dump_json(target / "config.json", large)
    write_tokenizer(target, shape["vocab_size"])
    for name in COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    where: dict[str, str] = {}
    for number, tensors in enumerate(parts.parts()):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, target / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    dump_json(target / INDEX, {"metadata": {}, "weight_map": where})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", required=True, choices=SHAPES, help="the large shape")
    parser.add_argument("--source", type=Path, default=hub.BUNDLED_DIR / "novelist-gqa",
                        help="folder of the small Llama; default: the bundled novelist-gqa")
    parser.add_argument("folder", type=Path, help="a new folder")
    given = parser.parse_args()
    if given.folder.exists():
        parser.error(f"{given.folder} exists; name a new folder")
    try:
        stretch(given.source, SHAPES[given.like], given.folder)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
